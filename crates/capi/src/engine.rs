//! Opening, describing and closing engines; tokens; adapters; counters.

use crate::border::{call, call_with, ids_out, is_calling, put, put_sized, sized, slice, string_out, text};
use crate::error::Failure;
use crate::types::{
    IEC_ABI_VERSION, IEC_ENGINE, IEC_USAGE, iec_engine, iec_ids, iec_metrics, iec_open_options, iec_str, iec_string,
};
use engine::{AdapterOptions, Engine, OpenOptions};
use serde_json::json;
use std::ptr;

/// Returns the version of the interface that the library has. It is at least IEC_ABI_VERSION of the header that a
/// program was compiled with, unless the library is older.
#[unsafe(no_mangle)]
pub extern "C" fn iec_abi_version() -> u32 {
    IEC_ABI_VERSION
}

/// Returns the version of the library, such as "0.1.0"; it lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn iec_version() -> *const std::ffi::c_char {
    const VERSION: &std::ffi::CStr =
        match std::ffi::CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no zeros"),
        };
    VERSION.as_ptr()
}

/// Opens a model: a pack, a checkpoint directory, a GGUF file, or ORG/NAME of a downloaded model. `options` may be
/// null.
/// `out` gets an engine for iec_engine_destroy().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_engine_open(
    model: iec_str,
    options: *const iec_open_options,
    out: *mut *mut iec_engine,
) -> i32 {
    call(|| {
        // SAFETY: the caller's duty.
        let (model, options) = unsafe { (text(model, "model")?, open_options(options)?) };
        // SAFETY: the caller's duty.
        unsafe { opened(Engine::open(model, &options)?, out) }
    })
}

/// Opens the small model that is embedded in the library, for examples and tests. `options` may be null. `out` gets an
/// engine for iec_engine_destroy().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_engine_open_embedded(options: *const iec_open_options, out: *mut *mut iec_engine) -> i32 {
    call(|| {
        // SAFETY: the caller's duty.
        let options = unsafe { open_options(options) }?;
        // SAFETY: the caller's duty.
        unsafe { opened(Engine::open_embedded(&options)?, out) }
    })
}

/// # Safety
/// `out` is null or valid for a write.
unsafe fn opened(engine: Engine, out: *mut *mut iec_engine) -> Result<(), Failure> {
    if out.is_null() {
        return Err(Failure::new(IEC_USAGE, "out: found null, expected a place for the result"));
    }
    let handle = Box::into_raw(Box::new(iec_engine { engine, last: Default::default() }));
    // SAFETY: not null; the rest is the caller's duty.
    unsafe { put(out, "out", || Ok(handle)) }
}

/// # Safety
/// `options` is null or valid for reads.
unsafe fn open_options(options: *const iec_open_options) -> Result<OpenOptions, Failure> {
    // SAFETY: the caller's duty.
    let Some(given) = (unsafe { sized(options, "options") })? else {
        return Ok(OpenOptions::default().with_caches(&|name| std::env::var_os(name))?);
    };
    // SAFETY: the caller's duty.
    let mut options = match unsafe { text(given.json, "options.json") }? {
        "" => OpenOptions::default(),
        text => OpenOptions::from_json(text)?,
    };
    if given.threads > 0 {
        options.threads = given.threads as usize;
    }
    if given.context > 0 {
        options.context = Some(given.context as usize);
    }
    Ok(options.with_caches(&|name| std::env::var_os(name))?)
}

/// Cancels all requests of an engine, and frees it. Null is fine. No other call with the engine may run; within a
/// callback of the engine it does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_engine_destroy(engine: *mut iec_engine) {
    if !engine.is_null() && !is_calling(engine) {
        // SAFETY: `opened` made it of a box.
        let engine = unsafe { Box::from_raw(engine) };
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(engine)));
    }
}

/// Describes the model as a JSON object: family, context, sizes, whether it has a chat template. Free `out` with
/// iec_string_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_engine_describe(engine: *const iec_engine, out: *mut iec_string) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { call_with(engine, |handle| put(out, "out", || Ok(string_out(as_json(&handle.engine.description()?)?)))) }
}

pub(crate) fn as_json(value: &impl serde::Serialize) -> Result<String, Failure> {
    serde_json::to_string(value).map_err(|e| Failure::new(IEC_ENGINE, e.to_string()))
}

/// Encodes a text; `special` other than 0 adds the special tokens of the tokenizer. Free `out` with iec_ids_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_tokenize(
    engine: *const iec_engine,
    input: iec_str,
    special: i32,
    out: *mut iec_ids,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe {
        call_with(engine, |handle| {
            put(out, "out", || Ok(ids_out(handle.engine.tokenize(text(input, "input")?, special != 0)?)))
        })
    }
}

/// Decodes `length` token ids; `skip_special` other than 0 leaves special tokens out. Free `out` with
/// iec_string_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_detokenize(
    engine: *const iec_engine,
    ids: *const u32,
    length: usize,
    skip_special: i32,
    out: *mut iec_string,
) -> i32 {
    // SAFETY: the caller's duty.
    unsafe {
        call_with(engine, |handle| {
            let text = handle.engine.detokenize(slice(ids, length, "ids")?, skip_special != 0)?;
            put(out, "out", || Ok(string_out(text)))
        })
    }
}

/// Loads an adapter (LoRA or DoRA of PEFT), which requests may name from then on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_adapter_load(engine: *const iec_engine, name: iec_str, path: iec_str, scale: f32) -> i32 {
    // SAFETY: the caller's duty.
    unsafe {
        call_with(engine, |handle| {
            let mut adapter = AdapterOptions::new(text(name, "name")?, text(path, "path")?);
            adapter.scale = scale;
            Ok(handle.engine.load_adapter(&adapter)?)
        })
    }
}

/// Removes an adapter that no request uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_adapter_unload(engine: *const iec_engine, name: iec_str) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { call_with(engine, |handle| Ok(handle.engine.unload_adapter(text(name, "name")?)?)) }
}

/// Returns the names of adapters as a JSON list. Free `out` with iec_string_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_adapter_list(engine: *const iec_engine, out: *mut iec_string) -> i32 {
    // SAFETY: the caller's duty.
    unsafe {
        call_with(engine, |handle| put(out, "out", || Ok(string_out(json!(handle.engine.adapters()?).to_string()))))
    }
}

/// Returns the counters of an engine. Set `struct_size` of `out` before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_get_metrics(engine: *const iec_engine, out: *mut iec_metrics) -> i32 {
    // SAFETY: the caller's duty.
    unsafe {
        call_with(engine, |handle| {
            let found = handle.engine.metrics();
            let metrics = iec_metrics {
                struct_size: 0,
                running: found.running,
                waiting: found.waiting,
                finished: found.finished,
                prompt_tokens: found.prompt_tokens,
                cached_tokens: found.cached_tokens,
                generated_tokens: found.generated_tokens,
                steps: found.steps,
                step_seconds: found.step_seconds,
            };
            put_sized(out, &metrics, "out")
        })
    }
}

/// Returns all counters of an engine as a JSON object. Free `out` with iec_string_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_get_metrics_json(engine: *const iec_engine, out: *mut iec_string) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { call_with(engine, |handle| put(out, "out", || Ok(string_out(as_json(&handle.engine.metrics())?)))) }
}

/// Returns all counters and histograms of an engine in the text format of Prometheus. Free `out` with
/// iec_string_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn iec_get_prometheus(engine: *const iec_engine, out: *mut iec_string) -> i32 {
    // SAFETY: the caller's duty.
    unsafe { call_with(engine, |handle| put(out, "out", || Ok(string_out(handle.engine.prometheus())))) }
}

/// Sets a pointer to null. Only for the initialization of results.
pub(crate) fn no_string() -> iec_string {
    iec_string { data: ptr::null_mut(), length: 0 }
}
