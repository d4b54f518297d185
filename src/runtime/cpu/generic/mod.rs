//! Kernels for all instruction sets, written once as generic code.
//!
//! An instruction set is an implementation of [`Isa`]: vectors of 32-bit lanes and about forty operations on them.
//! Each product is a [`Routine`], generic over [`Isa`]; [`Isa::enter`] compiles it for one instruction set and is the
//! only function of the kernels with a `#[target_feature]`. Everything that a routine calls is `#[inline(always)]`
//! and has no target features of its own, so that all of it becomes part of that one function.
//!
//! A tile has 16 rows. A *piece* of a tile is as many rows as fill one vector: a tile is one piece with AVX-512, two
//! with AVX2, four with NEON.
#![allow(unsafe_code)]

mod float;
mod integer;
mod isa;
mod panel;
pub(super) mod plain;
mod quantize;
mod tiles;
mod trellis;
mod weighted_sum;

#[cfg(target_arch = "x86_64")]
pub(super) use integer::{Codes, byte_quarter, byte_zeros};
#[cfg(target_arch = "x86_64")]
pub(super) use isa::Piece;
pub(super) use isa::{IntegerShape, Isa, PanelShape, Routine, memory, registers};
#[cfg(target_arch = "x86_64")]
pub(super) use panel::{NextTiles, Packed};

use super::kernels::KernelTable;
use super::weighted_sum as sums;
use integer::{Int8, Int16};

/// Returns the kernel table of an instruction set.
pub(super) const fn table<I: Isa>() -> KernelTable {
    KernelTable {
        name: I::NAME,
        detected: I::detected,
        level: I::LEVEL,
        plain: plain::plain::<I>,
        plain_bf16: plain::bf16::<I>,
        bf16_wants_magnitudes: I::BF16_DOTS,
        tile_float: float::kernel::<I>(),
        tile_int16: tiles::kernel::<I, Int16>(),
        tile_int8: tiles::kernel::<I, Int8>(),
        sum_f32: weighted_sum::sum::<I, { sums::F32 }>,
        sum_f16: weighted_sum::sum::<I, { sums::F16 }>,
        sum_bf16: weighted_sum::sum::<I, { sums::BF16 }>,
        probabilities: None,
        wide_probabilities: None,
        nibbles: None,
        pairs: None,
        quantize: quantize::quantize::<I>,
    }
}

/// Returns the kernel table `base`, which is that of `Base`, with the name, the detection, the BF16 kernels and the
/// products of trellises of `I`, an instruction set that adds a dot product of BF16 pairs and a wider lookup of bytes.
#[cfg(target_arch = "x86_64")]
pub(super) const fn with_bf16<I: Isa, Base: Isa>(base: KernelTable) -> KernelTable {
    KernelTable {
        tile_int16: tiles::with_trellis::<I, Base, Int16>(),
        tile_int8: tiles::with_trellis::<I, Base, Int8>(),
        name: I::NAME,
        detected: I::detected,
        plain_bf16: plain::bf16::<I>,
        bf16_wants_magnitudes: I::BF16_DOTS,
        sum_bf16: weighted_sum::sum::<I, { sums::BF16 }>,
        ..base
    }
}

/// Returns the kernel table `base` with the name, the detection and the int8 kernel of `I`, an instruction set that
/// adds a dot product of bytes to those of `base`.
#[cfg(target_arch = "x86_64")]
pub(super) const fn with_int8<I: Isa>(base: KernelTable) -> KernelTable {
    KernelTable { name: I::NAME, detected: I::detected, tile_int8: tiles::kernel::<I, Int8>(), ..base }
}
