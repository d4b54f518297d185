//! Rounding to the values of GGML's IQ4_NL ([`CodeTable::Iq4Nl`]), sixteen weights at once.

use crate::quant::lanes::Lanes;
use crate::quant::plain::LANES;
use crate::scheme::CodeTable;

/// Value of each code in units of the scale; no code stands for zero.
const VALUES: &[i8; 16] = CodeTable::Iq4Nl.values();

/// Midpoints between consecutive values.
const MIDDLES: [f32; 15] = {
    let (mut middles, mut i) = ([0f32; 15], 0);
    while i < 15 {
        middles[i] = (VALUES[i] as f32 + VALUES[i + 1] as f32) / 2.0;
        i += 1;
    }
    middles
};

/// Values of the codes as floats, and the codes themselves.
const AS_FLOATS: [f32; 16] = {
    let (mut values, mut i) = ([0f32; 16], 0);
    while i < 16 {
        values[i] = VALUES[i] as f32;
        i += 1;
    }
    values
};
const CODES: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// Returns the nearest table values; on a tie the lower one.
#[inline(always)]
pub(crate) fn nearest(x: &Lanes) -> Lanes {
    select(x, &AS_FLOATS)
}

/// Returns the codes of the nearest table values.
#[inline(always)]
pub(crate) fn codes(x: &Lanes) -> Lanes {
    select(x, &CODES)
}

/// Returns the entry behind the last midpoint below `x`. Uses comparisons instead of a binary search, which would need
/// a load for each lane. The lanes are the outer loop: with the midpoints outside, the compiler keeps `out` in memory
/// and takes 16 times as long.
#[inline(always)]
fn select(x: &Lanes, entries: &[f32; 16]) -> Lanes {
    let mut out = [0f32; LANES];
    for lane in 0..LANES {
        let mut entry = entries[0];
        for (middle, next) in MIDDLES.iter().zip(&entries[1..]) {
            entry = if x[lane] > *middle { *next } else { entry };
        }
        out[lane] = entry;
    }
    out
}

/// Returns the code of one of [`VALUES`].
pub(crate) fn code_of(value: f32) -> u8 {
    VALUES.iter().position(|v| f32::from(*v) == value).unwrap_or_default() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_gets_the_nearest_value_and_its_code() {
        for tenths in -1400..1400 {
            let x = tenths as f32 / 10.0;
            let (value, code) = (nearest(&[x; LANES])[3], codes(&[x; LANES])[3]);
            assert_eq!(f32::from(VALUES[code as usize]), value);
            assert_eq!(f32::from(code_of(value)), code);
            assert!(VALUES.iter().all(|v| (x - value).abs() <= (x - f32::from(*v)).abs()), "{x} became {value}");
        }
    }
}
