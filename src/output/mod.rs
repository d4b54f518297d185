//! Where output goes: files that appear complete or not at all, directories, and room on the disk.

mod atomic;
mod dir;
mod space;

pub use atomic::{AtomicFile, directory_of, sync_parent, write_atomically};
pub use dir::{OutDir, absolute, refuse_within};
pub use space::{free_bytes, occupied, require_space, reserve};
