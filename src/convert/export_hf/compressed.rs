//! compressed-tensors: `pack-quantized` for integers and `mxfp4-pack-quantized` for MXFP4.
//!
//! A weight (out, in) of n-bit integers is `weight_packed` I32 (out, ceil(in * n / 32)), a dense little-endian stream
//! per row: code j is in the bits from n * j on, and holds the signed integer plus 2^(n-1). `weight_scale` (out,
//! groups) has the type of the scales, `weight_shape` is I64. Zero points, signed and biased as the codes, are packed
//! along the rows: `weight_zero_point` I32 (ceil(out * n / 32), groups). Value = (code - zero point) * scale.
//! Unsigned codes and zero points of 4 bits are stored as they are, because both have the same bias.
//!
//! MXFP4 is `weight_packed` U8 (out, in / 2), the even column in the low nibble, and `weight_scale` U8 (out, in / 32),
//! value = E2M1 * 2^(scale - 127). Source: compressed-tensors 0.20, `compressors/pack_quantized` and
//! `compressors/mxfp4`. Codes of 5 and 6 bits are dense only since June 2026; before, words held whole codes.

use super::format::{Stored, describe, group_size, note_small_groups};
use super::matrix::ExportedMatrix;
use super::plan::Module;
use crate::convert::executor::TaskOutput;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::scheme::{BLOCK, CodeMap, CodeTable, QuantSpec, ScaleType};
use serde_json::{Value, json};

/// Bytes of codes that are collected before they are written.
const BAND_BYTES: usize = 4 << 20;
/// Sections of a module with integers.
const PACKED: usize = 0;
const SCALES: usize = 1;
const SHAPE: usize = 2;
const ZEROS: usize = 3;

/// Form in which the codes of a scheme are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Integers; `flip` is added to the codes of the pack without carry.
    Integers { bits: usize, flip: u8 },
    /// Indices of E2M1 numbers.
    Mxfp4,
}

fn kind(spec: &QuantSpec) -> Result<Kind> {
    let bits = spec.scheme.bits() as usize;
    match spec.code_map() {
        _ if !spec.scheme.has_encoder() || spec.has_two_levels() => {
            Err(Error::unsupported(format!("found {}, which compressed-tensors has no format for", describe(spec))))
        }
        CodeMap::Biased(_) | CodeMap::Affine | CodeMap::Unsigned => Ok(Kind::Integers { bits, flip: 0 }),
        CodeMap::Bytes => Ok(Kind::Integers { bits, flip: 0x80 }),
        CodeMap::Table(CodeTable::E2m1) => Ok(Kind::Mxfp4),
        CodeMap::Table(_) | CodeMap::Trellis(_) | CodeMap::E4m3 => {
            Err(Error::unsupported(format!("found {}, which compressed-tensors has no format for", describe(spec))))
        }
    }
}

/// Returns the specification of a module; floats are never planned for this format.
fn spec_of(module: &Module) -> Result<QuantSpec> {
    module.spec.ok_or_else(|| Error::unsupported("found floats, expected codes"))
}

/// Returns the element type of scales.
pub(super) fn scale_type(spec: &QuantSpec) -> DType {
    match spec.scale_dtype {
        ScaleType::F16 => DType::F16,
        ScaleType::F32 => DType::F32,
        ScaleType::E8m0 | ScaleType::I8 | ScaleType::E4m3 | ScaleType::I8Row => DType::U8,
    }
}

/// Returns the tensors of a module.
///
/// # Errors
/// The format has no equivalent of the codes, or of the groups of rows of this width.
pub(super) fn tensors(module: &Module) -> Result<Vec<Stored>> {
    let (spec, Module { rows, cols, .. }) = (spec_of(module)?, module);
    let groups = group_size(&spec, *cols)?.map_or(1, |size| cols / size);
    let stored = |name, dtype, shape: &[usize]| Stored { name, dtype, shape: shape.to_vec() };
    let scales = stored("weight_scale", scale_type(&spec), &[*rows, groups]);
    match kind(&spec)? {
        Kind::Mxfp4 if cols.is_multiple_of(BLOCK) => {
            Ok(vec![stored("weight_packed", DType::U8, &[*rows, cols / 2]), scales])
        }
        Kind::Mxfp4 => {
            Err(Error::unsupported(format!("found rows of {cols} weights, expected a multiple of {BLOCK} for MXFP4")))
        }
        Kind::Integers { bits, .. } => {
            let mut all = vec![
                stored("weight_packed", DType::I32, &[*rows, words(*cols, bits)]),
                scales,
                stored("weight_shape", DType::I64, &[2]),
            ];
            if !spec.symmetric {
                all.push(stored("weight_zero_point", DType::I32, &[words(*rows, bits), groups]));
            }
            Ok(all)
        }
    }
}

/// Returns the number of 32-bit words that hold `count` codes.
fn words(count: usize, bits: usize) -> usize {
    // Eight codes take `bits` bytes, which cannot overflow where one code takes a byte.
    (count / 8 * bits + (count % 8 * bits).div_ceil(8)).div_ceil(4)
}

/// Appends codes as a dense stream, padded to whole words of 32 bits.
fn pack(codes: impl IntoIterator<Item = u8>, bits: usize, out: &mut Vec<u8>) {
    let start = out.len();
    let (mut held, mut pending) = (0u32, 0);
    for code in codes {
        held |= u32::from(code) << pending;
        pending += bits;
        while pending >= 8 {
            out.push(held as u8);
            held >>= 8;
            pending -= 8;
        }
    }
    if pending > 0 {
        out.push(held as u8);
    }
    out.resize(start + (out.len() - start).next_multiple_of(4), 0);
}

/// Writes the tensors of a module.
pub(super) fn fill(module: &Module, matrix: &mut ExportedMatrix<'_>, out: &mut TaskOutput<'_>) -> Result<()> {
    let (spec, cols) = (spec_of(module)?, module.cols);
    let (bits, flip) = match kind(&spec)? {
        Kind::Integers { bits, flip } => (bits, flip),
        Kind::Mxfp4 => (4, 0),
    };
    let is_integer = kind(&spec)? != Kind::Mxfp4;
    let (mut packed, mut scales, mut zeros) = (Vec::new(), Vec::new(), ZeroPoints::new(bits));
    matrix.codes(|_, row| {
        pack(row.codes[..cols].iter().map(|code| code ^ flip), bits, &mut packed);
        scales.extend_from_slice(&row.scales);
        if !spec.symmetric {
            zeros.add(&row.zeros);
        }
        if packed.len() < BAND_BYTES {
            return Ok(());
        }
        out.append(PACKED, &packed)?;
        out.append(SCALES, &scales)?;
        packed.clear();
        scales.clear();
        Ok(())
    })?;
    out.append(PACKED, &packed)?;
    out.append(SCALES, &scales)?;
    if is_integer {
        let shape = [module.rows as u64, cols as u64].map(u64::to_le_bytes);
        out.append(SHAPE, shape.as_flattened())?;
    }
    if spec.symmetric { Ok(()) } else { out.append(ZEROS, &zeros.finish()) }
}

/// Zero points of all rows, packed along the rows.
struct ZeroPoints {
    bits: usize,
    /// Rows that do not fill a word yet.
    rows: Vec<Vec<u8>>,
    packed: Vec<u8>,
}

impl ZeroPoints {
    fn new(bits: usize) -> ZeroPoints {
        ZeroPoints { bits, rows: Vec::new(), packed: Vec::new() }
    }

    /// Adds the zero points of a row. Zero points exist for codes of 4 bits only, of which 8 fill a word.
    fn add(&mut self, zeros: &[u8]) {
        self.rows.push(zeros.to_vec());
        if self.rows.len() * self.bits == 32 {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let groups = self.rows.first().map_or(0, Vec::len);
        for group in 0..groups {
            pack(self.rows.iter().map(|row| row[group]), self.bits, &mut self.packed);
        }
        self.rows.clear();
    }

    fn finish(mut self) -> Vec<u8> {
        self.flush();
        self.packed
    }
}

/// Returns `quantization_config`: a group of modules for each combination of bits, groups and zero points.
///
/// # Errors
/// None; the signature is that of the table of formats.
pub(super) fn config(modules: &[&Module], unquantized: &[String]) -> Result<Value> {
    let mut groups: Vec<(Value, &str, Vec<&str>)> = Vec::new();
    for module in modules {
        let (format, weights) = weights(module)?;
        match groups.iter_mut().find(|group| group.0 == weights) {
            Some((_, _, names)) => names.push(&module.name),
            None => groups.push((weights, format, vec![&module.name])),
        }
    }
    let format = match groups.iter().all(|group| group.1 == groups[0].1) {
        true => groups[0].1,
        false => "mixed-precision",
    };
    let entry = |(number, (weights, format, targets)): (usize, &(Value, &str, Vec<&str>))| {
        let value = json!({
            "format": format, "targets": targets, "weights": weights, "input_activations": null,
            "output_activations": null,
        });
        (format!("group_{number}"), value)
    };
    let config_groups: serde_json::Map<String, Value> = groups.iter().enumerate().map(entry).collect();
    Ok(json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": unquantized,
        "kv_cache_scheme": null,
        "version": "0.20.0",
    }))
}

/// Returns the format and the description of the weights of a module.
fn weights(module: &Module) -> Result<(&'static str, Value)> {
    let spec = spec_of(module)?;
    let group = group_size(&spec, module.cols)?;
    Ok(match kind(&spec)? {
        Kind::Mxfp4 => (
            "mxfp4-pack-quantized",
            json!({
                "num_bits": 4, "type": "float", "symmetric": true, "strategy": "group", "group_size": 32,
                "dynamic": false, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
            }),
        ),
        Kind::Integers { bits, .. } => (
            "pack-quantized",
            json!({
                "num_bits": bits, "type": "int", "symmetric": spec.symmetric,
                "strategy": if group.is_some() { "group" } else { "channel" }, "group_size": group, "dynamic": false,
            }),
        ),
    })
}

/// Returns notes about the programs that read the format.
pub(super) fn notes(modules: &[&Module]) -> Vec<String> {
    let bits = |module: &&Module| module.spec.map_or(0, |spec| spec.scheme.bits());
    let odd = modules.iter().any(|module| [5, 6].contains(&bits(module))).then(|| {
        "codes of 5 and 6 bits are packed densely, as compressed-tensors reads them since June 2026; vLLM has no \
         kernels for them"
            .to_string()
    });
    let affine = modules.iter().any(|module| module.spec.is_some_and(|spec| !spec.symmetric)).then(|| {
        "vLLM reads zero points of compressed-tensors; transformers 5.24 does not, not even those of its own library"
            .to_string()
    });
    note_small_groups(modules).into_iter().chain(odd).chain(affine).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn codes_are_found_at_their_bits(bits in 1usize..9, codes in prop::collection::vec(any::<u8>(), 0..70)) {
            let codes: Vec<u8> = codes.iter().map(|code| code & ((1u16 << bits) - 1) as u8).collect();
            let mut packed = Vec::new();
            pack(codes.iter().copied(), bits, &mut packed);
            prop_assert_eq!(packed.len(), 4 * words(codes.len(), bits));
            let bit = |i: usize| packed[i / 8] >> (i % 8) & 1;
            for (j, code) in codes.iter().enumerate() {
                let found = (0..bits).fold(0, |found, i| found | bit(bits * j + i) << i);
                prop_assert_eq!(found, *code);
            }
        }
    }

    #[test]
    fn zero_points_of_eight_rows_share_a_word() {
        let mut zeros = ZeroPoints::new(4);
        (0..9).for_each(|row| zeros.add(&[row, 15 - row]));
        assert_eq!(zeros.finish(), [0x10, 0x32, 0x54, 0x76, 0xef, 0xcd, 0xab, 0x89, 8, 0, 0, 0, 7, 0, 0, 0]);
    }
}
