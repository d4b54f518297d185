//! Runs a fuzz target on one input and limits its peak memory and processor time.
//!
//! Memory is what the thread has allocated and not freed, counted by the allocator. Time is the processor time of the
//! thread, so that a busy machine is not mistaken for a hang. (A target that never returns is caught by libFuzzer's
//! `-timeout`.)

use super::targets::Target;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Limit of peak memory as a multiple of the input's size; the target's allowance applies if it is larger.
const TIMES: usize = 4;
thread_local! {
    /// Bytes that this thread has allocated and not freed; below 0 if it frees what others have allocated.
    static NOW: Cell<isize> = const { Cell::new(0) };
    /// Largest value of [`NOW`] since [`peak`] has reset it.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator with a count of allocated bytes per thread.
pub struct Counting;

fn count(bytes: isize) {
    // During the teardown of a thread the counters no longer exist.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: every call is forwarded to the system's allocator unchanged; counting allocates nothing.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The old and the new block may exist at the same time while the contents are copied.
        count(size as isize);
        count(-(layout.size() as isize));
        // SAFETY: the caller upholds the same contract.
        unsafe { System.realloc(place, layout, size) }
    }
}

/// Runs a target on an input. Returns an error when it exceeded its memory limit, or `slowness` times its limit of
/// processor time.
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

/// Runs a target on an input and returns the largest number of bytes that it had allocated at once.
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
