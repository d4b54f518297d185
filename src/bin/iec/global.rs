//! Options that every command takes, before or after its name.

use clap::{Args, ValueEnum};
use iec::error::{Error, Result};

/// Threads, verbosity and color.
#[derive(Debug, Args)]
pub struct Global {
    /// Worker threads [default: physical cores] [env: IE_THREADS, too]
    #[arg(long, global = true, env = "THREADS", value_name = "N", help_heading = "Global options")]
    threads: Option<usize>,
    /// No progress bars and no notes on stderr; errors still show
    #[arg(long, short, global = true, help_heading = "Global options")]
    pub quiet: bool,
    /// More notes on stderr (repeat for more)
    #[arg(long, short, global = true, action = clap::ArgAction::Count, help_heading = "Global options")]
    pub verbose: u8,
    /// Color of messages; NO_COLOR is honoured
    #[arg(long, global = true, value_enum, default_value = "auto", help_heading = "Global options")]
    pub color: Color,
}

/// When to color messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

impl Global {
    /// Sets up process-wide state: progress, interrupt handler, conversion thread pool.
    pub fn apply(&self) -> Result<()> {
        iec::progress::set_quiet(self.quiet);
        // A second interrupt ends the process at once.
        let _ = ctrlc::set_handler(|| {
            if iec::interrupt::requested() {
                std::process::exit(130);
            }
            iec::interrupt::request();
        });
        rayon::ThreadPoolBuilder::new()
            .num_threads(self.threads()?)
            .build_global()
            .map_err(|e| Error::engine(format!("no worker threads: {e}")))
    }

    /// Number of worker threads: flag, THREADS, IE_THREADS, then the machine's cores.
    pub fn threads(&self) -> Result<usize> {
        Ok(self.asked_threads()?.unwrap_or_else(physical_cores))
    }

    /// The number of threads the user asked for, if any.
    pub fn asked_threads(&self) -> Result<Option<usize>> {
        let from_env = || std::env::var("IE_THREADS").ok().filter(|v| !v.is_empty());
        let asked = match (self.threads, from_env()) {
            (Some(n), _) => Some(n),
            (None, Some(text)) => {
                Some(text.parse().map_err(|_| Error::usage(format!("IE_THREADS=`{text}` is not a number")))?)
            }
            (None, None) => None,
        };
        match asked {
            Some(n) if !(1..=1024).contains(&n) => Err(Error::usage(format!("{n} threads; expected 1 to 1024"))),
            _ => Ok(asked),
        }
    }

    /// A note for people on stderr, unless quiet.
    #[allow(dead_code)]
    pub fn note(&self, text: impl std::fmt::Display) {
        if !self.quiet {
            eprintln!("{text}");
        }
    }
}

/// Physical cores this process may use: hardware threads of the affinity mask, one per core where sysfs tells.
fn physical_cores() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, |n| n.get());
    let siblings =
        std::fs::read_to_string("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list").unwrap_or_default();
    let per_core = siblings.trim().split([',', '-']).filter(|s| !s.is_empty()).count().max(1);
    (logical / per_core).max(1)
}
