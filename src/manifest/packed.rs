//! Files and byte ranges that hold the finished codes and scales of a tensor, as `iec q4` writes them;
//! [`crate::quant::packed`] reads the bytes.

use crate::error::{Context, Error, Result};
use crate::iebin::reader::plain_file_name;
use crate::output::swap;
use crate::scheme::{CodeOrder, QuantSpec, TileLayout};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The range fields of a manifest entry. Zero points, if the scheme has any, lie in the file of the scales.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PackedJson {
    /// File of the canonical codes, relative to the manifest.
    pub packed_bin: String,
    /// Start of the codes in their file, in bytes.
    pub q4_offset: u64,
    /// Length of the codes in bytes; they are in the order `[matrix][row]`.
    pub q4_nbytes: u64,
    /// File of the scales, relative to the manifest.
    pub scale_bin: String,
    /// Start of the scales in their file, in bytes.
    pub scale_offset: u64,
    /// Length of the scales in bytes; they are in the order `[matrix][row][group]`, or `[matrix]` if the group size is
    /// `tensor`.
    pub scale_nbytes: u64,
    /// Start of the zero points in the file of the scales, in bytes; absent for symmetric schemes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero_offset: Option<u64>,
    /// Length of the zero points in bytes; they are in the order of the scales.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero_nbytes: Option<u64>,
    /// Number that was added to symmetric int4 codes: 0 (two's complement, the canonical form) or 8 (older tools).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bias: u8,
}

fn is_zero(bias: &u8) -> bool {
    *bias == 0
}

/// File name of the manifest that lists packed codes and scales.
pub const EXPANDED_NAME: &str = "q4_manifest.expanded.json";

/// Returns the path of a file that a manifest in `dir` names.
fn beside(dir: &Path, name: &str) -> PathBuf {
    swap::member(&dir.join(EXPANDED_NAME), name)
}

/// Returns the length of a file in `dir`. Refuses a link that leads out of the directory: the author of untrusted input
/// could otherwise choose which files are read.
///
/// # Errors
/// The name is not a plain file name, or the directory has no such file.
pub(crate) fn length_beside(dir: &Path, name: &str) -> Result<u64> {
    let path = beside(dir, plain_file_name(name)?);
    let advice = "put the file, or a hard link to it, into the directory of the JSON file that names it";
    let target = path.canonicalize().at(&path).help(advice)?;
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    if !target.starts_with(dir.canonicalize().at(dir)?) {
        let found = format!("found a link to {}, outside its directory", target.display());
        return Err(Error::unsupported(found).at(&path).help(advice));
    }
    Ok(std::fs::metadata(&target).at(&path)?.len())
}

/// Matrix, or stack of matrices, whose codes and scales are in files already.
#[derive(Debug, Clone)]
pub struct FinishedTensor {
    /// `(rows, cols)`, or `(count, rows, cols)`.
    pub shape: Vec<usize>,
    /// Quantization of the tensor, which defines the meaning of the codes.
    pub spec: QuantSpec,
    /// Location of the bytes.
    pub range: PackedRange,
}

/// The canonical bytes of one tensor in the files of `iec q4`.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedRange {
    /// File of the codes.
    pub bin: PathBuf,
    /// Range of the codes.
    pub codes: Range<u64>,
    /// File of the scales and zero points.
    pub scale_bin: PathBuf,
    /// Range of the scales.
    pub scales: Range<u64>,
    /// Range of the zero points; empty for symmetric schemes.
    pub zeros: Range<u64>,
    /// True when codes are stored as `value + 8`; the canonical encoding is two's complement.
    pub biased: bool,
}

impl PackedJson {
    /// Returns the total number of bytes of codes, scales and zero points.
    pub fn nbytes(&self) -> u64 {
        self.q4_nbytes + self.scale_nbytes + self.zero_nbytes.unwrap_or(0)
    }

    /// Checks file names, checks that the ranges lie inside the files in the directory of the manifest, and checks
    /// lengths against the tile layout.
    pub(crate) fn check(&self, layout: &TileLayout, count: usize, dir: &Path) -> Result<()> {
        let info = layout.spec.scheme.info();
        let may_be_biased = layout.spec.bias() == Some(8) && info.order == CodeOrder::Columns;
        if self.bias != 0 && !(self.bias == 8 && may_be_biased) {
            return Err(Error::unsupported(format!("bias: found {}, expected 0, or 8 for symmetric int4", self.bias)));
        }
        layout.refuse_two_levels()?;
        let (codes, scales, zeros) = layout.canonical_sizes(layout.rows);
        let fields = [
            ("q4_nbytes", &self.packed_bin, self.q4_offset, self.q4_nbytes, codes),
            ("scale_nbytes", &self.scale_bin, self.scale_offset, self.scale_nbytes, scales),
            ("zero_nbytes", &self.scale_bin, self.zero_offset.unwrap_or(0), self.zero_nbytes.unwrap_or(0), zeros),
        ];
        for (field, file, offset, nbytes, per_matrix) in fields {
            let expected = (per_matrix as u64).checked_mul(count as u64);
            if expected != Some(nbytes) {
                let expected = expected.map_or("a number above 2^64 - 1".into(), |n| n.to_string());
                return Err(Error::corrupt(format!("{field}: found {nbytes}, expected {expected}")));
            }
            let len = length_beside(dir, file)?;
            if offset.checked_add(nbytes).is_none_or(|end| end > len) {
                return Err(Error::corrupt(format!(
                    "found {nbytes} bytes at offset {offset}, which reach past the end of {file} ({len} bytes)"
                )));
            }
        }
        Ok(())
    }

    pub(crate) fn resolve(&self, dir: &Path) -> PackedRange {
        let zero = self.zero_offset.unwrap_or(0);
        PackedRange {
            bin: beside(dir, &self.packed_bin),
            codes: self.q4_offset..self.q4_offset + self.q4_nbytes,
            scale_bin: beside(dir, &self.scale_bin),
            scales: self.scale_offset..self.scale_offset + self.scale_nbytes,
            zeros: zero..zero + self.zero_nbytes.unwrap_or(0),
            biased: self.bias != 0,
        }
    }
}
