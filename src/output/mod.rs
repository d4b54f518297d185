//! Writes output files. All output of the program goes through this module.
//!
//! A command checks the location of its output before it starts to work: [`Target::check`] for a file that the user
//! named, [`refuse_within`], [`Inputs::refuse_members`] and [`require_space`] for a directory. Files then appear
//! complete or not at all:
//!
//! ```
//! # let dir = tempfile::tempdir().unwrap();
//! # let path = dir.path().join("report.json");
//! use iec::output::{Inputs, Rules, Target};
//! let target = Target::check(&path, Rules { overwrite: false, inputs: &Inputs::default(), stdout: false })?;
//! // … the work …
//! target.write(b"{}\n")?;
//! # iec::Result::Ok(())
//! ```
//!
//! | the name stands for | what happens |
//! |---|---|
//! | nothing yet | a temporary file in the same directory, synced and renamed |
//! | a regular file | the same with `overwrite`; refused without, even if it appears during the work |
//! | a symbolic link | the same, for the file that the link leads to |
//! | a device, a pipe, a descriptor (`/dev/fd/N`, `/dev/stdout`), `-` | it is opened and written to |
//! | a directory, a socket | refused |
//! | an input of the same command, a member of a pack or checkpoint that it reads | refused |
//!
//! Several files that the user named are checked and written by [`Together`], so that an interrupted command can be
//! repeated. Files of packs and checkpoints have names that the user did not choose; [`AtomicFile`] replaces only
//! regular files there. The module `iebin` decides which packs may not be replaced because others are rebuilt from
//! them.

mod atomic;
mod blocks;
mod dir;
mod exchange;
mod inputs;
mod json_lines;
mod lease;
mod lock;
mod paths;
mod space;
pub mod stale;
pub mod swap;
mod target;
mod together;

pub use atomic::{AtomicFile, refuse_special, sync_dir, sync_parent, write_atomically};
pub use dir::{OutDir, make_absolute, make_dir, refuse_within};
pub use exchange::{exchange, refuse_irreplaceable};
pub use inputs::Inputs;
pub use json_lines::JsonLines;
pub use lease::Lease;
pub use lock::{DirLock, LockedFile, lock};
pub use paths::{directory_of, remove_if_there};
pub use space::{free_bytes, occupied, require_space, reserve};
pub use target::{Rules, Target};
pub use together::Together;

use serde::Serialize;

/// Returns the bytes of an indented JSON file with a newline at the end.
pub fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("plain data always serializes");
    text.push(b'\n');
    text
}
