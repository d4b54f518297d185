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

/// Differences between consecutive values.
const STEPS: [f32; 15] = {
    let (mut steps, mut i) = ([0f32; 15], 0);
    while i < 15 {
        steps[i] = VALUES[i + 1] as f32 - VALUES[i] as f32;
        i += 1;
    }
    steps
};

/// Returns the nearest table values; on a tie the lower one.
#[inline(always)]
pub(crate) fn nearest(x: &Lanes) -> Lanes {
    climb(x, f32::from(VALUES[0]), &STEPS)
}

/// Returns the codes of the nearest table values.
#[inline(always)]
pub(crate) fn codes(x: &Lanes) -> Lanes {
    climb(x, 0.0, &[1.0; 15])
}

/// Adds to `from` one step for each midpoint below `x`. Uses comparisons instead of a binary search, which would need
/// a load for each lane.
#[inline(always)]
fn climb(x: &Lanes, from: f32, steps: &[f32; 15]) -> Lanes {
    let mut total = [from; LANES];
    for (middle, step) in MIDDLES.iter().zip(steps) {
        for lane in 0..LANES {
            total[lane] += if x[lane] > *middle { *step } else { 0.0 };
        }
    }
    total
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
