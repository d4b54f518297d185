//! Kinds of matrices, for each of which kernels exist.

/// Layout of the elements of a matrix, `Kind` in `args.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Kind {
    /// f32, row by row.
    F32 = 0,
    /// f16, row by row.
    F16 = 1,
    /// bf16, row by row.
    Bf16 = 2,
    /// Tiles of 4-bit integers with a bias of 8.
    Int4 = 3,
    /// Tiles of 4-bit codes with zero points.
    Int4Affine = 4,
    /// Tiles of 4-bit indices into the table of IQ4_NL.
    Nl4 = 5,
    /// Tiles of E2M1 codes.
    Mxfp4 = 6,
    /// Tiles of 8-bit integers.
    Int8 = 7,
    /// Tiles of 5-bit integers with a bias of 16.
    Int5 = 17,
    /// Tiles of 6-bit integers with a bias of 32.
    Int6 = 18,
    /// Tiles of GGML's Q4_1.
    Q4_1 = 19,
    /// Tiles of GGML's Q5_1.
    Q5_1 = 20,
    /// Tiles of GGML's Q2_K.
    Q2K = 21,
    /// Tiles of GGML's Q3_K.
    Q3K = 22,
    /// Tiles of GGML's Q4_K.
    Q4K = 23,
    /// Tiles of GGML's Q5_K.
    Q5K = 24,
    /// Tiles of GGML's Q6_K.
    Q6K = 25,
    /// Tiles of GGML's IQ4_XS.
    Iq4Xs = 26,
    /// Tiles of FP8 numbers.
    Fp8 = 27,
    /// Tiles of NVFP4.
    Nvfp4 = 28,
    /// Tiles of 4-bit integers whose scales are multiplied by a number of their row.
    Int4Row = 29,
    /// Tiles of 4-bit indices into the table of IQ4_NL, with such scales.
    Nl4Row = 30,
    /// Tiles of a trellis of 2 bits.
    T2 = 31,
    /// Tiles of a trellis of 3 bits.
    T3 = 32,
}

impl Kind {
    /// Reports whether kernels read how codes become weights from the matrix, or know it of the kind: `KIND_CODED`.
    pub fn is_coded(self) -> bool {
        self as u32 >= 16
    }

    /// Reports whether the matrix consists of tiles, and kernels know of the kind how their codes become weights.
    pub fn is_tiles(self) -> bool {
        !self.is_coded() && !matches!(self, Kind::F32 | Kind::F16 | Kind::Bf16)
    }

    /// Returns the name of this kind in kernels that serve several tiled layouts: `f32`, `f16`, `bf16`, `coded` or
    /// `tiles`.
    pub fn store_name(self) -> &'static str {
        match self {
            _ if self.is_coded() => "coded",
            _ if self.is_tiles() => "tiles",
            _ => self.name(),
        }
    }

    /// Returns the name of this kind in kernels for a single kind.
    pub fn name(self) -> &'static str {
        match self {
            Kind::F32 => "f32",
            Kind::F16 => "f16",
            Kind::Bf16 => "bf16",
            Kind::Int4 => "int4",
            Kind::Int4Affine => "int4_affine",
            Kind::Nl4 => "nl4",
            Kind::Mxfp4 => "mxfp4",
            Kind::Int8 => "int8",
            Kind::Int5 => "int5",
            Kind::Int6 => "int6",
            Kind::Q4_1 => "q4_1",
            Kind::Q5_1 => "q5_1",
            Kind::Q2K => "q2_k",
            Kind::Q3K => "q3_k",
            Kind::Q4K => "q4_k",
            Kind::Q5K => "q5_k",
            Kind::Q6K => "q6_k",
            Kind::Iq4Xs => "iq4_xs",
            Kind::Fp8 => "fp8",
            Kind::Nvfp4 => "nvfp4",
            Kind::Int4Row => "int4_row",
            Kind::Nl4Row => "nl4_row",
            Kind::T2 => "t2",
            Kind::T3 => "t3",
        }
    }
}
