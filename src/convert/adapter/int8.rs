//! Rounds the factors of an adapter to int8 with a scale per row, and refuses those that lose too much.

use crate::adapter::{Adapter, Int8Factor, LowRank};
use crate::error::{Context, Error, Result};
use crate::mapped::Bytes;
use crate::quant::Quantizer;
use crate::quant::block::tile::dequantize_rows;
use crate::quant::metrics::RowMetrics;
use crate::quant_spec::{Method, TensorQuant};
use crate::scheme::{BLOCK, QuantSpec, ScaleType};
use rayon::prelude::*;

/// Least cosine between the rows of a factor and their int8 form, in the mean and for the worst row. Rounding loses the
/// share `(c / 127)^2 / 12` of the energy of a row whose largest number is `c` times its root mean square: normal rows
/// (c = 3.5) reach a cosine of 0.99997, and the mean misses the gate from c = 14 on.
const GATE: (f64, f64) = (0.9995, 0.998);

/// Meaning of the codes: one f32 scale per row, since the scales of small factors may be subnormal as f16.
const INT8: TensorQuant = TensorQuant {
    spec: QuantSpec { scale_dtype: ScaleType::F32, ..QuantSpec::INT8_ROWS },
    method: Method::Rtn,
    clamp: None,
    percentile: None,
};

/// Rounds all factors of matrices to int8, except those that would not become smaller and those of the embedding, of
/// which a few rows are read for a token.
///
/// # Errors
/// A factor misses the gate; the message names its tensor.
pub fn round_to_int8(adapter: &mut Adapter) -> Result<()> {
    let tensors = adapter.changes.par_iter_mut().filter(|(name, _)| *name != "model.embed_tokens.weight");
    tensors.try_for_each(|(name, changes)| {
        changes.par_iter_mut().filter_map(|change| change.low_rank.as_mut()).try_for_each(round).tensor(name)
    })
}

fn round(factors: &mut LowRank) -> Result<()> {
    let LowRank { rank, a, b, int8, .. } = factors;
    if int8[0].is_some() {
        return Ok(());
    }
    let (cols, rows) = (a.len() / *rank, b.len() / *rank);
    int8[0] = Some(rounded("lora_A", a, *rank, cols)?);
    // Columns are padded to whole blocks.
    if rank.next_multiple_of(BLOCK) < 2 * *rank {
        int8[1] = Some(rounded("lora_B", b, rows, *rank)?);
    }
    Ok(())
}

/// Rounds a factor, whose numbers become those of the result.
fn rounded(name: &str, values: &mut [f32], rows: usize, cols: usize) -> Result<Int8Factor> {
    let quantizer = Quantizer::new(INT8, rows, cols)?;
    let layout = *quantizer.layout();
    let data = Bytes::build(layout.nbytes(), |tiles| quantizer.encode_tiles(values, tiles))?;
    let mut decoded = vec![0.0; values.len()];
    dequantize_rows(&layout, &data, 0..rows, &mut decoded);
    let metrics: Vec<RowMetrics> =
        values.chunks_exact(cols).zip(decoded.chunks_exact(cols)).map(|(x, y)| RowMetrics::of(x, y)).collect();
    let metrics = RowMetrics::summarize(&metrics);
    if metrics.cosine_mean < GATE.0 || metrics.cosine_min < GATE.1 {
        let (mean, least) = (metrics.cosine_mean, metrics.cosine_min);
        return Err(Error::unsupported(format!(
            "{name} in int8: found a cosine of {mean:.5} in the mean and of {least:.5} for the worst row, expected at \
             least {} and {}",
            GATE.0, GATE.1
        ))
        .help("keep the numbers of the file (--adapter-precision auto); int8 suits rows without outliers"));
    }
    values.copy_from_slice(&decoded);
    Ok(Int8Factor { layout, data })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::Change;
    use crate::dtype::DType;
    use crate::rng::Rng;
    use std::collections::BTreeMap;

    fn adapter(rank: usize, a: Vec<f32>) -> Adapter {
        let mut rng = Rng::new(3);
        let b = (0..40 * rank).map(|_| rng.next_normal() as f32).collect();
        let low_rank = Some(LowRank { rank, scale: 2.0, a, b, dtype: DType::F16, int8: [None, None] });
        let changes = BTreeMap::from([("lm_head.weight".to_string(), vec![Change { low_rank, ..Change::default() }])]);
        Adapter { hash: String::new(), changes }
    }

    #[test]
    fn factors_hold_the_numbers_of_their_codes() {
        for (rank, b_too) in [(1, false), (16, false), (17, true), (33, true)] {
            let mut rng = Rng::new(5);
            let mut adapter = adapter(rank, (0..rank * 100).map(|_| 1e-6 * rng.next_normal() as f32).collect());
            let before = adapter.clone();
            round_to_int8(&mut adapter).unwrap();
            let [of, was] = [&adapter, &before].map(|adapter| adapter.changes["lm_head.weight"][0].low_rank.clone());
            let (of, was) = (of.unwrap(), was.unwrap());
            assert_eq!((of.int8[0].is_some(), of.int8[1].is_some()), (true, b_too));
            assert!(of.a != was.a && (of.b != was.b) == b_too);
            for (x, y) in of.a.iter().zip(&was.a) {
                assert!((x - y).abs() < 4e-8, "{x} {y}");
            }
        }
    }

    #[test]
    fn a_row_with_an_outlier_is_refused_by_name() {
        let mut a: Vec<f32> = (0..4 * 2048).map(|i| (i % 7) as f32 - 3.0).collect();
        a[3000] = 200.0;
        let error = round_to_int8(&mut adapter(4, a)).unwrap_err().to_string();
        assert!(error.contains("lm_head.weight") && error.contains("lora_A"), "{error}");
    }
}
