//! Options that change the speed of a model, and nothing else.

use crate::compat::CompatArgs;
use crate::global::Global;
use crate::names::{Named, named};
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
    #[arg(help_heading = "Tuning", long, value_name = "POLICY", default_value = "none")]
    pub numa: Numa,
    /// When weights are read: on: all before the first token; auto: when they are used, with read-ahead by the system;
    /// off: when they are used, without read-ahead
    #[arg(
        help_heading = "Tuning",
        long,
        value_name = "on|off|auto",
        env = "PREFETCH",
        default_value = "auto",
        value_parser = parse_prefetch
    )]
    prefetch: Residency,
    /// Keep the weights locked in memory; implies --prefetch on
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

fn parse_prefetch(text: &str) -> Result<Residency, String> {
    match text {
        "on" => Ok(Residency::Whole),
        "off" => Ok(Residency::NoReadAhead),
        "auto" => Ok(Residency::OnDemand),
        number if number.parse::<usize>().is_ok() => {
            Err("found a number of prompts to tokenize ahead, which is not supported; expected on, off or auto".into())
        }
        _ => Err("expected on, off or auto".into()),
    }
}

impl TuningArgs {
    /// Returns when weights are read into memory.
    pub fn residency(&self) -> Residency {
        if self.pin { Residency::Locked } else { self.prefetch }
    }

    /// Prints a note about each given option that has no effect.
    pub fn note_options_without_effect(&self, global: &Global) {
        self.compat.note(global);
        if self.numa != Numa::None && Topology::probe(Path::new(SYSTEM_ROOT)).nodes.len() < 2 {
            global.note(format!("--numa {}: this machine has one memory node, so the option has no effect", self.numa));
        }
    }
}
