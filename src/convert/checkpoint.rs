//! A Hugging Face directory, seen as a model: its description and its canonical tensors, checked against each other.
//!
//! A [`CanonicalTensor`] knows where its numbers lie in the source; rows are read by position into the caller's
//! buffers, transposed or unpacked on the way.

use super::arch::{Arch, Expected, Fields, View, expected_tensors, is_ignorable};
use super::json::read_json;
use super::safetensors::SourceTensor;
use super::shards::Shards;
use crate::dtype::{DType, decode_floats};
use crate::error::{Cause, Context, Error, Result};
use crate::iebin::matrices;
use crate::model_config::ModelConfig;
use crate::quant::block::tile;
use crate::role::Role;
use crate::scheme::{BLOCK, QuantSpec, TileLayout};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An opened checkpoint; every tensor the model needs is there with the right shape.
#[derive(Debug)]
pub struct Checkpoint {
    /// Where companions (config, tokenizer) may lie, most specific first.
    dirs: Vec<PathBuf>,
    config: ModelConfig,
    tensors: Vec<CanonicalTensor>,
    shards: Shards,
}

/// What the numbers of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Floats of this type.
    Float(DType),
    /// 4-bit codes with block scales.
    Mxfp4,
}

/// A tensor by its canonical name and shape.
#[derive(Debug, Clone)]
pub struct CanonicalTensor {
    /// Canonical name (see [`crate::role`]).
    pub name: String,
    /// Canonical shape.
    pub shape: Vec<usize>,
    /// What its numbers are.
    pub kind: Kind,
    /// The part it plays.
    pub role: Role,
    source: Source,
}

#[derive(Debug, Clone)]
enum Source {
    /// The bytes from `skip` on are the tensor.
    Straight { tensor: SourceTensor, skip: usize },
    /// The last two axes are swapped.
    Transposed { tensor: SourceTensor },
    /// Codes and scales.
    Mxfp4 { blocks: SourceTensor, scales: SourceTensor },
}

impl CanonicalTensor {
    /// The tensor as a stack of matrices `(count, rows, cols)`; a vector is one row.
    pub fn matrices(&self) -> (usize, usize, usize) {
        // A vector has no second axis; shapes of matrices were computed without overflow when the file was opened.
        matrices(&self.shape).unwrap_or((1, 1, self.shape.iter().product()))
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// `Some("in_out")` when the source stores the last two axes swapped.
    pub fn source_layout(&self) -> Option<&'static str> {
        matches!(self.source, Source::Transposed { .. }).then_some("in_out")
    }

    /// Position in the source, for reading in an order that suits the disk: number of the file and offset.
    pub fn position(&self) -> (usize, u64) {
        let tensor = self.source.main();
        (tensor.shard, tensor.start)
    }
}

impl Source {
    fn main(&self) -> &SourceTensor {
        match self {
            Source::Straight { tensor, .. } | Source::Transposed { tensor } => tensor,
            Source::Mxfp4 { blocks, .. } => blocks,
        }
    }
}

impl Checkpoint {
    /// Opens a directory with `config.json` and safetensors weights. A directory that has only gpt-oss's `original/`
    /// below it is opened there.
    ///
    /// # Errors
    /// A file is missing or damaged, the configuration is not supported, or tensors are missing, unexpected or of
    /// another shape than the configuration says.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        let dirs = search_path(dir);
        let config_path = dirs[0].join("config.json");
        let config: Map<String, Value> = read_json(&config_path).map_err(|e| match e.cause() {
            Cause::Io(_) => e.help("name the directory of a Hugging Face checkpoint with --hf-dir"),
            _ => e,
        })?;
        let generation = match find(&dirs, "generation_config.json") {
            Some(path) => Some(read_json::<Map<String, Value>>(&path)?),
            None => None,
        };
        let fields = Fields::new(&config);
        let arch = Arch::of(&fields).at(&config_path)?;
        let model = arch.model_config(&fields, generation.as_ref()).at(&config_path)?;
        let shards = Shards::open(&dirs[0])?;
        let tensors = bind(arch, &model, &shards).at(&dirs[0])?;
        Ok(Checkpoint { dirs, config: model, tensors, shards })
    }

    /// The model's description.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// All tensors, in the order in which a forward pass needs them.
    pub fn tensors(&self) -> &[CanonicalTensor] {
        &self.tensors
    }

    /// A tensor by its canonical name.
    pub fn get(&self, name: &str) -> Option<&CanonicalTensor> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// The weight files.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// A file that accompanies the weights (`tokenizer.json`, …), if it exists.
    pub fn companion(&self, name: &str) -> Option<PathBuf> {
        find(&self.dirs, name)
    }

    /// Reads rows of matrix number `matrix` of a float tensor as stored, `(rows, cols)` in the element type of its
    /// [`Kind`]. `out` is resized to the exact length.
    ///
    /// # Errors
    /// The tensor is not of floats, or reading fails.
    pub fn read_rows(
        &self,
        tensor: &CanonicalTensor,
        matrix: usize,
        rows: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let (count, n_rows, cols) = tensor.matrices();
        assert!(matrix < count && rows.start <= rows.end && rows.end <= n_rows, "rows outside {}", tensor.name);
        let Kind::Float(dtype) = tensor.kind else {
            return Err(Error::unsupported("MXFP4 codes where floats are needed").tensor(&tensor.name));
        };
        let row_bytes = cols * dtype.size();
        out.resize(rows.len() * row_bytes, 0);
        if out.is_empty() {
            return Ok(());
        }
        match &tensor.source {
            Source::Straight { tensor: source, skip } => {
                self.shards.read(source, skip + (matrix * n_rows + rows.start) * row_bytes, out)
            }
            Source::Transposed { tensor: source } => {
                let slab = Slab { source, first: matrix * cols * n_rows, width: n_rows, height: cols };
                match dtype.size() {
                    2 => self.read_transposed::<2>(&slab, rows, out),
                    4 => self.read_transposed::<4>(&slab, rows, out),
                    _ => self.read_transposed::<8>(&slab, rows, out),
                }
            }
            Source::Mxfp4 { .. } => unreachable!("its kind is not Float"),
        }
    }

    /// Reads rows of matrix number `matrix` as f32; `out` holds `rows.len() * cols` values. MXFP4 is decoded.
    pub fn read_rows_f32(
        &self,
        tensor: &CanonicalTensor,
        matrix: usize,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let mut bytes = Vec::new();
        match tensor.kind {
            Kind::Float(dtype) => {
                self.read_rows(tensor, matrix, rows, &mut bytes)?;
                decode_floats(dtype, &bytes, out).tensor(&tensor.name)
            }
            Kind::Mxfp4 => {
                let layout = self.read_mxfp4_tiles(tensor, matrix, rows.clone(), &mut bytes)?;
                tile::dequantize_rows(&layout, &bytes, 0..rows.len(), out);
                Ok(())
            }
        }
    }

    /// Reads rows of an MXFP4 tensor as tiles; `out` is resized to the exact length. Returns the layout of just these
    /// rows.
    pub fn read_mxfp4_tiles(
        &self,
        tensor: &CanonicalTensor,
        matrix: usize,
        rows: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<TileLayout> {
        let Source::Mxfp4 { blocks, scales } = &tensor.source else {
            return Err(Error::unsupported("floats where MXFP4 codes are needed").tensor(&tensor.name));
        };
        let (_, n_rows, cols) = tensor.matrices();
        let first = matrix * n_rows + rows.start;
        let layout = TileLayout::new(QuantSpec::MXFP4, rows.len(), cols).tensor(&tensor.name)?;
        let mut codes = vec![0; rows.len() * cols / 2];
        self.shards.read(blocks, first * cols / 2, &mut codes)?;
        let mut exponents = vec![0; rows.len() * cols / BLOCK];
        self.shards.read(scales, first * cols / BLOCK, &mut exponents)?;
        out.resize(layout.nbytes(), 0);
        tile::mxfp4_to_tiles(&layout, &codes, &exponents, rows.len(), out)
            .tensor(&scales.name)
            .at(self.shards.path(scales))?;
        Ok(layout)
    }

    /// Reads columns `rows` of a `(height, width)` matrix as rows.
    fn read_transposed<const N: usize>(&self, slab: &Slab, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        // Lines of the source are gathered in groups, so that each output row is written in runs.
        const GROUP: usize = 64;
        let line_bytes = rows.len() * N;
        let mut lines = vec![0; GROUP * line_bytes];
        let (out, _) = out.as_chunks_mut::<N>();
        for group in (0..slab.height).step_by(GROUP) {
            let n = GROUP.min(slab.height - group);
            for (i, line) in lines.chunks_exact_mut(line_bytes).take(n).enumerate() {
                let element = slab.first + (group + i) * slab.width + rows.start;
                self.shards.read(slab.source, element * N, line)?;
            }
            let (elements, _) = lines.as_chunks::<N>();
            for (r, row) in out.chunks_exact_mut(slab.height).enumerate() {
                for (i, value) in row[group..group + n].iter_mut().enumerate() {
                    *value = elements[i * rows.len() + r];
                }
            }
        }
        Ok(())
    }
}

/// One matrix within a source tensor, `(height, width)`, starting at element `first`.
struct Slab<'a> {
    source: &'a SourceTensor,
    first: usize,
    width: usize,
    height: usize,
}

/// The weights' directory first, then where their companions may lie.
fn search_path(dir: &Path) -> Vec<PathBuf> {
    let original = dir.join("original");
    if !Shards::lie_in(dir) && original.join("config.json").exists() {
        return vec![original, dir.to_path_buf()];
    }
    match dir.parent() {
        Some(parent) if dir.file_name().is_some_and(|name| name == "original") => {
            vec![dir.to_path_buf(), parent.to_path_buf()]
        }
        _ => vec![dir.to_path_buf()],
    }
}

fn find(dirs: &[PathBuf], name: &str) -> Option<PathBuf> {
    dirs.iter().map(|dir| dir.join(name)).find(|path| path.exists())
}

/// Finds every expected tensor in the source and refuses what is left over.
fn bind(arch: &Arch, model: &ModelConfig, shards: &Shards) -> Result<Vec<CanonicalTensor>> {
    if model.n_layers > shards.tensor_count() {
        let found = format!("{} layers, but the checkpoint has {} tensors", model.n_layers, shards.tensor_count());
        return Err(Error::corrupt(found).tensor("num_hidden_layers"));
    }
    let mut used: HashSet<&str> = HashSet::new();
    let mut tensors = Vec::new();
    for expected in expected_tensors(model) {
        let tensor = bind_one(arch.views(model, &expected), expected, shards)?;
        match &tensor.source {
            Source::Straight { tensor, .. } | Source::Transposed { tensor } => {
                used.extend(shards.get(&tensor.name).map(|t| t.name.as_str()));
            }
            Source::Mxfp4 { blocks, scales } => {
                used.extend([blocks, scales].iter().filter_map(|t| shards.get(&t.name)).map(|t| t.name.as_str()));
            }
        }
        tensors.push(tensor);
    }
    let tied_copy = |name: &str| model.tied_embeddings && name == "lm_head.weight";
    let left =
        shards.tensors().find(|t| !used.contains(t.name.as_str()) && !is_ignorable(&t.name) && !tied_copy(&t.name));
    match left {
        Some(t) => Err(Error::unsupported(format!("unexpected tensor for {}", model.architecture))
            .at(shards.path(t))
            .tensor(&t.name)
            .help("the checkpoint has parts that config.json does not describe; nothing is left out silently")),
        None => Ok(tensors),
    }
}

fn bind_one(views: Vec<View>, expected: Expected, shards: &Shards) -> Result<CanonicalTensor> {
    let Some(view) = views.iter().find(|view| view.sources().iter().any(|name| shards.get(name).is_some())) else {
        let names = views.iter().map(|v| v.sources().join(" + ")).collect::<Vec<_>>().join(" or ");
        return Err(Error::corrupt(format!("missing from the checkpoint (looked for {names})")).tensor(expected.name));
    };
    let source = |name: &str| {
        let missing =
            || Error::corrupt(format!("missing from the checkpoint (needed for {})", expected.name)).tensor(name);
        shards.get(name).ok_or_else(missing)
    };
    let shape = &expected.shape;
    let (lead, last) = (&shape[..shape.len() - 1], shape[shape.len() - 1]);
    let (kind, bound) = match view {
        View::Rows { source: name, first, of } => {
            let tensor = source(name)?;
            let dtype = float(tensor, &[&[*of], &shape[1..]].concat(), shards)?;
            let entry: usize = shape[1..].iter().product();
            (Kind::Float(dtype), Source::Straight { tensor: tensor.clone(), skip: first * entry * dtype.size() })
        }
        View::Transposed { source: name } => {
            let tensor = source(name)?;
            let mut swapped = shape.clone();
            swapped.swap(shape.len() - 1, shape.len() - 2);
            (Kind::Float(float(tensor, &swapped, shards)?), Source::Transposed { tensor: tensor.clone() })
        }
        View::Mxfp4 { blocks, scales } => {
            let (blocks, scales) = (source(blocks)?, source(scales)?);
            if !last.is_multiple_of(BLOCK) {
                let found = format!("{last} columns do not divide into MXFP4 blocks of {BLOCK}");
                return Err(Error::corrupt(found).tensor(&blocks.name));
            }
            require(blocks, DType::U8, &[lead, &[last / BLOCK, BLOCK / 2]].concat(), shards)?;
            require(scales, DType::U8, &[lead, &[last / BLOCK]].concat(), shards)?;
            (Kind::Mxfp4, Source::Mxfp4 { blocks: blocks.clone(), scales: scales.clone() })
        }
    };
    Ok(CanonicalTensor {
        role: Role::of(&expected.name),
        kind,
        source: bound,
        name: expected.name,
        shape: expected.shape,
    })
}

/// A float tensor of this shape; returns its element type.
fn float(tensor: &SourceTensor, shape: &[usize], shards: &Shards) -> Result<DType> {
    if !tensor.dtype.is_float() {
        let found = format!("{} elements, expected floats", tensor.dtype);
        return Err(Error::unsupported(found).at(shards.path(tensor)).tensor(&tensor.name));
    }
    require(tensor, tensor.dtype, shape, shards)?;
    Ok(tensor.dtype)
}

fn require(tensor: &SourceTensor, dtype: DType, shape: &[usize], shards: &Shards) -> Result<()> {
    if tensor.shape == shape && tensor.dtype == dtype {
        return Ok(());
    }
    let found = format!("{} {:?}, but config.json says {dtype} {shape:?}", tensor.dtype, tensor.shape);
    Err(Error::corrupt(found).at(shards.path(tensor)).tensor(&tensor.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
    }

    #[test]
    fn every_fixture_opens_with_all_its_tensors() {
        for (name, layers, windows) in
            [("llama-gqa", 3, 0), ("llama3-rope-tied", 2, 0), ("gptoss-bf16", 2, 2), ("gptoss-trained", 4, 4)]
        {
            let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
            assert_eq!(checkpoint.config().n_layers, layers, "{name}");
            assert_eq!(checkpoint.config().attention.windows.len(), windows, "{name}");
            let last = &checkpoint.tensors()[checkpoint.tensors().len() - 1].name;
            assert_eq!(*last == "lm_head.weight", !checkpoint.config().tied_embeddings, "{name}");
        }
    }

    #[test]
    fn float_experts_are_read_transposed_in_any_chunks() {
        let checkpoint = Checkpoint::open(&fixture("gptoss-bf16")).unwrap();
        let tensor = checkpoint.get("model.layers.1.mlp.experts.gate_up_proj").unwrap();
        assert_eq!((tensor.shape.as_slice(), tensor.source_layout()), (&[4, 192, 64][..], Some("in_out")));
        let source = checkpoint.shards().get("model.layers.1.mlp.experts.gate_up_proj").unwrap();
        let mut raw = vec![0; source.nbytes];
        checkpoint.shards().read(source, 0, &mut raw).unwrap();
        let mut stored = vec![0f32; tensor.elements()];
        decode_floats(source.dtype, &raw, &mut stored).unwrap();
        for (matrix, rows) in [(0, 0..192), (3, 0..192), (2, 17..100), (1, 191..192), (1, 5..5)] {
            let mut values = vec![f32::NAN; rows.len() * 64];
            checkpoint.read_rows_f32(tensor, matrix, rows.clone(), &mut values).unwrap();
            for (i, row) in rows.enumerate() {
                for k in 0..64 {
                    assert_eq!(values[i * 64 + k], stored[(matrix * 64 + k) * 192 + row]);
                }
            }
        }
    }

    #[test]
    fn mxfp4_experts_decode_as_the_standard_says() {
        let checkpoint = Checkpoint::open(&fixture("gptoss-mxfp4")).unwrap();
        let tensor = checkpoint.get("model.layers.2.mlp.experts.down_proj").unwrap();
        let (experts, rows, cols) = tensor.matrices();
        assert_eq!((experts, rows, cols, tensor.kind), (8, 96, 64, Kind::Mxfp4));
        let raw = |suffix: &str| {
            let source = checkpoint.shards().get(&format!("{}_{suffix}", tensor.name)).unwrap();
            let mut bytes = vec![0; source.nbytes];
            checkpoint.shards().read(source, 0, &mut bytes).unwrap();
            bytes
        };
        let (blocks, scales) = (raw("blocks"), raw("scales"));
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let (matrix, range) = (5, 30..61);
        let mut values = vec![f32::NAN; range.len() * cols];
        checkpoint.read_rows_f32(tensor, matrix, range.clone(), &mut values).unwrap();
        for (i, row) in range.enumerate() {
            for k in 0..cols {
                let at = (matrix * rows + row) * cols + k;
                let code = blocks[at / 2] >> (4 * (at % 2)) & 15;
                let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
                let value = sign * magnitudes[code as usize & 7] * 2f32.powi(i32::from(scales[at / 32]) - 127);
                assert_eq!(values[i * cols + k], value);
            }
        }
    }
}
