//! How does a GGUF file become a pack? Metadata gives the configuration, the family's own code the description, that the
//! tensors there must be; then every tensor is gathered row by row in canonical order.
//!
//! Blocks that have a scheme of ours keep codes and scales; floats keep their bytes; all other types become their exact f32
//! values. Memory is bounded by a few chunks per thread.

use super::blocks;
use super::config::config_json;
use super::family::Family;
use super::names::{Mapped, Rows, is_vector, map};
use super::reader::{Gguf, GgufTensor};
use super::tokenizer_in::{TokenizerFiles, tokenizer_config, tokenizer_files};
use super::types::GgmlType;
use crate::atomic_file::AtomicFile;
use crate::convert::arch::{Arch, Expected, Fields, expected_tensors};
use crate::convert::digest::hash_file;
use crate::convert::json::read_limited;
use crate::convert::pack::companions::{self, NAMES, TOKENIZER};
use crate::convert::pack::{refuse_occupied, refuse_overflow};
use crate::convert::payload::Payload;
use crate::convert::read_at::ReadAt;
use crate::dtype::{DType, encode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::{DescriptionParts, Entry, IebinWriter, JSON_NAME, PlannedTensor, Source, SourceFile, Store};
use crate::model_config::ModelConfig;
use crate::progress;
use crate::quant::block::CodedRow;
use crate::quant::block::tile::{pad_tile, put_row};
use crate::scheme::{TILE_ROWS, TileLayout};
use indicatif::ProgressBar;
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Elements gathered at once by a thread.
const CHUNK_ELEMENTS: usize = 1 << 20;
const CONFIG: &str = "config.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// What is imported, and how.
#[derive(Debug, Clone, Default)]
pub struct ImportOptions {
    /// The file, or the first one of a split model.
    pub file: PathBuf,
    /// Where the pack goes; made when missing.
    pub out_dir: PathBuf,
    /// The float type of tensors that are not quantized in the pack; `None` keeps each as it is, and makes exact f32 of
    /// types that have no scheme of ours.
    pub dtype: Option<DType>,
    /// A tokenizer.json to use instead of the file's own tokenizer.
    pub tokenizer: Option<PathBuf>,
    /// Replace an existing pack.
    pub overwrite: bool,
}

/// What was imported.
#[derive(Debug, Clone, Serialize)]
pub struct ImportSummary {
    /// Class name of the model.
    pub architecture: String,
    /// Number of tensors in the pack.
    pub tensors: usize,
    /// Of these, stored quantized, with the codes and scales of the file.
    pub quantized_tensors: usize,
    /// Of these, decoded from a type that has no scheme here, by the name of the type.
    pub decoded_tensors: BTreeMap<String, usize>,
    /// Of these, rounded to the type asked for.
    pub rounded_tensors: usize,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes of all files read.
    pub bytes_in: u64,
    /// Bytes of the binary written.
    pub bytes_out: u64,
    /// Payload bits per weight.
    pub bits_per_weight: f64,
    /// Wall time.
    pub seconds: f64,
    /// False when the file has no tokenizer and none was given.
    pub tokenizer: bool,
}

/// Imports a GGUF file as a pack.
///
/// # Errors
/// The file is damaged or of a family, type or tokenizer that is not supported, or the output cannot be written. Nothing is
/// left in `out_dir` then.
pub fn import(options: &ImportOptions) -> Result<ImportSummary> {
    let start = Instant::now();
    refuse_occupied(&options.out_dir, options.overwrite)?;
    let gguf = Gguf::open(&options.file)?;
    let model = Model::read(&gguf, options).at(&options.file)?;
    let items = model.plan(options.dtype).at(&options.file)?;
    let planned = items.iter().map(|item| item.planned.clone()).collect();
    let writer = IebinWriter::create(&options.out_dir, planned, options.overwrite)?;
    let payloads: u64 = writer.entries().iter().map(|e| e.nbytes as u64).sum();
    let bytes_in: u64 = gguf.files().iter().map(|f| f.nbytes).sum();
    let bar = progress::bytes("importing", payloads + bytes_in);
    let (source, hashes) = rayon::join(|| source(&gguf, &bar), || fill(&model, &items, &writer, &bar));
    bar.finish_and_clear();
    let (source, hashes) = (source?, hashes.at(&options.file)?);
    let parts = DescriptionParts {
        model: Some(model.config.clone()),
        tokenizer: model.tokenizer.is_some().then(|| TOKENIZER.to_string()),
        source: Some(source),
        companions: model.companions(&options.out_dir)?,
        obsolete: if options.out_dir.join(JSON_NAME).exists() { model.obsolete() } else { Vec::new() },
    };
    let entries = writer.finish(parts, hashes)?;
    Ok(summary(&model, &items, &entries, bytes_in, start))
}

fn summary(model: &Model, items: &[Item], entries: &[Entry], bytes_in: u64, start: Instant) -> ImportSummary {
    let mut decoded = BTreeMap::new();
    for item in items {
        if let Some(kind) = item.decoded_from() {
            *decoded.entry(kind.to_string()).or_default() += 1;
        }
    }
    let payload: u64 = entries.iter().map(|e| e.nbytes as u64).sum();
    let parameters: u64 = entries.iter().map(|e| e.elements() as u64).sum();
    ImportSummary {
        architecture: model.config.architecture.clone(),
        tensors: entries.len(),
        quantized_tensors: items.iter().filter(|item| matches!(item.planned.store, Store::Tiled(_))).count(),
        decoded_tensors: decoded,
        rounded_tensors: items.iter().filter(|item| item.is_rounded()).count(),
        parameters,
        bytes_in,
        bytes_out: entries.last().map_or(0, |e| (e.offset + e.nbytes) as u64),
        bits_per_weight: payload as f64 * 8.0 / parameters as f64,
        seconds: start.elapsed().as_secs_f64(),
        tokenizer: model.tokenizer.is_some(),
    }
}

/// Everything but the weights.
struct Model<'a> {
    gguf: &'a Gguf,
    config_json: Map<String, Value>,
    config: ModelConfig,
    expected: Vec<Expected>,
    mapped: Vec<Mapped>,
    /// The tensor of the file for each of `mapped`.
    tensors: Vec<&'a GgufTensor>,
    tokenizer: Option<TokenizerFiles>,
}

impl<'a> Model<'a> {
    fn read(gguf: &'a Gguf, options: &ImportOptions) -> Result<Model<'a>> {
        let family = Family::of_file(gguf.metadata.text("general.architecture")?)?;
        let config_json = config_json(gguf)?;
        let fields = Fields::new(&config_json);
        let config = Arch::of(&fields)?.model_config(&fields, None)?;
        if config.n_layers > gguf.tensors.len() {
            let found = format!("{} layers, but the file has {} tensors", config.n_layers, gguf.tensors.len());
            return Err(Error::corrupt(found).tensor("block_count"));
        }
        let by_name: HashMap<&str, &GgufTensor> = gguf.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let expected = expected_tensors(&config);
        let fused = |name: &str| if name.contains(".attn_qkv.") { by_name.contains_key(name) } else { family.fused };
        let mapped = map(family, &config, &expected, fused)?;
        let tensors = mapped.iter().map(|m| bind(m, &by_name)).collect::<Result<Vec<_>>>()?;
        refuse_leftovers(gguf, &mapped)?;
        let tokenizer = read_tokenizer(gguf, config.vocab, options.tokenizer.as_deref())?;
        Ok(Model { gguf, config_json, config, expected, mapped, tensors, tokenizer })
    }

    /// Writes the small files, to be committed with the pack.
    fn companions(&self, dir: &Path) -> Result<Vec<AtomicFile>> {
        let pretty =
            |value: &Value| serde_json::to_vec_pretty(value).map_err(|e| Error::corrupt(format!("no JSON: {e}")));
        let mut files = vec![(CONFIG, pretty(&Value::Object(self.config_json.clone()))?)];
        if let Some(TokenizerFiles { tokenizer, config }) = &self.tokenizer {
            files.push((TOKENIZER, tokenizer.clone()));
            files.push((TOKENIZER_CONFIG, pretty(config)?));
        }
        let write = |(name, bytes): (&str, Vec<u8>)| {
            let mut file = AtomicFile::create(&dir.join(name))?;
            file.write_all(&bytes).at(file.path())?;
            Ok(file)
        };
        files.into_iter().map(write).collect()
    }

    /// Companions that an older pack may have left and this one does not have.
    fn obsolete(&self) -> Vec<&'static str> {
        let ours: &[&str] = if self.tokenizer.is_some() { &[CONFIG, TOKENIZER, TOKENIZER_CONFIG] } else { &[CONFIG] };
        NAMES.iter().copied().filter(|name| !ours.contains(name)).collect()
    }

    fn plan(&self, dtype: Option<DType>) -> Result<Vec<Item>> {
        let mut sources: Vec<Vec<(usize, usize)>> = vec![Vec::new(); self.expected.len()];
        for (number, mapped) in self.mapped.iter().enumerate() {
            for (part, canonical) in mapped.canonical.iter().enumerate() {
                sources[*canonical].push((number, part));
            }
        }
        self.expected.iter().zip(sources).map(|(e, sources)| self.plan_one(e, sources, dtype).tensor(&e.name)).collect()
    }

    fn plan_one(&self, expected: &Expected, sources: Vec<(usize, usize)>, dtype: Option<DType>) -> Result<Item> {
        let kinds: Vec<GgmlType> = sources.iter().map(|(number, _)| self.tensors[*number].kind).collect();
        for ((number, _), kind) in sources.iter().zip(&kinds) {
            blocks::check_supported(*kind).tensor(&self.mapped[*number].name)?;
        }
        let one = kinds.iter().all(|kind| *kind == kinds[0]);
        let plus_one = sources.iter().any(|(number, _)| self.mapped[*number].plus_one);
        let vector = is_vector(&expected.name, &expected.shape);
        let float = blocks::plain(kinds[0]).filter(|_| one && !plus_one).unwrap_or(DType::F32);
        let store = match blocks::scheme(kinds[0]) {
            Some(spec) if one && !vector => Store::Tiled(spec),
            _ => Store::Plain(dtype.unwrap_or(float)),
        };
        let planned = PlannedTensor {
            name: expected.name.clone(),
            shape: expected.shape.clone(),
            store,
            source_layout: None,
            metrics: None,
        };
        let rows = Rows::new(&expected.shape, vector);
        Ok(Item { planned, rows, vector, sources, kinds, plus_one })
    }
}

fn bind<'a>(mapped: &Mapped, by_name: &HashMap<&str, &'a GgufTensor>) -> Result<&'a GgufTensor> {
    let Some(tensor) = by_name.get(mapped.name.as_str()) else {
        return Err(Error::corrupt(format!("missing from the file; the model needs it with shape {:?}", mapped.shape))
            .tensor(&mapped.name));
    };
    if tensor.shape != mapped.shape {
        let found = format!("shape {:?}, but the metadata says {:?}", tensor.shape, mapped.shape);
        return Err(Error::corrupt(found).tensor(&mapped.name));
    }
    Ok(tensor)
}

/// Refuses tensors without a place in the model, but for those that became part of the configuration.
fn refuse_leftovers(gguf: &Gguf, mapped: &[Mapped]) -> Result<()> {
    let used: HashSet<&str> = mapped.iter().map(|m| m.name.as_str()).collect();
    let read_already = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];
    let left =
        gguf.tensors.iter().find(|t| !used.contains(t.name.as_str()) && !read_already.contains(&t.name.as_str()));
    match left {
        Some(t) => Err(Error::unsupported("the model has no place for this tensor").tensor(&t.name)),
        None => Ok(()),
    }
}

fn read_tokenizer(gguf: &Gguf, rows: usize, given: Option<&Path>) -> Result<Option<TokenizerFiles>> {
    if let Some(path) = given {
        let tokenizer = read_limited(path)?;
        companions::check(TOKENIZER, &tokenizer).at(path)?;
        return Ok(Some(TokenizerFiles { tokenizer, config: tokenizer_config(&gguf.metadata)? }));
    }
    match gguf.metadata.text_opt("tokenizer.ggml.model")? {
        None | Some("none" | "no_vocab") => Ok(None),
        Some(_) => tokenizer_files(&gguf.metadata, rows).map(Some),
    }
}

/// One tensor of the pack and where its rows come from.
struct Item {
    planned: PlannedTensor,
    rows: Rows,
    vector: bool,
    /// Numbers of the mapped tensors, and which part of them it is.
    sources: Vec<(usize, usize)>,
    /// Their types.
    kinds: Vec<GgmlType>,
    plus_one: bool,
}

impl Item {
    /// The type that had to be decoded, because no scheme of ours means the same.
    fn decoded_from(&self) -> Option<GgmlType> {
        let coded = self.kinds.iter().find(|kind| blocks::plain(**kind).is_none());
        coded.copied().filter(|_| matches!(self.planned.store, Store::Plain(_)))
    }

    /// True when values may have changed.
    fn is_rounded(&self) -> bool {
        let Store::Plain(to) = self.planned.store else { return false };
        self.kinds.iter().any(|kind| match (blocks::plain(*kind), to) {
            (Some(from), to) if from == to => false,
            (Some(DType::F16 | DType::BF16) | None, DType::F32) => false,
            (Some(DType::F32), DType::F32) => false,
            _ => true,
        })
    }
}

/// Hashes the files.
fn source(gguf: &Gguf, bar: &ProgressBar) -> Result<Source> {
    let hash = |file: &super::reader::GgufFile| {
        let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let sha256 = hash_file(file.nbytes, bar, |at, out| file.read_at(at, out)).at(&file.path)?;
        Ok(SourceFile { name, bytes: file.nbytes, sha256 })
    };
    Ok(Source { repo: None, files: gguf.files().iter().map(hash).collect::<Result<_>>()? })
}

fn fill(model: &Model, items: &[Item], writer: &IebinWriter, bar: &ProgressBar) -> Result<Vec<String>> {
    let one = |filler: &mut Filler, (index, item): (usize, &Item)| {
        filler.fill(item, Payload::new(writer, bar, index)).tensor(&item.planned.name)
    };
    let new = || Filler { model, spans: Vec::new(), values: Vec::new(), encoded: Vec::new() };
    items.par_iter().enumerate().map_init(new, one).collect()
}

/// One thread's buffers.
struct Filler<'a> {
    model: &'a Model<'a>,
    spans: Vec<Vec<u8>>,
    values: Vec<f32>,
    encoded: Vec<u8>,
}

/// Where one canonical row lies: number of the span, and range of its bytes.
type Place = (usize, Range<usize>);

impl Filler<'_> {
    fn fill(&mut self, item: &Item, mut payload: Payload) -> Result<String> {
        let Rows { count, rows, cols } = item.rows;
        let height = (CHUNK_ELEMENTS / cols / TILE_ROWS * TILE_ROWS).max(TILE_ROWS);
        for matrix in 0..count {
            for start in (0..rows).step_by(height) {
                let range = start..rows.min(start + height);
                let places = self.read(item, matrix, range)?;
                self.encode(item, &places)?;
                payload.append(&self.encoded)?;
            }
        }
        Ok(payload.finish())
    }

    /// Reads all rows that make up a range of canonical rows, each source in one piece.
    fn read(&mut self, item: &Item, matrix: usize, range: Range<usize>) -> Result<Vec<Place>> {
        let model = self.model;
        self.spans.resize_with(item.sources.len(), Vec::new);
        let mut found: Vec<(usize, usize)> = vec![(0, 0); range.len()];
        let mut firsts = Vec::new();
        for (s, (number, part)) in item.sources.iter().enumerate() {
            let (mut first, mut last) = (usize::MAX, 0);
            for row in range.clone() {
                if let Some(there) = model.mapped[*number].order.gguf_row(*part, row) {
                    (first, last) = (first.min(there), last.max(there));
                    found[row - range.start] = (s, there);
                }
            }
            firsts.push(first);
            if first <= last {
                let tensor = model.tensors[*number];
                let (rows, bytes) = row_layout(tensor, &model.mapped[*number], item)?;
                self.spans[s].resize((last + 1 - first) * bytes, 0);
                model.gguf.read(tensor, ((matrix * rows + first) * bytes) as u64, &mut self.spans[s])?;
            }
        }
        let place = |(s, there): (usize, usize)| {
            let number = item.sources[s].0;
            let (_, bytes) = row_layout(model.tensors[number], &model.mapped[number], item)?;
            let at = (there - firsts[s]) * bytes;
            Ok((s, at..at + bytes))
        };
        found.into_iter().map(place).collect()
    }

    fn encode(&mut self, item: &Item, places: &[Place]) -> Result<()> {
        self.encoded.clear();
        match item.planned.store {
            Store::Tiled(spec) => {
                let layout = TileLayout::new(spec, item.rows.rows, item.rows.cols)?;
                self.encoded.resize(places.len().div_ceil(TILE_ROWS) * layout.tile_bytes, 0);
                let mut coded = CodedRow::new(&layout);
                for (tile, places) in self.encoded.chunks_exact_mut(layout.tile_bytes).zip(places.chunks(TILE_ROWS)) {
                    for (row, (s, bytes)) in places.iter().enumerate() {
                        blocks::to_row(item.kinds[*s], &self.spans[*s][bytes.clone()], &mut coded)?;
                        put_row(&layout, tile, row, &coded);
                    }
                    pad_tile(&layout, tile, places.len());
                }
                Ok(())
            }
            Store::Plain(dtype) => {
                let same = |s: usize| blocks::plain(item.kinds[s]) == Some(dtype) && !item.plus_one;
                self.values.resize(item.rows.cols, 0.0);
                for (s, bytes) in places {
                    let raw = &self.spans[*s][bytes.clone()];
                    if same(*s) {
                        self.encoded.extend_from_slice(raw);
                        continue;
                    }
                    blocks::dequantize(item.kinds[*s], raw, &mut self.values)?;
                    if item.plus_one {
                        // Exact from 0.5 on, where every norm of a trained model lies.
                        self.values.iter_mut().for_each(|x| *x -= 1.0);
                    }
                    refuse_overflow(&self.values, dtype)?;
                    encode_floats(dtype, &self.values, &mut self.encoded)?;
                }
                Ok(())
            }
        }
    }
}

/// Rows of one matrix of a source and bytes of a row.
fn row_layout(tensor: &GgufTensor, mapped: &Mapped, item: &Item) -> Result<(usize, usize)> {
    let rows = Rows::new(&mapped.shape, item.vector).rows;
    let bytes = tensor.kind.row_bytes(item.rows.cols).ok_or_else(|| {
        Error::unsupported(format!("{} where the model needs floats", tensor.kind)).tensor(&mapped.name)
    })?;
    Ok((rows, bytes))
}
