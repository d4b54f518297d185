//! Options that change the speed of a model, and nothing else.

use crate::compat::CompatArgs;
use crate::global::Global;
use crate::names::{Named, named, offering};
use iec::runtime::Residency;
use iec::runtime::cpu::place::{Affinity, Numa};
use iec::runtime::cpu::topology::{SYSTEM_ROOT, Topology};
use std::path::Path;

/// Options that place threads and memory and say when weights are read.
#[derive(Debug, clap::Args)]
pub struct TuningArgs {
    /// Whether threads are bound to processors; the first hardware thread of each physical core is used before the second
    #[arg(
        help_heading = "Tuning",
        long,
        value_parser = named(AFFINITIES),
        value_name = "HOW",
        env = "AFFINITY",
        default_value = "auto"
    )]
    pub affinity: Affinity,
    /// Placement on NUMA nodes. none: left to the system; interleave: memory from all nodes in turn; node:X: threads on
    /// node X, and memory while it has space; strict: threads and memory on one node only. Pages of files that are
    /// cached already are not moved
    #[arg(help_heading = "Tuning", long, value_name = "POLICY", default_value = "none", hide_possible_values = true)]
    #[arg(value_parser = offering(&["none", "interleave", "strict"], str::parse::<Numa>))]
    pub numa: Numa,
    /// When weights are read: on: all before the first token; auto: when they are used, with read-ahead by the system;
    /// off: when they are used, without read-ahead. N: as auto, and `iec run --prompts-file` encodes at most N prompts
    /// ahead of those that are computed (256 otherwise)
    #[arg(
        help_heading = "Tuning",
        long,
        value_name = "on|off|auto|N",
        env = "PREFETCH",
        default_value = "auto",
        hide_possible_values = true,
        value_parser = offering(&["on", "off", "auto"], parse_prefetch)
    )]
    prefetch: Prefetch,
    /// Keep the weights and the KV cache locked in memory; implies --prefetch on
    #[arg(help_heading = "Tuning", long)]
    pin: bool,
    #[command(flatten)]
    compat: CompatArgs,
}

/// The values of --affinity.
const AFFINITIES: &[Named<Affinity>] = &[
    (Affinity::Auto, &["auto"], "Placement by the operating system"),
    (Affinity::Compact, &["compact"], "Fill one memory node before the next"),
    (Affinity::Scatter, &["scatter"], "Distribute threads over the memory nodes in turn"),
];

/// Number of prompts that are encoded ahead unless an option says otherwise.
const PROMPTS_AHEAD: usize = 256;

/// The value of --prefetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prefetch {
    /// When weights are read.
    Weights(Residency),
    /// Number of prompts that are encoded ahead.
    Prompts(usize),
}

fn parse_prefetch(text: &str) -> Result<Prefetch, String> {
    match text {
        "on" => Ok(Prefetch::Weights(Residency::Whole)),
        "off" => Ok(Prefetch::Weights(Residency::NoReadAhead)),
        "auto" => Ok(Prefetch::Weights(Residency::OnDemand)),
        number => match number.parse() {
            Ok(prompts) if prompts > 0 => Ok(Prefetch::Prompts(prompts)),
            _ => Err("expected on, off, auto, or a number of prompts of at least 1".into()),
        },
    }
}

impl TuningArgs {
    /// Returns when weights are read into memory.
    pub fn residency(&self) -> Residency {
        match self.prefetch {
            _ if self.pin => Residency::Locked,
            Prefetch::Weights(residency) => residency,
            Prefetch::Prompts(_) => Residency::OnDemand,
        }
    }

    /// Returns the largest number of prompts that are encoded before they are computed.
    pub fn prompts_ahead(&self) -> usize {
        match self.prefetch {
            Prefetch::Weights(_) => PROMPTS_AHEAD,
            Prefetch::Prompts(prompts) => prompts,
        }
    }

    /// Prints a note in a command that encodes all prompts before it measures.
    pub fn note_prompts_ahead(&self, global: &Global) {
        if let Prefetch::Prompts(prompts) = self.prefetch {
            global.note(format!(
                "--prefetch {prompts}: only `iec run --prompts-file` encodes prompts ahead, so the number has no effect"
            ));
        }
    }

    /// Prints a note about each given option that has no effect.
    pub fn note_options_without_effect(&self, global: &Global) {
        self.compat.note(global);
        if self.numa != Numa::None && Topology::probe(Path::new(SYSTEM_ROOT)).nodes.len() < 2 {
            global.note(format!("--numa {}: this machine has one memory node, so the option has no effect", self.numa));
        }
    }
}
