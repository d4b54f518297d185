//! Long calls with progress: they run on a thread of their own, while the calling thread shows the progress and looks
//! for signals.

use crate::errors::{of_parts, raise};
use crate::wait::{SLICE, no_thread, panicked};
use engine::{InspectRequest, PackRequest, Progress, QuantizeRequest, VerifyRequest};
use pyo3::prelude::*;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Progress for the callback: label, done, total.
type Step = (String, u64, u64);

/// Does work on another thread. The callback gets the progress on this thread; if it raises an exception, or Ctrl-C is
/// pressed, the work is cancelled, and the exception is raised when it has ended.
pub fn watched<T: Send + 'static>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce() -> engine::Result<T> + Send + 'static,
) -> PyResult<T> {
    let (sender, steps) = channel::<Step>();
    let steps = Mutex::new(steps);
    let is_cancelled = Arc::new(AtomicBool::new(false));
    let cancelled = is_cancelled.clone();
    let reports = progress.is_some();
    let observer = move |progress: Progress<'_>| {
        if let (true, Progress::Advanced { label, done, total, .. }) = (reports, progress) {
            let _ = sender.send((label.to_string(), done, total));
        }
        !cancelled.load(Ordering::Relaxed)
    };
    let thread = std::thread::Builder::new()
        .name("iec-python".into())
        .spawn(move || engine::with_progress(observer, work))
        .map_err(|e| no_thread(py, &e))?;
    let mut raised = None;
    loop {
        let received = py.detach(|| {
            let steps = steps.lock().unwrap_or_else(PoisonError::into_inner);
            (thread.is_finished(), steps.recv_timeout(SLICE))
        });
        let outcome = match received {
            (_, Ok((label, done, total))) => progress.map_or(Ok(()), |call| call.call1((label, done, total)).map(drop)),
            (true, Err(_)) => break,
            (false, Err(RecvTimeoutError::Disconnected)) => {
                py.detach(|| std::thread::sleep(Duration::from_millis(1)));
                Ok(())
            }
            (false, Err(RecvTimeoutError::Timeout)) => Ok(()),
        };
        if let Err(e) = outcome.and_then(|()| py.check_signals()) {
            is_cancelled.store(true, Ordering::Relaxed);
            raised.get_or_insert(e);
        }
    }
    let done = py.detach(|| thread.join());
    match (raised, done) {
        (Some(exception), _) => Err(exception),
        (None, Ok(Ok(value))) => Ok(value),
        (None, Ok(Err(error))) => Err(raise(py, &error)),
        (None, Err(_)) => Err(panicked(py)),
    }
}

/// Does a conversion whose request is a JSON object, and returns its summary as JSON.
#[pyfunction]
pub fn convert(py: Python<'_>, name: &str, request: &str, progress: Option<&Bound<'_, PyAny>>) -> PyResult<String> {
    let wrong = |e: serde_json::Error| of_parts(py, 2, "usage", &e.to_string(), None);
    let value = |made: serde_json::Result<Value>| made.map_err(|e| engine::Error::engine(e.to_string()));
    let summary = match name {
        "pack" => {
            let request: PackRequest = serde_json::from_str(request).map_err(wrong)?;
            watched(py, progress, move || value(serde_json::to_value(engine::pack(&request)?)))?
        }
        "ptq" => {
            let request: QuantizeRequest = serde_json::from_str(request).map_err(wrong)?;
            watched(py, progress, move || engine::quantize(&request))?
        }
        "inspect" => {
            let request: InspectRequest = serde_json::from_str(request).map_err(wrong)?;
            watched(py, progress, move || engine::inspect(&request))?
        }
        "verify" => {
            let request: VerifyRequest = serde_json::from_str(request).map_err(wrong)?;
            watched(py, progress, move || value(serde_json::to_value(engine::verify(&request)?)))?
        }
        other => return Err(of_parts(py, 2, "usage", &format!("there is no conversion `{other}`"), None)),
    };
    Ok(summary.to_string())
}
