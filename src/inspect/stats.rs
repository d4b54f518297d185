//! Computes minimum, maximum, mean and standard deviation of a tensor's values in one pass over its bytes.

use super::container::Payload;
use crate::dtype::{DType, decode_floats};
use crate::error::Result;
use crate::interrupt;
use crate::quant::block::tile::dequantize_rows;
use crate::scheme::TileLayout;
use serde_json::{Value, json};

/// Number of values decoded at once.
const CHUNK: usize = 1 << 16;

/// Statistics of the values of one tensor. Minimum, maximum, mean and deviation are those of the finite values.
#[derive(Debug, Clone, PartialEq)]
pub struct Stats {
    count: u64,
    finite: u64,
    /// Smallest finite value.
    pub min: f32,
    /// Largest finite value.
    pub max: f32,
    sum: f64,
    squares: f64,
    /// Number of values that are exactly zero.
    pub zeros: u64,
    /// Number of values that are NaN.
    pub nan: u64,
    /// Number of values that are infinite.
    pub infinite: u64,
}

impl Stats {
    fn new() -> Stats {
        let (min, max) = (f32::INFINITY, f32::NEG_INFINITY);
        Stats { count: 0, finite: 0, min, max, sum: 0.0, squares: 0.0, zeros: 0, nan: 0, infinite: 0 }
    }

    /// Computes the statistics of a float tensor or of the dequantized values of a quantized one; `None` for
    /// integers.
    pub fn of(payload: &Payload) -> Result<Option<Stats>> {
        let mut stats = Stats::new();
        match payload {
            Payload::Plain(dtype, content) if dtype.is_float() => stats.add_plain(*dtype, &content.bytes()?)?,
            Payload::Tiled(layout, content) => stats.add_tiles(layout, &content.bytes()?)?,
            Payload::Plain(..) => return Ok(None),
        }
        Ok(Some(stats))
    }

    fn add_plain(&mut self, dtype: DType, bytes: &[u8]) -> Result<()> {
        let mut values = vec![0f32; CHUNK];
        for chunk in bytes.chunks(CHUNK * dtype.size()) {
            interrupt::check()?;
            let values = &mut values[..chunk.len() / dtype.size()];
            decode_floats(dtype, chunk, values)?;
            self.add(values);
        }
        Ok(())
    }

    fn add_tiles(&mut self, layout: &TileLayout, bytes: &[u8]) -> Result<()> {
        let step = (CHUNK / layout.cols).max(1);
        let mut values = vec![0f32; step * layout.cols];
        for matrix in bytes.chunks_exact(layout.nbytes()) {
            for first in (0..layout.rows).step_by(step) {
                interrupt::check()?;
                let rows = first..(first + step).min(layout.rows);
                let values = &mut values[..rows.len() * layout.cols];
                dequantize_rows(layout, matrix, rows, values);
                self.add(values);
            }
        }
        Ok(())
    }

    fn add(&mut self, values: &[f32]) {
        self.count += values.len() as u64;
        for &v in values {
            if v.is_finite() {
                self.finite += 1;
                self.min = self.min.min(v);
                self.max = self.max.max(v);
                self.sum += f64::from(v);
                self.squares += f64::from(v) * f64::from(v);
                self.zeros += u64::from(v == 0.0);
            } else if v.is_nan() {
                self.nan += 1;
            } else {
                self.infinite += 1;
            }
        }
    }

    /// Returns the mean of the finite values.
    pub fn mean(&self) -> f64 {
        self.sum / self.finite.max(1) as f64
    }

    /// Returns the standard deviation of the finite values.
    pub fn std(&self) -> f64 {
        (self.squares / self.finite.max(1) as f64 - self.mean().powi(2)).max(0.0).sqrt()
    }

    /// Returns the share of zeros, 0..=1.
    pub fn zero_share(&self) -> f64 {
        self.zeros as f64 / self.count.max(1) as f64
    }

    /// Returns the statistics as JSON; `min` and `max` are null when no value is finite.
    pub fn json(&self) -> Value {
        let number = |v: f32| if v.is_finite() { json!(v) } else { Value::Null };
        json!({
            "min": number(self.min), "max": number(self.max), "mean": self.mean(), "std": self.std(),
            "zeros": self.zeros, "nan": self.nan, "infinite": self.infinite,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::container::Content;
    use super::*;
    use crate::mapped::Bytes;

    #[test]
    fn statistics_count_what_is_not_a_number_apart() {
        let values = [1.0f32, -3.0, 0.0, f32::NAN, f32::INFINITY, 2.0];
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let stats = Stats::of(&Payload::Plain(DType::F32, Content::Here(Bytes::copied(&bytes)))).unwrap().unwrap();
        assert_eq!((stats.min, stats.max, stats.zeros, stats.nan, stats.infinite), (-3.0, 2.0, 1, 1, 1));
        assert_eq!(stats.mean(), 0.0);
        assert!((stats.std() - 3.5f64.sqrt()).abs() < 1e-12);
        assert_eq!(Stats::of(&Payload::Plain(DType::U8, Content::Here(Bytes::copied(&[1])))).unwrap(), None);
    }
}
