//! Hardware counters of the calling thread: instructions, cycles and last-level cache misses (perf events of Linux).
//!
//! A group of three events is opened for one thread and read with one system call, which costs less than a
//! microsecond. Only code of the program itself is counted, not the kernel, which needs no privileges where
//! `kernel.perf_event_paranoid` is 2 or less. If the processor has fewer counters than programs ask for, the kernel
//! lets groups take turns; counts are then extrapolated from the share of the time in which this group was counted.
//!
//! The counters of other threads are not read: reading the counters of a running thread interrupts its processor, at
//! every stage of every layer.
#![allow(unsafe_code)]

use std::io;

/// Numbers of hardware events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions that were completed.
    pub instructions: u64,
    /// Clock cycles in which the thread ran.
    pub cycles: u64,
    /// Reads and writes that the last-level cache did not have.
    pub cache_misses: u64,
}

impl Counts {
    /// Returns the events between `earlier` and this reading. An extrapolated count may fall; that counts as zero.
    pub fn since(&self, earlier: &Counts) -> Counts {
        Counts {
            instructions: self.instructions.saturating_sub(earlier.instructions),
            cycles: self.cycles.saturating_sub(earlier.cycles),
            cache_misses: self.cache_misses.saturating_sub(earlier.cache_misses),
        }
    }

    /// Adds events.
    pub fn add(&mut self, more: &Counts) {
        self.instructions = self.instructions.saturating_add(more.instructions);
        self.cycles = self.cycles.saturating_add(more.cycles);
        self.cache_misses = self.cache_misses.saturating_add(more.cache_misses);
    }
}

/// Counters of the thread that opened them.
#[derive(Debug)]
pub struct Counters(system::CounterGroup);

impl Counters {
    /// Opens the counters of the calling thread, which begin to count.
    ///
    /// # Errors
    /// The machine has no hardware counters, as many virtual machines, or the system does not allow to read them.
    pub fn open() -> io::Result<Counters> {
        system::CounterGroup::open(system::HARDWARE, [system::INSTRUCTIONS, system::CYCLES, system::CACHE_MISSES])
            .map(Counters)
    }

    /// Returns the reason why this thread's counters cannot be opened, in words for users; `None` if they can.
    pub fn refusal() -> Option<String> {
        let error = Counters::open().err()?;
        Some(format!(
            "no hardware events per stage: perf_event_open: {error}; they need a machine with hardware counters and \
             kernel.perf_event_paranoid of 2 or less"
        ))
    }

    /// Returns the events since the counters were opened; `None` if the kernel cannot report them.
    pub fn read(&self) -> Option<Counts> {
        let [instructions, cycles, cache_misses] = self.0.read()?;
        Some(Counts { instructions, cycles, cache_misses })
    }
}

/// Returns the counts that the kernel's answer to a read of a group holds: number of events, time enabled, time
/// counted, one count per event.
#[cfg(target_os = "linux")]
fn scaled(answer: &[u64; 6]) -> Option<[u64; 3]> {
    let [3, enabled, counted, counts @ ..] = *answer else { return None };
    match counted {
        0 => None,
        _ if counted >= enabled => Some(counts),
        _ => Some(counts.map(|count| (count as f64 * (enabled as f64 / counted as f64)) as u64)),
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs::File;
    use std::io::{Error, Read, Result};
    use std::os::fd::{AsRawFd, FromRawFd};

    /// Event type `PERF_TYPE_HARDWARE`.
    pub(super) const HARDWARE: u32 = 0;
    /// Hardware event `PERF_COUNT_HW_CPU_CYCLES`.
    pub(super) const CYCLES: u64 = 0;
    /// Hardware event `PERF_COUNT_HW_INSTRUCTIONS`.
    pub(super) const INSTRUCTIONS: u64 = 1;
    /// Hardware event `PERF_COUNT_HW_CACHE_MISSES`.
    pub(super) const CACHE_MISSES: u64 = 3;

    /// Read format: time enabled (1), time counted (2), all events of the group (8).
    const READ_FORMAT: u64 = 1 | 2 | 8;
    /// Attribute flags `exclude_kernel` (bit 5) and `exclude_hv` (bit 6).
    const EXCLUDE_KERNEL: u64 = 1 << 5 | 1 << 6;
    /// Flag `PERF_FLAG_FD_CLOEXEC`.
    const CLOSE_ON_EXEC: libc::c_ulong = 8;

    /// First version of `struct perf_event_attr`, which all kernels accept: 64 bytes.
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        kind: u32,
        size: u32,
        config: u64,
        sample_period: u64,
        sample_type: u64,
        read_format: u64,
        flags: u64,
        wakeup_events: u32,
        breakpoint_type: u32,
        config1: u64,
    }

    /// Three events that are counted at the same time.
    #[derive(Debug)]
    pub(super) struct CounterGroup {
        leader: File,
        /// The other events, which are counted as long as they are open.
        _members: [File; 2],
    }

    impl CounterGroup {
        pub(super) fn open(kind: u32, [first, second, third]: [u64; 3]) -> Result<CounterGroup> {
            let leader = open(kind, first, -1)?;
            let members = [open(kind, second, leader.as_raw_fd())?, open(kind, third, leader.as_raw_fd())?];
            Ok(CounterGroup { leader, _members: members })
        }

        pub(super) fn read(&self) -> Option<[u64; 3]> {
            let mut bytes = [0; 48];
            if (&self.leader).read(&mut bytes).ok()? != bytes.len() {
                return None;
            }
            let mut answer = [0; 6];
            for (word, bytes) in answer.iter_mut().zip(bytes.as_chunks::<8>().0) {
                *word = u64::from_ne_bytes(*bytes);
            }
            super::scaled(&answer)
        }
    }

    /// Opens one event of the calling thread, on whichever processor it runs. `group` is the leader, or -1.
    fn open(kind: u32, config: u64, group: i32) -> Result<File> {
        let size = size_of::<Attributes>() as u32;
        let attributes =
            Attributes { kind, size, config, read_format: READ_FORMAT, flags: EXCLUDE_KERNEL, ..Attributes::default() };
        // SAFETY: the kernel reads `size` bytes at the pointer, which is a struct of that size; the other arguments
        // are numbers: this thread (0), any processor (-1).
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                0 as libc::pid_t,
                -1 as libc::c_int,
                group,
                CLOSE_ON_EXEC,
            )
        };
        match i32::try_from(fd) {
            // SAFETY: the call has just returned this descriptor, so nothing else owns it.
            Ok(fd @ 0..) => Ok(unsafe { File::from_raw_fd(fd) }),
            _ => Err(Error::last_os_error()),
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub(super) const HARDWARE: u32 = 0;
    pub(super) const CYCLES: u64 = 0;
    pub(super) const INSTRUCTIONS: u64 = 1;
    pub(super) const CACHE_MISSES: u64 = 3;

    /// Group of events, which this system does not have.
    #[derive(Debug)]
    pub(super) enum CounterGroup {}

    impl CounterGroup {
        pub(super) fn open(_kind: u32, _events: [u64; 3]) -> std::io::Result<CounterGroup> {
            Err(std::io::ErrorKind::Unsupported.into())
        }

        pub(super) fn read(&self) -> Option<[u64; 3]> {
            match *self {}
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn counts_are_extrapolated_when_groups_took_turns() {
        assert_eq!(scaled(&[3, 100, 100, 7, 8, 9]), Some([7, 8, 9]));
        assert_eq!(scaled(&[3, 100, 25, 7, 8, 0]), Some([28, 32, 0]));
        assert_eq!(scaled(&[3, 100, 0, 0, 0, 0]), None);
        assert_eq!(scaled(&[2, 100, 100, 7, 8, 0]), None);
    }

    #[test]
    fn a_group_counts_the_work_of_its_thread() {
        // Software events exist on machines without hardware counters, too: page faults, context switches, a dummy.
        let Ok(group) = system::CounterGroup::open(1, [2, 3, 9]) else { return };
        let before = group.read().unwrap();
        // Memory of the heap may have been touched before.
        let mut pages = memmap2::MmapMut::map_anon(8 << 20).unwrap();
        pages.fill(1);
        std::hint::black_box(&pages);
        let after = group.read().unwrap();
        assert!(after[0] > before[0], "{before:?} {after:?}");
        assert_eq!(after[2], 0);
    }

    #[test]
    fn hardware_counts_rise_where_they_are_allowed() {
        let opened = Counters::open();
        assert_eq!(opened.is_err(), Counters::refusal().is_some());
        let Ok(counters) = opened else { return };
        let before = counters.read().unwrap();
        let sum = (0..100_000u64).fold(0, |sum, i| std::hint::black_box(sum ^ i));
        std::hint::black_box(sum);
        let used = counters.read().unwrap().since(&before);
        assert!(used.instructions > 100_000 && used.cycles > 10_000, "{used:?}");
        assert_eq!(before.since(&counters.read().unwrap()), Counts::default());
    }
}
