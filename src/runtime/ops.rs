//! Elementwise arithmetic between matrix products: norms, activations, and the exponential function they share.
//!
//! The result for a token depends on the values of this token only, and sums have a fixed order. The loops are written
//! over 16 lanes and compiled once per instruction set through [`Kernel`].

use super::cpu::scalar::fold;
use crate::model_config::Activation;
use crate::simd::Kernel;

/// Number of partial sums (lanes) of every sum.
pub const LANES: usize = 16;

/// Adding and subtracting 1.5 * 2^23 rounds an f32 to the nearest integer, which is then in the low bits of the sum.
pub(super) const ROUNDER: f32 = 12_582_912.0;

/// Computes e^x within 2 units in the last place; 0 below -87.33 (no denormals), infinite above 88.37, NaN for NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial (Taylor to degree 7, whose error is below 2^-27), times
/// 2^n.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = r.mul_add(p, c);
    }
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127) << 23);
    let y = p * power;
    let y = if x < -87.33 { 0.0 } else { y };
    if x > 88.37 { f32::INFINITY } else { y }
}

/// Coefficients of the polynomial of [`exp2`], highest power first.
pub(super) const EXP2_TERMS: [f32; 7] =
    [1.546_973_2e-4, 0.001_341, 0.009_618_031, 0.055_502_973, 0.240_226_5, 0.693_147_24, 1.0];

/// Computes 2^x for x up to 127, within 2 units in the last place and exact for integers; 0 below -126, NaN for NaN.
///
/// x = n + r with |r| <= 1/2; 2^r by the polynomial with the least relative error (4e-9) among those that are 1 at
/// zero.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    exp2_from(-126.0, x)
}

/// Computes [`exp2`], but returns 0 below `least`, which is -126 or more.
#[inline(always)]
pub fn exp2_from(least: f32, x: f32) -> f32 {
    let shifted = x + ROUNDER;
    let r = x - (shifted - ROUNDER);
    let mut p = EXP2_TERMS[0];
    for c in &EXP2_TERMS[1..] {
        p = r.mul_add(p, *c);
    }
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127) << 23);
    if x < least { 0.0 } else { p * power }
}

/// Computes 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Computes tanh within 3 units in the last place.
///
/// Values near zero use the odd polynomial of Cephes' `tanhf`, because the formula for other values, 1 - 2 / (e^2x +
/// 1), loses all accurate digits there.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let square = x * x;
    let mut p = -5.704_988_7e-3;
    for c in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
        p = square.mul_add(p, c);
    }
    let near = (x * square).mul_add(p, x);
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

/// Computes `cap * tanh(x / cap)`.
#[inline(always)]
pub fn softcap(x: f32, cap: f32) -> f32 {
    cap * tanh(x / cap)
}

/// Returns the largest value, ignoring NaN; minus infinity for an empty slice.
#[inline(always)]
pub fn max(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, tail) = values.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], chunk[l]);
        }
    }
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] = larger(lanes[l], lanes[l + half]);
        }
    }
    tail.iter().fold(lanes[0], |m, v| larger(m, *v))
}

/// Returns the sum of the squares.
#[inline(always)]
pub fn sum_of_squares(values: &[f32]) -> f32 {
    let (chunks, tail) = values.as_chunks::<LANES>();
    let mut lanes = [0f32; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = chunk[l].mul_add(chunk[l], lanes[l]);
        }
    }
    for l in 0..tail.len() {
        lanes[l] = tail[l].mul_add(tail[l], lanes[l]);
    }
    fold(lanes)
}

#[inline(always)]
fn sum(values: &[f32]) -> f32 {
    let (chunks, tail) = values.as_chunks::<LANES>();
    let mut lanes = [0f32; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] += chunk[l];
        }
    }
    for l in 0..tail.len() {
        lanes[l] += tail[l];
    }
    fold(lanes)
}

/// Computes 1 / sqrt(mean(x^2) + eps).
#[inline(always)]
pub fn inverse_root(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt()
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`.
#[derive(Debug)]
pub struct RmsNorm<'a> {
    /// Input of one token: `(width)`.
    pub x: &'a [f32],
    /// Factors of the norm: `(width)`.
    pub weight: &'a [f32],
    /// Added to the mean square before the root.
    pub eps: f32,
    /// Normalized output: `(width)`.
    pub out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    #[inline(always)]
    fn run(self) {
        let scale = inverse_root(self.x, self.eps);
        for ((out, x), w) in self.out.iter_mut().zip(self.x).zip(self.weight) {
            *out = x * scale * w;
        }
    }
}

/// `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight`.
#[derive(Debug)]
pub struct LayerNorm<'a> {
    /// Input of one token: `(width)`.
    pub x: &'a [f32],
    /// Factors of the norm: `(width)`.
    pub weight: &'a [f32],
    /// Added to the variance before the root.
    pub eps: f32,
    /// Normalized output: `(width)`.
    pub out: &'a mut [f32],
}

impl Kernel for LayerNorm<'_> {
    #[inline(always)]
    fn run(self) {
        let mean = sum(self.x) / self.x.len() as f32;
        self.out.iter_mut().zip(self.x).for_each(|(out, x)| *out = x - mean);
        let scale = inverse_root(self.out, self.eps);
        self.out.iter_mut().zip(self.weight).for_each(|(out, w)| *out = *out * scale * w);
    }
}

/// `x += y / sqrt(mean(y^2) + eps) * weight`.
#[derive(Debug)]
pub struct AddNormed<'a> {
    /// Vector that is changed in place.
    pub x: &'a mut [f32],
    /// Vector of the same length as `x`.
    pub y: &'a [f32],
    /// Factors of the norm: `(width)`.
    pub weight: &'a [f32],
    /// Added to the mean square before the root.
    pub eps: f32,
}

impl Kernel for AddNormed<'_> {
    #[inline(always)]
    fn run(self) {
        let scale = inverse_root(self.y, self.eps);
        for ((x, y), w) in self.x.iter_mut().zip(self.y).zip(self.weight) {
            *x += y * scale * w;
        }
    }
}

/// Divides a vector by its root mean square.
#[derive(Debug)]
pub struct UnitNorm<'a> {
    /// Vector that is changed in place.
    pub x: &'a mut [f32],
    /// Added to the mean square before the root.
    pub eps: f32,
}

impl Kernel for UnitNorm<'_> {
    #[inline(always)]
    fn run(self) {
        let scale = inverse_root(self.x, self.eps);
        self.x.iter_mut().for_each(|x| *x *= scale);
    }
}

/// `x *= sigmoid(gate)`.
#[derive(Debug)]
pub struct SigmoidGate<'a> {
    /// Vector that is changed in place.
    pub x: &'a mut [f32],
    /// Vector of the same length as `x`, or one number for each of equal parts of `x`.
    pub gate: &'a [f32],
}

impl Kernel for SigmoidGate<'_> {
    #[inline(always)]
    fn run(self) {
        let each = self.x.len() / self.gate.len().max(1);
        if each > 1 {
            for (part, gate) in self.x.chunks_exact_mut(each).zip(self.gate) {
                let factor = sigmoid(*gate);
                part.iter_mut().for_each(|x| *x *= factor);
            }
            return;
        }
        self.x.iter_mut().zip(self.gate).for_each(|(x, gate)| *x *= sigmoid(*gate));
    }
}

/// `x *= factor`.
#[derive(Debug)]
pub struct Scale<'a> {
    /// Vector that is changed in place.
    pub x: &'a mut [f32],
    /// Factor of every value.
    pub factor: f32,
}

impl Kernel for Scale<'_> {
    #[inline(always)]
    fn run(self) {
        self.x.iter_mut().for_each(|x| *x *= self.factor);
    }
}

/// Normalizes each head in place like [`RmsNorm`].
#[inline(always)]
pub fn norm_heads(heads: &mut [f32], weight: &[f32], eps: f32) {
    for head in heads.chunks_exact_mut(weight.len()) {
        let scale = inverse_root(head, eps);
        for (v, w) in head.iter_mut().zip(weight) {
            *v = *v * scale * w;
        }
    }
}

/// `x = cap * tanh(x / cap)`.
#[derive(Debug)]
pub struct SoftCap<'a> {
    /// Vector that is changed in place.
    pub x: &'a mut [f32],
    /// Bound of the absolute value of the result.
    pub cap: f32,
}

impl Kernel for SoftCap<'_> {
    #[inline(always)]
    fn run(self) {
        for x in self.x {
            *x = softcap(*x, self.cap);
        }
    }
}

/// `x += y`.
#[derive(Debug)]
pub struct Add<'a> {
    /// Vector that is changed in place.
    pub x: &'a mut [f32],
    /// Vector of the same length as `x`.
    pub y: &'a [f32],
}

impl Kernel for Add<'_> {
    #[inline(always)]
    fn run(self) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += y;
        }
    }
}

/// `x += scale * y`.
#[derive(Debug)]
pub struct AddScaled<'a> {
    /// Vector that is changed in place.
    pub x: &'a mut [f32],
    /// Vector of the same length as `x`.
    pub y: &'a [f32],
    /// Factor of `y`.
    pub scale: f32,
}

impl Kernel for AddScaled<'_> {
    #[inline(always)]
    fn run(self) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x = y.mul_add(self.scale, *x);
        }
    }
}

#[inline(always)]
fn gated(activation: Activation, gate: f32, up: f32) -> f32 {
    match activation {
        Activation::Silu => gate * sigmoid(gate) * up,
        Activation::GeluTanh => {
            // gelu(x) = x (1 + tanh u) / 2 = x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
            const TWICE_ROOT: f32 = 1.595_769;
            let cubic = (gate * gate * gate).mul_add(0.044_715, gate);
            gate * sigmoid(TWICE_ROOT * cubic) * up
        }
        Activation::SwigluOai { alpha, limit } => {
            let gate = if gate > limit { limit } else { gate };
            let up = up.clamp(-limit, limit);
            (up + 1.0) * (gate * sigmoid(alpha * gate))
        }
        Activation::Relu2 => {
            let x = up.max(0.0);
            x * x
        }
    }
}

/// Gated activation of one token, with gate and up in two vectors.
#[derive(Debug)]
pub struct Gated<'a> {
    /// Activation function.
    pub activation: Activation,
    /// Gate, `(intermediate)`; any vector if the activation has no gate.
    pub gate: &'a [f32],
    /// Up: `(intermediate)`.
    pub up: &'a [f32],
    /// Output: `(intermediate)`.
    pub out: &'a mut [f32],
}

impl Kernel for Gated<'_> {
    #[inline(always)]
    fn run(self) {
        for ((out, gate), up) in self.out.iter_mut().zip(self.gate).zip(self.up) {
            *out = gated(self.activation, *gate, *up);
        }
    }
}

/// Gated activation of one token, with gate and up interleaved.
#[derive(Debug)]
pub struct GatedPairs<'a> {
    /// Activation function.
    pub activation: Activation,
    /// Interleaved gate and up, `(2 * intermediate)`: gate, up, gate, up, …
    pub gate_up: &'a [f32],
    /// Output: `(intermediate)`.
    pub out: &'a mut [f32],
}

impl Kernel for GatedPairs<'_> {
    #[inline(always)]
    fn run(self) {
        let (pairs, _) = self.gate_up.as_chunks::<2>();
        for (out, [gate, up]) in self.out.iter_mut().zip(pairs) {
            *out = gated(self.activation, *gate, *up);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Level;

    /// `exp` of a slice as a kernel, to test every instruction set.
    struct Exp<'a>(&'a mut [f32]);
    impl Kernel for Exp<'_> {
        #[inline(always)]
        fn run(self) {
            self.0.iter_mut().for_each(|x| *x = exp(*x));
        }
    }

    #[test]
    fn exp_is_within_two_ulps_of_f64_over_its_whole_range() {
        let xs: Vec<f32> = (0..400_000).map(|i| -87.33 + (88.37 + 87.33) * (i as f32 / 400_000.0)).collect();
        let mut worst = 0f64;
        for x in xs {
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1) - exact as f32);
            worst = worst.max((f64::from(exp(x)) - exact).abs() / ulp);
        }
        assert!(worst < 2.0, "{worst} ulp");
        assert_eq!((exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert_eq!((exp(89.0), exp(f32::INFINITY)), (f32::INFINITY, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn exp2_is_within_two_ulps_of_f64_and_exact_for_whole_numbers() {
        let mut worst = 0f64;
        for i in 0..400_000 {
            let x = -126.0 + 127.0 * (i as f32 / 400_000.0);
            let exact = f64::from(x).exp2();
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1) - exact as f32);
            worst = worst.max((f64::from(exp2(x)) - exact).abs() / ulp);
        }
        assert!(worst < 2.0, "{worst} ulp");
        for n in -126..=0 {
            assert_eq!(exp2(n as f32), 2f32.powi(n));
        }
        assert_eq!((exp2(-126.1), exp2(f32::NEG_INFINITY)), (0.0, 0.0));
        assert!(exp2(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_within_three_ulps_of_f64_over_its_whole_range() {
        let mut worst = 0f64;
        for i in -400_000i32..=400_000 {
            let x = (i as f32 / 40_000.0).powi(3) / 50.0;
            let exact = f64::from(x).tanh();
            let rounded = (exact as f32).abs().max(f32::MIN_POSITIVE);
            let ulp = f64::from(f32::from_bits(rounded.to_bits() + 1) - rounded);
            worst = worst.max((f64::from(tanh(x)) - exact).abs() / ulp);
        }
        assert!(worst < 3.0, "{worst} ulp");
        assert_eq!((tanh(0.0), tanh(f32::NEG_INFINITY), tanh(100.0)), (0.0, -1.0, 1.0));
        assert!(tanh(f32::NAN).is_nan() && softcap(1e30, 5.0) == 5.0);
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let xs: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 0.137).collect();
        let (mut a, mut b) = (xs.clone(), xs.clone());
        Level::BASELINE.run(Exp(&mut a));
        Level::detect().run(Exp(&mut b));
        assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()));
        let (mut a, mut b) = (vec![f32::NAN; 1000], vec![f32::NAN; 1000]);
        Level::BASELINE.run(RmsNorm { x: &xs, weight: &xs, eps: 1e-5, out: &mut a });
        Level::detect().run(RmsNorm { x: &xs, weight: &xs, eps: 1e-5, out: &mut b });
        assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()));
    }

    #[test]
    fn layer_norm_subtracts_the_mean() {
        for n in [1, 3, 16, 37, 80] {
            let x: Vec<f32> = (0..n).map(|i| 5.0 + (i as f32 * 0.7).sin()).collect();
            let weight: Vec<f32> = (0..n).map(|i| 0.5 + i as f32 * 0.1).collect();
            let mut out = vec![f32::NAN; n];
            Level::detect().run(LayerNorm { x: &x, weight: &weight, eps: 1e-5, out: &mut out });
            let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
            let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n as f64;
            for ((x, w), found) in x.iter().zip(&weight).zip(out) {
                let exact = (f64::from(*x) - mean) / (variance + 1e-5).sqrt() * f64::from(*w);
                assert!((f64::from(found) - exact).abs() < 1e-4 * (1.0 + exact.abs()), "{n}: {found}, not {exact}");
            }
        }
    }

    #[test]
    fn gelu_is_the_tanh_approximation() {
        for i in -100..=100 {
            let x = f64::from(i) * 0.13;
            let exact = 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
            let found = f64::from(gated(Activation::GeluTanh, x as f32, 3.0));
            assert!((found - 3.0 * exact).abs() <= 1e-6 * x.abs(), "{x}: {found} against {exact}");
        }
    }

    #[test]
    fn the_clamped_swiglu_limits_the_gate_from_above_only() {
        let oai = Activation::SwigluOai { alpha: 1.702, limit: 7.0 };
        let expect = |gate: f64, up: f64| (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp());
        for (gate, up, exact) in
            [(9.0, 9.0, expect(7.0, 7.0)), (-9.0, -9.0, expect(-9.0, -7.0)), (1.0, 0.5, expect(1.0, 0.5))]
        {
            assert!((f64::from(gated(oai, gate, up)) - exact).abs() < 1e-5 * exact.abs().max(1e-3), "{gate} {up}");
        }
    }
}
