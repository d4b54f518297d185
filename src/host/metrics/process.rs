//! Metrics of the whole process: processor time, memory, files, page faults, context switches.
//!
//! The first names are those of Prometheus's own client libraries. What the system does not report is left out.

use super::text::{MetricKind, MetricsText};
use crate::files;
use crate::session::usage::Usage;
use std::path::Path;

/// Writes the metrics of this process, which started at `start` (Unix time in seconds).
pub(super) fn write(text: &mut MetricsText, start: f64) {
    text.family("process_start_time_seconds", MetricKind::Gauge, "Unix time at which the server started.");
    text.value(&[], start);
    if let Some(bytes) = resident_bytes() {
        text.family("process_resident_memory_bytes", MetricKind::Gauge, "Resident memory, mapped weights included.");
        text.value(&[], bytes);
    }
    if let Some(open) = open_files() {
        text.family("process_open_fds", MetricKind::Gauge, "Open file descriptors.");
        text.value(&[], open);
    }
    if let Some(most) = most_open_files() {
        text.family("process_max_fds", MetricKind::Gauge, "Largest number of open file descriptors.");
        text.value(&[], most);
    }
    if let Some(usage) = Usage::now() {
        write_usage(text, &usage);
    }
}

fn write_usage(text: &mut MetricsText, usage: &Usage) {
    text.family("process_cpu_seconds_total", MetricKind::Counter, "Processor time of all threads, user and system.");
    text.value(&[], usage.cpu_user_s + usage.cpu_system_s);
    text.family(
        "process_page_faults_total",
        MetricKind::Counter,
        "Page faults; major ones read from a file or swap space.",
    );
    text.value(&[("kind", "minor")], usage.page_faults_minor);
    text.value(&[("kind", "major")], usage.page_faults_major);
    let help = "Context switches; involuntary ones took a processor away from a thread.";
    text.family("process_context_switches_total", MetricKind::Counter, help);
    text.value(&[("kind", "voluntary")], usage.context_switches_voluntary);
    text.value(&[("kind", "involuntary")], usage.context_switches_involuntary);
}

/// Returns the resident memory in bytes: VmRSS of the kernel.
fn resident_bytes() -> Option<u64> {
    let status = files::read_to_string(Path::new("/proc/self/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the number of open file descriptors, without the one that reads the list.
fn open_files() -> Option<usize> {
    std::fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count().saturating_sub(1))
}

#[cfg(unix)]
fn most_open_files() -> Option<u64> {
    use nix::sys::resource::{Resource, getrlimit};
    getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(now, _)| now)
}

#[cfg(not(unix))]
fn most_open_files() -> Option<u64> {
    None
}
