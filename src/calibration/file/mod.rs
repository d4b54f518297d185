//! File format of calibration statistics (`iec calib`): a safetensors file of sums, sealed with a hash.
//!
//! A site is a place in the model whose values are the inputs of one or more matrices ([`super::Site`]). Each site, in
//! the order of the model, has these tensors. Their first dimension is the half of the windows. All are sums, so files
//! can be merged by addition, except those with corrections:
//!
//! | tensor | type | shape | content |
//! |---|---|---|---|
//! | `SITE.counts` | F64 | `[2, matrices]` | number of rows that were summed |
//! | `SITE.squares` | F64 | `[2, matrices, cols]` | sums of squares of each input channel |
//! | `SITE.products` | F32 | `[2, cols * (cols + 1) / 2]` | upper triangle of `X^T X` by rows, only with `--hessian` |
//! | `SITE.correction` | BF16 | `[rows, cols]` | what is added to the matrix that reads the site, with `--quantized` |
//!
//! The last tensor, `seal`, is the SHA-256 of all bytes before it; manifests refer to the file by this hash.
//! `__metadata__` has `format` and `description`, a JSON text with the model's [`Source`] and the [`CalibrationText`]s
//! that were read.

mod read;
mod write;

pub use read::{Calibration, InputMeans};
pub use write::CalibrationWriter;

use crate::provenance::Source;
use serde::{Deserialize, Serialize};

const FORMAT: &str = "iec_calibration_v1";

/// Calibration text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalibrationText {
    /// File name without directories.
    pub name: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Number of tokens of the text that were read.
    pub tokens: u64,
}

/// Origin of the sums.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// Program and version that wrote the file.
    pub created_by: String,
    /// Checkpoint from which the pack was made, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// Precision in which the model was run.
    pub precision: String,
    /// Tokens per window.
    pub window: u64,
    /// Texts that were read.
    pub texts: Vec<CalibrationText>,
    /// SHA-256 of the schemes and methods of the manifest that quantized the matrices before each site
    /// ([`crate::manifest::Document::decisions_hash`]); absent if the model read the texts as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantized: Option<String>,
}

/// Name and dimensions of a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiteShape {
    /// Name of the site.
    pub name: String,
    /// Number of matrices with separate sums: the number of experts, otherwise 1.
    pub matrices: usize,
    /// Number of input channels.
    pub cols: usize,
    /// True if products are stored.
    pub products: bool,
    /// Rows of the correction of the matrix that reads the site; 0 if there is none.
    pub correction_rows: usize,
}

impl SiteShape {
    /// Returns the number of bytes of all tensors of the site.
    pub fn nbytes(&self) -> u64 {
        self.tensors().iter().map(|(.., bytes)| bytes).sum()
    }

    /// Returns the tensors of the site: name, type, shape, bytes.
    fn tensors(&self) -> Vec<(String, &'static str, Vec<u64>, u64)> {
        let (n, cols) = (self.matrices as u64, self.cols as u64);
        let at = |leaf: &str| format!("{}.{leaf}", self.name);
        let mut tensors =
            vec![(at("counts"), "F64", vec![2, n], 16 * n), (at("squares"), "F64", vec![2, n, cols], 16 * n * cols)];
        if self.products {
            let triangle = cols * (cols + 1) / 2;
            tensors.push((at("products"), "F32", vec![2, triangle], 8 * triangle));
        }
        if self.correction_rows > 0 {
            let rows = self.correction_rows as u64;
            tensors.push((at("correction"), "BF16", vec![rows, cols], 2 * rows * cols));
        }
        tensors
    }
}
