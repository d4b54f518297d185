//! Results of a check.

use crate::runtime::device::DeviceInfo;
use serde::Serialize;

/// Result of the checks of one kernel.
#[derive(Debug, Clone, Serialize)]
pub struct Checked {
    /// Name of the computation, such as `matmul, int4 x bf16, few rows`.
    pub kernel: String,
    /// Number of launches that were compared.
    pub cases: usize,
    /// Largest error relative to its tolerance; above 1 is wrong.
    pub worst: f64,
    /// True when no result was wrong.
    pub ok: bool,
    /// Description of the first wrong result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Speed of a kernel.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// Description of the computation.
    pub what: String,
    /// Median of twenty measurements in seconds, after a few that are not counted.
    pub seconds: f64,
    /// Memory traffic in 10^9 bytes per second, counting the bytes that must be read and written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gb_per_s: Option<f64>,
    /// Throughput in 10^12 additions and multiplications per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tflops: Option<f64>,
}

/// Report of a check.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Device that was checked.
    #[serde(skip)]
    pub device: DeviceInfo,
    /// Results of all kernels.
    pub kernels: Vec<Checked>,
    /// Speeds; empty for a simulated device and for a quick check.
    pub measurements: Vec<Measured>,
    /// Duration of the check in seconds.
    pub seconds: f64,
}

impl Report {
    /// Returns the kernels that computed a wrong result.
    pub fn failed(&self) -> impl Iterator<Item = &Checked> {
        self.kernels.iter().filter(|kernel| !kernel.ok)
    }
}
