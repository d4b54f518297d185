//! Checks that GPU kernels compute what the CPU computes, and measures their speed.
//!
//! Each kernel is launched by the functions of the forward pass, with random inputs in several shapes, among them some
//! that are not a multiple of a block. Its results are compared with sums that this module computes in f64 from the
//! dequantized weights and from the activations, rounded to the type that the kernel reads. The tolerance of a result
//! follows from the number of its terms and from the type that it is rounded to, so it is small enough that a kernel
//! that omits a block of 32 products, or reads a neighbor instead of an element, fails.

mod attention;
mod elementwise;
mod logits;
mod low_rank;
mod mixture;
mod positions;
mod products;
mod random;
mod recurrent;
mod report;
mod rig;
mod speed;

use crate::error::Result;
use crate::progress::{self, ProgressBar};
use crate::runtime::cuda::context::Context;
use crate::runtime::cuda::driver::Driver;
pub use report::{Checked, Measured, Report};
use rig::Rig;
use std::time::Instant;

/// Options of a check.
#[derive(Debug, Clone, Copy, Default)]
pub struct CheckOptions {
    /// True to check fewer shapes of each kernel and to measure no speeds.
    pub quick: bool,
}

/// Checks the kernels of a device, and measures them if it is a real one.
///
/// # Errors
/// There is no such device, or its driver reports an error.
pub fn run(ordinal: usize, options: CheckOptions) -> Result<Report> {
    let started = Instant::now();
    let device = Driver::open()?.device(ordinal)?;
    let measure = !options.quick && !device.is_simulated();
    let context = Context::open(device.clone())?;
    context.enter()?;
    let hidden = ProgressBar::hidden();
    let mut rig = Rig::new(&context, &hidden, options.quick)?;
    type Check = fn(&mut Rig<'_>) -> Result<()>;
    let checks: [(&str, Check); 10] = [
        ("elementwise", elementwise::check),
        ("positions", positions::check),
        ("latent attention", positions::latent),
        ("inputs of layers", elementwise::token_inputs),
        ("recurrent layers", recurrent::check),
        ("logits", logits::check),
        ("mixtures", mixture::check),
        ("products", products::check),
        ("adapters", low_rank::check),
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
