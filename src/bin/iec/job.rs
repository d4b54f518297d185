//! Options of commands whose work can be interrupted, continued and shared.

use iec::error::{Error, Result};
use iec::job::{Pace, Part, RunOptions, Share};
use iec::units::parse_size;

/// Options that divide work into parts and make it resumable. None of them changes the result.
#[derive(Debug, Clone, clap::Args)]
pub struct JobArgs {
    /// Do part K of N only; run the other parts here or on machines that share this file system, then `iec merge`
    #[arg(help_heading = "Long conversions", long, value_name = "K/N", conflicts_with = "parts")]
    part: Option<Part>,
    /// Do one of N parts (auto: as many as the job array has tasks); SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX gives
    /// its number
    #[arg(help_heading = "Long conversions", long, value_name = "N|auto")]
    parts: Option<String>,
    #[command(flatten)]
    keeping: Keeping,
}

/// Options about the work that an interrupted run keeps.
#[derive(Debug, Clone, clap::Args)]
pub struct Keeping {
    /// Start over instead of continuing an interrupted run
    #[arg(help_heading = "Long conversions", long)]
    fresh: bool,
    /// Save progress after this many bytes or 10 s, whichever is first; a killed run loses the work since the last save
    #[arg(
        help_heading = "Long conversions",
        long,
        value_name = "SIZE",
        default_value = "256M",
        value_parser = parse_size
    )]
    checkpoint_every: u64,
}

impl Keeping {
    /// Returns the options for the library, for a job that is not divided.
    pub fn options(&self) -> RunOptions {
        let pace = Pace { bytes: self.checkpoint_every, ..Pace::default() };
        RunOptions { share: Share::Whole, fresh: self.fresh, pace }
    }
}

impl JobArgs {
    /// Returns the options for the library.
    pub fn options(&self) -> Result<RunOptions> {
        let share = match (&self.part, &self.parts) {
            (Some(part), _) => Share::Part(*part),
            (None, Some(parts)) => Share::Part(scheduled(parts)?),
            (None, None) => Share::Whole,
        };
        Ok(RunOptions { share, ..self.keeping.options() })
    }
}

/// Returns `part 2/8 of `, or an empty text for a job that is not divided.
pub fn part_of(part: &Option<String>) -> String {
    part.as_ref().map_or(String::new(), |part| format!("part {part} of "))
}

/// Returns `, 7 finished before`, or an empty text if no work was resumed.
pub fn finished_before(resumed_tensors: usize) -> String {
    if resumed_tensors > 0 { format!(", {resumed_tensors} finished before") } else { String::new() }
}

fn scheduled(parts: &str) -> Result<Part> {
    let count = match parts {
        "auto" => None,
        text => Some(
            text.parse().map_err(|_| Error::usage(format!("--parts: found `{text}`, expected a number or auto")))?,
        ),
    };
    Part::from_scheduler(count, |name| std::env::var(name).ok())
}
