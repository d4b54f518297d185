//! Numbers of few bits: FP8 with 4 bits of exponent (e4m3fn) and FP4 (E2M1).

use crate::scheme;
use std::sync::LazyLock;

/// Values of the 256 codes of e4m3fn: one sign bit, four of exponent with bias 7, three of mantissa. 0x7F and 0xFF are
/// NaN; there is no infinity.
pub(super) static E4M3: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| e4m3(code as u8)));

/// Values of the 16 codes of E2M1.
pub(super) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

fn e4m3(code: u8) -> f32 {
    let value = if code & 0x7F == 0x7F { f32::NAN } else { scheme::e4m3(code) };
    if code & 0x80 == 0 { value } else { -value.abs() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_has_the_values_of_the_standard() {
        for (code, value) in
            [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x08, 2f32.powi(-6)), (0x38, 1.0), (0x7E, 448.0), (0xBC, -1.5)]
        {
            assert_eq!(E4M3[code], value, "{code:#x}");
        }
        assert!(E4M3[0x7F].is_nan() && E4M3[0xFF].is_nan());
        assert!(E4M3[0x80] == 0.0 && E4M3[0x80].is_sign_negative());
        assert_eq!(E4M3.iter().filter(|value| value.is_finite()).count(), 254);
    }
}
