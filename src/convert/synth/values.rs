//! Generates synthetic weights: random bits index small tables of encoded elements.
//!
//! A [`Palette`] has a table for each of eight row scales, with 4096 encoded elements that are equally likely:
//! quantiles of a normal distribution in the tensor's own type (floats), two E2M1 codes (MXFP4 blocks) or an exponent
//! (MXFP4 scales).
//! Filling a row is a table look-up per element, which is faster than any disk. The numbers of a row depend only on
//! the seed, the name of the tensor and the index of the row, not on threads, chunks or shards.

use crate::dtype::{DType, encode_floats};
use crate::error::Result;
use crate::rng::Rng;
use std::sync::LazyLock;

/// Bits of one table index; a 64-bit random number gives five.
const INDEX_BITS: u32 = 12;
/// Elements of one table.
const ENTRIES: usize = 1 << INDEX_BITS;
/// Number of row scales: factors by which the rows of a matrix differ, as those of trained models do.
const ROW_SCALES: usize = 8;

/// Distribution of the elements of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// Normal with this mean and standard deviation, times the row scale.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
    /// Bytes of two E2M1 codes. With [`Values::Mxfp4Scales`] of the same `std` they represent normal weights.
    Mxfp4Codes {
        /// Standard deviation of the weights.
        std: f32,
    },
    /// Exponent bytes, 2^(s - 127).
    Mxfp4Scales {
        /// Standard deviation of the weights.
        std: f32,
    },
}

/// Tails of the distribution of weights, and the spread of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tails {
    /// Normal weights; rows differ by a factor of 0.74 to 1.35.
    #[default]
    Light,
    /// Heavy tails, as trained weights mostly have: large ones are far more frequent than in a normal distribution
    /// (Tukey's h distribution, h = 0.1: excess kurtosis 2.5), and rows differ by a factor of 0.35 to 2.8.
    Heavy,
}

impl Tails {
    /// Returns row scale number `k`, by which all weights of a row are multiplied.
    fn row_scale(self, k: usize) -> f32 {
        let step = match self {
            Tails::Light => 1.0 / ROW_SCALES as f32,
            Tails::Heavy => 0.43,
        };
        ((k as f32 - (ROW_SCALES - 1) as f32 / 2.0) * step).exp2()
    }

    /// Converts a standard normal number `z` to one of this distribution, whose standard deviation is also 1.
    fn value(self, z: f32) -> f32 {
        const H: f32 = 0.1;
        match self {
            Tails::Light => z,
            Tails::Heavy => z * (0.5 * H * z * z).exp() * (1.0 - 2.0 * H).powf(0.75),
        }
    }
}

/// Encoded elements for each row scale.
#[derive(Debug)]
pub struct Palette {
    width: usize,         // bytes of one element
    tables: Vec<Vec<u8>>, // ROW_SCALES x (ENTRIES * width)
}

impl Palette {
    /// Creates the tables for a tensor of this element type (`U8` for the MXFP4 kinds).
    pub fn new(values: &Values, dtype: DType, tails: Tails) -> Result<Palette> {
        let tables = (0..ROW_SCALES).map(|k| table(values, dtype, tails, tails.row_scale(k)));
        let tables = tables.collect::<Result<Vec<_>>>()?;
        Ok(Palette { width: dtype.size(), tables })
    }

    /// Fills one row. `group` names the tensors that share row scales (an MXFP4 tensor's codes and exponents), `name`
    /// the tensor.
    pub fn fill_row(&self, seed: u64, group: &str, name: &str, row: u64, out: &mut [u8]) {
        let scale = row_rng(seed, group, row).next_u64() as usize % ROW_SCALES;
        let mut rng = row_rng(seed ^ 0x5EED, name, row);
        let table = &self.tables[scale];
        match self.width {
            1 => look_up::<1>(&mut rng, table, out),
            2 => look_up::<2>(&mut rng, table, out),
            4 => look_up::<4>(&mut rng, table, out),
            other => unreachable!("elements of {other} bytes are not made here"),
        }
    }
}

fn look_up<const N: usize>(rng: &mut Rng, table: &[u8], out: &mut [u8]) {
    let (table, _) = table.as_chunks::<N>();
    let table: &[[u8; N]; ENTRIES] = table.try_into().expect("a palette table has ENTRIES elements");
    let (out, _) = out.as_chunks_mut::<N>();
    for five in out.chunks_mut(5) {
        let mut bits = rng.next_u64();
        for element in five {
            *element = table[bits as usize % ENTRIES];
            bits >>= INDEX_BITS;
        }
    }
}

/// Returns the random number generator of one row, seeded with FNV-1a over the name, mixed with seed and row.
fn row_rng(seed: u64, name: &str, row: u64) -> Rng {
    let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3));
    Rng::new(hash ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ row.wrapping_mul(0xD6E8_FEB8_6659_FD93))
}

fn table(values: &Values, dtype: DType, tails: Tails, scale: f32) -> Result<Vec<u8>> {
    match *values {
        Values::Normal { mean, std } => {
            let elements: Vec<f32> = QUANTILES.iter().map(|z| mean + std * scale * tails.value(*z)).collect();
            let mut bytes = Vec::new();
            encode_floats(dtype, &elements, &mut bytes)?;
            Ok(bytes)
        }
        Values::Mxfp4Codes { std } => {
            let (_, spread) = mxfp4_scale(std * scale);
            // Six bits of the index select each code: one of 64 quantiles, each the middle one of 64 neighbours.
            let code = |i: usize| e2m1(spread * tails.value(QUANTILES[i * 64 + 32]));
            Ok((0..ENTRIES).map(|i| code(i % 64) | code(i / 64) << 4).collect())
        }
        Values::Mxfp4Scales { std } => {
            let (exponent, _) = mxfp4_scale(std * scale);
            // A quarter of the blocks has half the scale, so that scales vary along a row.
            Ok((0..ENTRIES).map(|i| exponent - u8::from(i % 4 == 0)).collect())
        }
    }
}

/// Returns the exponent byte for weights of this standard deviation, and the standard deviation in units of that
/// scale, which is between 1.5 and 3, because the largest E2M1 number is 6.
fn mxfp4_scale(std: f32) -> (u8, f32) {
    let exponent = (std / 1.5).log2().floor().clamp(-120.0, 120.0);
    ((exponent as i32 + 127) as u8, std / exponent.exp2())
}

/// Returns the nearest E2M1 code: magnitude in the low three bits, sign above.
fn e2m1(value: f32) -> u8 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let distance = |code: usize| (MAGNITUDES[code] - value.abs()).abs();
    let code = (0..8).min_by(|a, b| distance(*a).total_cmp(&distance(*b))).expect("eight codes") as u8;
    if value < 0.0 { code | 8 } else { code }
}

/// Quantiles of the standard normal distribution at (i + 1/2) / ENTRIES, computed by adding up the density in small
/// steps.
static QUANTILES: LazyLock<[f32; ENTRIES]> = LazyLock::new(|| {
    const STEP: f64 = 1.0 / 16384.0;
    let density = |z: f64| (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt();
    let mut quantiles = [0f32; ENTRIES];
    let (mut z, mut probability) = (0.0, 0.5);
    for i in ENTRIES / 2..ENTRIES {
        let wanted = (i as f64 + 0.5) / ENTRIES as f64;
        while probability < wanted {
            probability += STEP * density(z + STEP / 2.0);
            z += STEP;
        }
        let quantile = (z - (probability - wanted) / density(z)) as f32;
        quantiles[i] = quantile;
        quantiles[ENTRIES - 1 - i] = -quantile;
    }
    quantiles
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::decode_floats;

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        // Known: the quantile of 0.975 is 1.959964.
        let at = |p: f64| QUANTILES[(p * ENTRIES as f64) as usize];
        assert!((at(0.975) - 1.96).abs() < 3e-3, "{}", at(0.975));
        assert!((at(0.8413) - 1.0).abs() < 2e-3);
        let variance: f64 = QUANTILES.iter().map(|q| f64::from(*q).powi(2)).sum::<f64>() / ENTRIES as f64;
        assert!((variance - 1.0).abs() < 1e-3, "{variance}");
    }

    #[test]
    fn a_row_has_the_asked_mean_and_deviation_and_repeats() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let palette = Palette::new(&Values::Normal { mean: 0.0, std: 0.02 }, dtype, Tails::Light).unwrap();
            let mut bytes = vec![0; 256 * 1024 * dtype.size()];
            for (row, out) in bytes.chunks_mut(1024 * dtype.size()).enumerate() {
                palette.fill_row(7, "w", "w", row as u64, out);
            }
            let mut values = vec![0f32; 256 * 1024];
            decode_floats(dtype, &bytes, &mut values).unwrap();
            let std = (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64).sqrt();
            assert!((0.018..0.022).contains(&std), "{dtype}: {std}");
            let mut again = vec![0; 1024 * dtype.size()];
            palette.fill_row(7, "w", "w", 3, &mut again);
            assert_eq!(again, bytes[3 * again.len()..4 * again.len()]);
            palette.fill_row(8, "w", "w", 3, &mut again);
            assert_ne!(again, bytes[3 * again.len()..4 * again.len()]);
        }
    }

    #[test]
    fn heavy_tails_have_the_same_deviation_and_more_kurtosis() {
        let moment = |power: i32| {
            QUANTILES.iter().map(|z| f64::from(Tails::Heavy.value(*z)).powi(power)).sum::<f64>() / ENTRIES as f64
        };
        assert!((moment(2) - 1.0).abs() < 0.01, "{}", moment(2));
        assert!((4.8..5.7).contains(&moment(4)), "{}", moment(4));
    }

    #[test]
    fn mxfp4_codes_and_scales_together_have_the_asked_deviation() {
        let (std, blocks) = (1.0 / 2880f32.sqrt(), 90);
        let codes = Palette::new(&Values::Mxfp4Codes { std }, DType::U8, Tails::Light).unwrap();
        let scales = Palette::new(&Values::Mxfp4Scales { std }, DType::U8, Tails::Light).unwrap();
        let value = |nibble: u8| {
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(nibble & 7)];
            if nibble & 8 != 0 { -magnitude } else { magnitude }
        };
        let mut sum = 0f64;
        for row in 0..64 {
            let (mut c, mut s) = (vec![0; blocks * 16], vec![0; blocks]);
            codes.fill_row(1, "w", "w_blocks", row, &mut c);
            scales.fill_row(1, "w", "w_scales", row, &mut s);
            for (block, scale) in c.chunks(16).zip(s) {
                let unit = (f64::from(scale) - 127.0).exp2();
                sum += block.iter().flat_map(|b| [b & 15, b >> 4]).map(|n| (value(n) * unit).powi(2)).sum::<f64>();
            }
        }
        let measured = (sum / (64 * blocks * 32) as f64).sqrt() as f32;
        assert!((0.8..1.2).contains(&(measured / std)), "{measured} for {std}");
    }
}
