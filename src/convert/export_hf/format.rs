//! Table of the formats: the tensors that a linear layer becomes, how they are filled, and `quantization_config`.

use super::matrix::ExportedMatrix;
use super::plan::Module;
use super::{compressed, fp8, gptq};
use crate::convert::executor::TaskOutput;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::scheme::{Granularity, QuantSpec};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;

/// Format of the quantized matrices of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HfFormat {
    /// compressed-tensors, `pack-quantized` for integers and `mxfp4-pack-quantized` for MXFP4.
    CompressedTensors,
    /// GPTQ, first version: symmetric integers of 4 or 8 bits.
    Gptq,
    /// 8-bit floats (E4M3) with a scale per block of 128 x 128.
    Fp8,
}

impl fmt::Display for HfFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().name)
    }
}

/// Tensor of a module in the checkpoint.
pub(super) struct Stored {
    /// Name behind that of the module.
    pub(super) name: &'static str,
    /// Element type.
    pub(super) dtype: DType,
    /// Dimensions, slowest first.
    pub(super) shape: Vec<usize>,
}

/// Entry of [`FORMATS`].
pub(super) struct Format {
    pub(super) format: HfFormat,
    pub(super) name: &'static str,
    /// True if the format quantizes floats; the others keep the codes of the pack.
    pub(super) quantizes_floats: bool,
    /// Returns the tensors of a module, in the order of the sections that `fill` fills. It fails with the reason if the
    /// format has no equivalent.
    pub(super) tensors: fn(&Module) -> Result<Vec<Stored>>,
    /// Writes the tensors of a module.
    pub(super) fill: fn(&Module, &mut ExportedMatrix<'_>, &mut TaskOutput<'_>) -> Result<()>,
    /// Returns `quantization_config` for these modules; the names are those of linear layers that stay floats.
    pub(super) config: fn(&[&Module], &[String]) -> Result<Value>,
    /// Returns notes for the user.
    pub(super) notes: fn(&[&Module]) -> Vec<String>,
}

/// All formats.
const FORMATS: [Format; 3] = [
    Format {
        format: HfFormat::CompressedTensors,
        name: "compressed-tensors",
        quantizes_floats: false,
        tensors: compressed::tensors,
        fill: compressed::fill,
        config: compressed::config,
        notes: compressed::notes,
    },
    Format {
        format: HfFormat::Gptq,
        name: "gptq",
        quantizes_floats: false,
        tensors: gptq::tensors,
        fill: gptq::fill,
        config: gptq::config,
        notes: gptq::notes,
    },
    Format {
        format: HfFormat::Fp8,
        name: "fp8",
        quantizes_floats: true,
        tensors: fp8::tensors,
        fill: fp8::fill,
        config: fp8::config,
        notes: fp8::notes,
    },
];

impl HfFormat {
    pub(super) fn row(self) -> &'static Format {
        static ROWS: [Format; 3] = FORMATS;
        ROWS.iter().find(|row| row.format == self).expect("every format has a row")
    }
}

/// Returns the number of weights that share a scale; `None` for a scale per row. A scale of a whole tensor counts as
/// one of each row, because the pack holds a copy for each.
///
/// # Errors
/// The last group of a row is shorter than the others.
pub(super) fn group_size(spec: &QuantSpec, cols: usize) -> Result<Option<usize>> {
    match spec.granularity {
        Granularity::Group(n) if cols.is_multiple_of(n as usize) => Ok(Some(n as usize)),
        Granularity::Group(n) if cols > n as usize => {
            Err(Error::unsupported(format!("found rows of {cols} weights, expected a multiple of the group size {n}")))
        }
        Granularity::Group(_) | Granularity::Row | Granularity::Tensor => Ok(None),
    }
}

/// Returns a description of a scheme for messages.
pub(super) fn describe(spec: &QuantSpec) -> String {
    let kind = if spec.symmetric { "" } else { " with zero points" };
    format!("{}{kind} with group size {}", spec.scheme.name(), spec.granularity)
}

/// Returns a note about groups of 32, if a module has such.
pub(super) fn note_small_groups(modules: &[&Module]) -> Option<String> {
    let is_small = |module: &&Module| module.spec.is_some_and(|spec| spec.granularity == Granularity::Group(32));
    modules.iter().any(is_small).then(|| {
        "groups of 32 run in vLLM only with kernels that accept this group size, as Marlin does on NVIDIA GPUs"
            .to_string()
    })
}
