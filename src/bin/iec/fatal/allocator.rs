//! Global allocator: that of the system, but a refused allocation ends the process with a message and exit code 6
//! instead of SIGABRT.

use super::{decimal, end_process};
use iec::resources::refusal_is_handled;
use std::alloc::{GlobalAlloc, Layout, System};

/// Exit code of [`iec::error::Cause::OutOfMemory`].
pub(super) const OUT_OF_MEMORY: i32 = 6;
/// Advice for all refusals.
pub(super) const HELP: &[u8] =
    b"help: give the process more memory or address space (`ulimit -v`), or use fewer --threads or a shorter --ctx\n";

/// The system's allocator. It returns null only to callers that report the refusal themselves.
struct EndsWhenRefused;

#[global_allocator]
static ALLOCATOR: EndsWhenRefused = EndsWhenRefused;

// SAFETY: all methods pass their arguments and results through to the system's allocator; a refusal may end the
// process.
unsafe impl GlobalAlloc for EndsWhenRefused {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of this method, which is that of `System`.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as in `alloc`; `memory` came from `System`.
        checked(unsafe { System.realloc(memory, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as in `realloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[inline]
fn checked(memory: *mut u8, size: usize) -> *mut u8 {
    if memory.is_null() {
        refused(size);
    }
    memory
}

#[cold]
#[inline(never)]
fn refused(size: usize) {
    if !refusal_is_handled() {
        let message = b"error: out of memory: the system refuses ";
        end_process(OUT_OF_MEMORY, [message, decimal(size, &mut [0; 20]), b" bytes\n", HELP]);
    }
}
