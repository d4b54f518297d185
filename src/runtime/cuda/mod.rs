//! The same artifacts on NVIDIA GPUs.
//!
//! Nothing links against CUDA: [`driver`] looks for it when a GPU is asked for, `context` takes a device into use and
//! loads the kernels, which were compiled to PTX when they were written (`kernels/`, `scripts/ptx.sh`). `weights`
//! brings layers to the device in the pack's layout, `kv` holds keys and values there, `part` walks through the layers
//! of one device by the launches of `ops`, and [`gpus`] passes the residual stream from the CPU's layers through the
//! devices.

pub(crate) mod args;
pub(crate) mod array;
pub(crate) mod attend;
pub(crate) mod best;
pub(crate) mod context;
pub(crate) mod driver;
pub(super) mod gpus;
mod input;
pub(crate) mod kv;
pub(crate) mod multiply;
pub(crate) mod ops;
mod part;
pub(crate) mod scratch;
pub(crate) mod weights;
