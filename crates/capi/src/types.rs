//! Structs that cross the border.

use std::ffi::{c_char, c_void};

/// Version of the interface. Functions and fields are only added within a version.
pub const IEC_ABI_VERSION: u32 = 1;

/// The call succeeded.
pub const IEC_OK: i32 = 0;
/// A file cannot be read or written, is damaged, or is not supported.
pub const IEC_FAILED: i32 = 1;
/// An argument or a field of a request is wrong.
pub const IEC_USAGE: i32 = 2;
/// The model is missing, unreadable or damaged.
pub const IEC_MODEL: i32 = 3;
/// A quality gate or a comparison refuses the result.
pub const IEC_REFUSED: i32 = 4;
/// The engine cannot run the model as asked, or has failed.
pub const IEC_ENGINE: i32 = 5;
/// The system refuses memory or threads.
pub const IEC_OUT_OF_MEMORY: i32 = 6;
/// A callback called a function with the engine that called it.
pub const IEC_REENTERED: i32 = 7;
/// The caller cancelled the work.
pub const IEC_CANCELLED: i32 = 130;

/// A request has the fields of `/v1/completions`.
pub const IEC_COMPLETION: i32 = 0;
/// A request has the fields of `/v1/chat/completions`.
pub const IEC_CHAT: i32 = 1;

/// An event has new text.
pub const IEC_EVENT_TEXT: i32 = 0;
/// An event has new reasoning before an answer.
pub const IEC_EVENT_REASONING: i32 = 1;
/// A call of a tool begins: `name`, `id`, `index`.
pub const IEC_EVENT_TOOL_CALL: i32 = 2;
/// More of the arguments of the call `index`: `text`.
pub const IEC_EVENT_TOOL_ARGUMENTS: i32 = 3;
/// A choice has ended: `finish`.
pub const IEC_EVENT_END: i32 = 4;

/// The model ended the text, or a stop text appeared.
pub const IEC_FINISH_STOP: i32 = 0;
/// The text has its largest number of tokens.
pub const IEC_FINISH_LENGTH: i32 = 1;
/// The model waits for the results of tools.
pub const IEC_FINISH_TOOL_CALLS: i32 = 2;
/// The caller cancelled the text.
pub const IEC_FINISH_CANCELLED: i32 = 3;

/// Progress is counted in items.
pub const IEC_UNIT_ITEMS: i32 = 0;
/// Progress is counted in bytes.
pub const IEC_UNIT_BYTES: i32 = 1;

/// The vector of a text is the hidden state of its last token.
pub const IEC_POOLING_LAST: i32 = 0;
/// The vector of a text is the mean of the hidden states of its tokens.
pub const IEC_POOLING_MEAN: i32 = 1;

/// Text of the caller, or of an event while its callback runs: UTF-8, not necessarily with a zero at the end. Null with
/// length 0 is the empty text.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct iec_str {
    /// First byte.
    pub data: *const c_char,
    /// Number of bytes.
    pub length: usize,
}

/// Text of the library, with a zero behind its last byte. Free it with iec_string_free().
#[repr(C)]
pub struct iec_string {
    /// First byte; null for no text.
    pub data: *mut c_char,
    /// Number of bytes without the zero.
    pub length: usize,
}

/// Token ids of the library. Free them with iec_ids_free().
#[repr(C)]
pub struct iec_ids {
    /// First id.
    pub data: *mut u32,
    /// Number of ids.
    pub length: usize,
}

/// Rows of numbers of the library, one behind the other. Free them with iec_matrix_free().
#[repr(C)]
pub struct iec_matrix {
    /// First number.
    pub values: *mut f32,
    /// Number of rows.
    pub rows: usize,
    /// Numbers of a row.
    pub columns: usize,
}

/// Options of iec_engine_open(). Zero all bytes, then set `struct_size`; zeros are defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct iec_open_options {
    /// sizeof(iec_open_options).
    pub struct_size: usize,
    /// Number of threads; 0 = one per physical core.
    pub threads: u32,
    /// Longest prompt with its answer in tokens; 0 = the model's maximum.
    pub context: u32,
    /// A JSON object with any option, by the names of the guide (docs/guide/c.md); empty = none.
    pub json: iec_str,
}

/// A token with its probability.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct iec_token {
    /// Id.
    pub id: u32,
    /// Natural logarithm of the probability; NaN if the request does not ask for it.
    pub logprob: f64,
    /// Most likely tokens at its place, most likely first.
    pub top: *const iec_candidate,
    /// Number of these.
    pub top_length: usize,
}

/// A token that is likely at a place.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct iec_candidate {
    /// Id.
    pub id: u32,
    /// Natural logarithm of the probability.
    pub logprob: f64,
}

/// Change of an answer. It and its texts are valid while the callback runs.
#[repr(C)]
pub struct iec_event {
    /// Size of the struct in this version of the library.
    pub struct_size: usize,
    /// IEC_EVENT_TEXT and so on.
    pub kind: i32,
    /// Number of the choice.
    pub choice: u32,
    /// New text, or new arguments of a call.
    pub text: iec_str,
    /// Number of a call in its choice.
    pub index: u32,
    /// Why the choice ended: IEC_FINISH_STOP and so on.
    pub finish: i32,
    /// Id of a call that begins.
    pub id: iec_str,
    /// Name of the function of a call that begins.
    pub name: iec_str,
    /// Tokens whose text the event shows.
    pub tokens: *const iec_token,
    /// Number of these.
    pub tokens_length: usize,
}

/// Receiver of events. A return value other than 0 cancels the request.
pub type iec_on_event = Option<unsafe extern "C" fn(user: *mut c_void, event: *const iec_event) -> i32>;

/// Receiver of progress: a part of the work has `done` of `total` units (IEC_UNIT_BYTES or IEC_UNIT_ITEMS). Several
/// threads call it, one after the other. A return value other than 0 cancels the work.
pub type iec_on_progress =
    Option<unsafe extern "C" fn(user: *mut c_void, label: iec_str, done: u64, total: u64, unit: i32) -> i32>;

/// A request for iec_generate(). Zero all bytes, then set `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct iec_request {
    /// sizeof(iec_request).
    pub struct_size: usize,
    /// IEC_COMPLETION or IEC_CHAT.
    pub kind: i32,
    /// A JSON object with the fields of the server's API, such as `{"prompt": "Once", "max_tokens": 32}`.
    pub json: iec_str,
    /// Receiver of events; may be null.
    pub on_event: iec_on_event,
    /// First argument of `on_event`.
    pub user: *mut c_void,
    /// Handle by which another thread may cancel the request; may be null.
    pub cancel: *const iec_cancel,
}

/// Counters of an engine since it was opened. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct iec_metrics {
    /// sizeof(iec_metrics).
    pub struct_size: usize,
    /// Texts that are computed.
    pub running: u64,
    /// Texts that wait.
    pub waiting: u64,
    /// Texts that ended.
    pub finished: u64,
    /// Tokens of the prompts of all texts that began.
    pub prompt_tokens: u64,
    /// Tokens of these prompts that came from the prefix cache.
    pub cached_tokens: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Steps of the model.
    pub steps: u64,
    /// Time of all steps in seconds.
    pub step_seconds: f64,
}

/// An opened model.
pub struct iec_engine {
    pub(crate) engine: engine::Engine,
    pub(crate) last: std::sync::Mutex<crate::error::LastError>,
}

/// Handle that cancels requests from other threads.
pub struct iec_cancel {
    pub(crate) state: std::sync::Mutex<crate::generate::Cancel>,
}
