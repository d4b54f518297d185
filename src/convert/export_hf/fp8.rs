//! FP8 in blocks, as DeepSeek-V3 and Qwen3 release their weights: 8-bit floats (E4M3) with an f32 scale per block of
//! 128 x 128.
//!
//! A weight (out, in) becomes `weight` F8_E4M3 (out, in) and `weight_scale_inv` F32 (ceil(out / 128), ceil(in / 128));
//! in spite of its name the scale is a factor. Value = number * scale. The scale of a block is its largest magnitude
//! divided by 448, the largest number of E4M3, or 1 if all its weights are 0; quotients are rounded to nearest even.

use super::format::Stored;
use super::matrix::ExportedMatrix;
use super::plan::Module;
use crate::convert::executor::TaskOutput;
use crate::dtype::DType;
use crate::error::{Error, Result};
use serde_json::{Value, json};

/// Rows and columns of a block.
const SIDE: usize = 128;
/// Largest number of E4M3.
const LARGEST: f32 = 448.0;
/// Sections of a module.
const WEIGHTS: usize = 0;
const SCALES: usize = 1;

/// Returns the tensors of a module.
///
/// # Errors
/// None; the signature is that of the table of formats.
pub(super) fn tensors(module: &Module) -> Result<Vec<Stored>> {
    let Module { rows, cols, .. } = module;
    let blocks = vec![rows.div_ceil(SIDE), cols.div_ceil(SIDE)];
    Ok(vec![
        Stored { name: "weight", dtype: DType::F8E4M3, shape: vec![*rows, *cols] },
        Stored { name: "weight_scale_inv", dtype: DType::F32, shape: blocks },
    ])
}

/// Writes the tensors of a module, a row of blocks at a time.
pub(super) fn fill(module: &Module, matrix: &mut ExportedMatrix<'_>, out: &mut TaskOutput<'_>) -> Result<()> {
    let mut band = Vec::new();
    matrix.values(|row, values| {
        if let Some(bad) = values.iter().find(|value| !value.is_finite()) {
            return Err(Error::unsupported(format!("found the weight {bad} in row {row}, expected finite weights"))
                .help("the checkpoint is damaged; get it again"));
        }
        band.extend_from_slice(values);
        if (row + 1) % SIDE != 0 && row + 1 != module.rows {
            return Ok(());
        }
        let (codes, scales) = encode(&band, module.cols);
        band.clear();
        out.append(WEIGHTS, &codes)?;
        out.append(SCALES, &scales)
    })
}

/// Encodes up to 128 rows of `cols` values; returns the numbers, row by row, and the scales.
fn encode(band: &[f32], cols: usize) -> (Vec<u8>, Vec<u8>) {
    let mut scales = vec![0f32; cols.div_ceil(SIDE)];
    for row in band.chunks_exact(cols) {
        for (scale, block) in scales.iter_mut().zip(row.chunks(SIDE)) {
            *scale = block.iter().fold(*scale, |largest, value| largest.max(value.abs()));
        }
    }
    // A quotient below the range of f32 would become 0, by which nothing can be divided.
    scales
        .iter_mut()
        .for_each(|scale| *scale = if *scale == 0.0 { 1.0 } else { (*scale / LARGEST).max(f32::MIN_POSITIVE) });
    let rows = band.chunks_exact(cols).flat_map(|row| row.chunks(SIDE).zip(&scales));
    let codes = rows.flat_map(|(block, scale)| block.iter().map(|value| e4m3(*value / *scale))).collect();
    (codes, scales.iter().flat_map(|scale| scale.to_le_bytes()).collect())
}

/// Rounds a number to E4M3: a sign, four bits of exponent with bias 7, three bits of fraction; nearest, ties to even.
/// Magnitudes beyond 448 become 448.
fn e4m3(value: f32) -> u8 {
    let (sign, magnitude) = (u8::from(value.is_sign_negative()) << 7, value.abs().min(LARGEST));
    // Numbers below 2^-6 are multiples of 2^-9, those above of a step of an eighth of their power of two.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    let steps = (magnitude * 2f32.powi(3 - exponent)).round_ties_even() as u8;
    // Eight steps are the power of two itself; more or less of them carry into the exponent or make it 0.
    sign | (((exponent + 6) as u8) << 3).wrapping_add(steps)
}

/// Returns `quantization_config`.
///
/// # Errors
/// None; the signature is that of the table of formats.
pub(super) fn config(_: &[&Module], unquantized: &[String]) -> Result<Value> {
    Ok(json!({
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SIDE, SIDE],
        "modules_to_not_convert": unquantized,
    }))
}

/// Returns notes about the programs that read the format.
pub(super) fn notes(modules: &[&Module]) -> Vec<String> {
    let is_cut = |side: usize| side > SIDE && !side.is_multiple_of(SIDE);
    let cut = modules.iter().filter(|module| is_cut(module.rows) || is_cut(module.cols)).count();
    let note = || {
        format!(
            "{cut} matrices have a side that is not a multiple of {SIDE}: transformers reads the scales of their last \
             blocks in other places, vLLM and SGLang do not"
        )
    };
    (cut > 0).then(note).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of a code.
    fn value(code: u8) -> f32 {
        let (sign, exponent, fraction) = (code >> 7, i32::from(code >> 3 & 15), f32::from(code & 7));
        let magnitude = match exponent {
            0 => fraction * 2f32.powi(-9),
            _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
        };
        if sign == 1 { -magnitude } else { magnitude }
    }

    #[test]
    fn every_number_is_its_own_code_and_halves_go_to_even() {
        for code in (0..=0x7e).chain(0x80..=0xfe) {
            assert_eq!(e4m3(value(code)), code);
        }
        for code in 0..0x7e {
            let (low, high) = (value(code), value(code + 1));
            let middle = (low + high) / 2.0;
            assert_eq!(e4m3(middle), code + code % 2, "{middle}");
            assert_eq!(e4m3(f32::from_bits(middle.to_bits() - 1)), code);
            assert_eq!(e4m3(-f32::from_bits(middle.to_bits() + 1)), 0x80 | (code + 1));
        }
        assert_eq!([449.0, f32::INFINITY, -1e9].map(e4m3), [0x7e, 0x7e, 0xfe]);
    }

    #[test]
    fn each_block_has_a_scale_of_its_own() {
        let mut band = vec![0.0; 2 * 130];
        (band[0], band[130], band[129]) = (-4.48, 2.24, 896.0);
        let (codes, scales) = encode(&band, 130);
        let scales: Vec<f32> = scales.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(scales, [4.48f32 / 448.0, 2.0]);
        assert_eq!((codes[0], codes[130], codes[129], codes[1]), (0xfe, e4m3(224.0), 0x7e, 0));
        assert_eq!(encode(&[0.0; 4], 4), (vec![0; 4], 1f32.to_le_bytes().to_vec()));
        let tiny = encode(&[1e-45, 0.0], 2);
        assert_eq!(tiny.1, f32::MIN_POSITIVE.to_le_bytes());
    }
}
