//! Processor time, page faults and context switches of the process, as the system counts them (`getrusage`).

use serde::Serialize;

/// Resources that the process has used since its start, or between two readings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Usage {
    /// Seconds in which the threads of the process ran its own code, added up over processors.
    pub cpu_user_s: f64,
    /// Seconds in which the kernel worked for the process, added up over processors.
    pub cpu_system_s: f64,
    /// Page faults that needed no input or output.
    pub page_faults_minor: u64,
    /// Page faults that read from a file or from swap space.
    pub page_faults_major: u64,
    /// Context switches in which a thread gave up its processor to wait.
    pub context_switches_voluntary: u64,
    /// Context switches in which the system took a processor away from a thread.
    pub context_switches_involuntary: u64,
}

impl Usage {
    /// Returns the resources used so far by all threads, also by threads that have ended; `None` if the system does
    /// not report them.
    #[cfg(unix)]
    pub fn now() -> Option<Usage> {
        use nix::sys::resource::{UsageWho, getrusage};
        use nix::sys::time::TimeValLike;
        let usage = getrusage(UsageWho::RUSAGE_SELF).ok()?;
        let count = |value: i64| u64::try_from(value).unwrap_or(0);
        Some(Usage {
            cpu_user_s: usage.user_time().num_microseconds() as f64 / 1e6,
            cpu_system_s: usage.system_time().num_microseconds() as f64 / 1e6,
            page_faults_minor: count(usage.minor_page_faults()),
            page_faults_major: count(usage.major_page_faults()),
            context_switches_voluntary: count(usage.voluntary_context_switches()),
            context_switches_involuntary: count(usage.involuntary_context_switches()),
        })
    }

    /// Returns `None`: this system does not report resources.
    #[cfg(not(unix))]
    pub fn now() -> Option<Usage> {
        None
    }

    /// Returns the resources used between `earlier` and this reading.
    pub fn since(&self, earlier: &Usage) -> Usage {
        Usage {
            cpu_user_s: (self.cpu_user_s - earlier.cpu_user_s).max(0.0),
            cpu_system_s: (self.cpu_system_s - earlier.cpu_system_s).max(0.0),
            page_faults_minor: self.page_faults_minor.saturating_sub(earlier.page_faults_minor),
            page_faults_major: self.page_faults_major.saturating_sub(earlier.page_faults_major),
            context_switches_voluntary: self
                .context_switches_voluntary
                .saturating_sub(earlier.context_switches_voluntary),
            context_switches_involuntary: self
                .context_switches_involuntary
                .saturating_sub(earlier.context_switches_involuntary),
        }
    }

    /// Returns the sum of two usages.
    pub fn plus(&self, other: &Usage) -> Usage {
        Usage {
            cpu_user_s: self.cpu_user_s + other.cpu_user_s,
            cpu_system_s: self.cpu_system_s + other.cpu_system_s,
            page_faults_minor: self.page_faults_minor + other.page_faults_minor,
            page_faults_major: self.page_faults_major + other.page_faults_major,
            context_switches_voluntary: self.context_switches_voluntary + other.context_switches_voluntary,
            context_switches_involuntary: self.context_switches_involuntary + other.context_switches_involuntary,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Computes, touches new pages and sleeps, and returns what the process has used meanwhile.
    fn work() -> Usage {
        let before = Usage::now().unwrap();
        let mut sum = 0u64;
        for _ in 0..30_000_000 {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(7));
        }
        // More than 32 MiB: smaller blocks may be memory that another test has freed, whose pages are there.
        let pages = vec![1u8; 40 << 20];
        std::hint::black_box(&pages);
        std::thread::sleep(Duration::from_millis(2));
        Usage::now().unwrap().since(&before)
    }

    #[test]
    fn work_new_pages_and_sleep_are_counted() {
        // A reading may count a thread twice that ends at that moment (other tests do), so one pair proves nothing.
        let counted = (0..50).map(|_| work()).find(|used| {
            let seconds = used.cpu_user_s + used.cpu_system_s;
            seconds > 0.0 && used.page_faults_minor > 0 && used.context_switches_voluntary > 0
        });
        assert!(counted.is_some(), "no reading counted the work: {:?}", work());
    }

    #[test]
    fn sums_and_differences_hold_for_every_count() {
        let used = Usage {
            cpu_user_s: 1.5,
            cpu_system_s: 0.5,
            page_faults_minor: 3,
            page_faults_major: 4,
            context_switches_voluntary: 5,
            context_switches_involuntary: 6,
        };
        assert_eq!(used.plus(&used).since(&used), used);
        assert_eq!(used.since(&used.plus(&used)), Usage::default(), "a difference is never negative");
    }
}
