//! Requests: events, whole answers, cancellation.

use crate::border::{borrowed, call_with, ids_out, in_callback, put, shared, sized, string_out, text};
use crate::engine::{as_json, no_string};
use crate::error::Failure;
use crate::types::*;
use engine::{CancelHandle, Delta, FinishReason, Request, RequestKind, StreamEvent, TokenInfo};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// State of a handle that cancels.
#[derive(Default)]
pub(crate) struct Cancel {
    is_cancelled: bool,
    /// Requests that run with the handle.
    running: Vec<(usize, CancelHandle)>,
    /// Number of requests so far.
    count: usize,
}

/// Answers a request. Its events are passed to `on_event` on this thread, and `out`, if it is not null, gets the whole
/// answer as a JSON object for iec_string_free(). A request that was cancelled returns IEC_CANCELLED, and `out` gets
/// the answer so far.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_generate(
    engine: *const iec_engine,
    request: *const iec_request,
    out: *mut iec_string,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe {
        call_with(engine, |handle| {
            if !out.is_null() {
                put(out, "out", || Ok(no_string()))?;
            }
            let (given, request) = read(request)?;
            generate(handle, &given, &request, out)
        })
    }
}

/// # Safety
/// `out` is null or valid for a write, and the request of the caller is valid.
unsafe fn generate(
    handle: &iec_engine,
    given: &iec_request,
    request: &Request,
    out: *mut iec_string,
) -> Result<(), Failure> {
    // Without a receiver of events, the best of several texts may be chosen at the end.
    let request = match given.on_event {
        Some(_) => request,
        None => &request.clone().field("stream", false),
    };
    let mut stream = handle.engine.stream(request)?;
    let canceller = stream.cancel_handle();
    // SAFETY: the caller's duty.
    let cancel = unsafe { shared(given.cancel) };
    let _running = cancel.map(|cancel| Running::begin(cancel, &canceller));
    let (mut receiver, mut is_cancelled) = (given.on_event, false);
    for event in stream.by_ref() {
        let event = event?;
        is_cancelled |= event.delta == Delta::End(FinishReason::Cancelled);
        if let Some(on_event) = receiver {
            // SAFETY: the caller's duty; the event lives until the callback has returned.
            let wants_end = with_event(&event, |event| in_callback(handle, || unsafe { on_event(given.user, event) }));
            if wants_end != 0 {
                canceller.cancel();
                (receiver, is_cancelled) = (None, true);
            }
        }
    }
    if !out.is_null() {
        // SAFETY: the caller's duty.
        unsafe { put(out, "out", || Ok(string_out(as_json(&stream.into_answer())?))) }?;
    }
    match is_cancelled {
        true => Err(Failure::new(IEC_CANCELLED, "the request was cancelled")),
        false => Ok(()),
    }
}

/// # Safety
/// `request` is null or valid.
unsafe fn read(request: *const iec_request) -> Result<(iec_request, Request), Failure> {
    // SAFETY: the caller's duty.
    let given = unsafe { sized(request, "request") }?;
    let given = given.ok_or_else(|| Failure::new(IEC_USAGE, "request: found null"))?;
    let kind = match given.kind {
        IEC_COMPLETION => RequestKind::Completion,
        IEC_CHAT => RequestKind::Chat,
        kind => {
            let message = format!("request.kind: found {kind}, expected IEC_COMPLETION or IEC_CHAT");
            return Err(Failure::new(IEC_USAGE, message));
        }
    };
    // SAFETY: the caller's duty.
    let request = Request::from_json(kind, unsafe { text(given.json, "request.json") }?)?;
    Ok((given, request))
}

/// Returns the token ids of the prompt that a request has. Free `out` with iec_ids_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_prompt_ids(
    engine: *const iec_engine,
    request: *const iec_request,
    out: *mut iec_ids,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { call_with(engine, |handle| put(out, "out", || Ok(ids_out(handle.engine.prompt_ids(&read(request)?.1)?)))) }
}

/// Passes an event in the form of the header.
fn with_event<T>(event: &StreamEvent, pass: impl FnOnce(&iec_event) -> T) -> T {
    let candidates: Vec<Vec<iec_candidate>> = event.tokens.iter().map(candidates).collect();
    let token = |(token, top): (&TokenInfo, &Vec<iec_candidate>)| iec_token {
        id: token.id,
        logprob: token.logprob.unwrap_or(f64::NAN),
        top: top.as_ptr(),
        top_length: top.len(),
    };
    let tokens: Vec<iec_token> = event.tokens.iter().zip(&candidates).map(token).collect();
    let nothing = iec_str { data: ptr::null(), length: 0 };
    let empty = iec_event {
        struct_size: size_of::<iec_event>(),
        kind: IEC_EVENT_END,
        choice: event.choice as u32,
        text: nothing,
        index: 0,
        finish: IEC_FINISH_STOP,
        id: nothing,
        name: nothing,
        tokens: tokens.as_ptr(),
        tokens_length: tokens.len(),
    };
    let event = match &event.delta {
        Delta::Text(text) => iec_event { kind: IEC_EVENT_TEXT, text: borrowed(text), ..empty },
        Delta::Reasoning(text) => iec_event { kind: IEC_EVENT_REASONING, text: borrowed(text), ..empty },
        Delta::ToolCall { index, id, name } => {
            let (id, name) = (borrowed(id), borrowed(name));
            iec_event { kind: IEC_EVENT_TOOL_CALL, index: *index as u32, id, name, ..empty }
        }
        Delta::ToolArguments { index, text } => {
            iec_event { kind: IEC_EVENT_TOOL_ARGUMENTS, index: *index as u32, text: borrowed(text), ..empty }
        }
        Delta::End(reason) => iec_event { finish: finish(*reason), ..empty },
        _ => empty,
    };
    pass(&event)
}

fn candidates(token: &TokenInfo) -> Vec<iec_candidate> {
    token.top.iter().map(|(id, logprob)| iec_candidate { id: *id, logprob: *logprob }).collect()
}

fn finish(reason: FinishReason) -> i32 {
    match reason {
        FinishReason::Length => IEC_FINISH_LENGTH,
        FinishReason::ToolCalls => IEC_FINISH_TOOL_CALLS,
        FinishReason::Cancelled => IEC_FINISH_CANCELLED,
        _ => IEC_FINISH_STOP,
    }
}

/// Creates a handle that cancels requests from other threads. Free it with iec_cancel_free().
#[unsafe(no_mangle)]
pub extern "C" fn iec_cancel_new() -> *mut iec_cancel {
    Box::into_raw(Box::new(iec_cancel { state: Mutex::default() }))
}

/// Cancels all requests that run with the handle, and those that begin with it later. A callback may call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_cancel_requests(cancel: *const iec_cancel) {
    // SAFETY: the caller's duty.
    if let Some(cancel) = unsafe { shared(cancel) } {
        let mut state = lock(cancel);
        state.is_cancelled = true;
        state.running.iter().for_each(|(_, handle)| handle.cancel());
    }
}

/// Frees a handle that no request uses. Null is fine.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_cancel_free(cancel: *mut iec_cancel) {
    if !cancel.is_null() {
        // SAFETY: `iec_cancel_new` made it of a box.
        drop(unsafe { Box::from_raw(cancel) });
    }
}

fn lock(cancel: &iec_cancel) -> MutexGuard<'_, Cancel> {
    cancel.state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A request that runs with a handle, until it is dropped.
struct Running<'a> {
    cancel: &'a iec_cancel,
    number: usize,
}

impl<'a> Running<'a> {
    fn begin(cancel: &'a iec_cancel, handle: &CancelHandle) -> Running<'a> {
        let mut state = lock(cancel);
        if state.is_cancelled {
            handle.cancel();
        }
        let number = state.count;
        state.count += 1;
        state.running.push((number, handle.clone()));
        Running { cancel, number }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        lock(self.cancel).running.retain(|(number, _)| *number != self.number);
    }
}
