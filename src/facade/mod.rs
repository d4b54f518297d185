//! The names that other programs may rely on, re-exported at the root of the crate: an [`Engine`] that answers
//! requests, conversions, and errors. All of them are methods and functions over the modules of the library, which may
//! change at any time. The C ABI and the Python package are built on these names.

mod answer;
mod convert;
mod engine;
mod numbers;
mod options;
mod request;
mod stream;

pub use crate::host::metrics::EngineMetrics;
pub use answer::{Answer, Choice, FinishReason, TokenInfo, ToolUse, UsageCounts};
pub use convert::{
    InspectRequest, PackRequest, QuantizeRequest, VerifyRequest, VerifySummary, inspect, pack, quantize, verify,
    with_progress,
};
pub use engine::{Engine, ModelDescription};
pub use numbers::{Matrix, Pooling};
pub use options::{AdapterOptions, OpenOptions};
pub use request::{Request, RequestKind};
pub use stream::{CancelHandle, Delta, Stream, StreamEvent, StreamNext};
