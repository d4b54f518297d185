//! Have we been asked to stop? Long loops call [`check`] and unwind with an error, so that temporaries are removed and
//! journals are brought up to date.

use crate::error::{Cause, Error, Result};
use std::sync::atomic::{AtomicU8, Ordering};

/// Who asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// The user: Ctrl-C, SIGINT.
    Interrupt,
    /// The system or a scheduler: SIGTERM.
    Terminate,
}

impl Signal {
    /// What the process exits with: 128 + the number of the signal, as shells have it.
    pub fn exit_code(self) -> u8 {
        match self {
            Signal::Interrupt => 130,
            Signal::Terminate => 143,
        }
    }
}

/// Exit code of the signal that was received; 0 for none.
static REQUESTED: AtomicU8 = AtomicU8::new(0);

/// Notes the request; the first one counts.
pub fn request(signal: Signal) {
    let _ = REQUESTED.compare_exchange(0, signal.exit_code(), Ordering::Relaxed, Ordering::Relaxed);
}

/// The signal that asked us to stop, if one did.
pub fn requested() -> Option<Signal> {
    let code = REQUESTED.load(Ordering::Relaxed);
    [Signal::Interrupt, Signal::Terminate].into_iter().find(|signal| signal.exit_code() == code)
}

/// Fails with [`Cause::Interrupted`] once an interrupt was requested.
pub fn check() -> Result<()> {
    match requested() {
        Some(signal) => Err(Error::new(Cause::Interrupted { signal, resumable: false })),
        None => Ok(()),
    }
}
