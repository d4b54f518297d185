//! Handler of SIGBUS: a page of a mapped file has no data, because another program has truncated the file or its disk
//! fails. The process ends with a message that names the file and exit code 3.

use super::{end_process, handle, raise_again};
use libc::{c_int, c_void, siginfo_t};

/// Exit code of [`iec::error::Cause::Model`].
const MODEL: c_int = 3;

/// Installs the handler.
pub fn install() {
    handle(libc::SIGBUS, without_data);
}

extern "C" fn without_data(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the system passes a valid description to a handler with `SA_SIGINFO`, with an address for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    if let Some(name) = iec::mapped::file_at(address) {
        let message =
            b": found no data where the file had some when it was opened; it was truncated, or its disk fails\n";
        let help = b"help: restore the file, and replace files only by renaming complete ones\n";
        end_process(MODEL, [b"error: ", name, message, help]);
    }
    raise_again(signal);
}
