//! Waiting for the library: without the interpreter, and with looks for signals.

use crate::errors::{of_parts, raise};
use pyo3::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Longest time between two looks for signals.
pub const SLICE: Duration = Duration::from_millis(50);

/// Runs short work of the library without the interpreter. A panic becomes an error of the engine.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> engine::Result<T> + Send) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(work))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(raise(py, &error)),
        Err(_) => Err(panicked(py)),
    }
}

/// Runs work of the library on a thread of its own, while this thread looks for signals. After a signal the work is
/// cancelled; the exception is raised at once, and the result of the work is dropped when it ends.
pub fn waited<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> engine::Result<T> + Send + 'static,
) -> PyResult<T> {
    let (sender, receiver) = channel();
    let receiver = Mutex::new(receiver);
    let is_cancelled = Arc::new(AtomicBool::new(false));
    let cancelled = is_cancelled.clone();
    let thread = std::thread::Builder::new().name("iec-python".into()).spawn(move || {
        let observer = move |_: engine::Progress<'_>| !cancelled.load(Ordering::Relaxed);
        let _ = sender.send(engine::with_progress(observer, work));
    });
    thread.map_err(|e| no_thread(py, &e))?;
    loop {
        let received = py.detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SLICE));
        match received {
            Ok(done) => return done.map_err(|error| raise(py, &error)),
            // The thread ended without a result.
            Err(RecvTimeoutError::Disconnected) => return Err(panicked(py)),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals().inspect_err(|_| is_cancelled.store(true, Ordering::Relaxed))?;
            }
        }
    }
}

/// Builds the exception for a panic of the library.
pub fn panicked(py: Python<'_>) -> PyErr {
    of_parts(py, 5, "engine", "a function of the library panicked", None)
}

/// Builds the exception for a thread that the system refuses.
pub fn no_thread(py: Python<'_>, error: &std::io::Error) -> PyErr {
    of_parts(py, 6, "out_of_memory", &format!("the system refuses another thread: {error}"), None)
}

/// Process in which an object was made: the threads of an engine do not survive a fork.
#[derive(Debug, Clone, Copy)]
pub struct Owner(u32);

impl Owner {
    /// Returns this process.
    pub fn this() -> Owner {
        Owner(std::process::id())
    }

    /// Returns true in the process in which the object was made.
    pub fn is_here(self) -> bool {
        self.0 == std::process::id()
    }

    /// Raises an exception in a forked process.
    pub fn check(self, py: Python<'_>) -> PyResult<()> {
        let message = "the engine belongs to the process that was forked";
        let help = Some("open the model in the new process");
        if self.is_here() { Ok(()) } else { Err(of_parts(py, 5, "engine", message, help)) }
    }
}
