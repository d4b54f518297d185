//! Quantizes groups of a single block, sixteen at once: each lane of a vector holds one row of the tile.
//!
//! With the rows in the lanes, no sum or comparison crosses lanes, and the codes of a block are already in the order
//! of the tile ([`crate::scheme`]). [`turn`] transposes a block of every row into this form. The other functions are
//! loops over its columns: the plain choice and the encoding are here, the search is in [`super::search::small`].

use super::block::{iq4_nl, q4_0, stored_scale};
use super::plain::{self, Choice, CodeRange, LANES, ROUND};
use crate::error::Result;
use crate::scheme::{BLOCK, QuantSpec, ScaleType, TILE_ROWS};
use crate::simd::{Kernel, black_box};
use half::f16;
use half::slice::HalfFloatSliceExt;

const _: () = assert!(LANES == TILE_ROWS);

/// One value per row.
pub(super) type Lanes = [f32; LANES];

/// One block of every row, `[column][row]`; every vector has its own cache line.
#[repr(align(64))]
pub(super) struct Block(pub [Lanes; BLOCK]);

/// Columns of a [`Block`]. Their number is always [`BLOCK`], but it is not a constant in the type: the compiler would
/// unroll a loop with that many iterations and spill its vectors to memory.
pub(super) type Turned<'a> = &'a [Lanes];

/// Scale and zero point of the block of each row: one [`Choice`] per lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choices {
    pub scale: Lanes,
    pub zero: Lanes,
}

impl Choices {
    pub fn each(choice: impl Fn(usize) -> Choice) -> Choices {
        let mut choices = Choices { scale: [0.0; LANES], zero: [0.0; LANES] };
        for lane in 0..LANES {
            let Choice { scale, zero } = choice(lane);
            (choices.scale[lane], choices.zero[lane]) = (scale, f32::from(zero));
        }
        choices
    }

    /// Returns the choices with the scales rounded to their storage type.
    ///
    /// # Errors
    /// A scale does not fit its storage type.
    pub fn stored(self, spec: &QuantSpec) -> Result<Choices> {
        let scale = stored_scales(spec.scale_dtype, &self.scale);
        match scale.iter().position(|scale| !scale.is_finite()) {
            None => Ok(Choices { scale, ..self }),
            Some(lane) => stored_scale(spec.scale_dtype, self.scale[lane]).map(|_| self),
        }
    }
}

/// Rounds scales to their storage type; the result is infinite where one does not fit.
pub(super) fn stored_scales(dtype: ScaleType, scales: &Lanes) -> Lanes {
    let mut stored = *scales;
    if dtype == ScaleType::F16 {
        halves(scales).convert_to_f32_slice(&mut stored);
    }
    stored
}

/// Largest number of steps of a scale of [`ScaleType::I8Row`].
const MOST_STEPS: f32 = 127.0;

/// Returns the steps of the scales of rows, of which all are given: the largest scale of a row has [`MOST_STEPS`].
pub(super) fn steps_of_rows<'a>(scales: impl Iterator<Item = &'a Lanes>) -> Lanes {
    let mut steps = [0f32; LANES];
    for scales in scales {
        for lane in 0..LANES {
            steps[lane] = steps[lane].max(scales[lane].abs());
        }
    }
    steps.map(|step| step / MOST_STEPS)
}

/// Returns the choices with the scales rounded to whole steps away from zero, and to `more` steps beyond.
pub(super) fn rounded_up(choices: &Choices, steps: &Lanes, more: f32) -> Choices {
    let (inverse, mut rounded) = (inverses(steps), *choices);
    for lane in 0..LANES {
        let exact = choices.scale[lane] * inverse[lane];
        // Of the largest scale the quotient may be a bit more than its number of steps.
        let whole = (exact.abs().ceil() + more).clamp(0.0, MOST_STEPS).copysign(exact);
        rounded.scale[lane] = whole * steps[lane];
    }
    rounded
}

/// Rounds scales to whole steps.
#[inline(always)]
pub(super) fn whole_steps(scales: &Lanes, steps: &Lanes) -> Lanes {
    let mut whole = steps_of(scales, steps);
    for lane in 0..LANES {
        whole[lane] *= steps[lane];
    }
    whole
}

/// Returns the whole numbers of steps that are nearest to scales.
#[inline(always)]
fn steps_of(scales: &Lanes, steps: &Lanes) -> Lanes {
    let (inverse, mut whole) = (inverses(steps), [0f32; LANES]);
    for lane in 0..LANES {
        let steps = scales[lane] * inverse[lane];
        let steps = if steps < -MOST_STEPS { -MOST_STEPS } else { steps };
        let steps = if steps > MOST_STEPS { MOST_STEPS } else { steps };
        whole[lane] = (steps + ROUND) - ROUND;
    }
    whole
}

/// Writes scales of [`ScaleType::I8Row`].
pub(super) fn put_steps(scales: &Lanes, steps: &Lanes, out: &mut [u8]) {
    out.iter_mut().zip(steps_of(scales, steps)).for_each(|(out, steps)| *out = steps as i8 as u8);
}

fn halves(scales: &Lanes) -> [f16; LANES] {
    let mut halves = [f16::ZERO; LANES];
    halves.convert_from_f32_slice(scales);
    halves
}

/// Writes scales that their storage type can represent.
pub(super) fn put_scales(dtype: ScaleType, scales: &Lanes, out: &mut [u8]) {
    match dtype {
        ScaleType::F16 => {
            for (out, scale) in out.as_chunks_mut().0.iter_mut().zip(halves(scales)) {
                *out = scale.to_le_bytes();
            }
        }
        _ => {
            for (out, scale) in out.as_chunks_mut().0.iter_mut().zip(scales) {
                *out = scale.to_le_bytes();
            }
        }
    }
}

/// Transposes rows into lanes. The compiler makes the fastest version of this plain loop: it transposes four rows by
/// four columns with baseline instructions.
#[inline(never)]
pub(super) fn turn(rows: &[[f32; BLOCK]; LANES], turned: &mut Block) {
    for lane in 0..LANES {
        for column in 0..BLOCK {
            turned.0[column][lane] = rows[lane][column];
        }
    }
}

/// Kernel that returns, for each row, the first value of largest magnitude, with its sign.
pub(super) struct Peaks<'a>(pub Turned<'a>);

impl Kernel<Lanes> for Peaks<'_> {
    #[inline(always)]
    fn run(self) -> Lanes {
        let (mut magnitude, mut peak) = ([0f32; LANES], [0f32; LANES]);
        for x in self.0 {
            for lane in 0..LANES {
                let larger = x[lane].abs() > magnitude[lane];
                peak[lane] = if larger { x[lane] } else { peak[lane] };
                magnitude[lane] = if larger { x[lane].abs() } else { magnitude[lane] };
            }
        }
        peak
    }
}

/// Kernel that returns the smallest and the largest value of each row.
pub(super) struct Extremes<'a>(pub Turned<'a>);

impl Kernel<(Lanes, Lanes)> for Extremes<'_> {
    #[inline(always)]
    fn run(self) -> (Lanes, Lanes) {
        let (mut min, mut max) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
        for x in self.0 {
            for lane in 0..LANES {
                min[lane] = if x[lane] < min[lane] { x[lane] } else { min[lane] };
                max[lane] = if x[lane] > max[lane] { x[lane] } else { max[lane] };
            }
        }
        (min, max)
    }
}

/// Kernel that writes the codes of a block in tile order: those nearest to the values under `choices`.
pub(super) struct Encode<'a> {
    pub x: Turned<'a>,
    pub spec: &'a QuantSpec,
    pub choices: Choices,
    pub out: &'a mut [u8],
}

impl Kernel for Encode<'_> {
    #[inline(always)]
    fn run(self) {
        let inverse = inverses(&self.choices.scale);
        if self.spec.has_table() {
            return put_nibbles(self.x, self.out, |x| {
                let code = iq4_nl::codes(&times(x, &inverse));
                let mut bits = [0u32; LANES];
                for lane in 0..LANES {
                    bits[lane] = (code[lane] + ROUND).to_bits() & 15;
                }
                bits
            });
        }
        let Limits { low, high, bias } = Limits::of(self.spec, &self.choices.zero);
        let code = |x: &Lanes| {
            let mut code = [0u32; LANES];
            for lane in 0..LANES {
                let c = x[lane] * inverse[lane];
                let c = if c < low[lane] { low[lane] } else { c };
                let c = if c > high[lane] { high[lane] } else { c };
                // The low bits of the float are the integer.
                code[lane] = (c + ROUND).to_bits().wrapping_add(bias[lane]) & 0xff;
            }
            code
        };
        match self.spec.scheme.bits() {
            8 => put_bytes(self.x, self.out, code),
            6 => put_more::<2>(self.x, self.out, code),
            5 => put_more::<1>(self.x, self.out, code),
            _ => put_nibbles(self.x, self.out, code),
        }
    }
}

/// Kernel that encodes q4_0 exactly as GGML does, from the scales before rounding; see [`Encode`].
pub(super) struct EncodeQ4_0<'a> {
    pub x: Turned<'a>,
    pub scale: Lanes,
    pub out: &'a mut [u8],
}

impl Kernel for EncodeQ4_0<'_> {
    #[inline(always)]
    fn run(self) {
        let inverse = inverses(&self.scale);
        put_nibbles(self.x, self.out, |x| {
            let mut code = [0u32; LANES];
            for lane in 0..LANES {
                code[lane] = q4_0::code(x[lane], inverse[lane]);
            }
            code
        });
    }
}

/// Writes 4-bit codes: vector i of a block has columns 4i..4i + 4 in its low nibbles and columns 4i + 16..4i + 20 in
/// its high nibbles.
#[inline(always)]
fn put_nibbles(x: Turned<'_>, out: &mut [u8], code: impl Fn(&Lanes) -> [u32; LANES]) {
    let (low, high) = x.split_at(x.len() / 2);
    let (low, high) = (low.as_chunks::<4>().0, high.as_chunks::<4>().0);
    let out = out.as_chunks_mut::<{ 4 * LANES }>().0;
    for i in 0..out.len() {
        let mut words = [0u32; LANES];
        for j in 0..4 {
            let (low, high) = (black_box(code(&low[i][j])), black_box(code(&high[i][j])));
            for lane in 0..LANES {
                words[lane] |= (low[lane] | high[lane] << 4) << (8 * j);
            }
        }
        put_words(&words, &mut out[i]);
    }
}

/// Writes codes of more than four bits: the low nibbles by [`put_nibbles`], then vectors of the `HIGH` high bits. Those
/// of columns 4f..4f + 4 are in vector `HIGH * f / 8`, beginning at bit `HIGH * f % 8` of each byte.
#[inline(always)]
fn put_more<const HIGH: usize>(x: Turned<'_>, out: &mut [u8], code: impl Fn(&Lanes) -> [u32; LANES]) {
    let (nibbles, high) = out.split_at_mut(16 * LANES);
    put_nibbles(x, nibbles, |x| code(x).map(|code| code & 15));
    let (out, columns) = (high.as_chunks_mut::<{ 4 * LANES }>().0, x.as_chunks::<4>().0);
    let fours = 8 / HIGH;
    for vector in 0..out.len() {
        let mut words = [0u32; LANES];
        for i in 0..fours {
            for j in 0..4 {
                let code = black_box(code(&columns[vector * fours + i][j]));
                for lane in 0..LANES {
                    words[lane] |= (code[lane] >> 4) << (8 * j + HIGH * i);
                }
            }
        }
        put_words(&words, &mut out[vector]);
    }
}

/// Writes 8-bit codes: vector i of a block has columns 4i..4i + 4.
#[inline(always)]
fn put_bytes(x: Turned<'_>, out: &mut [u8], code: impl Fn(&Lanes) -> [u32; LANES]) {
    let (out, columns) = (out.as_chunks_mut::<{ 4 * LANES }>().0, x.as_chunks::<4>().0);
    for i in 0..out.len() {
        let mut words = [0u32; LANES];
        for j in 0..4 {
            let code = black_box(code(&columns[i][j]));
            for lane in 0..LANES {
                words[lane] |= code[lane] << (8 * j);
            }
        }
        put_words(&words, &mut out[i]);
    }
}

#[inline(always)]
fn put_words(words: &[u32; LANES], out: &mut [u8; 4 * LANES]) {
    let (words, out) = (black_box(*words), out.as_chunks_mut::<4>().0);
    for lane in 0..LANES {
        out[lane] = words[lane].to_le_bytes();
    }
}

#[inline(always)]
pub(super) fn times(a: &Lanes, b: &Lanes) -> Lanes {
    let mut product = [0f32; LANES];
    for lane in 0..LANES {
        product[lane] = a[lane] * b[lane];
    }
    product
}

#[inline(always)]
pub(super) fn inverses(scales: &Lanes) -> Lanes {
    let mut inverses = [0f32; LANES];
    for lane in 0..LANES {
        inverses[lane] = plain::inverse(scales[lane]);
    }
    black_box(inverses)
}

/// One [`CodeRange`] per lane.
pub(super) struct Limits {
    pub low: Lanes,
    pub high: Lanes,
    pub bias: [u32; LANES],
}

impl Limits {
    #[inline(always)]
    pub fn of(spec: &QuantSpec, zero: &Lanes) -> Limits {
        let CodeRange { low, high, bias } = CodeRange::of(spec, 0);
        let (mut low, mut high, mut bias) = ([low; LANES], [high; LANES], [u32::from(bias); LANES]);
        if !spec.symmetric {
            for lane in 0..LANES {
                (low[lane], high[lane], bias[lane]) = (-zero[lane], 15.0 - zero[lane], zero[lane] as u32);
            }
        }
        black_box(Limits { low, high, bias })
    }
}
