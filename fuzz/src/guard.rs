//! Watches one input: how much memory at most, and how long?
//!
//! Memory is what the thread has allocated and not freed, counted by the allocator; time is the processor time of the
//! thread, so that a busy machine is not mistaken for a hang. (What never returns is caught by libFuzzer's `-timeout`.)

use super::targets::Target;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Peak memory that an input may cause: this many times its size, if that is more than the target's allowance.
const TIMES: usize = 4;
thread_local! {
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, counting for each thread.
pub struct Counting;

fn count(bytes: isize) {
    // During the teardown of a thread there is nothing left to count.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting allocates nothing.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Old and new may exist side by side while the contents are moved.
        count(size as isize);
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(place, layout, size) }
    }
}

/// Runs a target on an input; tells when it took too much memory, or more than `slowness` times its processor time.
pub fn watch(target: &Target, data: &[u8], slowness: u64) -> Result<(), String> {
    let start = cpu_ms();
    let peak = peak(target, data);
    let limit = (TIMES * data.len()).max(target.allowance);
    if peak > limit {
        return Err(format!("{peak} bytes of memory for an input of {} bytes; the limit is {limit}", data.len()));
    }
    let spent = cpu_ms() - start;
    if spent > slowness * target.limit_ms {
        return Err(format!("{spent} ms for an input of {} bytes; the limit is {} ms", data.len(), target.limit_ms));
    }
    Ok(())
}

/// Runs a target on an input; the most memory that was in use at once.
pub fn peak(target: &Target, data: &[u8]) -> usize {
    let before = NOW.get();
    PEAK.set(before);
    (target.run)(data);
    (PEAK.get() - before).max(0) as usize
}

fn cpu_ms() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    #[allow(unsafe_code)]
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "every Linux has this clock");
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}
