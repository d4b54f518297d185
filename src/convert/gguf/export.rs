//! How does a pack become a GGUF file? The plan fixes every type and offset; then tensors are written at their places, chunk
//! by chunk, by all threads. The bytes do not depend on their number.
//!
//! q4_0, q8_0 and mxfp4 keep codes and scales. So do int4 and int8 with fp16 scales of any group size: a block of 32 gets the
//! scale of the group it lies in. What GGML has no type for is refused, or written as floats when the caller says so.

use super::blocks;
use super::config_out::{self, Description};
use super::family::Family;
use super::names::{Mapped, Order, Rows, is_vector, map};
use super::tokenizer_out::{self, tokenizer_keys};
use super::types::GgmlType;
use super::value::Value as Meta;
use super::writer::{Layout, PlannedTensor, lay_out};
use crate::atomic_file::AtomicFile;
use crate::convert::arch::{Expected, expected_tensors};
use crate::convert::json::{read_json, read_limited};
use crate::convert::pack::refuse_overflow;
use crate::dtype::{DType, decode_floats, encode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::{Entry, IebinReader, JSON_NAME, Store};
use crate::model_config::ModelConfig;
use crate::out_dir::{require_space, reserve};
use crate::quant::block::CodedRow;
use crate::quant::block::tile::get_row;
use crate::scheme::{BLOCK, TILE_ROWS, TileLayout};
use crate::{interrupt, progress};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Elements moved at once by a thread.
const CHUNK_ELEMENTS: usize = 1 << 20;

/// What is exported, and how.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// The pack.
    pub model_dir: PathBuf,
    /// The file.
    pub out: PathBuf,
    /// The float type of matrices that are not quantized in the file; `None` keeps each as it is.
    pub dtype: Option<DType>,
    /// Which quantized tensors are written as floats.
    pub dequantize: Dequantize,
    /// Name of the pre-tokenizer, where it cannot be told from the tokenizer.
    pub pre: Option<String>,
    /// Replace an existing file.
    pub overwrite: bool,
}

/// Which quantized tensors are written as floats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Dequantize {
    /// None: what GGML has no type for is refused.
    #[default]
    None,
    /// Those that GGML has no type for.
    Needed,
    /// All.
    All,
}

/// What was exported.
#[derive(Debug, Clone, Serialize)]
pub struct ExportSummary {
    /// Value of `general.architecture`.
    pub architecture: String,
    /// Number of tensors in the file.
    pub tensors: usize,
    /// Tensors by type.
    pub types: BTreeMap<String, usize>,
    /// Quantized tensors that were written as floats.
    pub dequantized_tensors: usize,
    /// Length of the file.
    pub bytes_out: u64,
    /// Wall time.
    pub seconds: f64,
    /// Where llama.cpp will compute or cut text differently.
    pub notes: Vec<String>,
}

/// Exports a pack.
///
/// # Errors
/// The pack is damaged, llama.cpp does not know its architecture or tokenizer, a tensor has no GGML type, or the file
/// cannot be written. Nothing is left under its name then.
pub fn export(options: &ExportOptions) -> Result<ExportSummary> {
    let start = Instant::now();
    if options.out.exists() && !options.overwrite {
        return Err(Error::usage("exists already").at(&options.out).help("add --overwrite or choose another --out"));
    }
    let reader = IebinReader::open(&options.model_dir).map_err(Error::while_opening_model)?;
    let json = options.model_dir.join(JSON_NAME);
    let missing = || Error::corrupt("missing; only packs of known models are exported").tensor("model").at(&json);
    let config = reader.description.model.clone().ok_or_else(missing)?;
    let family = Family::of_model(&config).at(&json)?;
    let description = config_out::describe(&config, family).at(&json)?;
    let pack = Pack::new(&reader, options, family, &config)?;
    let planned = pack.plan(&description).at(&json)?;
    let tokenizer = tokenizer(&reader, &config, options)?;

    let mut metadata = general(family, &planned);
    metadata.extend(description.entries);
    metadata.extend(tokenizer.entries);
    let listed: Vec<PlannedTensor> = planned.iter().map(|p| p.tensor.clone()).collect();
    let layout = lay_out(&metadata, &listed);
    pack.write(&planned, &layout)?;

    let mut types = BTreeMap::new();
    planned.iter().for_each(|p| *types.entry(p.tensor.kind.to_string()).or_default() += 1);
    Ok(ExportSummary {
        architecture: family.name.to_string(),
        tensors: planned.len(),
        types,
        dequantized_tensors: planned.iter().filter(|p| pack.is_dequantized(p)).count(),
        bytes_out: layout.total,
        seconds: start.elapsed().as_secs_f64(),
        notes: description.notes.into_iter().chain(tokenizer.notes).collect(),
    })
}

/// Keys that say what the file is.
fn general(family: &Family, planned: &[Planned]) -> Vec<(String, Meta)> {
    let mut bytes: BTreeMap<GgmlType, u64> = BTreeMap::new();
    planned.iter().for_each(|p| *bytes.entry(p.tensor.kind).or_default() += p.tensor.nbytes);
    let most = bytes.into_iter().max_by_key(|(_, n)| *n).map_or(GgmlType::F32, |(kind, _)| kind);
    // `llama_ftype`: what most of the file is, informative.
    let file_type = match most {
        GgmlType::F16 => 1,
        GgmlType::Q4_0 => 2,
        GgmlType::Q8_0 => 7,
        GgmlType::BF16 => 32,
        GgmlType::MXFP4 => 38,
        _ => 0,
    };
    vec![
        ("general.architecture".into(), Meta::String(family.name.into())),
        ("general.type".into(), Meta::String("model".into())),
        ("general.quantized_by".into(), Meta::String(concat!("iec ", env!("CARGO_PKG_VERSION")).into())),
        ("general.file_type".into(), Meta::u32(file_type)),
        ("general.quantization_version".into(), Meta::u32(2)),
    ]
}

fn tokenizer(reader: &IebinReader, config: &ModelConfig, options: &ExportOptions) -> Result<tokenizer_out::Keys> {
    let name = reader.description.tokenizer.as_deref().unwrap_or("tokenizer.json");
    let path = reader.dir.join(crate::iebin::reader::plain_file_name(name)?);
    if !path.exists() {
        return Err(Error::corrupt("missing; a GGUF file needs the tokenizer")
            .at(&path)
            .help("pack again with --tokenizer FILE"));
    }
    let tokenizer: Value = read_json(&path)?;
    let optional = |name: &str| Some(reader.dir.join(name)).filter(|path| path.exists());
    let settings: Value = optional("tokenizer_config.json").map_or(Ok(Value::Null), |path| read_json(&path))?;
    let template = optional("chat_template.jinja").map(|path| read_limited(&path)).transpose()?;
    let template = template.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let source = tokenizer_out::Source {
        tokenizer: &tokenizer,
        config: &settings,
        template: template.as_deref(),
        model: config,
        pre: options.pre.as_deref(),
    };
    tokenizer_keys(&source).at(&path)
}

/// A tensor of the file and where its rows come from.
struct Planned {
    tensor: PlannedTensor,
    rows: Rows,
    from: From,
}

enum From {
    /// Positions of entries of the pack.
    Entries { entries: Vec<usize>, order: Order, plus_one: bool },
    /// Values that are known already.
    Values(Vec<f32>),
}

struct Pack<'a> {
    reader: &'a IebinReader,
    options: &'a ExportOptions,
    bin: File,
    expected: Vec<Expected>,
    mapped: Vec<Mapped>,
}

impl<'a> Pack<'a> {
    fn new(
        reader: &'a IebinReader,
        options: &'a ExportOptions,
        family: &Family,
        config: &ModelConfig,
    ) -> Result<Pack<'a>> {
        let expected = expected_tensors(config);
        let mapped = map(family, config, &expected, |_| family.fused)?;
        let path = reader.bin().path();
        Ok(Pack { reader, options, bin: File::open(path).at(path)?, expected, mapped })
    }

    fn plan(&self, description: &Description) -> Result<Vec<Planned>> {
        let positions: BTreeMap<&str, usize> =
            self.reader.entries().iter().enumerate().map(|(i, e)| (e.name.as_str(), i)).collect();
        let mut all = Vec::new();
        for (name, values) in &description.factors {
            let shape = vec![values.len()];
            let tensor =
                PlannedTensor { name: name.to_string(), kind: GgmlType::F32, nbytes: 4 * values.len() as u64, shape };
            let rows = Rows { count: 1, rows: values.len(), cols: 1 };
            all.push(Planned { tensor, rows, from: From::Values(values.clone()) });
        }
        for mapped in &self.mapped {
            let entries = mapped.canonical.iter().map(|c| self.entry(&positions, &self.expected[*c]));
            let entries = entries.collect::<Result<Vec<_>>>()?;
            all.push(self.plan_one(mapped, entries)?);
        }
        Ok(all)
    }

    fn entry(&self, positions: &BTreeMap<&str, usize>, expected: &Expected) -> Result<usize> {
        let missing = || Error::corrupt("missing from the pack").tensor(&expected.name);
        let position = *positions.get(expected.name.as_str()).ok_or_else(missing)?;
        let entry = &self.reader.entries()[position];
        if entry.shape != expected.shape {
            let found = format!("shape {:?}, the model needs {:?}", entry.shape, expected.shape);
            return Err(Error::corrupt(found).tensor(&expected.name));
        }
        Ok(position)
    }

    fn plan_one(&self, mapped: &Mapped, entries: Vec<usize>) -> Result<Planned> {
        let first = &self.reader.entries()[entries[0]];
        let vector = is_vector(&first.name, &first.shape);
        let rows = Rows::new(&mapped.shape, vector);
        // llama.cpp computes with f32 vectors, and its own converter keeps routers in f32.
        let small = vector || first.name.contains(".mlp.router.");
        let kinds = entries
            .iter()
            .map(|i| {
                let entry = &self.reader.entries()[*i];
                self.kind(entry, small).tensor(&entry.name)
            })
            .collect::<Result<Vec<_>>>()?;
        let kind = match kinds.iter().all(|kind| *kind == kinds[0]) {
            true => kinds[0],
            false => self.mixed(&kinds).tensor(&mapped.name)?,
        };
        let bytes = kind.row_bytes(rows.cols).and_then(|row| row.checked_mul(rows.count * rows.rows));
        let bytes = bytes.ok_or_else(|| Error::corrupt("too large").tensor(&mapped.name))?;
        let tensor =
            PlannedTensor { name: mapped.name.clone(), kind, shape: mapped.shape.clone(), nbytes: bytes as u64 };
        let from = From::Entries { entries, order: mapped.order.clone(), plus_one: mapped.plus_one };
        Ok(Planned { tensor, rows, from })
    }

    /// The type in which an entry is written.
    fn kind(&self, entry: &Entry, small: bool) -> Result<GgmlType> {
        match entry.store {
            Store::Plain(_) if small => Ok(GgmlType::F32),
            Store::Plain(dtype) => ggml_float(self.options.dtype.unwrap_or(dtype)),
            Store::Tiled(_) if small => {
                Err(Error::unsupported("quantized, where llama.cpp needs floats")
                    .help("pack again without quantizing it"))
            }
            Store::Tiled(spec) => {
                let cols = entry.shape[entry.shape.len() - 1];
                let why = match blocks::twin(&spec) {
                    Some(kind) if cols.is_multiple_of(BLOCK) && self.options.dequantize != Dequantize::All => {
                        return Ok(kind);
                    }
                    Some(kind) => format!("rows of {cols} weights do not divide into {kind} blocks of {BLOCK}"),
                    None => format!(
                        "{} {} with {} has no type in GGML",
                        spec.scheme.name(),
                        spec.granularity,
                        if spec.symmetric { "f32 scales" } else { "zero points" }
                    ),
                };
                match self.options.dequantize {
                    Dequantize::Needed | Dequantize::All => ggml_float(self.options.dtype.unwrap_or(DType::F32)),
                    Dequantize::None => Err(Error::unsupported(why)
                        .help("add --dequantize to write such tensors as floats, or pack with scheme q4_0")),
                }
            }
        }
    }

    /// The type of a stack of entries that are stored differently.
    fn mixed(&self, kinds: &[GgmlType]) -> Result<GgmlType> {
        if self.options.dequantize != Dequantize::None || kinds.iter().all(|kind| blocks::plain(*kind).is_some()) {
            return ggml_float(self.options.dtype.unwrap_or(DType::F32));
        }
        let found = format!("one matrix in GGUF, but its parts are {kinds:?}");
        Err(Error::unsupported(found)
            .help("add --dequantize to write such tensors as floats, or quantize its parts alike"))
    }

    fn is_dequantized(&self, planned: &Planned) -> bool {
        let From::Entries { entries, .. } = &planned.from else { return false };
        let tiled = |i: &usize| matches!(self.reader.entries()[*i].store, Store::Tiled(_));
        blocks::plain(planned.tensor.kind).is_some() && entries.iter().any(tiled)
    }

    fn write(&self, planned: &[Planned], layout: &Layout) -> Result<()> {
        require_space(&self.options.out, layout.total, 0)?;
        let out = AtomicFile::create(&self.options.out)?;
        reserve(out.file(), layout.total, std::iter::once(0..layout.total)).at(out.path())?;
        out.file().write_all_at(&layout.header, 0).at(out.path())?;
        let bar = progress::bytes("exporting", planned.iter().map(|p| p.tensor.nbytes).sum());
        let one = |buffers: &mut Buffers, (planned, start): (&Planned, &u64)| {
            self.write_one(buffers, planned, |at, bytes| {
                interrupt::check()?;
                bar.inc(bytes.len() as u64);
                out.file().write_all_at(bytes, start + at).at(out.path())
            })
            .tensor(&planned.tensor.name)
        };
        planned.par_iter().zip(&layout.starts).map_init(Buffers::default, one).collect::<Result<()>>()?;
        bar.finish_and_clear();
        interrupt::check()?;
        out.commit()
    }

    /// Writes one tensor: `put` takes the position within it and bytes.
    fn write_one(
        &self,
        buffers: &mut Buffers,
        planned: &Planned,
        put: impl Fn(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (entries, order, plus_one) = match &planned.from {
            From::Values(values) => {
                buffers.encoded.clear();
                encode_floats(DType::F32, values, &mut buffers.encoded)?;
                return put(0, &buffers.encoded);
            }
            From::Entries { entries, order, plus_one } => (entries, order, *plus_one),
        };
        let Rows { count, rows, cols } = planned.rows;
        let kind = planned.tensor.kind;
        let height = (CHUNK_ELEMENTS / cols).max(1);
        let mut at = 0;
        for matrix in 0..count {
            for start in (0..rows).step_by(height) {
                let range = start..rows.min(start + height);
                buffers.encoded.clear();
                let spans = Spans::read(self, entries, order, matrix, &range, planned.rows)?;
                for row in range {
                    let (part, row) = order.canonical_row(row);
                    spans.encode(part, row, kind, plus_one, buffers)?;
                }
                put(at, &buffers.encoded)?;
                at += buffers.encoded.len() as u64;
            }
        }
        Ok(())
    }
}

fn ggml_float(dtype: DType) -> Result<GgmlType> {
    match dtype {
        DType::F32 => Ok(GgmlType::F32),
        DType::F16 => Ok(GgmlType::F16),
        DType::BF16 => Ok(GgmlType::BF16),
        other => Err(Error::unsupported(format!("{other} elements")).help("add --dtype f32, f16 or bf16")),
    }
}

/// One thread's buffers.
#[derive(Default)]
struct Buffers {
    values: Vec<f32>,
    encoded: Vec<u8>,
}

/// The rows of the pack that a chunk needs: of each entry one piece.
struct Spans<'a> {
    pieces: Vec<Option<Piece<'a>>>,
    cols: usize,
}

struct Piece<'a> {
    entry: &'a Entry,
    layout: Option<TileLayout>,
    /// First row (a multiple of 16 for tiles).
    first: usize,
    bytes: Vec<u8>,
}

impl<'a> Spans<'a> {
    fn read(
        pack: &'a Pack<'a>,
        entries: &[usize],
        order: &Order,
        matrix: usize,
        range: &Range<usize>,
        rows: Rows,
    ) -> Result<Spans<'a>> {
        let mut needed: Vec<Option<Range<usize>>> = vec![None; entries.len()];
        for row in range.clone() {
            let (part, row) = order.canonical_row(row);
            let grown = needed[part].take().map_or(row..row + 1, |r| r.start.min(row)..r.end.max(row + 1));
            needed[part] = Some(grown);
        }
        let read = |(i, needed): (&usize, Option<Range<usize>>)| {
            let entry = &pack.reader.entries()[*i];
            needed.map(|rows| Piece::read(pack, entry, matrix, rows)).transpose().tensor(&entry.name)
        };
        let pieces = entries.iter().zip(needed).map(read).collect::<Result<_>>()?;
        Ok(Spans { pieces, cols: rows.cols })
    }

    /// Appends one canonical row in the wanted type.
    fn encode(&self, part: usize, row: usize, kind: GgmlType, plus_one: bool, buffers: &mut Buffers) -> Result<()> {
        let piece = self.pieces[part].as_ref().expect("every needed row was read");
        let row = row - piece.first;
        let Buffers { values, encoded } = buffers;
        let to = blocks::plain(kind);
        match (piece.entry.store, &piece.layout) {
            (Store::Plain(dtype), _) => {
                let bytes = &piece.bytes[row * self.cols * dtype.size()..][..self.cols * dtype.size()];
                if to == Some(dtype) && !plus_one {
                    encoded.extend_from_slice(bytes);
                    return Ok(());
                }
                values.resize(self.cols, 0.0);
                decode_floats(dtype, bytes, values)?;
                if plus_one {
                    values.iter_mut().for_each(|x| *x += 1.0);
                }
            }
            (Store::Tiled(_), Some(layout)) => {
                let mut coded = CodedRow::new(layout);
                get_row(layout, &piece.bytes[row / TILE_ROWS * layout.tile_bytes..], row % TILE_ROWS, &mut coded);
                if to.is_none() {
                    let start = encoded.len();
                    encoded.resize(start + self.cols / BLOCK * kind.block_bytes(), 0);
                    blocks::from_row(kind, layout, &coded, &mut encoded[start..]);
                    return Ok(());
                }
                values.resize(self.cols, 0.0);
                coded.dequantize(layout, values);
            }
            (Store::Tiled(_), None) => unreachable!("tiles have a layout"),
        }
        let to = to.expect("quantized types were written above");
        refuse_overflow(values, to)?;
        encode_floats(to, values, encoded)
    }
}

impl<'a> Piece<'a> {
    fn read(pack: &Pack, entry: &'a Entry, matrix: usize, rows: Range<usize>) -> Result<Piece<'a>> {
        let layout = entry.layout().transpose()?;
        let view = Rows::new(&entry.shape, is_vector(&entry.name, &entry.shape));
        let (first, start, length) = match (entry.store, &layout) {
            (Store::Tiled(_), Some(layout)) => {
                let tiles = rows.start / TILE_ROWS..rows.end.div_ceil(TILE_ROWS);
                let start = matrix * layout.nbytes() + tiles.start * layout.tile_bytes;
                (tiles.start * TILE_ROWS, start, tiles.len() * layout.tile_bytes)
            }
            (Store::Plain(dtype), _) => {
                let row = view.cols * dtype.size();
                (rows.start, (matrix * view.rows + rows.start) * row, rows.len() * row)
            }
            (Store::Tiled(_), None) => unreachable!("tiles have a layout"),
        };
        assert!(start + length <= entry.nbytes, "rows outside {}", entry.name);
        let mut bytes = vec![0; length];
        let path: &Path = pack.reader.bin().path();
        pack.bin.read_exact_at(&mut bytes, (entry.offset + start) as u64).at(path)?;
        Ok(Piece { entry, layout, first, bytes })
    }
}
