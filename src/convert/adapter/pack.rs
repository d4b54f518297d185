//! Adapters as packs: the changes of the canonical tensors of one model, in the container of [`crate::iebin`].
//!
//! The tensor `NAME.I.PART` is a part of the change of matrix `I` of the tensor `NAME`; docs/FORMAT.md lists them.
//! Factors in int8 are multiplied from the mapped file as they are.

use super::{Summary, int8, map};
use crate::adapter::{Adapter, Change, Int8Factor, LowRank};
use crate::convert::pack_output;
use crate::convert::source::read_at::{Stamp, changed_meanwhile};
use crate::dtype::{DType, decode_floats, encode_floats};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::writer::{self, Layout, PACK};
use crate::iebin::{
    self, AdapterJson, AdapterScales, DescriptionParts, Entry, IebinReader, JSON_NAME, PlannedTensor, Store,
};
use crate::job::{Command, Fingerprint, Job, Order, Output, RunOptions};
use crate::model_config::ModelConfig;
use crate::output::{AtomicFile, Inputs};
use crate::provenance::{Source, SourceFile};
use crate::quant::block::tile::dequantize_rows;
use crate::scheme::{Scheme, TileLayout};
use crate::sha256::{Digest, Sha256, hex};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::iter::once;
use std::path::{Path, PathBuf};

/// Number type of the factors of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum FactorNumbers {
    /// That of the file.
    Keep,
    /// This float type.
    Float(DType),
    /// int8 with a scale per row where that is smaller, see [`int8::round_to_int8`].
    Int8,
}

/// Options of [`pack()`].
#[derive(Debug)]
pub struct AdapterPackOptions {
    /// Directory of the adapter, as PEFT wrote it.
    pub adapter: PathBuf,
    /// Pack of a model that the adapter changes: the one that it was trained for, quantized or not.
    pub base: PathBuf,
    /// Directory of the new pack; created if it is missing.
    pub out_dir: PathBuf,
    /// Number type of the factors.
    pub numbers: FactorNumbers,
    /// True to replace a pack.
    pub overwrite: bool,
}

/// Result of [`pack()`].
#[derive(Debug, Clone, Serialize)]
pub struct AdapterPackSummary {
    /// Always `adapter`.
    pub kind: &'static str,
    /// `LoRA`, `rsLoRA` or `DoRA`.
    pub method: String,
    /// Class name of the model.
    pub architecture: String,
    /// Number of changed matrices.
    pub matrices: usize,
    /// Largest rank.
    pub rank: usize,
    /// Bytes of the tensors of PEFT.
    pub bytes_in: u64,
    /// Bytes of the binary written.
    pub bytes: u64,
    /// Number of modules in each part for images or sound, which are left out.
    pub unused: BTreeMap<String, usize>,
}

/// Part of the change of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChangePart {
    A,
    B,
    Magnitude,
    Replaced,
    Added,
    Bias,
}

/// All parts with the ends of their names.
const PARTS: [(ChangePart, &str); 6] = [
    (ChangePart::A, "lora_A"),
    (ChangePart::B, "lora_B"),
    (ChangePart::Magnitude, "magnitude"),
    (ChangePart::Replaced, "weight"),
    (ChangePart::Added, "added"),
    (ChangePart::Bias, "bias"),
];

/// Shape, storage and bytes of a tensor.
type Stored = (Vec<usize>, Store, Vec<u8>);

/// Numbers of a tensor, its tiles if they are int8, and its type.
type Numbers = (Vec<f32>, Option<Int8Factor>, DType);

/// A tensor to be written.
struct Payload {
    planned: PlannedTensor,
    bytes: Vec<u8>,
}

/// Packs an adapter of PEFT for a model.
///
/// # Errors
/// The adapter cannot be read or does not fit the model, rows lose too much in int8, or the output cannot be written.
pub fn pack(options: &AdapterPackOptions) -> Result<AdapterPackSummary> {
    let summary = super::describe(&options.adapter)?;
    let base = IebinReader::open(&options.base)?;
    let Some(model) = base.description.model.clone() else {
        return Err(Error::unsupported("found a pack of an older program, expected one with a model").at(&options.base));
    };
    if is_at(&options.adapter)? {
        return Err(Error::usage("found a pack, expected an adapter of PEFT").at(&options.adapter));
    }
    let sources = [super::CONFIG, super::FILE].map(|name| options.adapter.join(name));
    let inputs = Inputs::default().files(sources.iter()).packs([&options.base], &iebin::members());
    let occupied = || pack_output::refuse_occupied(&options.out_dir, options.overwrite, &inputs);
    writer::recover(&options.out_dir)?;
    let before = stamps(&sources)?;
    let mut adapter = super::read(&options.adapter, &model)?;
    let fingerprint = fingerprint(options, &adapter.hash, &model);
    if !pack_output::was_torn(&options.out_dir, &fingerprint) {
        occupied()?;
    }
    if options.numbers == FactorNumbers::Int8 {
        int8::round_to_int8(&mut adapter).at(&options.adapter)?;
    }
    let (payloads, tensors) = payloads(&adapter, options.numbers)?;
    let layout = Layout::new(payloads.iter().map(|payload| payload.planned.clone()).collect())?;
    let source = Source { repo: None, files: sources.iter().map(|path| source_file(path)).collect::<Result<_>>()? };
    if let Some((path, _)) =
        sources.iter().zip(before.iter().zip(stamps(&sources)?)).find(|(_, (a, b))| a.may_differ_from(b))
    {
        return Err(changed_meanwhile(path));
    }
    let parts = DescriptionParts {
        model: Some(model.clone()),
        source: Some(source),
        adapter: Some(AdapterJson { method: summary.method.clone(), tensors }),
        ..DescriptionParts::default()
    };
    let (rank, matrices) = (adapter.rank(), adapter.changes.values().flatten().filter(|c| !c.is_empty()).count());
    write(options, &fingerprint, layout.clone(), &payloads, parts, occupied)?;
    Ok(AdapterPackSummary {
        kind: "adapter",
        method: summary.method,
        architecture: model.architecture,
        matrices,
        rank,
        bytes_in: summary.bytes,
        bytes: layout.total_bytes,
        unused: summary.unused,
    })
}

/// Returns the states of the files, by which a change while they are read is found.
fn stamps(paths: &[PathBuf]) -> Result<Vec<Stamp>> {
    paths.iter().map(|path| Ok(Stamp::of(&std::fs::metadata(path).at(path)?))).collect()
}

/// Returns the fingerprint of the job: the adapter by its content, and the model that it is packed for.
fn fingerprint(options: &AdapterPackOptions, hash: &str, model: &ModelConfig) -> String {
    let mut fingerprint = Fingerprint::new("pack");
    fingerprint.field("adapter", hash);
    fingerprint.json("numbers", &options.numbers);
    fingerprint.json("model", model);
    fingerprint.finish()
}

fn source_file(path: &Path) -> Result<SourceFile> {
    Ok(SourceFile {
        name: path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        bytes: std::fs::metadata(path).at(path)?.len(),
        sha256: crate::sha256::of_file(path, |_| ())?,
    })
}

/// Returns the tensors of all changes, and the scales of their factors.
fn payloads(adapter: &Adapter, numbers: FactorNumbers) -> Result<(Vec<Payload>, AdapterScales)> {
    let (mut payloads, mut scales) = (Vec::new(), BTreeMap::new());
    for (name, changes) in &adapter.changes {
        for (i, change) in changes.iter().enumerate() {
            for (part, end) in PARTS {
                let payload = payload(part, change, numbers).tensor(name)?;
                payloads.extend(payload.map(|(shape, store, bytes)| Payload {
                    planned: PlannedTensor {
                        name: format!("{name}.{i}.{end}"),
                        shape,
                        store,
                        source_layout: None,
                        metrics: None,
                    },
                    bytes,
                }));
            }
        }
        let scale = |change: &Change| change.low_rank.as_ref().map(|factors| factors.scale);
        scales.insert(name.clone(), changes.iter().map(scale).collect());
    }
    Ok((payloads, scales))
}

/// Returns the shape, the storage and the bytes of a part, if the change has it.
fn payload(part: ChangePart, change: &Change, numbers: FactorNumbers) -> Result<Option<Stored>> {
    let low_rank = change.low_rank.as_ref();
    let factor =
        |i: usize, values: &[f32], shape: Vec<usize>, dtype: DType| match &low_rank.and_then(|f| f.int8[i].clone()) {
            Some(Int8Factor { layout, data }) => Ok((shape, Store::Tiled(layout.spec), data.to_vec())),
            None => floats(values, shape, numbers, dtype),
        };
    let vector = |values: &Option<Vec<f32>>| {
        values.as_ref().map(|values| floats(values, vec![values.len()], FactorNumbers::Float(DType::F32), DType::F32))
    };
    match part {
        ChangePart::A => low_rank.map(|f| factor(0, &f.a, vec![f.rank, f.a.len() / f.rank], f.dtype)),
        ChangePart::B => low_rank.map(|f| factor(1, &f.b, vec![f.b.len() / f.rank, f.rank], f.dtype)),
        ChangePart::Magnitude => vector(&change.magnitude),
        ChangePart::Replaced => {
            change.replaced.as_ref().map(|values| floats(values, vec![values.len()], numbers, DType::BF16))
        }
        ChangePart::Added => vector(&change.added),
        ChangePart::Bias => vector(&change.bias),
    }
    .transpose()
}

/// Encodes floats. A type that is only kept, not chosen, must hold all of them exactly; otherwise they become f32.
fn floats(values: &[f32], shape: Vec<usize>, numbers: FactorNumbers, of_file: DType) -> Result<Stored> {
    let encode = |dtype: DType| -> Result<(Vec<u8>, bool)> {
        let (mut bytes, mut decoded) = (Vec::new(), vec![0.0; values.len()]);
        encode_floats(dtype, values, &mut bytes)?;
        decode_floats(dtype, &bytes, &mut decoded)?;
        match decoded.iter().find(|x| !x.is_finite()) {
            Some(_) => {
                Err(Error::unsupported(format!("found a number that {dtype} cannot hold")).help("keep the type"))
            }
            None => Ok((bytes, decoded == values)),
        }
    };
    let (bytes, dtype) = match numbers {
        FactorNumbers::Float(dtype) => (encode(dtype)?.0, dtype),
        FactorNumbers::Keep | FactorNumbers::Int8 => match encode(of_file) {
            Ok((bytes, true)) => (bytes, of_file),
            _ => (encode(DType::F32)?.0, DType::F32),
        },
    };
    Ok((shape, Store::Plain(dtype), bytes))
}

/// Writes the files of the pack. `allowed`, which fails when files would be lost, is called immediately before files
/// are replaced.
fn write(
    options: &AdapterPackOptions,
    fingerprint: &str,
    layout: Layout,
    payloads: &[Payload],
    parts: DescriptionParts,
    allowed: impl Fn() -> Result<()>,
) -> Result<()> {
    let order = Order {
        fingerprint,
        inputs: "",
        command: &Command::new("pack", &()),
        lead: Some(PACK.lead),
        output: Output::Alone,
        run: &RunOptions::default(),
    };
    let binary = [pack_output::binary(&layout)];
    let (job, mut files) = Job::open(&options.out_dir, &order, &binary, &[once(0..layout.total_bytes).collect()])?;
    let bin: AtomicFile = files.remove(0);
    let fill = || -> Result<Vec<String>> {
        let one = |(payload, entry): (&Payload, &Entry)| {
            bin.write_at(&payload.bytes, entry.offset as u64)?;
            Ok(hex(Sha256::new_with_prefix(&payload.bytes)))
        };
        payloads.iter().zip(&layout.entries).map(one).collect()
    };
    let outcome = fill().and_then(|digests| {
        job.commit_begins()?;
        let allowed = || if job.was_torn() { Ok(()) } else { allowed() };
        writer::commit(layout, bin, job.dir(), parts, digests, allowed)
    });
    job.conclude(outcome)
}

/// Returns true if `dir` has the pack of an adapter or of a model.
///
/// # Errors
/// The directory cannot be read.
pub(super) fn is_at(dir: &Path) -> Result<bool> {
    Ok(!files::exists(&dir.join(super::CONFIG))? && files::exists(&dir.join(JSON_NAME))?)
}

/// An opened pack of an adapter.
pub(super) struct AdapterPack {
    reader: IebinReader,
    pub adapter: AdapterJson,
}

impl AdapterPack {
    /// Opens the pack in `dir`.
    ///
    /// # Errors
    /// It is damaged, or the pack of a model.
    pub fn open(dir: &Path) -> Result<AdapterPack> {
        let mut reader = IebinReader::open(dir)?;
        match reader.description.adapter.take() {
            Some(adapter) => Ok(AdapterPack { reader, adapter }),
            None => Err(Error::usage("found the pack of a model, expected an adapter")
                .at(dir)
                .help("name a directory that PEFT or `iec pack ADAPTER --base PACK` wrote")),
        }
    }

    fn entries(&self) -> &[Entry] {
        self.reader.entries()
    }

    /// Describes the adapter.
    ///
    /// # Errors
    /// The description names no model.
    pub fn describe(&self) -> Result<Summary> {
        let factors =
            || self.entries().iter().filter(|entry| entry.name.ends_with(".lora_A") || entry.name.ends_with(".lora_B"));
        let mut targets = BTreeMap::new();
        for name in self.adapter.tensors.keys() {
            let module = name.strip_suffix(".weight").unwrap_or(name);
            *targets.entry(module.rsplit('.').next().unwrap_or(module).to_string()).or_insert(0) += 1;
        }
        let ranks =
            factors().filter(|entry| entry.name.ends_with(".lora_A")).filter_map(|entry| entry.shape.first().copied());
        Ok(Summary {
            method: self.adapter.method.clone(),
            base: Some(self.model()?.architecture.clone()),
            modules: self.adapter.tensors.len(),
            rank: ranks.max().unwrap_or(0),
            parameters: factors().map(|entry| entry.elements() as u64).sum(),
            bytes: self.entries().iter().map(|entry| entry.nbytes as u64).sum(),
            targets,
            unused: BTreeMap::new(),
        })
    }

    /// Returns the model that the adapter changes.
    ///
    /// # Errors
    /// The description names none.
    fn model(&self) -> Result<&ModelConfig> {
        self.reader
            .description
            .model
            .as_ref()
            .ok_or_else(|| Error::corrupt("found no model of the adapter").at(self.path()))
    }

    fn path(&self) -> PathBuf {
        self.reader.dir.join(JSON_NAME)
    }

    /// Reads the adapter for a model.
    ///
    /// # Errors
    /// The adapter was packed for another model, or a tensor is missing, has another size, or is not finite.
    pub fn read(&self, model: &ModelConfig) -> Result<Adapter> {
        let own = self.model()?;
        if own.architecture != model.architecture {
            let found = format!("found an adapter of {}, expected one of {}", own.architecture, model.architecture);
            return Err(Error::usage(found).at(self.path()).help("name the model for which the adapter was packed"));
        }
        let hash = self.reader.description.sha256.clone();
        let hash =
            hash.ok_or_else(|| Error::corrupt("found no digest of the pack").at(self.path()).tensor("sha256"))?;
        let expected: BTreeMap<String, Vec<usize>> =
            map::expected(model).into_iter().map(|tensor| (tensor.name, tensor.shape)).collect();
        let tensors = &self.adapter.tensors;
        let belongs = |entry: &&Entry| {
            let mut parts = entry.name.rsplitn(3, '.');
            let [end, index, name] = [parts.next(), parts.next(), parts.next()];
            let scales = name.and_then(|name| tensors.get(name)).map_or(0, Vec::len);
            PARTS.iter().any(|(_, known)| Some(*known) == end)
                && index.and_then(|index| index.parse::<usize>().ok()).is_some_and(|index| index < scales)
        };
        if let Some(entry) = self.entries().iter().find(|entry| !belongs(entry)) {
            return Err(Error::corrupt("found a tensor that belongs to no change").at(self.path()).tensor(&entry.name));
        }
        let changes = tensors.par_iter().map(|(name, scales)| {
            let shape = expected.get(name).filter(|shape| shape.len() > 1);
            let count = shape.map(|shape| shape[..shape.len() - 2].iter().product::<usize>());
            let (Some(shape), true) = (shape, count == Some(scales.len())) else {
                let found = format!("found changes of {} matrices that the model does not have", scales.len());
                return Err(Error::corrupt(found).at(self.path()).tensor(name).help(map::WRONG_BASE));
            };
            let size = (shape[shape.len() - 2], shape[shape.len() - 1]);
            let one = |(i, scale): (usize, &Option<f32>)| self.change(&format!("{name}.{i}"), *scale, size);
            let all = scales.iter().enumerate().map(one).collect::<Result<Vec<_>>>()?;
            Ok((name.clone(), all))
        });
        Ok(Adapter { hash, changes: changes.collect::<Result<_>>()? })
    }

    /// Reads the change of a matrix of `rows` x `cols`.
    fn change(&self, name: &str, scale: Option<f32>, (rows, cols): (usize, usize)) -> Result<Change> {
        let part = |part: ChangePart, shape: &[usize]| -> Result<Option<Numbers>> {
            let end = PARTS.iter().find(|(of, _)| *of == part).map_or("", |(_, end)| end);
            let name = format!("{name}.{end}");
            let Some(entry) = self.reader.get(&name) else { return Ok(None) };
            self.values(entry, shape).at(self.path()).tensor(&entry.name).map(Some)
        };
        let rank =
            self.reader.get(&format!("{name}.lora_A")).and_then(|entry| entry.shape.first().copied()).unwrap_or(0);
        let low_rank = match (scale, part(ChangePart::A, &[rank, cols])?, part(ChangePart::B, &[rows, rank])?) {
            (None, None, None) => None,
            (Some(scale), Some((a, of_a, dtype)), Some((b, of_b, other))) if scale.is_finite() && rank > 0 => {
                let dtype = if of_a.is_some() { other } else { dtype };
                Some(LowRank { rank, scale, a, b, dtype, int8: [of_a, of_b] })
            }
            _ => {
                let found = "found a part of lora_A, lora_B and their scale, expected all of them or none";
                return Err(Error::corrupt(found).at(self.path()).tensor(name));
            }
        };
        let is_embedding = name.starts_with("model.embed_tokens.");
        let vector = |of: ChangePart, len: usize| Ok::<_, Error>(part(of, &[len])?.map(|(values, ..)| values));
        Ok(Change {
            low_rank,
            magnitude: vector(ChangePart::Magnitude, if is_embedding { cols } else { rows })?,
            replaced: vector(ChangePart::Replaced, rows * cols)?,
            added: vector(ChangePart::Added, rows)?,
            bias: vector(ChangePart::Bias, rows)?,
        })
    }

    /// Reads the numbers of a tensor, and its tiles if it has any.
    fn values(&self, entry: &Entry, shape: &[usize]) -> Result<Numbers> {
        if entry.shape != shape {
            let found = format!("found shape {:?}, expected {shape:?}", entry.shape);
            return Err(Error::corrupt(found).help(map::WRONG_BASE));
        }
        let data = self.reader.payload(entry)?;
        let mut values = vec![0.0; entry.elements()];
        let (int8, dtype) = match (entry.store, entry.layout().transpose()?) {
            (Store::Plain(dtype @ (DType::F32 | DType::F16 | DType::BF16)), _) => {
                decode_floats(dtype, &data, &mut values)?;
                (None, dtype)
            }
            (Store::Tiled(spec), Some(layout)) if spec.scheme == Scheme::Int8 && spec.symmetric => {
                let layout: TileLayout = layout;
                dequantize_rows(&layout, &data, 0..layout.rows, &mut values);
                (Some(Int8Factor { layout, data }), DType::F32)
            }
            (store, _) => {
                let found = format!("found numbers of {}, expected f32, f16, bf16 or int8", store.name());
                return Err(Error::unsupported(found));
            }
        };
        // Without an early end, this loop uses vectors.
        match values.iter().fold(true, |finite, x| finite & x.is_finite()) {
            true => Ok((values, int8, dtype)),
            false => Err(Error::corrupt("found a number that is infinite or no number")),
        }
    }
}
