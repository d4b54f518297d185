//! Options of commands whose work can be interrupted, continued and shared.

use iec::error::{Error, Result};
use iec::job::{Pace, Part, RunOptions, Share};
use iec::units::parse_size;

/// How a conversion is run. Nothing here shows in the result.
#[derive(Debug, Clone, clap::Args)]
pub struct JobArgs {
    /// Do part K of N only; run the others anywhere on the same file system, then `iec merge`
    #[arg(help_heading = "Long conversions", long, value_name = "K/N", conflicts_with = "parts")]
    part: Option<Part>,
    /// Do one of N parts (or auto: as many as the array has tasks); SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX say
    /// which
    #[arg(help_heading = "Long conversions", long, value_name = "N|auto")]
    parts: Option<String>,
    #[command(flatten)]
    keeping: Keeping,
}

/// How finished work is kept.
#[derive(Debug, Clone, clap::Args)]
pub struct Keeping {
    /// Forget what an interrupted run has left, instead of continuing
    #[arg(help_heading = "Long conversions", long)]
    fresh: bool,
    /// Make finished work durable after this many bytes, and every 10 s; a killed run loses what came after
    #[arg(help_heading = "Long conversions", long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    checkpoint_every: u64,
}

impl Keeping {
    /// As the library takes them, for the whole of a job.
    pub fn options(&self) -> RunOptions {
        let pace = Pace { bytes: self.checkpoint_every, ..Pace::default() };
        RunOptions { share: Share::Whole, fresh: self.fresh, pace }
    }
}

impl JobArgs {
    /// As the library takes them.
    pub fn options(&self) -> Result<RunOptions> {
        let share = match (&self.part, &self.parts) {
            (Some(part), _) => Share::Part(*part),
            (None, Some(parts)) => Share::Part(scheduled(parts)?),
            (None, None) => Share::Whole,
        };
        Ok(RunOptions { share, ..self.keeping.options() })
    }
}

/// `part 2/8 of `, or nothing for the whole.
pub fn part_of(part: &Option<String>) -> String {
    part.as_ref().map_or(String::new(), |part| format!("part {part} of "))
}

/// `, 7 finished before`, or nothing where all work was new.
pub fn finished_before(resumed_tensors: usize) -> String {
    if resumed_tensors > 0 { format!(", {resumed_tensors} finished before") } else { String::new() }
}

fn scheduled(parts: &str) -> Result<Part> {
    let count = match parts {
        "auto" => None,
        text => Some(text.parse().map_err(|_| Error::usage(format!("--parts `{text}`; expected a number or auto")))?),
    };
    Part::from_scheduler(count, |name| std::env::var(name).ok())
}
