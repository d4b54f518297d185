//! Plans the tensors of the checkpoint and the parts of pack entries that each is made of. The family's [`View`]s are
//! applied in reverse: a view gives the location of a canonical tensor in the source, and thereby the source tensor
//! to which an entry of the pack belongs.

use crate::catalogue::Role;
use crate::convert::arch::{Arch, ExpectedTensor, Fields, LeftOut, Naming, View, expected_tensors};
use crate::convert::executor::Section;
use crate::convert::published::parts_of_mxfp4;
use crate::convert::sharding::Listed;
use crate::dtype::DType;
use crate::error::{Context, Error, Result};
use crate::iebin::{Entry, IebinReader, Store};
use crate::model_config::{ModelConfig, Recurrent, RecurrentLayers};
use crate::scheme::{BLOCK, QuantSpec};
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

/// Tensor of the planned checkpoint, and the parts that it is made of.
pub(in crate::convert) type UnpackedTensor = Listed<Vec<TargetPart>>;

impl UnpackedTensor {
    /// Returns the sections of its parts in file number `file`; the tensor begins at byte `start`.
    pub(in crate::convert) fn sections(&self, reader: &IebinReader, file: usize, start: u64) -> Vec<Section> {
        let section = |part: &TargetPart| {
            let start = start + (part.first * self.dtype.size()) as u64;
            Section { file, range: start..start + (part.elements(reader) * self.dtype.size()) as u64 }
        };
        self.content.iter().map(section).collect()
    }
}

impl TargetPart {
    /// Returns all rows of an entry, in their order.
    fn all(number: usize, entry: &Entry) -> TargetPart {
        let (count, rows, _) = entry.matrices().unwrap_or((1, 1, 1));
        TargetPart { entry: number, matrices: 0..count, phase: 0, step: 1, rows, form: PartForm::Rows, first: 0 }
    }

    /// Returns the number of elements of the target that it fills.
    fn elements(&self, reader: &IebinReader) -> usize {
        let entry = &reader.entries()[self.entry];
        let (_, _, cols) = entry.matrices().unwrap_or((1, 1, entry.elements()));
        let elements = self.matrices.len() * self.rows * cols;
        match self.form {
            PartForm::Rows | PartForm::Transposed { .. } => elements,
            PartForm::Codes => elements / 2,
            PartForm::Scales => elements / BLOCK,
        }
    }
}

/// Rows of an entry that fill one range of a target.
#[derive(Debug, Clone)]
pub(in crate::convert) struct TargetPart {
    /// Number of the entry in the pack.
    pub(in crate::convert) entry: usize,
    /// Matrices of the entry.
    pub(in crate::convert) matrices: Range<usize>,
    /// First row of each matrix that is used.
    pub(in crate::convert) phase: usize,
    /// Distance of the rows that are used; 1 for all rows from the first on.
    pub(in crate::convert) step: usize,
    /// Number of rows of each matrix that are used.
    pub(in crate::convert) rows: usize,
    /// Form in which the rows are written.
    pub(in crate::convert) form: PartForm,
    /// Index of the element of the target at which the rows start.
    pub(in crate::convert) first: usize,
}

/// Form in which rows of an entry are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::convert) enum PartForm {
    /// Rows in their order.
    Rows,
    /// Rows are written as columns. If `stacks` is not 1, rows of so many stacks alternate, and the columns of one
    /// stack follow those of the one before.
    Transposed { stacks: usize },
    /// The 4-bit codes of MXFP4.
    Codes,
    /// The block scales of MXFP4.
    Scales,
}

/// Advice for a pack whose tensors are not those of its config.json.
const MISMATCH: &str =
    "config.json is not that of this pack, or the pack is damaged; make the pack again with `iec pack`";

/// Plan of the checkpoint.
pub(in crate::convert) struct UnpackPlan {
    /// Tensors in the order of the model.
    pub(in crate::convert) targets: Vec<UnpackedTensor>,
    /// Canonical names of tensors that are decoded from fewer bits, so that they differ from the source.
    pub(in crate::convert) dequantized: Vec<String>,
    /// True when no tensor is written as MXFP4.
    pub(in crate::convert) all_floats: bool,
}

/// Plans every tensor; `dtype` is for tensors that are decoded.
///
/// # Errors
/// The pack differs from its config.json, or a tensor of the source would have parts of different types.
pub(in crate::convert) fn plan(
    reader: &IebinReader,
    arch: &Arch,
    model: &ModelConfig,
    config: &Fields,
    dtype: DType,
) -> Result<UnpackPlan> {
    refuse_gguf_layout(reader)?;
    // The configuration in gpt-oss's original/ names neither class nor family; views with its tensor names come last.
    let last = config.get("architectures").is_none() && config.get("model_type").is_none();
    let mut builder = Builder { reader, targets: Vec::new(), by_name: BTreeMap::new(), used: HashSet::new() };
    let mut dequantized = Vec::new();
    let naming = Naming::usual(config)?;
    for expected in expected_tensors(model) {
        let (number, entry) = builder.entry(&expected)?;
        let views: Vec<View> = arch.views(model, &expected).into_iter().map(|view| naming.view(view)).collect();
        let codes = entry.store == Store::Tiled(QuantSpec::MXFP4)
            && views.iter().any(|view| matches!(view, View::Coded { .. }));
        let mut fitting = views.iter().filter(|view| codes == matches!(view, View::Coded { .. }));
        let view = if last { fitting.next_back() } else { fitting.next() };
        let view = view.ok_or_else(|| {
            Error::unsupported("found no tensor in checkpoints of this family that could hold this one")
                .tensor(&expected.name)
        })?;
        if matches!(entry.store, Store::Tiled(_)) && !codes {
            dequantized.push(expected.name.clone());
        }
        let part = TargetPart::all(number, entry);
        builder.walk(view, part, &expected.shape);
    }
    let left_out = LeftOut::of(config)?;
    for (number, entry) in reader.entries().iter().enumerate() {
        if Role::of(&entry.name) == Role::Prediction && builder.used.insert(number) {
            let source = left_out.prediction_source(&entry.name, naming);
            let view = View::Rows { source, first: 0, of: entry.shape[0] };
            builder.walk(&view, TargetPart::all(number, entry), &entry.shape);
        }
    }
    builder.refuse_strangers()?;
    for target in &mut builder.targets {
        check_coverage(target, reader).tensor(&target.name)?;
        target.dtype = dtype_of(target, reader, dtype).tensor(&target.name)?;
    }
    let all_floats = builder.targets.iter().all(|t| !t.content.iter().any(|p| p.form == PartForm::Codes));
    Ok(UnpackPlan { targets: builder.targets, dequantized, all_floats })
}

struct Builder<'a> {
    reader: &'a IebinReader,
    targets: Vec<UnpackedTensor>,
    by_name: BTreeMap<String, usize>,
    used: HashSet<usize>,
}

impl<'a> Builder<'a> {
    /// Returns the entry of a tensor that the configuration requires.
    fn entry(&mut self, expected: &ExpectedTensor) -> Result<(usize, &'a Entry)> {
        let number = self.reader.position(&expected.name);
        let number = number
            .ok_or_else(|| Error::corrupt("found no such tensor in the pack").tensor(&expected.name).help(MISMATCH))?;
        let entry = &self.reader.entries()[number];
        if entry.shape != expected.shape {
            let found = format!("found shape {:?}, expected {:?} from config.json", entry.shape, expected.shape);
            return Err(Error::corrupt(found).tensor(&expected.name).help(MISMATCH));
        }
        self.used.insert(number);
        Ok((number, entry))
    }

    fn refuse_strangers(&self) -> Result<()> {
        match self.reader.entries().iter().enumerate().find(|(i, _)| !self.used.contains(i)) {
            Some((_, entry)) => Err(Error::corrupt("found in the pack, but not described by config.json")
                .tensor(&entry.name)
                .help(MISMATCH)),
            None => Ok(()),
        }
    }

    /// Adds the source tensors of a view of `part`, which has the shape `shape`.
    fn walk(&mut self, view: &View, part: TargetPart, shape: &[usize]) {
        match view {
            View::Stacked(parts) => {
                for (m, view) in parts.iter().enumerate() {
                    let m = part.matrices.start + m;
                    self.walk(view, TargetPart { matrices: m..m + 1, ..part.clone() }, &shape[1..]);
                }
            }
            View::Interleaved(parts) => {
                let n = parts.len();
                let shape = [shape[0], shape[1] / n, shape[2]];
                for (i, view) in parts.iter().enumerate() {
                    let (phase, step) = (part.phase + i * part.step, part.step * n);
                    self.walk(view, TargetPart { phase, step, rows: part.rows / n, ..part.clone() }, &shape);
                }
            }
            View::Joined(parts) => {
                let rows = part.rows / parts.len();
                for (i, view) in parts.iter().enumerate() {
                    let phase = part.phase + i * rows * part.step;
                    self.walk(view, TargetPart { phase, rows, ..part.clone() }, &[rows, shape[1]]);
                }
            }
            View::Rows { first, .. } => {
                let entry: usize = shape[1..].iter().product();
                self.add(view, shape, [TargetPart { first: first * entry, ..part }]);
            }
            View::Slices { first, of, .. } => {
                let (count, cols) = (shape[0], shape[2]);
                for m in 0..count {
                    let at = part.matrices.start + m;
                    let first = (m * of + first) * cols;
                    self.add(view, shape, [TargetPart { matrices: at..at + 1, first, ..part.clone() }]);
                }
            }
            View::Transposed { stacks, .. } => {
                self.add(view, shape, [TargetPart { form: PartForm::Transposed { stacks: *stacks }, ..part }]);
            }
            View::Coded { source } => {
                let scales = TargetPart { form: PartForm::Scales, ..part.clone() };
                let parts = [TargetPart { form: PartForm::Codes, ..part }, scales];
                for ((name, shape), part) in parts_of_mxfp4(source, shape).into_iter().zip(parts) {
                    self.add_one(&name, shape, part);
                }
            }
        }
    }

    /// Adds `parts`, one to each source tensor of a view that is not composed of other views.
    fn add<const N: usize>(&mut self, view: &View, shape: &[usize], parts: [TargetPart; N]) {
        for ((name, shape), part) in view.source_shapes(shape).into_iter().zip(parts) {
            self.add_one(name, shape, part);
        }
    }

    /// Adds `part` to the source tensor of this name and shape.
    fn add_one(&mut self, name: &str, shape: Vec<usize>, part: TargetPart) {
        let number = *self.by_name.entry(name.to_string()).or_insert_with(|| {
            // The type is decided when all parts are known.
            let name = name.to_string();
            self.targets.push(UnpackedTensor { name, dtype: DType::U8, shape, content: Vec::new() });
            self.targets.len() - 1
        });
        self.targets[number].content.push(part);
    }
}

/// Refuses packs of GGUF files whose tensors differ from those of checkpoints.
fn refuse_gguf_layout(reader: &IebinReader) -> Result<()> {
    let recurrent = reader.description.model.as_ref().and_then(|model| model.recurrent.as_ref());
    let differs = |recurrent: &RecurrentLayers| match recurrent.mixer {
        Recurrent::GatedDeltaNet(net) => net.tiled || net.decay_factors,
        Recurrent::Mamba2(mamba) => mamba.decay_factors,
        Recurrent::ShortConv(_) => false,
    };
    if !recurrent.is_some_and(differs) {
        return Ok(());
    }
    Err(Error::unsupported("found heads or decays of recurrent layers in the form of GGUF files")
        .tensor("model.recurrent.mixer")
        .help("`iec export-gguf` writes this pack as a GGUF file; or unpack a pack of the original checkpoint"))
}

/// Checks that every element of a target has a source; a fused tensor has several parts.
fn check_coverage(target: &UnpackedTensor, reader: &IebinReader) -> Result<()> {
    let found: usize = target.content.iter().map(|part| part.elements(reader)).sum();
    if found == target.shape.iter().product::<usize>() {
        return Ok(());
    }
    Err(Error::corrupt(format!("found {found} elements in the pack, expected those of shape {:?}", target.shape))
        .help(MISMATCH))
}

/// Returns the type of a target: that of its floats, or `decoded` if all of it is decoded.
fn dtype_of(target: &UnpackedTensor, reader: &IebinReader, decoded: DType) -> Result<DType> {
    if target.content.iter().any(|part| matches!(part.form, PartForm::Codes | PartForm::Scales)) {
        return Ok(DType::U8);
    }
    let mut found = None;
    for part in &target.content {
        let entry = &reader.entries()[part.entry];
        let Store::Plain(dtype) = entry.store else { continue };
        if *found.get_or_insert(dtype) != dtype {
            return Err(Error::unsupported(format!(
                "found floats of different types, expected one type for all parts of a tensor; {} is {dtype}",
                entry.name
            ))
            .help("pack again with --dtype, so that all floats have one type"));
        }
    }
    Ok(found.unwrap_or(decoded))
}
