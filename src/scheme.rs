//! How a quantized tensor is described and laid out, without touching a single weight.
//!
//! [`QuantSpec`] says what a code means (scheme, granularity, zero point, scale type); [`TileLayout`] says where the
//! bytes of a matrix lie in the artifact. Every reader and writer of quantized bytes goes through these two.
//!
//! # The tile
//!
//! A matrix of `rows x cols` (`cols` is the summed dimension K) is cut into tiles of [`TILE_ROWS`] rows; the last tile is
//! padded with rows whose scales are zero. K is padded to a multiple of [`BLOCK`] with codes that are multiplied by zero
//! activations (code 0 after unbiasing where the scheme has one). A tile holds three sections, each starting on a
//! 64-byte boundary:
//!
//! 1. **scales**: for each scale group along K, 16 scales, one per row (`[group][row]`);
//! 2. **zero points** (affine schemes only): for each group 16 bytes (`[group][row]`);
//! 3. **codes**: for each block of 32 along K:
//!    * 4 bit: 256 bytes as 4 vectors of 64; vector `i`, bytes `4r..4r+4` belong to row `r`; the low nibble of byte `j`
//!      is k = 4i + j, the high nibble is k = 16 + 4i + j. Symmetric integer codes are stored biased by 8 (`value + 8`),
//!      affine codes and those of tables (nl4, MXFP4) as they are.
//!    * 5 and 6 bit: the low four bits as in 4 bit, then 64 or 128 bytes with the b = 1 or 2 high bits of each code: those of
//!      k = 4f + j lie in vector `f * b / 8`, byte `4r + j`, from bit `f * b % 8` on. Codes are biased by 16 or 32.
//!    * 8 bit: 512 bytes as 8 vectors of 64; vector `i`, byte `4r + j` is row `r`, k = 4i + j, two's complement.
//!
//! One lane per row, blocks in K order: no kernel needs a horizontal sum, and every instruction set, batch size and
//! number of threads adds in the same order. Tensors of several matrices (experts) store them one after the other.

use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// Rows that are interleaved in one tile.
pub const TILE_ROWS: usize = 16;
/// Elements along K that form one block; every group size is a multiple of it.
pub const BLOCK: usize = 32;
/// Alignment of every section and every tile, in bytes.
pub const TILE_ALIGN: usize = 64;

/// What a code means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// GGML q4_0: blocks of 32, value = (code - 8) * d, d = fp16 (value of largest magnitude) / -8.
    #[serde(rename = "q4_0")]
    Q4_0,
    /// 4-bit integers per group, row or tensor: symmetric -8..=7, or affine 0..=15 with a zero point.
    Int4,
    /// GGML's IQ4_NL: blocks of 32, value = d * an entry of a table of 16 ([`crate::quant::block::nl4`]).
    Nl4,
    /// OCP microscaling FP4: blocks of 32 E2M1 codes, scale 2^(s - 127).
    Mxfp4,
    /// 5-bit integers -16..=15 per group, row or tensor; symmetric.
    Int5,
    /// 6-bit integers -32..=31 per group, row or tensor; symmetric.
    Int6,
    /// 8-bit integers -127..=127 per group, row or tensor; symmetric.
    Int8,
}

/// Every scheme with its name in manifests and on the command line, and its bits per code.
const SCHEMES: [(Scheme, &str, u32); 7] = [
    (Scheme::Q4_0, "q4_0", 4),
    (Scheme::Int4, "int4", 4),
    (Scheme::Nl4, "nl4", 4),
    (Scheme::Mxfp4, "mxfp4", 4),
    (Scheme::Int5, "int5", 5),
    (Scheme::Int6, "int6", 6),
    (Scheme::Int8, "int8", 8),
];

impl Scheme {
    /// Bits per code.
    pub fn bits(self) -> u32 {
        self.row().2
    }

    /// The name used in manifests and on the command line.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    fn row(self) -> &'static (Scheme, &'static str, u32) {
        SCHEMES.iter().find(|row| row.0 == self).expect("every scheme has a row")
    }

    /// Those that weights are quantized to.
    pub fn offered() -> impl Iterator<Item = Scheme> {
        SCHEMES.into_iter().map(|row| row.0).filter(|scheme| *scheme != Scheme::Mxfp4)
    }

    /// The one that is meant where only bits per code are given.
    pub fn of_bits(bits: u32) -> Option<Scheme> {
        Scheme::offered().find(|scheme| scheme.bits() == bits)
    }
}

impl std::str::FromStr for Scheme {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let row = SCHEMES.iter().find(|row| row.1 == s);
        row.map(|row| row.0).ok_or_else(|| Error::usage(format!("there is no scheme `{s}`")))
    }
}

/// How many weights share a scale: a number of columns, a whole row, or the whole tensor.
/// Spelled `32`, `"row"`, `"tensor"` in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// This many consecutive columns of a row; a multiple of [`BLOCK`].
    Group(u32),
    /// One scale per row.
    Row,
    /// One scale for the tensor (stored once per row of a tile, so that kernels need not know).
    Tensor,
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Granularity::Group(n) => write!(f, "{n}"),
            Granularity::Row => f.write_str("row"),
            Granularity::Tensor => f.write_str("tensor"),
        }
    }
}

impl std::str::FromStr for Granularity {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "row" => Ok(Granularity::Row),
            "tensor" => Ok(Granularity::Tensor),
            _ => match s.parse() {
                Ok(n @ (32 | 64 | 128 | 256)) => Ok(Granularity::Group(n)),
                _ => Err(Error::usage(format!("group size `{s}`: expected 32, 64, 128, 256, row or tensor"))),
            },
        }
    }
}

impl Serialize for Granularity {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Granularity::Group(n) => s.serialize_u32(*n),
            _ => s.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for Granularity {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Spelling {
            Number(u32),
            Word(String),
        }
        let word = match Spelling::deserialize(d)? {
            Spelling::Number(n) => n.to_string(),
            Spelling::Word(w) => w,
        };
        word.parse().map_err(serde::de::Error::custom)
    }
}

/// Storage type of scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleType {
    /// IEEE half precision.
    F16,
    /// IEEE single precision, where half would over- or underflow.
    F32,
    /// An exponent byte: 2^(s - 127); MXFP4 only.
    E8m0,
}

impl ScaleType {
    /// Size in bytes.
    pub fn size(self) -> usize {
        match self {
            ScaleType::F16 => 2,
            ScaleType::F32 => 4,
            ScaleType::E8m0 => 1,
        }
    }
}

/// Everything needed to know what the codes and scales of a tensor mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QuantSpec {
    /// What a code means.
    pub scheme: Scheme,
    /// How many weights share a scale.
    #[serde(rename = "group_size")]
    pub granularity: Granularity,
    /// False when groups carry a zero point: value = (code - zero) * scale.
    pub symmetric: bool,
    /// How scales are stored.
    pub scale_dtype: ScaleType,
}

impl QuantSpec {
    /// GGML's q4_0.
    pub const Q4_0: QuantSpec = QuantSpec {
        scheme: Scheme::Q4_0,
        granularity: Granularity::Group(32),
        symmetric: true,
        scale_dtype: ScaleType::F16,
    };
    /// OCP MXFP4 as gpt-oss checkpoints store their experts.
    pub const MXFP4: QuantSpec = QuantSpec {
        scheme: Scheme::Mxfp4,
        granularity: Granularity::Group(32),
        symmetric: true,
        scale_dtype: ScaleType::E8m0,
    };

    /// What a scheme is where nothing else is said.
    pub fn usual(scheme: Scheme) -> QuantSpec {
        match scheme {
            Scheme::Mxfp4 => QuantSpec::MXFP4,
            Scheme::Int8 => QuantSpec { scheme, granularity: Granularity::Row, ..QuantSpec::Q4_0 },
            _ => QuantSpec { scheme, ..QuantSpec::Q4_0 },
        }
    }

    /// What tiles add to the integer that a code stands for: half the range, or nothing where codes are two's complement bytes.
    /// `None` where a zero point or a table says what codes stand for.
    pub fn bias(&self) -> Option<u8> {
        match self.scheme {
            Scheme::Nl4 | Scheme::Mxfp4 => None,
            _ if !self.symmetric => None,
            Scheme::Int8 => Some(0),
            scheme => Some(1 << (scheme.bits() - 1)),
        }
    }

    /// Refuses combinations that no encoder writes.
    pub fn validate(&self) -> Result<()> {
        let only = QuantSpec::usual(self.scheme);
        if matches!(self.scheme, Scheme::Q4_0 | Scheme::Nl4 | Scheme::Mxfp4) && *self != only {
            return Err(Error::unsupported(format!(
                "scheme {} has groups of 32, symmetric, {:?} scales only",
                self.scheme.name(),
                only.scale_dtype
            )));
        }
        if self.scale_dtype == ScaleType::E8m0 && self.scheme != Scheme::Mxfp4 {
            return Err(Error::unsupported(format!("e8m0 scales with scheme {}", self.scheme.name())));
        }
        if self.scheme != Scheme::Int4 && !self.symmetric {
            return Err(Error::unsupported(format!("affine {}; choose symmetric", self.scheme.name())));
        }
        match self.granularity {
            Granularity::Group(n) if ![32, 64, 128, 256].contains(&n) => {
                Err(Error::unsupported(format!("group size {n}; expected 32, 64, 128 or 256")))
            }
            _ => Ok(()),
        }
    }

    /// Scale groups along a row of `cols` weights, as kernels see them (a tensor-wide scale counts as one per row).
    pub fn groups(&self, cols: usize) -> usize {
        match self.granularity {
            Granularity::Group(n) => cols.div_ceil(n as usize),
            Granularity::Row | Granularity::Tensor => 1,
        }
    }
}

/// Where the bytes of one `rows x cols` matrix lie when stored as tiles. See the module text for the picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileLayout {
    /// What codes and scales mean.
    pub spec: QuantSpec,
    /// Rows of the matrix (output features), without padding.
    pub rows: usize,
    /// Columns of the matrix (input features, K), without padding.
    pub cols: usize,
    /// Blocks of 32 along K, padding included.
    pub blocks: usize,
    /// Scale groups along K.
    pub groups: usize,
    /// Blocks that share a scale; the last group may be shorter.
    pub group_blocks: usize,
    /// Offset of the zero points within a tile (equals `codes_offset` when there are none).
    pub zeros_offset: usize,
    /// Offset of the codes within a tile.
    pub codes_offset: usize,
    /// Bytes of one block of codes: 64 for each bit of a code.
    pub block_bytes: usize,
    /// Bytes of one tile.
    pub tile_bytes: usize,
    /// Bytes of a tile per block, scales included: how far a block takes whoever reads both.
    pub block_step: usize,
    /// Number of tiles.
    pub tiles: usize,
}

impl TileLayout {
    /// Computes the layout with checked arithmetic.
    ///
    /// # Errors
    /// The spec is unsupported, a dimension is zero, or a size overflows.
    pub fn new(spec: QuantSpec, rows: usize, cols: usize) -> Result<TileLayout> {
        spec.validate()?;
        if rows == 0 || cols == 0 {
            return Err(Error::corrupt(format!("a quantized matrix of {rows} x {cols}")));
        }
        Self::checked(spec, rows, cols)
            .ok_or_else(|| Error::corrupt(format!("a quantized matrix of {rows} x {cols} overflows the address space")))
    }

    fn checked(spec: QuantSpec, rows: usize, cols: usize) -> Option<TileLayout> {
        let blocks = cols.div_ceil(BLOCK);
        let groups = spec.groups(cols);
        let group_blocks = match spec.granularity {
            Granularity::Group(n) => n as usize / BLOCK,
            Granularity::Row | Granularity::Tensor => blocks,
        };
        let scales = groups.checked_mul(TILE_ROWS * spec.scale_dtype.size())?;
        let zeros_offset = scales.checked_next_multiple_of(TILE_ALIGN)?;
        let zeros = if spec.symmetric { 0 } else { groups.checked_mul(TILE_ROWS)? };
        let codes_offset = zeros_offset.checked_add(zeros)?.checked_next_multiple_of(TILE_ALIGN)?;
        let block_bytes = TILE_ROWS * BLOCK * spec.scheme.bits() as usize / 8;
        let tile_bytes = codes_offset.checked_add(blocks.checked_mul(block_bytes)?)?;
        let tiles = rows.div_ceil(TILE_ROWS);
        tiles.checked_mul(tile_bytes)?;
        rows.checked_mul(cols)?;
        Some(TileLayout {
            spec,
            rows,
            cols,
            blocks,
            groups,
            group_blocks,
            zeros_offset,
            codes_offset,
            block_bytes,
            tile_bytes,
            block_step: tile_bytes / blocks,
            tiles,
        })
    }

    /// Bytes of the whole matrix.
    pub fn nbytes(&self) -> usize {
        self.tiles * self.tile_bytes
    }

    /// Lengths in bytes of the canonical codes, scales and zero points (see [`crate::quant::block`]) of `rows` rows.
    pub fn canonical_sizes(&self, rows: usize) -> (usize, usize, usize) {
        let per_row = match self.spec.scheme {
            Scheme::Q4_0 | Scheme::Nl4 | Scheme::Mxfp4 => self.blocks * BLOCK / 2,
            Scheme::Int4 => self.cols.div_ceil(2),
            Scheme::Int5 => self.cols.div_ceil(2) + self.cols.div_ceil(8),
            Scheme::Int6 => self.cols.div_ceil(2) + self.cols.div_ceil(4),
            Scheme::Int8 => self.cols,
        };
        let groups = match self.spec.granularity {
            Granularity::Tensor => 1,
            _ => rows * self.groups,
        };
        let zeros = if self.spec.symmetric { 0 } else { groups };
        (rows * per_row, groups * self.spec.scale_dtype.size(), zeros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_adds_up_for_odd_shapes() {
        let l = TileLayout::new(QuantSpec::Q4_0, 17, 80).unwrap();
        assert_eq!((l.tiles, l.blocks, l.groups, l.group_blocks), (2, 3, 3, 1));
        assert_eq!((l.zeros_offset, l.codes_offset, l.tile_bytes), (128, 128, 128 + 3 * 256));
        assert_eq!(l.nbytes(), 2 * l.tile_bytes);
    }

    #[test]
    fn names_parse_back_and_bits_name_the_usual_scheme() {
        for (scheme, name, bits) in SCHEMES {
            assert_eq!((name.parse::<Scheme>().unwrap(), scheme.bits()), (scheme, bits));
            assert_eq!(serde_json::to_value(scheme).unwrap(), name);
            QuantSpec::usual(scheme).validate().unwrap();
        }
        let of_bits = [4, 5, 6, 7, 8].map(Scheme::of_bits);
        assert_eq!(of_bits, [Some(Scheme::Q4_0), Some(Scheme::Int5), Some(Scheme::Int6), None, Some(Scheme::Int8)]);
        assert!("int7".parse::<Scheme>().is_err());
    }

    #[test]
    fn absurd_shapes_are_refused_not_wrapped() {
        assert!(TileLayout::new(QuantSpec::Q4_0, usize::MAX, 64).is_err());
        assert!(TileLayout::new(QuantSpec::Q4_0, 1 << 40, 1 << 40).is_err());
        assert!(TileLayout::new(QuantSpec::Q4_0, 0, 64).is_err());
    }

    #[test]
    fn granularity_is_a_number_or_a_word_in_json() {
        for (text, g) in
            [("32", Granularity::Group(32)), ("\"row\"", Granularity::Row), ("\"tensor\"", Granularity::Tensor)]
        {
            assert_eq!(serde_json::from_str::<Granularity>(text).unwrap(), g);
            assert_eq!(serde_json::to_string(&g).unwrap(), text);
        }
        assert!(serde_json::from_str::<Granularity>("48").is_err());
    }
}
