//! Arithmetic of recurrent mixers on the rows of a chunk: convolution, norms, decays, and sums over rows.

use crate::runtime::ops::{exp, inverse_root, sigmoid, sum_of_squares};
use crate::simd::Kernel;

/// Number of positions from one border to the next, see [`super::states::folded`].
pub(super) const CHUNK: usize = super::states::folded::CHUNK;

/// Convolution over the positions of a text, channel by channel, and SiLU. Products are added from the oldest position
/// on.
pub(super) struct Convolve<'a> {
    /// Positions that are read, including the present one.
    pub taps: usize,
    /// Number of all channels, which are in each row of `history` and `kernel`.
    pub channels: usize,
    /// Inputs at the positions before the text's first row, from the first channel on.
    pub history: &'a [f32],
    /// Inputs of the rows, `stride` apart, from the first channel on.
    pub projected: &'a [f32],
    pub stride: usize,
    /// Factors of the positions, from the first channel on.
    pub kernel: &'a [f32],
    pub bias: Option<&'a [f32]>,
    /// First row that is computed.
    pub first: usize,
    /// Number of channels that are computed.
    pub width: usize,
    /// Output: `(rows, width)`.
    pub out: &'a mut [f32],
}

impl Kernel for Convolve<'_> {
    #[inline(always)]
    fn run(self) {
        let (channels, reach, width) = (self.channels, self.taps - 1, self.width);
        for (row, out) in self.out.chunks_exact_mut(width).enumerate() {
            out.fill(0.0);
            for tap in 0..=reach {
                let at = self.first + row + tap;
                let inputs = match at < reach {
                    true => &self.history[at * channels..][..width],
                    false => &self.projected[(at - reach) * self.stride..][..width],
                };
                let factors = &self.kernel[tap * channels..][..width];
                for i in 0..width {
                    out[i] += inputs[i] * factors[i];
                }
            }
            for i in 0..width {
                let x = out[i] + self.bias.map_or(0.0, |bias| bias[i]);
                out[i] = x * sigmoid(x);
            }
        }
    }
}

/// Divides each head by the root of its sum of squares, and multiplies it by a factor.
pub(super) struct L2Norms<'a> {
    /// Heads, `width` values each.
    pub heads: &'a mut [f32],
    pub width: usize,
    pub factor: f32,
}

/// Added to the sum of squares, as in transformers.
const L2_EPS: f32 = 1e-6;

impl Kernel for L2Norms<'_> {
    #[inline(always)]
    fn run(self) {
        for head in self.heads.chunks_exact_mut(self.width) {
            let scale = self.factor / (sum_of_squares(head) + L2_EPS).sqrt();
            head.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

/// `out = products * exp(own - decays)`: products of a row with earlier ones, times the decay between them.
pub(super) struct Decayed<'a> {
    pub products: &'a [f32],
    /// Sums of the logarithms of the decays up to the earlier rows.
    pub decays: &'a [f32],
    /// Sum up to this row.
    pub own: f32,
    pub out: &'a mut [f32],
}

impl Kernel for Decayed<'_> {
    #[inline(always)]
    fn run(self) {
        for i in 0..self.out.len() {
            self.out[i] = self.products[i] * exp(self.own - self.decays[i]);
        }
    }
}

/// Adds rows with their factors to a sum, from the first on.
#[inline(always)]
fn add_rows(sum: &mut [f32], factors: &[f32], rows: &[f32]) {
    for (factor, row) in factors.iter().zip(rows.chunks_exact(sum.len())) {
        for i in 0..sum.len() {
            sum[i] = factor.mul_add(row[i], sum[i]);
        }
    }
}

/// Row that the delta rule adds: `rate * (values - decay * recalled - sum)`, where the sum over earlier rows is
/// completed by the last of them.
pub(super) struct Correct<'a> {
    pub values: &'a [f32],
    /// Product of the key with the matrix at the border.
    pub recalled: &'a [f32],
    /// Logarithm of the decay since the border.
    pub decay: f32,
    pub rate: f32,
    /// Factors of the last earlier rows.
    pub factors: &'a [f32],
    pub rows: &'a [f32],
    pub sum: &'a mut [f32],
    pub out: &'a mut [f32],
}

impl Kernel for Correct<'_> {
    #[inline(always)]
    fn run(self) {
        add_rows(self.sum, self.factors, self.rows);
        let (decay, rate) = (exp(self.decay), sigmoid(self.rate));
        for i in 0..self.values.len() {
            self.out[i] = rate * (self.values[i] - decay * self.recalled[i] - self.sum[i]);
        }
    }
}

/// Row that Mamba-2 adds: `factor * values`.
pub(super) struct ScaleRow<'a> {
    pub values: &'a [f32],
    pub factor: f32,
    pub out: &'a mut [f32],
}

impl Kernel for ScaleRow<'_> {
    #[inline(always)]
    fn run(self) {
        for i in 0..self.values.len() {
            self.out[i] = self.factor * self.values[i];
        }
    }
}

/// Output of a head: `decay * recalled + sum`, where the sum over rows is completed by the last of them, and perhaps a
/// share of the values.
pub(super) struct HeadAnswer<'a> {
    /// Product of the query with the matrix at the border.
    pub recalled: &'a [f32],
    /// Logarithm of the decay since the border.
    pub decay: f32,
    /// Factors of the last rows.
    pub factors: &'a [f32],
    pub rows: &'a [f32],
    pub sum: &'a mut [f32],
    /// Share of the values, if there is one.
    pub skip: Option<f32>,
    pub values: &'a [f32],
    pub out: &'a mut [f32],
}

impl Kernel for HeadAnswer<'_> {
    #[inline(always)]
    fn run(self) {
        add_rows(self.sum, self.factors, self.rows);
        let decay = exp(self.decay);
        for i in 0..self.out.len() {
            self.out[i] = decay.mul_add(self.recalled[i], self.sum[i]);
        }
        if let Some(skip) = self.skip {
            for i in 0..self.out.len() {
                self.out[i] = skip.mul_add(self.values[i], self.out[i]);
            }
        }
    }
}

/// Keys as columns of a chunk, times the decay from their row to the border behind it.
pub(super) struct DecayKeys<'a> {
    /// Keys: `(key, CHUNK)`.
    pub keys: &'a [f32],
    /// Sums of the logarithms of the decays: `(CHUNK)`.
    pub decays: &'a [f32],
    /// Output: `(key, CHUNK)`.
    pub out: &'a mut [f32],
}

impl Kernel for DecayKeys<'_> {
    #[inline(always)]
    fn run(self) {
        let mut factors = [0f32; CHUNK];
        for i in 0..CHUNK {
            factors[i] = exp(self.decays[CHUNK - 1] - self.decays[i]);
        }
        for (out, keys) in self.out.chunks_exact_mut(CHUNK).zip(self.keys.chunks_exact(CHUNK)) {
            for i in 0..CHUNK {
                out[i] = keys[i] * factors[i];
            }
        }
    }
}

/// `matrix = exp(decay) * matrix + added`.
pub(super) struct Fold<'a> {
    pub decay: f32,
    pub added: &'a [f32],
    pub matrix: &'a mut [f32],
}

impl Kernel for Fold<'_> {
    #[inline(always)]
    fn run(self) {
        let decay = exp(self.decay);
        for i in 0..self.matrix.len() {
            self.matrix[i] = decay.mul_add(self.matrix[i], self.added[i]);
        }
    }
}

/// Norm of a head, times `silu(gate)`.
pub(super) struct GatedNorm<'a> {
    pub x: &'a [f32],
    pub gate: &'a [f32],
    /// Factors of the norm.
    pub weight: &'a [f32],
    pub eps: f32,
    pub out: &'a mut [f32],
}

impl Kernel for GatedNorm<'_> {
    #[inline(always)]
    fn run(self) {
        let scale = inverse_root(self.x, self.eps);
        for i in 0..self.out.len() {
            self.out[i] = self.x[i] * scale * self.weight[i] * (self.gate[i] * sigmoid(self.gate[i]));
        }
    }
}

/// Norm of `x * silu(gate)`.
pub(super) struct NormGated<'a> {
    pub x: &'a [f32],
    pub gate: &'a [f32],
    /// Factors of the norm.
    pub weight: &'a [f32],
    pub eps: f32,
    pub out: &'a mut [f32],
}

impl Kernel for NormGated<'_> {
    #[inline(always)]
    fn run(self) {
        for i in 0..self.out.len() {
            self.out[i] = self.x[i] * (self.gate[i] * sigmoid(self.gate[i]));
        }
        let scale = inverse_root(self.out, self.eps);
        for i in 0..self.out.len() {
            self.out[i] = self.out[i] * scale * self.weight[i];
        }
    }
}

/// Computes `ln(1 + e^x)`, which is `x` where the difference is below the precision of an f32.
pub(super) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
