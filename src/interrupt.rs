//! Has the user asked us to stop? Long loops call [`check`] and unwind with an error, so that temporaries are removed.

use crate::error::{Cause, Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Notes the request; a signal handler may call this.
pub fn request() {
    REQUESTED.store(true, Ordering::Relaxed);
}

/// True once an interrupt was requested.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Fails with [`Cause::Interrupted`] once an interrupt was requested.
pub fn check() -> Result<()> {
    if requested() { Err(Error::new(Cause::Interrupted)) } else { Ok(()) }
}
