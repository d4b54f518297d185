//! Rounds floats to another float type and refuses finite weights that would become infinite.

use crate::dtype::{DType, encode_floats};
use crate::error::{Error, Result};

/// Appends `values` as elements of `to`. Rounding may lose precision, but a finite weight must not become infinite.
///
/// # Errors
/// A weight is too large for `to`.
pub(super) fn round_into(to: DType, values: &[f32], out: &mut Vec<u8>) -> Result<()> {
    refuse_overflow(values, to)?;
    encode_floats(to, values, out)
}

fn refuse_overflow(values: &[f32], to: DType) -> Result<()> {
    let limit = match to {
        // 65504 is the largest finite f16; from 65520 on, rounding gives infinity.
        DType::F16 => 65_520.0,
        // Half a rounding step above the largest finite bf16; from here on, rounding gives infinity.
        DType::BF16 => f32::from_bits(0x7f7f_8000),
        _ => return Ok(()),
    };
    match values.iter().find(|x| x.is_finite() && x.abs() >= limit) {
        Some(x) => Err(Error::unsupported(format!("found weight {x}, which is out of range for {to}")).help(
            "choose a type with a larger range with --dtype or, if the manifest requires this type, with its `keep`",
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::decode_floats;

    #[test]
    fn exactly_the_weights_that_would_become_infinite_are_refused() {
        for (value, to) in [
            (65_519.996, DType::F16),
            (65_520.0, DType::F16),
            (f32::from_bits(0x7f7f_7fff), DType::BF16),
            (f32::from_bits(0x7f7f_8000), DType::BF16),
            (f32::MAX, DType::F32),
        ] {
            let mut bytes = Vec::new();
            encode_floats(to, &[-value], &mut bytes).unwrap();
            let mut back = [0.0];
            decode_floats(to, &bytes, &mut back).unwrap();
            assert_eq!(refuse_overflow(&[-value], to).is_err(), back[0].is_infinite(), "{value} as {to}");
        }
        assert!(refuse_overflow(&[f32::INFINITY], DType::F16).is_ok());
    }
}
