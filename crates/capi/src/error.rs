//! Last errors, of each thread and of each engine.

use crate::border::{self, string_out};
use crate::types::{IEC_CANCELLED, IEC_FAILED, IEC_OK, iec_engine, iec_string};
use std::cell::RefCell;
use std::sync::PoisonError;

/// Message and advice of an error.
#[derive(Debug, Clone, Default)]
pub(crate) struct LastError {
    pub message: String,
    pub help: String,
}

thread_local! {
    static LAST: RefCell<LastError> = RefCell::default();
}

/// A failure on its way to the caller.
#[derive(Debug)]
pub(crate) struct Failure {
    pub status: i32,
    pub error: LastError,
}

impl Failure {
    pub(crate) fn new(status: i32, message: impl Into<String>) -> Failure {
        Failure { status, error: LastError { message: message.into(), help: String::new() } }
    }
}

impl From<engine::Error> for Failure {
    fn from(error: engine::Error) -> Failure {
        let status = match error.is_interrupt() {
            true => IEC_CANCELLED,
            false => i32::from(error.cause().exit_code()).max(IEC_FAILED),
        };
        let help = error.help_text().unwrap_or_default().to_string();
        Failure { status, error: LastError { message: error.to_string(), help } }
    }
}

/// Keeps the error of a call, and returns its status.
pub(crate) fn keep(result: Result<(), Failure>, engine: Option<&iec_engine>) -> i32 {
    let Err(Failure { status, error }) = result else { return IEC_OK };
    if let Some(engine) = engine {
        *engine.last.lock().unwrap_or_else(PoisonError::into_inner) = error.clone();
    }
    LAST.set(error);
    status
}

/// Returns the message of the last call of this thread that failed, or an empty text. Free it with iec_string_free().
#[unsafe(no_mangle)]
pub extern "C" fn iec_last_error() -> iec_string {
    LAST.with_borrow(|last| string_out(last.message.clone()))
}

/// Returns the advice about the last call of this thread that failed, or an empty text. Free it with iec_string_free().
#[unsafe(no_mangle)]
pub extern "C" fn iec_last_help() -> iec_string {
    LAST.with_borrow(|last| string_out(last.help.clone()))
}

/// Returns the message of the last call of any thread with this engine that failed, or an empty text. Free it with
/// iec_string_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_engine_last_error(engine: *const iec_engine) -> iec_string {
    // SAFETY: the caller's duty.
    let engine = unsafe { border::shared(engine) };
    let message = engine.map(|engine| engine.last.lock().unwrap_or_else(PoisonError::into_inner).message.clone());
    string_out(message.unwrap_or_default())
}
