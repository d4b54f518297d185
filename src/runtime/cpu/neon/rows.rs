//! NEON: plain numbers as floats.

use super::super::mix::{F16, F32};
use super::halves;
use std::arch::aarch64::*;

/// The first 16 elements as floats.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn widened<const TYPE: u8>(from: &[u8]) -> [float32x4_t; 4] {
    let mut wide = [vdupq_n_f32(0.0); 4];
    for q in 0..4 {
        if TYPE == F32 {
            let four: &[u8; 16] = from[16 * q..].first_chunk().expect("four floats");
            // SAFETY: 16 readable bytes.
            wide[q] = vreinterpretq_f32_u8(unsafe { vld1q_u8(four.as_ptr()) });
            continue;
        }
        let four: &[u8; 8] = from[8 * q..].first_chunk().expect("four halves");
        // SAFETY: 8 readable bytes.
        let bits = vmovl_u16(vreinterpret_u16_u8(unsafe { vld1_u8(four.as_ptr()) }));
        wide[q] = if TYPE == F16 { halves(bits) } else { vreinterpretq_f32_u32(vshlq_n_u32::<16>(bits)) };
    }
    wide
}
