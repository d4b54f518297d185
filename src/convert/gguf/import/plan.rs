//! Plans an import: checks that a GGUF file has the tensors of its model and chooses the storage format of each in the
//! pack, before any weight is read.

use super::super::config::{FACTORS, NEXTN, ROPE_FREQS, UNIT_NORMS, config_json};
use super::super::family::Family;
use super::super::heads::{HeadBlock, fill_heads};
use super::super::names::{MappedTensor, RowOrder, is_vector, map};
use super::super::tokenizer_in::{TokenizerFiles, tokenizer_config, tokenizer_files};
use crate::convert::arch::{Arch, ExpectedTensor, Fields, expected_tensors};
use crate::convert::companions::{self, Companions, TOKENIZER};
use crate::convert::executor::{OnlyBytes, TaskOutput};
use crate::convert::json::read_limited;
use crate::convert::rows::{Form, Put, RowSource, RowStack, RowTarget};
use crate::convert::source::gguf::blocks;
use crate::convert::source::gguf::reader::{Gguf, GgufTensor};
use crate::convert::source::gguf::types::GgmlType;
use crate::dtype::DType;
use crate::error::{Context, Error, Result};
use crate::iebin::{PlannedTensor, Store};
use crate::model_config::{ModelConfig, QkNorm, Recurrent};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

const CONFIG: &str = "config.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Ending of the names of matrices, and that of the numbers that multiply the scales of NVFP4.
const WEIGHT: &str = ".weight";
const SCALE: &str = ".scale";
/// Tensors of a layer that computes keys and values.
const KEYS_VALUES: [&str; 3] = ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"];
/// Tensors that hold several others in some files, while other files of the same family have these apart.
const FUSED: [&str; 3] = [".attn_qkv.", ".attn_kv_b.", ".ffn_gate_up_exps."];

/// Contents of a GGUF file except the weights, checked and mapped to canonical tensors.
#[derive(Debug)]
pub(in crate::convert) struct GgufModel {
    pub(in crate::convert) gguf: Gguf,
    config_json: Map<String, Value>,
    pub(in crate::convert) config: ModelConfig,
    expected: Vec<ExpectedTensor>,
    mapped: Vec<MappedTensor>,
    /// Index of the tensor in the file, in the order of `mapped`.
    tensors: Vec<usize>,
    /// Numbers that multiply the scales of NVFP4 tensors, one for each matrix, by the index in `mapped`.
    further_scales: HashMap<usize, Vec<f32>>,
}

impl GgufModel {
    /// Opens a GGUF file, of a split model its first file, and checks that it has the tensors of its model.
    ///
    /// # Errors
    /// The file is damaged, or its family or a tensor is not supported.
    pub(in crate::convert) fn open(file: &Path) -> Result<GgufModel> {
        GgufModel::of(Gguf::open(file)?).at(file)
    }

    fn of(gguf: Gguf) -> Result<GgufModel> {
        let family = Family::of_file(gguf.metadata.text("general.architecture")?)?;
        let config_json = config_json(&gguf)?;
        let fields = Fields::new(&config_json);
        let mut config = Arch::of(&fields)?.model_config(&fields, None)?;
        match config.recurrent.as_mut().map(|recurrent| &mut recurrent.mixer) {
            Some(Recurrent::GatedDeltaNet(net)) => {
                (net.tiled, net.decay_factors) = (family.has_tiled_heads() && net.per_key() > 1, true);
            }
            Some(Recurrent::Mamba2(mamba)) => mamba.decay_factors = true,
            Some(Recurrent::ShortConv(_)) | None => {}
        }
        if config.n_layers > gguf.tensors.len() {
            let found =
                format!("found {} layers, but the file has only {} tensors", config.n_layers, gguf.tensors.len());
            return Err(Error::corrupt(found).tensor("block_count"));
        }
        let by_name: HashMap<&str, usize> =
            gguf.tensors.iter().enumerate().map(|(number, tensor)| (tensor.name.as_str(), number)).collect();
        let expected = expected_tensors(&config);
        let is_optional = |name: &str| FUSED.iter().any(|leaf| name.contains(leaf));
        let fused = |name: &str| if is_optional(name) { by_name.contains_key(name) } else { family.fused };
        let mapped = map(family, &config, &expected, fused)?;
        let tensors = mapped.iter().map(|m| bind(m, &gguf.tensors, &by_name)).collect::<Result<Vec<_>>>()?;
        let mut further_scales = HashMap::new();
        for (number, mapped) in mapped.iter().enumerate() {
            if let Some(numbers) = further_scales_of(&gguf, &mapped.name, &by_name)? {
                further_scales.insert(number, numbers);
            }
        }
        refuse_leftovers(&gguf, family, &config, &mapped)?;
        Ok(GgufModel { config_json, config, expected, mapped, tensors, further_scales, gguf })
    }

    /// Returns the companion files of the pack; `tokenizer` replaces the tokenizer of the file.
    ///
    /// # Errors
    /// The tokenizer is damaged or not supported.
    pub(in crate::convert) fn companions(&self, tokenizer: Option<&Path>) -> Result<Companions> {
        let pretty = |value: &Value| serde_json::to_vec_pretty(value).expect("JSON values serialize");
        let mut files = vec![(CONFIG, pretty(&Value::Object(self.config_json.clone())))];
        if let Some(TokenizerFiles { tokenizer, config }) = read_tokenizer(&self.gguf, self.config.vocab, tokenizer)? {
            files.push((TOKENIZER, tokenizer));
            files.push((TOKENIZER_CONFIG, pretty(&config)));
        }
        Ok(Companions::new(files))
    }

    /// Returns the position of the first rows of a tensor: index of the file and offset.
    pub(in crate::convert) fn position(&self, item: &ImportedTensor) -> (usize, u64) {
        let tensor = self.tensor(item.sources.first().map_or(0, |(number, _)| *number));
        (tensor.file, tensor.start)
    }

    /// Returns the tensor of the file that holds a mapped tensor.
    fn tensor(&self, mapped: usize) -> &GgufTensor {
        &self.gguf.tensors[self.tensors[mapped]]
    }

    /// Plans every tensor of the model; `dtype` is the type of those that are not quantized, `None` keeps theirs.
    ///
    /// # Errors
    /// A tensor has a type that cannot be decoded.
    pub(in crate::convert) fn plan(&self, dtype: Option<DType>) -> Result<Vec<ImportedTensor>> {
        let mut sources: Vec<Vec<(usize, usize)>> = vec![Vec::new(); self.expected.len()];
        for (number, mapped) in self.mapped.iter().enumerate() {
            for (part, canonical) in mapped.canonical.iter().enumerate() {
                sources[*canonical].push((number, part));
            }
        }
        self.expected.iter().zip(sources).map(|(e, sources)| self.plan_one(e, sources, dtype).tensor(&e.name)).collect()
    }

    fn plan_one(
        &self,
        expected: &ExpectedTensor,
        sources: Vec<(usize, usize)>,
        dtype: Option<DType>,
    ) -> Result<ImportedTensor> {
        let kinds: Vec<GgmlType> = sources.iter().map(|(number, _)| self.tensor(*number).kind).collect();
        for ((number, _), kind) in sources.iter().zip(&kinds) {
            blocks::check_supported(*kind).tensor(&self.mapped[*number].name)?;
        }
        let one = kinds.iter().all(|kind| *kind == kinds[0]);
        let plus_one = sources.iter().any(|(number, _)| self.mapped[*number].plus_one);
        let vector = is_vector(&expected.name, &expected.shape);
        let moved = sources.iter().any(|(number, _)| self.mapped[*number].order.is_transposed());
        let float = blocks::plain(kinds[0]).filter(|_| one && !plus_one).unwrap_or(DType::F32);
        let store = match blocks::scheme(kinds[0]) {
            Some(spec) if one && !vector && !moved => Store::Tiled(spec),
            _ => Store::Plain(dtype.unwrap_or(float)),
        };
        let planned = PlannedTensor {
            name: expected.name.clone(),
            shape: expected.shape.clone(),
            store,
            source_layout: None,
            metrics: None,
        };
        Ok(ImportedTensor { planned, vector, sources, kinds, plus_one })
    }

    /// Gathers the rows of a tensor from the file.
    pub(super) fn fill(&self, item: &ImportedTensor, out: &mut TaskOutput<'_>) -> Result<OnlyBytes> {
        let RowStack { count, rows, .. } = item.stack();
        self.read(item, item.planned.store.into(), (0..count, 0..rows), &mut |bytes| out.append(0, bytes))?;
        Ok(OnlyBytes {})
    }

    /// Passes rows of a tensor to `put` in the form `form`: these rows of each of these matrices. For tiles, the first
    /// row is that of a tile.
    ///
    /// # Errors
    /// A block is damaged, a value does not fit the form, reading fails, or `put` fails.
    pub(in crate::convert) fn read(
        &self,
        item: &ImportedTensor,
        form: Form,
        (matrices, rows): (Range<usize>, Range<usize>),
        put: &mut Put<'_>,
    ) -> Result<()> {
        let source = |(number, _): &(usize, usize)| {
            let tensor = self.tensor(*number);
            let rows = self.mapped[*number].order.stack(&tensor.shape, item.vector);
            let read = |at: usize, out: &mut [u8]| self.gguf.read(tensor, at as u64, out);
            let numbers = self.further_scales.get(number).map_or(&[][..], |numbers| numbers);
            Ok(RowSource::new(&tensor.name, tensor.kind.into(), rows, read)?.with_numbers(numbers))
        };
        let mut sources = item.sources.iter().map(source).collect::<Result<Vec<_>>>()?;
        let RowStack { rows: all, cols, .. } = item.stack();
        if let Some((heads, blocks)) = self.head_blocks(item) {
            let Form::Plain(dtype) = form else { unreachable!("transposed matrices are floats") };
            let (height, row_bytes) = (all / heads, cols * dtype.size());
            for head in rows.start / height..rows.end.div_ceil(height) {
                let mut bytes = Vec::new();
                let mut collect = |block: &[u8]| {
                    bytes.extend_from_slice(block);
                    Ok(())
                };
                fill_heads(&mut sources, head..head + 1, &blocks, dtype, &mut collect).tensor(&item.planned.name)?;
                let within = |row: usize| row.clamp(head * height, (head + 1) * height) - head * height;
                put(&bytes[within(rows.start) * row_bytes..within(rows.end) * row_bytes])?;
            }
            return Ok(());
        }
        let find = |row: usize| {
            let row = row + rows.start;
            let row_of = |(number, part): &(usize, usize)| self.mapped[*number].order.gguf_row(*part, row);
            let mut places = item.sources.iter().map(row_of).enumerate();
            places.find_map(|(source, row)| Some((source, row?))).expect("every row lies in one of the tensors")
        };
        // Subtracting 1 is exact for values of at least 0.5, as all stored norm weights of trained models are.
        let add = if item.plus_one { -1.0 } else { 0.0 };
        let target = RowTarget { form, matrices, rows: rows.len(), cols, add, columns: None };
        target.fill(&mut sources, find, put).tensor(&item.planned.name)
    }

    /// Returns the number of heads of a tensor and the blocks of each head, if the file has some of them transposed.
    fn head_blocks(&self, item: &ImportedTensor) -> Option<(usize, Vec<HeadBlock>)> {
        let sources = || item.sources.iter().map(|(number, _)| (&self.mapped[*number].order, self.tensor(*number)));
        if !sources().any(|(order, _)| order.is_transposed()) {
            return None;
        }
        let block = |(source, (order, tensor)): (usize, (&RowOrder, &GgufTensor))| HeadBlock {
            source,
            head: tensor.shape[1],
            rows: tensor.shape[1],
            transposed: order.is_transposed(),
        };
        Some((sources().next()?.1.shape[0], sources().enumerate().map(block).collect()))
    }
}

/// Finds a mapped tensor among those of the file.
fn bind(mapped: &MappedTensor, tensors: &[GgufTensor], by_name: &HashMap<&str, usize>) -> Result<usize> {
    let Some(number) = by_name.get(mapped.name.as_str()).copied() else {
        return Err(Error::corrupt(format!("missing from the file; expected with shape {:?}", mapped.shape))
            .tensor(&mapped.name)
            .help("the file is incomplete, or its metadata do not fit its tensors; get it again"));
    };
    let found = &tensors[number].shape;
    if *found != mapped.shape {
        let found = format!("found shape {found:?}, expected {:?} from the metadata", mapped.shape);
        return Err(Error::corrupt(found).tensor(&mapped.name));
    }
    Ok(number)
}

/// Reads the numbers that multiply the scales of an NVFP4 tensor: those of `STEM.scale` for `STEM.weight`, one for each
/// matrix.
///
/// # Errors
/// The numbers have another type or shape, or are not finite.
fn further_scales_of(gguf: &Gguf, name: &str, by_name: &HashMap<&str, usize>) -> Result<Option<Vec<f32>>> {
    let of = |name: &str| by_name.get(name).map(|number| &gguf.tensors[*number]);
    let scale = name.strip_suffix(WEIGHT).and_then(|stem| of(&format!("{stem}{SCALE}")));
    let weight = of(name).filter(|weight| weight.kind == GgmlType::NVFP4);
    let (Some(weight), Some(scale)) = (weight, scale) else { return Ok(None) };
    let (count, _, _) = weight.matrices();
    if scale.kind != GgmlType::F32 || scale.shape != [count] {
        let found = format!("found {} {:?}, expected F32 [{count}]", scale.kind, scale.shape);
        return Err(Error::corrupt(found).tensor(&scale.name).help("the file is damaged; get it again"));
    }
    let numbers = gguf.floats(scale)?;
    match numbers.iter().find(|number| !number.is_finite()) {
        None => Ok(Some(numbers)),
        Some(number) => Err(Error::corrupt(format!("found {number}, expected finite scales"))
            .tensor(&scale.name)
            .help("the file is damaged; get it again")),
    }
}

/// Refuses tensors that the model does not use, except those that became part of the configuration and those of layers
/// that predict further tokens.
fn refuse_leftovers(gguf: &Gguf, family: &Family, model: &ModelConfig, mapped: &[MappedTensor]) -> Result<()> {
    let mut used: HashSet<&str> = mapped.iter().map(|m| m.name.as_str()).collect();
    used.extend(FACTORS.into_iter().chain([ROPE_FREQS]));
    let nvfp4 = gguf.tensors.iter().filter(|tensor| tensor.kind == GgmlType::NVFP4);
    let nvfp4: HashSet<&str> = nvfp4.map(|tensor| &*tensor.name).filter(|name| used.contains(name)).collect();
    let further = gguf.metadata.count_opt(&format!("{}.{NEXTN}", family.name))?.unwrap_or(0);
    let is_read = |name: &str| {
        let Some((layer, leaf)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            return false;
        };
        let layer: usize = layer.parse().unwrap_or(0);
        let is_constant = model.attention.qk_norm == QkNorm::Unit && UNIT_NORMS.contains(&leaf);
        // Layers that read keys and values of earlier ones may have tensors for their own, which nothing reads.
        let reads_others = || layer < model.n_layers && model.layer(layer).kv_from().is_some();
        let is_unused = KEYS_VALUES.contains(&leaf) && reads_others();
        // Scales of activations are not used; those of weights were read.
        let of_weight = [SCALE, ".input_scale"].into_iter().find_map(|ending| name.strip_suffix(ending));
        let is_scale = of_weight.is_some_and(|stem| nvfp4.contains(&*format!("{stem}{WEIGHT}")));
        is_scale || is_constant || is_unused || (model.n_layers..model.n_layers + further).contains(&layer)
    };
    match gguf.tensors.iter().find(|t| !used.contains(t.name.as_str()) && !is_read(&t.name)) {
        Some(t) => Err(Error::unsupported("the architecture has no tensor of this name").tensor(&t.name).help(
            "a variant of the architecture with more tensors cannot be imported; no tensor is left out silently",
        )),
        None => Ok(()),
    }
}

fn read_tokenizer(gguf: &Gguf, rows: usize, given: Option<&Path>) -> Result<Option<TokenizerFiles>> {
    if let Some(path) = given {
        let tokenizer = read_limited(path)?;
        companions::check(TOKENIZER, &tokenizer, rows).at(path)?;
        return Ok(Some(TokenizerFiles { tokenizer, config: tokenizer_config(&gguf.metadata)? }));
    }
    match gguf.metadata.text_opt("tokenizer.ggml.model")? {
        None | Some("none" | "no_vocab") => Ok(None),
        Some(_) => {
            let files = tokenizer_files(&gguf.metadata, rows)?;
            companions::check(TOKENIZER, &files.tokenizer, rows)?;
            Ok(Some(files))
        }
    }
}

/// A tensor of the pack and the source of its rows.
#[derive(Debug)]
pub(in crate::convert) struct ImportedTensor {
    pub(in crate::convert) planned: PlannedTensor,
    vector: bool,
    /// Index of each source in the mapped tensors, and position of this tensor among the canonical
    /// tensors of that source.
    sources: Vec<(usize, usize)>,
    /// Types of the sources.
    kinds: Vec<GgmlType>,
    plus_one: bool,
}

impl ImportedTensor {
    /// Returns the tensor as a stack of matrices, in which vectors are columns.
    pub(in crate::convert) fn stack(&self) -> RowStack {
        RowStack::new(&self.planned.shape, self.vector)
    }

    /// Returns the type of the rows in the file, of the first ones if there are several.
    pub(in crate::convert) fn kind(&self) -> GgmlType {
        self.kinds[0]
    }

    /// Returns true if vectors are columns of its stack of matrices.
    pub(in crate::convert) fn is_vector(&self) -> bool {
        self.vector
    }

    /// Returns the type the tensor was decoded from, if it is a quantized type without an equivalent scheme.
    pub(in crate::convert) fn decoded_from(&self) -> Option<GgmlType> {
        let coded = self.kinds.iter().find(|kind| blocks::plain(**kind).is_none());
        coded.copied().filter(|_| matches!(self.planned.store, Store::Plain(_)))
    }

    /// Returns true when the tensor is stored in a float type that cannot hold all of its source values exactly.
    pub(super) fn is_rounded(&self) -> bool {
        let Store::Plain(to) = self.planned.store else { return false };
        let exact = |from: Option<DType>| from == Some(to) || to == DType::F32 && from != Some(DType::F64);
        self.kinds.iter().any(|kind| !exact(blocks::plain(*kind)))
    }
}
