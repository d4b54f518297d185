//! Records interrupts (SIGINT, SIGTERM, SIGHUP). Long loops call [`check`] and return its error. On the way
//! to the end of the program, temporary files are then removed and journals completed.

use crate::error::{Cause, Error, Result, Signal};
use std::sync::atomic::{AtomicU8, Ordering};

/// Exit code that belongs to the signal that was received; 0 if none was received.
static REQUESTED: AtomicU8 = AtomicU8::new(0);

/// Records a request to stop; only the first one counts.
pub fn request(signal: Signal) {
    let _ = REQUESTED.compare_exchange(0, signal.exit_code(), Ordering::Relaxed, Ordering::Relaxed);
}

/// Returns the signal that requested the process to stop, if any.
pub fn requested() -> Option<Signal> {
    let code = REQUESTED.load(Ordering::Relaxed);
    [Signal::Interrupt, Signal::Terminate, Signal::HangUp].into_iter().find(|signal| signal.exit_code() == code)
}

/// Fails with [`Cause::Interrupted`] once an interrupt was requested.
pub fn check() -> Result<()> {
    match requested() {
        Some(signal) => Err(Error::new(Cause::Interrupted { signal, resumable: false })),
        None => Ok(()),
    }
}
