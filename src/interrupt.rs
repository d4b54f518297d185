//! Records interrupts (SIGINT, SIGTERM, SIGHUP). Long loops call [`check`] and return its error. On the way
//! to the end of the program, temporary files are then removed and journals completed.

use crate::error::{Cause, Error, Result, Signal};
use crate::task;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// Exit code that belongs to the signal that was received; 0 if none was received.
static REQUESTED: AtomicU8 = AtomicU8::new(0);
/// True while a repeated SIGINT does not end the process.
static REPEATS_ALLOWED: AtomicBool = AtomicBool::new(false);

/// Handler of signals in place of [`request`].
static HANDLER: OnceLock<Handler> = OnceLock::new();

/// Function that receives signals.
type Handler = Box<dyn Fn(Signal) + Send + Sync>;

/// Passes all further signals to `handler`, which is called on the thread that listens for them. A program that goes on
/// after a signal needs this, such as a server that finishes its requests. Only the first handler counts.
pub fn handle(handler: impl Fn(Signal) + Send + Sync + 'static) {
    let _ = HANDLER.set(Box::new(handler));
}

/// Passes a signal to the handler; returns false if there is none.
pub fn divert_to_handler(signal: Signal) -> bool {
    HANDLER.get().map(|handler| handler(signal)).is_some()
}

/// Records a request to stop; only the first one counts.
pub fn request(signal: Signal) {
    let _ = REQUESTED.compare_exchange(0, signal.exit_code(), Ordering::Relaxed, Ordering::Relaxed);
}

/// Forgets a recorded SIGINT; returns true if there was one. SIGTERM and SIGHUP stay recorded. A conversation calls
/// this after it has stopped an answer.
pub fn take_interrupt() -> bool {
    let code = Signal::Interrupt.exit_code();
    REQUESTED.compare_exchange(code, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// Sets whether SIGINT may be repeated without ending the process, because the program stops its work and goes on.
pub fn allow_repeats(allowed: bool) {
    REPEATS_ALLOWED.store(allowed, Ordering::Relaxed);
}

/// Returns true if SIGINT may be repeated without ending the process.
pub fn repeats_allowed() -> bool {
    REPEATS_ALLOWED.load(Ordering::Relaxed)
}

/// Returns the signal that requested the process to stop, if any.
pub fn requested() -> Option<Signal> {
    let code = REQUESTED.load(Ordering::Relaxed);
    [Signal::Interrupt, Signal::Terminate, Signal::HangUp].into_iter().find(|signal| signal.exit_code() == code)
}

/// Fails with [`Cause::Interrupted`] once an interrupt was requested, or the task of this thread was cancelled.
pub fn check() -> Result<()> {
    let cancelled = || task::current().is_some_and(|task| task.is_cancelled()).then_some(Signal::Interrupt);
    match requested().or_else(cancelled) {
        Some(signal) => Err(Error::new(Cause::Interrupted { signal, resumable: false })),
        None => Ok(()),
    }
}
