//! Peak memory of the process.

use crate::files;
use std::path::Path;

/// Returns the peak resident memory in bytes: VmHWM of the kernel, or `getrusage` where there is no /proc.
pub fn peak_bytes() -> Option<u64> {
    let status = files::read_to_string(Path::new("/proc/self/status")).ok();
    status.as_deref().and_then(vm_hwm).or_else(max_rss)
}

fn vm_hwm(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(unix)]
fn max_rss() -> Option<u64> {
    use nix::sys::resource::{UsageWho, getrusage};
    let unit = if cfg!(target_vendor = "apple") { 1 } else { 1024 };
    let rss = getrusage(UsageWho::RUSAGE_SELF).ok()?.max_rss();
    u64::try_from(rss).ok().map(|rss| rss * unit)
}

#[cfg(not(unix))]
fn max_rss() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_read_in_bytes() {
        assert_eq!(vm_hwm("VmPeak:\t 10 kB\nVmHWM:\t    1234 kB\n"), Some(1234 * 1024));
        assert!(peak_bytes().unwrap() > 1 << 20);
        assert!(max_rss().unwrap() > 1 << 20);
    }
}
