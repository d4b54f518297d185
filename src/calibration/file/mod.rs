//! The file of `iec calib`: a safetensors file of sums, sealed with a hash.
//!
//! Of each site, in the order of the model, and all as sums so that files can be added:
//!
//! | tensor | type | shape | what |
//! |---|---|---|---|
//! | `SITE.counts` | F64 | `[2, matrices]` | rows seen, per half of the windows |
//! | `SITE.squares` | F64 | `[2, matrices, cols]` | sums of squares of each input channel |
//! | `SITE.products` | F32 | `[2, cols * (cols + 1) / 2]` | upper triangle of `X^T X` by rows, if it was asked for |
//!
//! The last tensor, `seal`, is the SHA-256 of all bytes before it; it is the name under which manifests know the file.
//! `__metadata__` has `format` and `description`, a JSON text with the model's [`Source`] and the [`Text`]s that were
//! read.

mod read;
mod write;

pub use read::{Calibration, Inputs};
pub use write::CalibrationWriter;

use crate::provenance::Source;
use serde::{Deserialize, Serialize};

const FORMAT: &str = "iec_calibration_v1";

/// A text that was read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Text {
    /// File name without directories.
    pub name: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Tokens read of it.
    pub tokens: u64,
}

/// Where the sums come from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The program that made the file.
    pub created_by: String,
    /// The checkpoint behind the pack that read the texts, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// What the pack was computed in.
    pub precision: String,
    /// Tokens of a window.
    pub window: u64,
    /// What was read.
    pub texts: Vec<Text>,
}

/// Size of a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiteShape {
    /// Its name.
    pub name: String,
    /// Matrices with inputs of their own: experts, otherwise 1.
    pub matrices: usize,
    /// Input channels.
    pub cols: usize,
    /// Whether products are kept.
    pub products: bool,
}

impl SiteShape {
    /// Bytes of all tensors of the site.
    pub fn nbytes(&self) -> u64 {
        self.tensors().iter().map(|(.., bytes)| bytes).sum()
    }

    /// Tensors of the site: name, type, shape, bytes.
    fn tensors(&self) -> Vec<(String, &'static str, Vec<u64>, u64)> {
        let (n, cols) = (self.matrices as u64, self.cols as u64);
        let at = |leaf: &str| format!("{}.{leaf}", self.name);
        let mut tensors =
            vec![(at("counts"), "F64", vec![2, n], 16 * n), (at("squares"), "F64", vec![2, n, cols], 16 * n * cols)];
        if self.products {
            let triangle = cols * (cols + 1) / 2;
            tensors.push((at("products"), "F32", vec![2, triangle], 8 * triangle));
        }
        tensors
    }
}
