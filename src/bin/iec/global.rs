//! Options that every command takes, before or after its name.

use crate::arguments::GLOBAL;
use crate::console;
use crate::names::offering;
use clap::{Args, ColorChoice};
use iec::error::{Error, Result, Signal};
use iec::files;
use iec::interrupt;
use iec::report::measurement::stages::StageTimes;
use iec::resources::{spawn, thread_refused};
use iec::runtime::cpu;
use iec::runtime::cpu::counters::Counters;
use iec::runtime::cpu::place::{granted_processors, physical_cores};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::OnceLock;

/// Threads, verbosity and color.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// Number of worker threads, or auto: one per physical core [default: auto]
    #[arg(
        long,
        global = true,
        env = "THREADS",
        value_name = "N",
        help_heading = GLOBAL,
        hide_possible_values = true,
        value_parser = offering(&["auto"], threads)
    )]
    threads: Option<Threads>,
    /// Print no progress bars and no notes; errors are still printed
    #[arg(long, short, global = true, help_heading = GLOBAL)]
    pub quiet: bool,
    /// Print more notes on stderr; -vv also prints one for each tensor [env: IEC_LOG=debug for -v, trace for -vv]
    #[arg(long, short, global = true, action = clap::ArgAction::Count, help_heading = GLOBAL)]
    verbose: u8,
    /// Color help and errors; auto: on a terminal, unless NO_COLOR is set
    #[arg(
        long,
        global = true,
        default_value = "auto",
        value_name = "WHEN",
        hide_short_help = true,
        help_heading = GLOBAL
    )]
    color: ColorChoice,
}

/// Most threads that convert weights per processor. Some of them may wait for a disk; more only compete.
const THREADS_PER_PROCESSOR: usize = 4;

/// Value of `--threads`; `auto` is `None`.
#[derive(Debug, Clone, Copy)]
struct Threads(Option<usize>);

fn threads(text: &str) -> std::result::Result<Threads, String> {
    match text.parse() {
        _ if text == "auto" => Ok(Threads(None)),
        Ok(n) if (1..=1024).contains(&n) => Ok(Threads(Some(n))),
        _ => Err("expected 1 to 1024, or auto".into()),
    }
}

/// Returns the value of an environment variable that is set and not empty.
pub fn non_empty_variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns the value of `--color`, read before the arguments are parsed, because errors of the parser are colored, too.
pub fn color_choice() -> ColorChoice {
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let after = |i: usize| words[i].strip_prefix("--color=").or(words.get(i + 1).map(String::as_str));
    let at = words.iter().position(|word| word == "--color" || word.starts_with("--color="));
    at.and_then(after).and_then(|when| when.parse().ok()).unwrap_or(ColorChoice::Auto)
}

/// Returns the verbosity that a filter in the syntax of `RUST_LOG` sets: `LEVEL` or `iec=LEVEL`, of which the last one
/// counts. Directives for other targets are ignored.
fn log_level(filter: &str) -> Result<u8> {
    let mut verbosity = 0;
    for directive in filter.split(',').map(str::trim).filter(|directive| !directive.is_empty()) {
        let level = match directive.split_once('=') {
            Some((target, _)) if target != "iec" && !target.starts_with("iec::") => continue,
            Some((_, level)) => level,
            None => directive,
        };
        verbosity = match level.to_ascii_lowercase().as_str() {
            "0" | "off" | "error" | "warn" | "info" => 0,
            "1" | "debug" => 1,
            "2" | "trace" => 2,
            _ => {
                let expected = "off, error, warn, info, debug (as -v) or trace (as -vv), or 0, 1 or 2";
                return Err(Error::usage(format!("IEC_LOG: found `{level}`, expected {expected}")));
            }
        };
    }
    Ok(verbosity)
}

impl Global {
    /// Sets up process-wide state: progress, interrupt handler, conversion thread pool.
    pub fn apply(&self) -> Result<()> {
        crate::progress_display::install();
        iec::progress::set_quiet(self.quiet);
        iec::progress::set_verbosity(self.verbosity()?);
        if let Some(isa) = non_empty_variable(cpu::ISA_VARIABLE) {
            cpu::force_isa(isa.to_string_lossy().into_owned());
        }
        listen_for_signals()?;
        let (threads, most) = (self.threads(), THREADS_PER_PROCESSOR * granted_processors());
        if threads > most {
            self.note(format_args!("--threads {threads}: {most} are started, {THREADS_PER_PROCESSOR} per processor"));
        }
        rayon::ThreadPoolBuilder::new().num_threads(threads.min(most)).build_global().map_err(thread_refused)
    }

    /// Returns how often `--verbose` is given, or the level of `IEC_LOG` if it is not given.
    fn verbosity(&self) -> Result<u8> {
        match self.verbose {
            0 => {
                let filter = non_empty_variable("IEC_LOG").unwrap_or_default();
                log_level(&filter.to_string_lossy())
            }
            level => Ok(level),
        }
    }

    /// Returns true with `--verbose` or its variable.
    pub fn is_verbose(&self) -> bool {
        self.verbosity().is_ok_and(|level| level > 0)
    }

    /// Returns true if errors are to be colored on stderr.
    pub fn colors(&self) -> bool {
        match self.color {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => non_empty_variable("NO_COLOR").is_none() && std::io::stderr().is_terminal(),
        }
    }

    /// Returns the number of worker threads: the value of `--threads`, otherwise the number of physical cores.
    pub fn threads(&self) -> usize {
        self.requested_threads().unwrap_or_else(physical_cores)
    }

    /// Returns the value of `--threads` or of its variable, if one is given.
    pub fn requested_threads(&self) -> Option<usize> {
        self.threads.and_then(|threads| threads.0)
    }

    /// Prints a note to stderr, except with `--quiet`.
    pub fn note(&self, text: impl std::fmt::Display) {
        if !self.quiet {
            console::note(text);
        }
    }

    /// Notes the times of the stages as a table, and with `--verbose` why hardware events are missing.
    pub fn note_stages(&self, stages: &StageTimes) {
        self.note(stages.table());
        if self.is_verbose() && stages.decode_counters.is_none() {
            Counters::refusal().iter().for_each(|reason| self.note(reason));
        }
    }

    /// Reports the result of a command: in words on stderr and, with its `--json`, as a line on stdout.
    pub fn summarize(&self, words: impl std::fmt::Display, json: bool, summary: &impl serde::Serialize) -> Result<()> {
        self.note(words);
        if json { console::print_json(summary) } else { Ok(()) }
    }
}

/// Handle that adds signals to those that are handled.
static SIGNALS: OnceLock<Handle> = OnceLock::new();

/// Handles SIGHUP also if the process was started with it ignored, as by `nohup`: a server reads its settings again and
/// does not end. Call it after [`interrupt::handle`].
// Only the server uses it.
#[cfg_attr(not(feature = "serve"), allow(dead_code))]
pub fn listen_for_hang_up() {
    // The system takes every signal but SIGKILL and SIGSTOP.
    let _ = SIGNALS.get().map(|handle| handle.add_signal(SIGHUP));
}

/// Handles signals: after the first SIGINT, SIGTERM or SIGHUP the command stops where it leaves nothing half-written;
/// a second SIGINT or SIGTERM ends the process at once. A terminal that closes may send SIGHUP several times.
fn listen_for_signals() -> Result<()> {
    let hang_up = Some(SIGHUP).filter(|_| !ignores_hang_up());
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM].into_iter().chain(hang_up)) else { return Ok(()) };
    let _ = SIGNALS.set(signals.handle());
    spawn("iec-signals", move || {
        for number in signals.forever() {
            let signal = match number {
                SIGTERM => Signal::Terminate,
                SIGHUP => Signal::HangUp,
                _ => Signal::Interrupt,
            };
            let ends = match signal {
                Signal::HangUp => false,
                Signal::Terminate => true,
                Signal::Interrupt => !interrupt::repeats_allowed(),
            };
            if interrupt::divert_to_handler(signal) {
                continue;
            }
            if ends && interrupt::requested().is_some() {
                std::process::exit(i32::from(signal.exit_code()));
            }
            interrupt::request(signal);
        }
    })?;
    Ok(())
}

/// Returns true if the process was started with SIGHUP ignored, as `nohup` does; then it runs on without its terminal.
fn ignores_hang_up() -> bool {
    let status = files::read_to_string(Path::new("/proc/self/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (SIGHUP - 1) & 1 == 1
}
