//! Rounds activations to int8, see [`super::super::scalar::quantize_group`].

use super::super::acts::{GROUP, GROUP_BLOCKS, Q8Group};
use super::isa::{Isa, Routine};
use crate::scheme::BLOCK;

/// Rounds whole groups.
///
/// # Safety
/// The processor has the instruction set.
pub(super) unsafe fn quantize<I: Isa>(values: &[[f32; GROUP]], groups: &mut [Q8Group]) {
    // SAFETY: the caller guarantees that the processor has the instruction set.
    unsafe { I::enter(Quantize { values, groups }) }
}

struct Quantize<'a> {
    values: &'a [[f32; GROUP]],
    groups: &'a mut [Q8Group],
}

impl Routine for Quantize<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for (values, group) in self.values.iter().zip(self.groups) {
            let mut largest = isa.splat_f32(0.0);
            for i in (0..GROUP).step_by(I::LANES) {
                let magnitude = isa.and(vector(isa, values, i), isa.splat(i32::MAX));
                largest = isa.max_f32(isa.as_f32(magnitude), largest);
            }
            group.scale = isa.largest(largest) / 127.0;
            let inverse = isa.splat_f32(if group.scale > 0.0 { 1.0 / group.scale } else { 0.0 });
            let mut seconds = [isa.splat(0); GROUP_BLOCKS];
            for block in 0..GROUP_BLOCKS {
                let mut halves = [isa.splat(0); 2];
                for i in (0..BLOCK).step_by(I::LANES) {
                    let half = &mut halves[i / (BLOCK / 2)];
                    let i = block * BLOCK + i;
                    let codes = rounded(isa, isa.mul_f32(isa.as_f32(vector(isa, values, i)), inverse));
                    *half = isa.add(*half, codes);
                    let to: &mut [i8] = &mut group.codes[i..][..I::LANES];
                    // SAFETY: a byte per lane is writable.
                    unsafe { isa.store_i8(to.as_mut_ptr(), codes) };
                }
                seconds[block] = halves[1];
                let sums = isa.add(halves[0], halves[1]);
                // SAFETY: the mask has 16 lanes.
                let first = isa.and(sums, unsafe { isa.load(FIRST_OF_WORD.as_ptr().cast()) });
                let [first, last] = totals(isa, first, isa.xor(sums, first));
                group.pair_starts[block] = [-8 * first as i16, -8 * last as i16];
                group.starts[block] = -8 * (first + last);
                group.wide_starts[block] = -128 * (first + last);
            }
            for block in (0..GROUP_BLOCKS).step_by(2) {
                let second = totals(isa, seconds[block], seconds[block + 1]).map(|total| -8 * total);
                for i in 0..2 {
                    group.half_starts[block + i] = (group.starts[block + i] - second[i]) as i16;
                }
            }
            let [a, b, c, d] = group.starts;
            group.start = a + b + c + d;
        }
    }
}

/// Returns the totals of two vectors of codes by adding up one: the numbers of the second count 2^16 times.
#[inline(always)]
fn totals<I: Isa>(isa: I, first: I::Int, second: I::Int) -> [i32; 2] {
    let total = isa.total(isa.add(first, isa.shl::<16>(second)));
    let first = total << 16 >> 16;
    [first, (total - first) >> 16]
}

/// Mask of the first two of four numbers.
static FIRST_OF_WORD: [i32; 16] = [-1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0];

/// Loads the vector of values that starts at index `i`.
#[inline(always)]
fn vector<I: Isa>(isa: I, values: &[f32; GROUP], i: usize) -> I::Int {
    // SAFETY: the slice is a whole vector.
    unsafe { isa.load(values[i..][..I::LANES].as_ptr().cast()) }
}

/// Rounds to the nearest integer, ties away from zero, clamped to -127..=127; NaN becomes zero.
#[inline(always)]
fn rounded<I: Isa>(isa: I, v: I::Float) -> I::Int {
    let v = isa.min_f32(isa.max_f32(isa.numbers(v), isa.splat_f32(-127.0)), isa.splat_f32(127.0));
    // This is the largest float below a half, with the sign of the value. Adding it before truncating rounds ties
    // away from zero and nothing below a half up.
    let sign = isa.and(isa.as_int(v), isa.splat(i32::MIN));
    let half = isa.or(sign, isa.as_int(isa.splat_f32(0.5f32.next_down())));
    isa.truncated(isa.add_f32(v, isa.as_f32(half)))
}
