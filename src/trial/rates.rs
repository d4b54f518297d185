//! Prediction of the speed of a pack: how many tokens per second this machine decodes, from the measured time of the
//! products with each storage format.
//!
//! Decoding reads every weight that a token needs once, so its time is the sum over the matrices. Products in memory
//! are measured with all threads on far more weights than the caches hold; attention over a long text and everything
//! between the products come on top.

use crate::catalogue::Role;
use crate::convert::dry_run::in_words;
use crate::convert::quantize::weights::Tensor;
use crate::error::Result;
use crate::iebin::Store;
use crate::mapped::Bytes;
use crate::model_config::Mlp;
use crate::runtime::cpu::{Acts, Arithmetic, Cpu, Form, Job, Matrix, MatrixStore};
use crate::scheme::{ScaleType, TileLayout};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

/// Rows and columns of the matrices that are measured.
const SIDE: usize = 2048;
/// Bytes of weights per measurement, far more than the caches of most processors hold.
const WORKING_SET: usize = 256 << 20;
/// Number of measurements of a format, of which the median counts.
const ROUNDS: usize = 5;

/// Time in which this machine reads and multiplies weights, by their storage format.
#[derive(Debug)]
pub struct Rates {
    source: RateSource,
    /// Share of the experts that compute a token.
    experts: f64,
    /// Measured seconds per byte, by the name of the format.
    known: RefCell<BTreeMap<String, f64>>,
}

#[derive(Debug)]
enum RateSource {
    /// Measurement with these threads.
    Measured(Cpu),
    /// The same for all formats: seconds per byte.
    Given(f64),
}

impl Rates {
    /// Prepares the prediction for a model with this feed-forward part: for this machine with `threads` threads, or for
    /// one that reads `bandwidth` 10^9 bytes per second from memory and computes faster than that with every format.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn new(mlp: &Mlp, threads: usize, bandwidth: Option<f64>) -> Result<Rates> {
        let experts = match mlp {
            Mlp::Moe { experts, top_k, .. } => *top_k as f64 / *experts as f64,
            Mlp::Dense { .. } => 1.0,
        };
        let source = match bandwidth {
            Some(bandwidth) => RateSource::Given(1e-9 / bandwidth),
            None => RateSource::Measured(Cpu::new(threads)?),
        };
        Ok(Rates { source, experts, known: RefCell::default() })
    }

    /// Returns the seconds that a token takes for a tensor of `bytes` bytes in a format.
    ///
    /// # Errors
    /// No kernel multiplies with the format, or memory is exhausted.
    pub fn seconds(&self, tensor: &Tensor, store: Store, bytes: u64) -> Result<f64> {
        let share = self.share_read(tensor)?;
        if share == 0.0 {
            return Ok(0.0);
        }
        Ok(share * bytes as f64 * self.seconds_per_byte(store)?)
    }

    /// Returns the share of a tensor that decoding one token reads.
    fn share_read(&self, tensor: &Tensor) -> Result<f64> {
        Ok(match tensor.role {
            Role::Embedding if !tensor.is_tied => 1.0 / tensor.matrices()?.1.max(1) as f64,
            Role::Experts => self.experts,
            // Layers of multi-token prediction, and encoders of images.
            Role::Prediction | Role::Other => 0.0,
            _ => 1.0,
        })
    }

    /// Returns the measured formats with their rates in 10^9 bytes per second.
    pub fn measurements(&self) -> BTreeMap<String, f64> {
        self.known.borrow().iter().map(|(name, seconds)| (name.clone(), 1e-9 / seconds)).collect()
    }

    fn seconds_per_byte(&self, store: Store) -> Result<f64> {
        let cpu = match &self.source {
            RateSource::Given(seconds) => return Ok(*seconds),
            RateSource::Measured(cpu) => cpu,
        };
        let name = match store {
            Store::Plain(dtype) => dtype.to_string(),
            Store::Tiled(spec) => in_words(&spec),
        };
        if let Some(seconds) = self.known.borrow().get(&name) {
            return Ok(*seconds);
        }
        let seconds = measure(cpu, store)?;
        self.known.borrow_mut().insert(name, seconds);
        Ok(seconds)
    }
}

/// Returns the seconds per byte of products of one token with matrices in a format.
fn measure(cpu: &Cpu, store: Store) -> Result<f64> {
    let store = match store {
        Store::Plain(dtype) => MatrixStore::Plain(dtype),
        Store::Tiled(spec) => MatrixStore::Tiled(TileLayout::new(spec, SIDE, SIDE)?),
    };
    let one = matrix_bytes(&store);
    let count = WORKING_SET.div_ceil(one.len());
    let fill = |all: &mut [u8]| {
        all.chunks_exact_mut(one.len()).for_each(|copy| copy.copy_from_slice(&one));
        Ok(())
    };
    let all = Bytes::build(one.len() * count, fill)?;
    let matrices = (0..count)
        .map(|i| Matrix::new(SIDE, SIDE, store, all.slice(i * one.len()..(i + 1) * one.len())))
        .collect::<Result<Vec<_>>>()?;
    let mut x = Acts::default();
    x.set(1, SIDE, &(0..SIDE).map(|i| (i % 7) as f32 - 3.0).collect::<Vec<_>>());
    [Form::Bf16, Form::Int8].into_iter().for_each(|form| cpu.prepare(&mut x, form));
    let mut y = vec![0f32; SIDE];
    let mut round = || {
        let start = Instant::now();
        for matrix in &matrices {
            cpu.matmul(&mut [Job::new(matrix, None, &x, &mut y)], Arithmetic::Int8);
        }
        black_box(&y);
        start.elapsed().as_secs_f64()
    };
    // The first round also finds the pages.
    round();
    let mut seconds: Vec<f64> = (0..ROUNDS).map(|_| round()).collect();
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[ROUNDS / 2] / all.len() as f64)
}

/// Returns the bytes of a matrix with scales of ordinary size. Codes are all the same, because the time does not depend
/// on them.
fn matrix_bytes(store: &MatrixStore) -> Vec<u8> {
    let layout = match store {
        MatrixStore::Plain(dtype) => return vec![0x3c; SIDE * SIDE * dtype.size()],
        MatrixStore::Tiled(layout) => layout,
    };
    let mut bytes = vec![0x5a; layout.nbytes()];
    for tile in bytes.chunks_exact_mut(layout.tile_bytes) {
        let scales = &mut tile[..layout.zeros_offset];
        match layout.spec.scale_dtype {
            ScaleType::E8m0 => scales.fill(120),
            // 2^-7 as a half; as a single, about 10^-19.
            _ => scales.as_chunks_mut::<2>().0.fill([0x00, 0x20]),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::model_config::Activation;
    use crate::scheme::QuantSpec;

    const DENSE: Mlp = Mlp::Dense { intermediate: 64, activation: Activation::Silu, bias: false };

    #[test]
    fn a_given_bandwidth_and_the_share_that_a_token_reads_make_the_time() {
        let rates = Rates::new(&DENSE, 1, Some(10.0)).unwrap();
        let seconds = |name: &str, is_tied: bool| {
            let tensor = Tensor::float(name, &[100, 32], is_tied);
            rates.seconds(&tensor, Store::Tiled(QuantSpec::Q4_0), 1_000_000).unwrap()
        };
        assert!((seconds("model.layers.0.mlp.up_proj.weight", false) - 1e-4).abs() < 1e-12);
        assert!((seconds("model.embed_tokens.weight", true) - 1e-4).abs() < 1e-12);
        assert!((seconds("model.embed_tokens.weight", false) - 1e-6).abs() < 1e-12);
        assert!(rates.measurements().is_empty());
        let sparse = Rates { experts: 0.25, ..rates };
        let experts = Tensor::float("model.layers.0.mlp.experts.down_proj", &[8, 32, 32], false);
        let seconds = sparse.seconds(&experts, Store::Plain(DType::BF16), 1_000_000).unwrap();
        assert!((seconds - 2.5e-5).abs() < 1e-12);
    }

    #[test]
    fn each_format_is_measured_once() {
        let rates = Rates::new(&DENSE, 1, None).unwrap();
        for store in [Store::Plain(DType::BF16), Store::Tiled(QuantSpec::Q4_0), Store::Tiled(QuantSpec::MXFP4)] {
            let first = rates.seconds_per_byte(store).unwrap();
            assert!(first > 0.0 && first.is_finite());
            assert_eq!(rates.seconds_per_byte(store).unwrap(), first);
        }
        assert_eq!(rates.measurements().len(), 3);
    }
}
