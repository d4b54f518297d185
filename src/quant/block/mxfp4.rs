//! OCP microscaling FP4: blocks of 32 E2M1 codes (0 0.5 1 1.5 2 3 4 6 with sign) that share a power of two.

use crate::error::{Error, Result};

/// Returns 2^(s - 127), exactly (s = 255 is NaN in the standard and rejected by [`check_scales`]).
pub fn e8m0(s: u8) -> f32 {
    if s == 0 { f32::from_bits(1 << 22) } else { f32::from_bits(u32::from(s) << 23) }
}

/// Returns an error if a scale byte means NaN.
pub fn check_scales(scales: &[u8]) -> Result<()> {
    match scales.iter().position(|s| *s == 255) {
        Some(at) => Err(Error::corrupt(format!("found MXFP4 scale 255 (NaN) at index {at}, expected at most 254"))
            .help("the file that the weights come from is damaged; download it again")),
        None => Ok(()),
    }
}

/// Encodes one block as the OCP specification recommends: scale 2^(floor(log2(largest magnitude)) - 2), codes to the
/// nearest value, ties to the even code, saturating at 6. Returns the scale byte.
pub fn encode_block(values: &[f32], codes: &mut [u8]) -> u8 {
    let peak = values.iter().fold(0f32, |m, x| m.max(x.abs()));
    // The biased exponent of an f32 is floor(log2) + 127; subnormals have 0 and get the smallest scale.
    let scale = ((peak.to_bits() >> 23) as u8).saturating_sub(2);
    let unit = f64::from(e8m0(scale));
    for (code, x) in codes.iter_mut().zip(values) {
        *code = nearest((f64::from(x.abs()) / unit) as f32) | u8::from(x.is_sign_negative()) << 3;
    }
    scale
}

/// Returns the magnitude code nearest to `x` >= 0: midpoints between neighbors, ties to the even code.
fn nearest(x: f32) -> u8 {
    const MIDPOINTS: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let above = MIDPOINTS.iter().filter(|m| x > **m).count() as u8;
    // On a midpoint, `above` is the lower of the two codes; if it is odd, the upper one is chosen.
    let tie = MIDPOINTS.get(usize::from(above)).is_some_and(|m| x == *m);
    if tie && above % 2 == 1 { above + 1 } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheme::CodeTable;

    #[test]
    fn every_e2m1_value_encodes_to_itself() {
        let doubled = CodeTable::E2m1.values();
        let values: Vec<f32> = (0..32).map(|i| f32::from(doubled[i % 16]) * 0.5 * 0.25).collect();
        let mut codes = [0; 32];
        let scale = encode_block(&values, &mut codes);
        assert_eq!(e8m0(scale), 0.25);
        for (i, code) in codes.iter().enumerate() {
            assert_eq!(doubled[usize::from(*code)], doubled[i % 16]);
        }
    }

    #[test]
    fn ties_go_to_the_even_code() {
        for (x, code) in [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (5.1, 7), (7.9, 7)]
        {
            assert_eq!(nearest(x), code, "{x}");
        }
    }

    #[test]
    fn a_nan_scale_is_refused() {
        assert!(check_scales(&[0, 254]).is_ok());
        assert!(check_scales(&[0, 255]).is_err());
    }
}
