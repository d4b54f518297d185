//! Does a GPU compute what the CPU computes, and how fast?
//!
//! Every kernel is started through the same launches as in the walk, on random numbers and on shapes that lie beside
//! the comfortable ones, and compared with plain loops in f64 over the numbers that it reads: weights as the CPU's
//! scalar arithmetic reads them, activations rounded as they are for that kernel. How far a result may be off follows
//! from the lengths of its sums and from the type it is rounded to, so that a forgotten half, a lost block or a wrong
//! neighbour shows.

mod attention;
mod elementwise;
mod logits;
mod mixture;
mod positions;
mod products;
mod random;
mod rig;
mod speed;

use crate::error::Result;
use crate::progress::{self, ProgressBar};
use crate::runtime::cuda::context::Context;
use crate::runtime::cuda::driver::Driver;
use crate::runtime::device::DeviceInfo;
use rig::Rig;
use serde::Serialize;
use std::time::Instant;

/// What is checked.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Fewer shapes of each kernel, and no measurements.
    pub quick: bool,
}

/// How a kernel did.
#[derive(Debug, Clone, Serialize)]
pub struct Checked {
    /// What it computes.
    pub kernel: String,
    /// Launches that were compared.
    pub cases: usize,
    /// The largest error relative to what it may be: above 1 is wrong.
    pub worst: f64,
    /// True when nothing was wrong.
    pub ok: bool,
    /// The first wrong number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// How fast a kernel is.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// What it computes.
    pub what: String,
    /// The median of twenty measurements, after some to warm up.
    pub seconds: f64,
    /// 10^9 bytes of memory per second that had to be read and written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gb_per_s: Option<f64>,
    /// 10^12 additions and multiplications per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tflops: Option<f64>,
}

/// What was found.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The device.
    #[serde(skip)]
    pub device: DeviceInfo,
    /// Every kernel.
    pub kernels: Vec<Checked>,
    /// Speeds; none of a simulated device.
    pub measurements: Vec<Measured>,
    /// How long it took.
    pub seconds: f64,
}

impl Report {
    /// Kernels that computed something wrong.
    pub fn failed(&self) -> impl Iterator<Item = &Checked> {
        self.kernels.iter().filter(|kernel| !kernel.ok)
    }
}

/// Checks the kernels of a device, and measures them if it is a real one.
///
/// # Errors
/// There is no such device, or its driver refuses something.
pub fn run(ordinal: usize, options: Options) -> Result<Report> {
    let started = Instant::now();
    let device = Driver::open()?.device(ordinal)?;
    let measure = !options.quick && !device.is_simulated();
    let context = Context::open(device.clone())?;
    context.enter()?;
    let hidden = ProgressBar::hidden();
    let mut rig = Rig::new(&context, &hidden, options.quick)?;
    type Check = fn(&mut Rig<'_>) -> Result<()>;
    let checks: [(&str, Check); 6] = [
        ("elementwise", elementwise::check),
        ("positions", positions::check),
        ("logits", logits::check),
        ("mixtures", mixture::check),
        ("products", products::check),
        ("attention", attention::check),
    ];
    let bar = progress::items("kernels", checks.len() as u64 + u64::from(measure));
    for (name, check) in checks {
        bar.set_message(name);
        check(&mut rig)?;
        bar.inc(1);
    }
    let mut measurements = Vec::new();
    if measure {
        bar.set_message("speed");
        speed::measure(&mut rig, &mut measurements)?;
    }
    Ok(Report { device, kernels: rig.results, measurements, seconds: started.elapsed().as_secs_f64() })
}
