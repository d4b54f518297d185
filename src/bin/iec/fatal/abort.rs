//! Handler of SIGABRT: the standard library and libc abort when they cannot get the memory of a new thread. Then the
//! process ends with a message and exit code 6; any other abort remains one.

use super::allocator::{HELP, OUT_OF_MEMORY};
use super::{end_process, handle, raise_again};
use iec::resources::was_thread_refused;
use libc::{c_int, c_void, siginfo_t};

/// Size of the mapping that is tried, in bytes: what libc asks the system for at least when its heap is used up.
const PROBE: usize = 1 << 20;

/// Installs the handler.
pub fn install() {
    handle(libc::SIGABRT, aborted);
}

extern "C" fn aborted(signal: c_int, _: *mut siginfo_t, _: *mut c_void) {
    if was_thread_refused() || is_exhausted() {
        let message = b"error: out of memory: a thread or a library could not go on\n";
        end_process(OUT_OF_MEMORY, [message, HELP]);
    }
    raise_again(signal);
}

/// Returns true if the system refuses a mapping.
fn is_exhausted() -> bool {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the system's choice changes no existing one. The process ends soon, so
    // that it need not be removed.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), PROBE, protection, flags, -1, 0) };
    memory == libc::MAP_FAILED
}
