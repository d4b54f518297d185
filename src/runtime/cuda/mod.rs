//! Runs models on NVIDIA GPUs, from the same packs as on the CPU.
//!
//! Nothing links against CUDA. [`driver`] loads the driver library when a GPU is requested, and `context` opens a
//! device and loads the kernels, which are stored as PTX in the repository (`kernels/`, `scripts/ptx.sh`).
//! `weights` uploads layers to the device in the layout of the pack file, `kv` holds the keys and values there,
//! `adapters` holds the changes of adapters, `part` computes the layers of one device by the launches of `ops`, block
//! by block (`blocks`), and [`gpus`] assigns layers to devices.

pub(crate) mod adapters;
pub(crate) mod args;
pub(crate) mod array;
pub(crate) mod attend;
pub(crate) mod best;
mod blocks;
pub(crate) mod context;
pub(crate) mod driver;
pub(super) mod gpus;
pub(crate) mod heads;
mod input;
pub(crate) mod kind;
pub(crate) mod kv;
pub(crate) mod low_rank;
mod mixers;
pub(crate) mod multiply;
pub(crate) mod ops;
mod part;
pub(crate) mod recurrent;
pub(crate) mod scratch;
pub(crate) mod states;
pub(crate) mod weights;
