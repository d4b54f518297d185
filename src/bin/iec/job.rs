//! Options of commands whose work can be interrupted, continued and shared.

use iec::error::{Error, Result};
use iec::job::{Pace, Part, RunOptions, Share};
use iec::units::parse_size;

/// How a conversion is run. Nothing here shows in the result.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Long conversions")]
pub struct JobArgs {
    /// Do part K of N only; run the others anywhere on the same file system, then `iec merge`
    #[arg(long, value_name = "K/N", conflicts_with = "parts")]
    part: Option<Part>,
    /// Do one of N parts (or auto: as many as the array has tasks); SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX say which
    #[arg(long, value_name = "N|auto")]
    parts: Option<String>,
    #[command(flatten)]
    keeping: Keeping,
}

/// How finished work is kept.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Long conversions")]
pub struct Keeping {
    /// Forget what an interrupted run has left, instead of continuing
    #[arg(long)]
    fresh: bool,
    /// Make finished work durable after this many bytes, and every 10 s; a killed run loses what came after
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
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

    /// Refuses them for work that is not run so.
    pub fn refuse(&self, what: &str) -> Result<()> {
        if self.part.is_some() || self.parts.is_some() || self.keeping.fresh {
            return Err(Error::usage(format!("{what} cannot be shared or continued: --part, --parts and --fresh")));
        }
        Ok(())
    }
}

fn scheduled(parts: &str) -> Result<Part> {
    let count = match parts {
        "auto" => None,
        text => Some(text.parse().map_err(|_| Error::usage(format!("--parts `{text}`; expected a number or auto")))?),
    };
    Part::from_scheduler(count, |name| std::env::var(name).ok())
}
