//! The IEBIN container of a model: the description `model.ie.json` and the payloads `model.ie.bin`.
//!
//! [`Entry`] is one tensor of the description; [`reader`] opens packs as untrusted input and checks every number in
//! them; [`writer`] writes packs that are either complete or absent. docs/FORMAT.md is the specification.

mod companions;
pub mod dependants;
pub mod int4;
mod liberal;
pub mod reader;
pub mod rebuild;
pub mod seal;
pub mod tensor_map;
pub mod writer;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::model_config::ModelConfig;
use crate::provenance::{Quality, Source};
use crate::scheme::{QuantSpec, TILE_ROWS, TileLayout};
use seal::sealed;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub use reader::IebinReader;
pub use writer::{DescriptionParts, PlannedTensor};

/// File name of the description.
pub const JSON_NAME: &str = "model.ie.json";
/// File name of the payloads.
pub const BIN_NAME: &str = "model.ie.bin";
/// File name of the description of a store that the payloads can be rebuilt from ([`crate::dedup`]).
pub const DEDUP_JSON_NAME: &str = "model.dedup.json";
/// Format name of the description of a store.
pub const DEDUP_FORMAT: &str = "iec_dedup_v2";
/// File names of the streams of a deduplicated store: bytes that are kept in full, masks, and exceptions.
pub const DEDUP_FILE_NAMES: [&str; 3] =
    ["model.dedup.defaults.bin", "model.dedup.masks.bin", "model.dedup.exceptions.bin"];
/// Files that a pack may copy from its checkpoint. The last ones are [`TOKENIZER_SOURCES`].
pub const COMPANIONS: [&str; 14] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    TOOL_TEMPLATE_NAME,
    "tekken.json",
    "tokenizer.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
];
/// Name of the chat template for conversations with tools in a pack.
pub const TOOL_TEMPLATE_NAME: &str = "chat_template.tool_use.jinja";
/// Path of the same file in a checkpoint.
pub const TOOL_TEMPLATE_SOURCE: &str = "additional_chat_templates/tool_use.jinja";
/// Files from which a tokenizer.json is made for a checkpoint without one. A pack has those that were used.
pub const TOKENIZER_SOURCES: [&str; 7] = {
    let [.., a, b, c, d, e, f, g] = COMPANIONS;
    [a, b, c, d, e, f, g]
};
/// Default name of the signature of a pack.
pub const SIGNATURE_NAME: &str = "model.sig";
/// Name of the file with the measured effects of types of the KV cache on the pack.
pub const KV_VERDICTS_NAME: &str = "model.ie.kv.json";
/// Name of the format, as the description spells it.
pub const FORMAT: &str = "iebin_v1";
/// Version written by this crate, and the highest one that it reads.
pub const VERSION: u32 = 1;
/// Lowest version of readers that understand what this crate writes.
pub const READER_VERSION: u32 = 1;
/// Alignment of every payload in bytes.
pub const ALIGNMENT: usize = 64;
/// Alignment of quantized payloads in bytes.
pub const QUANT_ALIGNMENT: usize = 256;
/// Name of the quantized layout this version writes and reads.
pub const LAYOUT: &str = "tile16";

/// Returns the names of all files that a pack and its store may consist of.
pub fn members() -> Vec<&'static str> {
    let own = [JSON_NAME, BIN_NAME, DEDUP_JSON_NAME, dependants::LIST_NAME, KV_VERDICTS_NAME];
    [&own[..], &DEDUP_FILE_NAMES, &COMPANIONS].concat()
}

/// The top level of `model.ie.json`, keys in the order in which they are written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Description {
    /// Format version.
    #[serde(default = "this_version")]
    pub version: u32,
    /// Dtype with the most bytes; informative only.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "liberal::text")]
    pub dtype: Option<String>,
    /// File name of the payloads, relative to the JSON.
    #[serde(default = "default_bin_name", alias = "bin")]
    pub weights_bin: String,
    /// Name of the format ([`FORMAT`]), for people and for programs that recognize file types; readers ignore it.
    #[serde(default)]
    pub format: String,
    /// Length of the payload file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Alignment of payloads in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alignment: Option<u64>,
    /// Always `little`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endianness: Option<String>,
    /// `iec` and its version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_by: Option<String>,
    /// Class name of the model in its checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// Configuration that the runtime is built from, the same form for all architectures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelConfig>,
    /// File name of the copied tokenizer, relative to the JSON.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "liberal::text")]
    pub tokenizer: Option<String>,
    /// Names of the files of the pack from which the tokenizer was made, if the checkpoint had none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tokenizer_from: Vec<String>,
    /// Source of the weights: file names, sizes and hashes, never a path of the machine that wrote the pack.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// Present if the weights come from a checkpoint that was quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<PublishedJson>,
    /// Quality thresholds of the quantization and its measured loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quality: Option<Quality>,
    /// Present in the pack of an adapter; `model` is then the model that it changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterJson>,
    /// SHA-256 of each file that belongs to the pack (configuration, tokenizer, chat template) in hex, by name. Absent
    /// in packs of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<BTreeMap<String, String>>,
    /// Lowest format version that a reader must support to read the pack; absent means `version`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reader_version: Option<u32>,
    /// One entry per tensor, in file order.
    #[serde(deserialize_with = "liberal::tensors")]
    pub tensors: Vec<EntryJson>,
    /// Digest of the pack in hex: the SHA-256 of the text before this field, which holds the hashes of all tensors and
    /// files. Absent in packs of earlier versions.
    #[serde(default, skip_serializing)]
    pub sha256: Option<String>,
    /// Device and inode number of the file from which the description was read.
    #[serde(skip)]
    pub(crate) read_from: Option<(u64, u64)>,
}

/// Describes the quantized checkpoint that a pack was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedJson {
    /// Name of the format.
    pub format: String,
    /// True if the checkpoint has scales of activations (W8A8, W4A8), which products with its weights do not use.
    pub activation_scales: bool,
}

/// For each changed tensor the factor of `B A`, one per matrix.
pub type AdapterScales = BTreeMap<String, Vec<Option<f32>>>;

/// The changes in the pack of an adapter.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct AdapterJson {
    /// `LoRA`, `rsLoRA` or `DoRA`.
    pub method: String,
    /// For each changed tensor of the model the factor of `B A`, one per matrix; null for a matrix without factors.
    pub tensors: AdapterScales,
}

impl Description {
    /// Returns true for packs of older programs, which have neither `created_by` nor `model`. They can be converted,
    /// but not run.
    pub fn is_older(&self) -> bool {
        self.model.is_none() && self.created_by.is_none()
    }

    /// Returns the text of the file, which ends with its digest.
    pub fn to_text(&self) -> String {
        let text = serde_json::to_string_pretty(self).expect("plain data always serializes");
        sealed(text.strip_suffix("\n}").expect("an object ends with a brace"))
    }
}

fn this_version() -> u32 {
    VERSION
}

fn default_bin_name() -> String {
    BIN_NAME.to_string()
}

/// A tensor entry of the JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "liberal::RawEntry")]
pub struct EntryJson {
    /// Canonical name (see [`crate::catalogue`]).
    pub name: String,
    /// `F32`, `BF16`, … for plain tensors; `INT4`, `INT5`, `INT6`, `INT8`, `NL4`, `FP4` when `quant` is present.
    pub dtype: String,
    /// Logical shape, `(out, in)` for matrices, `(experts, out, in)` for expert stacks.
    pub shape: Vec<u64>,
    /// Length of the payload.
    pub nbytes: u64,
    /// Start of the payload in the binary.
    pub offset: u64,
    /// SHA-256 of the payload in hex.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Layout of the tensor in the source when pack changed it (`"in_out"`: the last two axes were swapped).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_layout: Option<String>,
    /// Parameters needed to dequantize; present for quantized tensors only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quant: Option<QuantJson>,
    /// The `quant` object of an older writer (see [`int4`]), whose codes are not stored in tiles; such tensors can be
    /// converted, but not run. Empty when a manifest describes the codes.
    #[serde(skip)]
    pub older: Option<serde_json::Map<String, serde_json::Value>>,
}

/// Parameters that suffice to dequantize a tensor; no manifest is needed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QuantJson {
    /// Scheme, group size, symmetry, scale type.
    #[serde(flatten)]
    pub spec: QuantSpec,
    /// Bits per code.
    pub bits: u32,
    /// Number that is subtracted from a stored code ([`QuantSpec::bias`]); absent with per-group zero points and for
    /// MXFP4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero_point: Option<u32>,
    /// Name of the storage layout ([`LAYOUT`]).
    pub layout: String,
    /// Position of the scales inside each tile.
    pub scales: Section,
    /// Bytes of one tile.
    pub tile_bytes: u64,
    /// Metrics of the quantizer, if it measured any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<serde_json::Value>,
}

impl QuantJson {
    /// Builds the description of the tiles of one matrix.
    pub fn new(layout: &TileLayout, metrics: Option<serde_json::Value>) -> QuantJson {
        let spec = layout.spec;
        QuantJson {
            spec,
            bits: spec.scheme.bits(),
            zero_point: spec.bias().map(u32::from),
            layout: LAYOUT.to_string(),
            scales: Section { offset: 0, nbytes: (layout.groups * TILE_ROWS * spec.scale_dtype.size()) as u64 },
            tile_bytes: layout.tile_bytes as u64,
            metrics,
        }
    }
}

/// A byte range inside a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// Start within the tile.
    pub offset: u64,
    /// Length without padding.
    pub nbytes: u64,
}

/// Storage form of the payload of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// Row-major elements.
    Plain(DType),
    /// Row-interleaved tiles.
    Tiled(QuantSpec),
}

/// A tensor entry whose shape, store and length were checked against each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Canonical name.
    pub name: String,
    /// Logical shape.
    pub shape: Vec<usize>,
    /// Storage of the payload.
    pub store: Store,
    /// Start of the payload in the binary.
    pub offset: usize,
    /// Length of the payload.
    pub nbytes: usize,
    /// SHA-256 of the payload in hex, if recorded.
    pub sha256: Option<String>,
    /// `Some("in_out")` when pack swapped the last two axes of the source.
    pub source_layout: Option<String>,
    /// Metrics of the quantizer, if recorded.
    pub metrics: Option<serde_json::Value>,
}

impl Entry {
    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the matrices of the tensor as `(count, rows, cols)`; count is the product of all leading axes.
    pub fn matrices(&self) -> Result<(usize, usize, usize)> {
        matrices(&self.shape)
    }

    /// Returns the tile layout of one matrix; `None` for plain elements.
    pub fn layout(&self) -> Option<Result<TileLayout>> {
        match self.store {
            Store::Plain(_) => None,
            Store::Tiled(spec) => Some(self.matrices().and_then(|(_, rows, cols)| TileLayout::new(spec, rows, cols))),
        }
    }
}

/// Splits a shape into a stack of matrices: `(count, rows, cols)`.
pub fn matrices(shape: &[usize]) -> Result<(usize, usize, usize)> {
    match shape {
        [lead @ .., rows, cols] => match lead.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) {
            Some(count) => Ok((count, *rows, *cols)),
            None => Err(Error::corrupt(format!("found shape {shape:?}, whose number of matrices overflows"))),
        },
        _ => Err(Error::corrupt(format!("found shape {shape:?}, expected a matrix"))),
    }
}

/// Returns the bytes that a tensor of this shape takes in this store, computed with checked arithmetic.
pub fn stored_bytes(store: Store, shape: &[usize]) -> Result<usize> {
    let overflow = || Error::corrupt(format!("found shape {shape:?}, whose size in bytes overflows"));
    let elements = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).ok_or_else(overflow)?;
    match store {
        Store::Plain(dtype) => elements.checked_mul(dtype.size()).ok_or_else(overflow),
        Store::Tiled(spec) => {
            let (count, rows, cols) = matrices(shape)?;
            count.checked_mul(TileLayout::new(spec, rows, cols)?.nbytes()).ok_or_else(overflow)
        }
    }
}

impl Store {
    /// Returns the name of the element type or of the scheme.
    pub fn name(&self) -> &'static str {
        match self {
            Store::Plain(dtype) => dtype.name(),
            Store::Tiled(spec) => spec.scheme.name(),
        }
    }

    /// Returns the value of the `dtype` field of the JSON.
    pub fn dtype_name(&self) -> &'static str {
        match self {
            Store::Plain(dtype) => dtype.name(),
            Store::Tiled(spec) => spec.scheme.info().dtype,
        }
    }

    /// Returns the alignment of the payload in bytes.
    pub fn alignment(&self) -> usize {
        match self {
            Store::Plain(_) => ALIGNMENT,
            Store::Tiled(_) => QUANT_ALIGNMENT,
        }
    }
}
