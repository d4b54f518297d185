//! `compressed-tensors`, as `llm-compressor` writes it: several kinds of codes, chosen for each module by the groups of
//! the configuration (`compressed_tensors` 0.20, its compressor classes).
//!
//! * `pack-quantized`: `weight_packed` I32, `weight_scale` `(out, groups)`, `weight_shape` `[out, in]`, optionally
//!   `weight_zero_point`, packed along the rows, and `weight_g_idx`. The value is (code - zero) * scale.
//! * `int-quantized`: `weight` I8, `weight_scale`, optionally `weight_zero_point`; the same value.
//! * `float-quantized`: `weight` F8_E4M3, `weight_scale` per tensor, row or block; e4m3 * scale.
//! * `nvfp4-pack-quantized`: `weight_packed` U8 `(out, in / 2)`, `weight_scale` F8_E4M3 per 16 columns, and
//!   `weight_global_scale`; E2M1 * (scale / global).
//! * `mxfp4-pack-quantized`: `weight_packed` U8, `weight_scale` U8 per 32 columns; E2M1 * 2^(scale - 127).
//!
//! Packed codes and zero points have 2^(bits - 1) added. Files from before June 2026 put `32 / bits` codes in a word,
//! later ones pack them densely; for 3, 5, 6 and 7 bits the width of `weight_packed` tells which.

use super::coded::{Coded, Codes, Meaning, Packing, ScaleValues, Scales, ZeroOrder, Zeros};
use super::format::{Describe, Format, Settings};
use super::names::{Pattern, Patterns, spellings};
use super::parts::Parts;
use super::{fp4, fp8};
use crate::convert::arch::Fields;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::{Error, Result};
use serde_json::Value;

pub(super) const COMPRESSED_TENSORS: Format = Format {
    name: "compressed-tensors",
    methods: &["compressed-tensors", "compressed_tensors"],
    markers: &[".weight_scale"],
    excluded: &["ignore"],
    open,
    ..Format::NONE
};

/// Group of modules that are quantized alike.
struct Group {
    targets: Vec<ModuleTarget>,
    bits: u32,
    group_size: Option<usize>,
    block: Option<[usize; 2]>,
}

/// Modules of a group.
enum ModuleTarget {
    /// Every linear layer.
    Linear,
    /// One module.
    Name(String),
    /// All modules whose names match.
    Pattern(Pattern),
}

fn open(settings: &Settings<'_>) -> Result<Describe> {
    let fields = settings.fields()?;
    if let Some(sparsity) = fields.object_opt("sparsity_config")? {
        match sparsity.word_opt("format")? {
            None | Some("dense") => {}
            Some(_) => return Err(sparsity.unsupported("format", "expected dense weights")),
        }
    }
    let mut patterns = Patterns::default();
    let groups = fields.object_opt("config_groups")?.ok_or_else(|| fields.wrong("config_groups", "an object"))?;
    let groups = groups.keys().map(|key| Group::read(&groups, key, &mut patterns)).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(move |parts, scale| {
        let group = groups.iter().find(|group| group.has(parts.stem)).ok_or_else(|| {
            Error::unsupported("found a quantized matrix that no group of quantization_config targets")
                .at(parts.shards.path(scale))
                .tensor(parts.stem)
                .help("config.json is not that of these weights; get all files of the same revision")
        })?;
        group.describe(parts, scale)
    }))
}

impl ModuleTarget {
    fn read(text: &str, patterns: &mut Patterns) -> Result<ModuleTarget> {
        match (text, text.strip_prefix("re:")) {
            ("Linear", _) => Ok(ModuleTarget::Linear),
            (_, Some(pattern)) => patterns.compile(pattern).map(ModuleTarget::Pattern),
            (name, None) => Ok(ModuleTarget::Name(name.to_string())),
        }
    }

    fn has(&self, module: &str) -> bool {
        match self {
            ModuleTarget::Linear => true,
            ModuleTarget::Name(name) => spellings(module).any(|spelling| spelling == *name),
            ModuleTarget::Pattern(pattern) => pattern.matches(module),
        }
    }
}

impl Group {
    fn read(groups: &Fields<'_>, key: &str, patterns: &mut Patterns) -> Result<Group> {
        let group = groups.object_opt(key)?.ok_or_else(|| groups.wrong(key, "an object"))?;
        let targets = group.words_opt("targets")?.unwrap_or_default();
        let targets = targets.iter().map(|text| ModuleTarget::read(text, patterns)).collect::<Result<Vec<_>>>()?;
        let weights = group.object_opt("weights")?.ok_or_else(|| group.wrong("weights", "an object"))?;
        let bits = match weights.count("num_bits")? {
            bits @ 1..=8 => bits as u32,
            _ => return Err(weights.wrong("num_bits", "1 to 8")),
        };
        let group_size = match weights.get("group_size").and_then(Value::as_i64) {
            Some(-1) => None,
            _ => weights.count_opt("group_size")?,
        };
        let block = match weights.counts_opt("block_structure")?.as_deref() {
            Some(&[height, width]) if height > 0 && width > 0 => Some([height, width]),
            None => None,
            Some(_) => return Err(weights.wrong("block_structure", "two numbers above zero")),
        };
        Ok(Group { targets, bits, group_size, block })
    }

    fn has(&self, module: &str) -> bool {
        self.targets.iter().any(|target| target.has(module))
    }

    fn describe(&self, parts: &Parts<'_>, scale: &SourceTensor) -> Result<Coded> {
        let name = format!("{}.weight", parts.stem);
        match (parts.get(".weight_packed"), parts.get(".weight")) {
            (Some(packed), None) if packed.dtype == DType::I32 => self.packed_integers(&name, parts, packed, scale),
            (Some(packed), None) => match parts.get(".weight_global_scale") {
                Some(global) => fp4::nvfp4(&name, parts, packed, [scale, global], true),
                None => fp4::mxfp4(&name, parts, packed, scale),
            },
            (None, Some(weight)) if weight.dtype == DType::I8 => self.integers(&name, parts, weight, scale),
            (None, Some(weight)) => {
                let scales = fp8::scales(parts, weight, scale, self.block)?;
                Ok(fp8::matrix(&name, weight, "compressed-tensors FP8", scales))
            }
            _ => Err(parts.wrong(scale, "either `weight_packed` or `weight` beside it")),
        }
    }

    /// Describes 32-bit words with several codes each.
    fn packed_integers(
        &self,
        name: &str,
        parts: &Parts<'_>,
        packed: &SourceTensor,
        scale: &SourceTensor,
    ) -> Result<Coded> {
        let ([rows, words], bits) = (parts.matrix(packed)?, self.bits as usize);
        let cols = cols(parts, rows)?;
        let dense = cols.checked_mul(bits).map(|all| all.div_ceil(32));
        let whole = cols.div_ceil(32 / bits);
        let packing = match (dense == Some(words), whole == words) {
            (true, true) if !32usize.is_multiple_of(bits) => {
                let found = format!("found {words} words for {cols} codes of {bits} bits, which two packings have");
                return Err(Error::unsupported(found)
                    .at(parts.shards.path(packed))
                    .tensor(&packed.name)
                    .help("write the checkpoint again with compressed-tensors 0.20 or later and 4 or 8 bits"));
            }
            (true, _) => Packing::Stream,
            (false, true) => Packing::Words,
            (false, false) => {
                let all = format!("{} words for {cols} codes of {bits} bits", dense.unwrap_or(whole));
                return Err(parts.wrong(packed, all));
            }
        };
        let mut coded =
            self.scaled(name, parts, [rows, cols], scale, Codes::new(packed, packing, self.bits, Meaning::Unsigned))?;
        let middle = 1 << (self.bits - 1);
        coded.zeros = match parts.get(".weight_zero_point") {
            None => Zeros::Constant(middle),
            Some(zero) if packing == Packing::Words && !32usize.is_multiple_of(bits) => {
                return Err(parts.wrong(zero, "no zero points beside codes in whole words"));
            }
            Some(zero) => {
                let words = rows.checked_mul(bits).map_or(0, |all| all.div_ceil(32));
                parts.check(zero, &[DType::I32], &[words, coded.scales.groups])?;
                Zeros::Packed { tensor: zero.clone(), order: ZeroOrder::AlongRows, add: 0 }
            }
        };
        if let Some(index) = parts.get(".weight_g_idx") {
            parts.check(index, &[DType::I32], &[cols])?;
            coded.index = Some(index.clone());
        }
        coded.others.push(format!("{}.weight_shape", parts.stem));
        Ok(coded)
    }

    /// Describes integers of one byte each.
    fn integers(&self, name: &str, parts: &Parts<'_>, weight: &SourceTensor, scale: &SourceTensor) -> Result<Coded> {
        let [rows, cols] = parts.matrix(weight)?;
        let codes = Codes::new(weight, Packing::Bytes, self.bits, Meaning::Signed);
        let mut coded = self.scaled(name, parts, [rows, cols], scale, codes)?;
        if let Some(zero) = parts.get(".weight_zero_point") {
            parts.check(zero, &[DType::I8], &scale.shape)?;
            coded.zeros = Zeros::Bytes { tensor: zero.clone(), is_signed: true };
        }
        Ok(coded)
    }

    /// Describes integers with a scale for each group, for each row, or for the tensor.
    fn scaled(
        &self,
        name: &str,
        parts: &Parts<'_>,
        [rows, cols]: [usize; 2],
        scale: &SourceTensor,
        codes: Codes,
    ) -> Result<Coded> {
        let width = parts.group(scale, self.group_size, cols)?;
        let groups = cols / width;
        let [height, width] = match scale.shape[..] {
            [r, g] if r == rows && g == groups => [1, width],
            [r, 1] | [r] if r == rows => [1, cols],
            [1] | [] | [1, 1] => [rows, cols],
            _ => return Err(parts.wrong(scale, format!("floats of shape {:?}", [rows, groups]))),
        };
        parts.check_floats(scale, &[&scale.shape])?;
        let scales = Scales::blocks(ScaleValues::Floats(scale.clone()), height, width, cols);
        let form = format!("compressed-tensors int{}", self.bits);
        Ok(Coded::new(name, &[rows, cols], form, codes, scales))
    }
}

/// Returns the number of columns that `weight_shape` records.
fn cols(parts: &Parts<'_>, rows: usize) -> Result<usize> {
    let shape = parts.need(".weight_shape")?;
    let size = match (shape.dtype, &shape.shape[..]) {
        (DType::I64, [2]) => 8,
        (DType::I32, [2]) => 4,
        _ => return Err(parts.wrong(shape, "I64 [2]")),
    };
    let bytes = parts.bytes(shape)?;
    let number = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        usize::try_from(u64::from_le_bytes(word)).ok()
    };
    match (number(&bytes[..size]), number(&bytes[size..])) {
        (Some(out), Some(cols)) if out == rows && cols > 0 => Ok(cols),
        found => Err(parts.wrong(shape, format!("{rows} rows and some columns in it, not {found:?}"))),
    }
}
