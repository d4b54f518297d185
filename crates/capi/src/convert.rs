//! Conversions.

use crate::border::{borrowed, call, put, string_out, text};
use crate::engine::as_json;
use crate::error::Failure;
use crate::types::{IEC_UNIT_BYTES, IEC_UNIT_ITEMS, IEC_USAGE, iec_on_progress, iec_str, iec_string};
use engine::{Progress, Unit};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// Argument of a callback, which threads of the library pass on one after the other.
struct User(*mut c_void);
// SAFETY: the caller allows that threads of the library pass the pointer to the callback; a lock lets one at a time.
unsafe impl Send for User {}

/// Reads a request, does its work with progress, and writes the summary.
///
/// # Safety
/// Pointers are null or valid.
unsafe fn convert<T: DeserializeOwned, R: Serialize>(
    request: iec_str,
    on_progress: iec_on_progress,
    user: *mut c_void,
    out: *mut iec_string,
    work: fn(&T) -> engine::Result<R>,
) -> i32 {
    call(|| {
        // SAFETY: the caller's duty.
        let request = unsafe { text(request, "request") }?;
        let request = serde_json::from_str(request).map_err(|e| Failure::new(IEC_USAGE, format!("request: {e}")))?;
        let user = Mutex::new(User(user));
        let observer = move |progress: Progress<'_>| {
            let (Some(on_progress), Progress::Advanced { label, done, total, unit }) = (on_progress, progress) else {
                return true;
            };
            let unit = if unit == Unit::Bytes { IEC_UNIT_BYTES } else { IEC_UNIT_ITEMS };
            let user = user.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: the caller's duty.
            unsafe { on_progress(user.0, borrowed(label), done, total, unit) == 0 }
        };
        let summary = engine::with_progress(observer, || work(&request))?;
        match out.is_null() {
            true => Ok(()),
            // SAFETY: not null; the rest is the caller's duty.
            false => unsafe { put(out, "out", || Ok(string_out(as_json(&summary)?))) },
        }
    })
}

/// Packs a model: `request` is a JSON object with `model`, `out_dir`, and options such as `bits` (docs/guide/c.md).
/// `out`, if it is not null, gets the summary as JSON for iec_string_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_pack(
    request: iec_str,
    on_progress: iec_on_progress,
    user: *mut c_void,
    out: *mut iec_string,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { convert(request, on_progress, user, out, engine::pack) }
}

/// Quantizes a model on trial and writes a manifest for iec_pack(): `request` is a JSON object with `model`, `out`, and
/// options such as `bits` or `target_bpw`. `out`, if it is not null, gets the summary as JSON for iec_string_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_quantize(
    request: iec_str,
    on_progress: iec_on_progress,
    user: *mut c_void,
    out: *mut iec_string,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { convert(request, on_progress, user, out, engine::quantize) }
}

/// Describes a pack, a checkpoint, a weight file or a manifest: `request` is a JSON object with `path`, and `tensors`
/// or
/// `stats`. `out` gets a JSON object for iec_string_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_inspect(
    request: iec_str,
    on_progress: iec_on_progress,
    user: *mut c_void,
    out: *mut iec_string,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { convert(request, on_progress, user, out, engine::inspect) }
}

/// Compares the tensors and files of a pack with their recorded hashes: `request` is a JSON object with `pack`, and
/// `key` for its signature. `out` gets a JSON object with `differences` for iec_string_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_verify(
    request: iec_str,
    on_progress: iec_on_progress,
    user: *mut c_void,
    out: *mut iec_string,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { convert(request, on_progress, user, out, engine::verify) }
}
