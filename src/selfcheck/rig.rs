//! Test rig of all checks: a device, random numbers, comparison within tolerances, and the list of results.

use super::report::Checked;
use crate::error::Result;
use crate::interrupt;
use crate::progress::ProgressBar;
use crate::rng::Rng;
use crate::runtime::cpu::scalar::to_bf16;
use crate::runtime::cuda::array::{Acts, Array, Forms};
use crate::runtime::cuda::context::Context;
use crate::runtime::cuda::ops::Ops;
use crate::runtime::cuda::weights::Uploader;
use crate::scheme::BLOCK;
use half::bf16;
use std::sync::Arc;

/// Distance from 1 to the next f32. Tensor cores cut off what is smaller than this fraction of the largest number
/// that they add.
pub const EPS: f64 = 1.0 / (1 << 23) as f64;

/// Byte that memory is filled with before a kernel writes to it; floats of any type that consist of it are NaN.
pub const UNWRITTEN: u8 = 0xFF;

/// Returns the tolerance of an f32 sum of `terms` numbers, relative to the sum of their magnitudes. The rounding errors
/// of the additions are independent, and each is bounded by [`EPS`] times the partial sum, so that the total error
/// grows with the square root of the number of terms. The constant 16 covers tensor cores, which cut off the last bits
/// of up to 16 terms that they add at once.
pub fn rounding(terms: usize) -> f64 {
    (16.0 + (terms as f64).sqrt()) * EPS
}

/// Returns the sum of some terms and the sum of their magnitudes.
pub fn sum(terms: impl Iterator<Item = f64>) -> (f64, f64) {
    terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
}

/// Reference value that a result of a kernel is compared with.
#[derive(Debug, Clone, Copy)]
pub struct Expected {
    pub value: f64,
    /// Maximum absolute error.
    pub tolerance: f64,
}

impl Expected {
    /// Returns a reference value that a kernel must match exactly, because it is not rounded again.
    pub fn exact(value: impl Into<f64>) -> Expected {
        Expected { value: value.into(), tolerance: 0.0 }
    }
}

/// Description of a case for messages.
#[derive(Debug)]
pub struct Case {
    /// Name of what was launched; launches with the same name share a line of the report.
    kernel: String,
    shape: String,
}

/// A device under test.
pub struct Rig<'a> {
    pub context: &'a Arc<Context>,
    pub ops: Ops,
    pub uploader: Uploader<'a>,
    pub rng: Rng,
    /// True to check few shapes only.
    pub quick: bool,
    /// Results so far.
    pub results: Vec<Checked>,
}

impl<'a> Rig<'a> {
    /// Creates a rig with a fixed seed, so that its numbers are the same each time.
    pub fn new(context: &'a Arc<Context>, bar: &'a ProgressBar, quick: bool) -> Result<Rig<'a>> {
        let (ops, uploader) = (Ops::new(context)?, Uploader::new(context, bar)?);
        let mut rig = Rig { context, ops, uploader, rng: Rng::new(2026), quick, results: Vec::new() };
        // `Ops::new` has compared the sizes of the argument structs with those of the kernels.
        rig.begin("sizes", String::new())?;
        Ok(rig)
    }

    fn entry(&mut self, kernel: &str) -> &mut Checked {
        let at = self.results.iter().position(|result| result.kernel == kernel).unwrap_or_else(|| {
            self.results.push(Checked { kernel: kernel.into(), cases: 0, worst: 0.0, ok: true, failure: None });
            self.results.len() - 1
        });
        &mut self.results[at]
    }

    /// Begins a case and counts its first launch.
    ///
    /// # Errors
    /// The user interrupted the check.
    pub fn begin(&mut self, kernel: impl Into<String>, shape: String) -> Result<Case> {
        let case = Case { kernel: kernel.into(), shape };
        self.count(&case)?;
        Ok(case)
    }

    /// Counts a launch of a case.
    ///
    /// # Errors
    /// The user interrupted the check.
    pub fn count(&mut self, case: &Case) -> Result<()> {
        self.entry(&case.kernel).cases += 1;
        interrupt::check()
    }

    /// Records the largest error of a launch, `ratio` times its tolerance; `tell` describes the wrong result if `ratio`
    /// is above 1.
    fn note(&mut self, case: &Case, ratio: f64, tell: impl FnOnce() -> String) {
        let entry = self.entry(&case.kernel);
        // JSON has no infinity.
        entry.worst = entry.worst.max(ratio.min(1e9));
        if ratio > 1.0 && entry.ok {
            entry.ok = false;
            entry.failure = Some(format!("{}: {}", case.shape, tell()));
        }
    }

    /// Compares rows of `width` numbers with their reference values.
    pub fn compare(&mut self, case: &Case, width: usize, found: &[f32], expected: impl Fn(usize) -> Expected) {
        let worst = found.iter().enumerate().map(|(i, found)| (ratio(f64::from(*found), expected(i)), i));
        let Some((ratio, i)) = worst.fold(None, |worst: Option<(f64, usize)>, this| match worst {
            Some(worst) if worst.0 >= this.0 => Some(worst),
            _ => Some(this),
        }) else {
            return;
        };
        self.note(case, ratio, || {
            let Expected { value, tolerance } = expected(i);
            let (row, column) = (i / width, i % width);
            format!("row {row}, column {column}: found {}, expected {value} within {tolerance:.3e}", found[i])
        });
    }

    /// Compares numbers that must be equal.
    pub fn same<T: PartialEq + std::fmt::Debug>(&mut self, case: &Case, what: &str, found: &[T], expected: &[T]) {
        let differ = found.iter().zip(expected).position(|(found, expected)| found != expected);
        let differ = differ.or((found.len() != expected.len()).then_some(found.len().min(expected.len())));
        let ratio = if differ.is_some() { f64::INFINITY } else { 0.0 };
        self.note(case, ratio, || {
            let i = differ.unwrap_or(0);
            format!("{what} {i}: found {:?}, expected {:?}", found.get(i), expected.get(i))
        });
    }

    /// Copies rows of activations of `width` values to the device in the forms that are wanted, in the order in which
    /// kernels write them.
    pub fn acts(&self, forms: Forms, values: &[f32], width: usize) -> Result<Acts> {
        let (hi, lo) = halves(values, width);
        Ok(Acts {
            f32: forms.f32.then(|| self.array(values)).transpose()?,
            hi: forms.hi.then(|| self.array(&hi)).transpose()?,
            lo: forms.lo.then(|| self.array(&lo)).transpose()?,
            rows: values.len() / width,
            width,
        })
    }

    /// Reads the first `n` rows of activations that a kernel wrote in all forms, and compares the bf16 forms with
    /// the f32 form.
    pub fn read_acts(&mut self, case: &Case, acts: &Acts, n: usize) -> Result<Vec<f32>> {
        let mut values = acts.f32.as_ref().expect("all forms").read()?;
        values.truncate(n * acts.width);
        let (hi, lo) = halves(&values, acts.width);
        for (what, found, expected) in [("hi", &acts.hi, hi), ("lo", &acts.lo, lo)] {
            let found = found.as_ref().expect("all forms").read()?;
            // The bits of a NaN are irrelevant.
            let plain = |bits: &u16| if bits & 0x7FFF > 0x7F80 { 0x7FC0 } else { *bits };
            let found: Vec<u16> = found[..expected.len()].iter().map(plain).collect();
            let expected: Vec<u16> = expected.iter().map(plain).collect();
            self.same(case, what, &found, &expected);
        }
        Ok(values)
    }

    /// Allocates activations in all forms for a kernel to write. All of them, padding included, are NaN until then.
    pub fn room(&self, rows: usize, width: usize) -> Result<Acts> {
        let half = || self.unwritten(rows * width.next_multiple_of(BLOCK)).map(Some);
        Ok(Acts { f32: Some(self.unwritten(rows * width)?), hi: half()?, lo: half()?, rows, width })
    }

    /// Copies values to the device.
    pub fn array<T: bytemuck::Pod>(&self, values: &[T]) -> Result<Array<T>> {
        Array::copied(self.context, values)
    }

    /// Allocates numbers on the device. Floats are NaN and integers have the largest value until a kernel writes them.
    pub fn unwritten<T>(&self, len: usize) -> Result<Array<T>> {
        let array = Array::new(self.context, len)?;
        array.buffer().fill(UNWRITTEN)?;
        Ok(array)
    }
}

/// Returns an error relative to its tolerance. NaN and infinity must be where they are expected.
fn ratio(found: f64, expected: Expected) -> f64 {
    let Expected { value, tolerance } = expected;
    if found == value || (found.is_nan() && value.is_nan()) {
        return 0.0;
    }
    let ratio = (found - value).abs() / tolerance;
    if ratio.is_nan() { f64::INFINITY } else { ratio }
}

/// Returns the index at which column `k` of a row of bf16 activations is stored; see `place` in `kernels/types.cuh`.
fn place(k: usize) -> usize {
    (k & !31) | (k & 12) << 1 | (k & 16) >> 2 | (k & 1) << 1 | (k >> 1 & 1)
}

/// Rounds a number to bf16, and the remainder, too; the remainder of infinity and NaN is 0.
pub fn split(value: f32) -> (f32, f32) {
    let hi = bf16::from_bits(to_bf16(value)).to_f32();
    let lo = if hi.is_finite() { bf16::from_bits(to_bf16(value - hi)).to_f32() } else { 0.0 };
    (hi, lo)
}

/// Returns the two bf16 forms of rows of activations, padded to whole blocks.
fn halves(values: &[f32], width: usize) -> (Vec<u16>, Vec<u16>) {
    let stride = width.next_multiple_of(BLOCK);
    let rows = values.len() / width;
    let (mut hi, mut lo) = (vec![0; rows * stride], vec![0; rows * stride]);
    for (i, value) in values.iter().enumerate() {
        let at = i / width * stride + place(i % width);
        let (first, rest) = split(*value);
        (hi[at], lo[at]) = (to_bf16(first), to_bf16(rest));
    }
    (hi, lo)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_counts_relative_to_its_tolerance_and_nan_only_where_it_is_expected() {
        let expected = |value| Expected { value, tolerance: 0.5 };
        assert_eq!(ratio(1.25, expected(1.0)), 0.5);
        assert_eq!(ratio(f64::NAN, expected(f64::NAN)), 0.0);
        assert_eq!(ratio(f64::INFINITY, expected(f64::INFINITY)), 0.0);
        for (found, value) in
            [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::NEG_INFINITY, f64::INFINITY), (1.0, f64::INFINITY)]
        {
            assert!(ratio(found, expected(value)) > 1.0, "{found} {value}");
        }
        assert_eq!(ratio(1.0, Expected { value: 1.0, tolerance: 0.0 }), 0.0);
        assert!(ratio(1.0 + EPS, Expected { value: 1.0, tolerance: 0.0 }) > 1.0);
    }

    #[test]
    fn columns_of_a_block_are_permuted_within_it() {
        let mut places: Vec<usize> = (0..64).map(place).collect();
        assert_eq!(places[..8], [0, 2, 1, 3, 8, 10, 9, 11]);
        places.sort_unstable();
        assert_eq!(places, (0..64).collect::<Vec<_>>());
        let (hi, lo) = halves(&[1.0 + 1.0 / 256.0 + 1.0 / 4096.0, -2.0, 3.0], 3);
        assert_eq!((hi.len(), hi[0], hi[2], hi[1]), (32, to_bf16(1.0 + 1.0 / 128.0), to_bf16(-2.0), to_bf16(3.0)));
        assert_eq!((lo[0], lo[1]), (to_bf16(1.0 / 4096.0 - 1.0 / 256.0), 0));
    }
}
