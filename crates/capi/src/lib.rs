//! C interface of `iec`: handles and plain structs over the promised names of the library.
//!
//! `include/iec.h` is made of this crate. All pointers of a caller are read in [`border`], which also catches panics and
//! keeps the last error; the other modules are functions of the header.
//!
//! # Safety
//! All functions of the header have the same duties for their caller: a pointer is null or valid for what the function
//! reads or writes, a handle is null or was returned by this library and not freed, and what a function was given is
//! not changed while it runs.

#![allow(non_camel_case_types)]
// One text for all functions, above.
#![allow(clippy::missing_safety_doc)]

mod border;
mod convert;
mod engine;
mod error;
mod generate;
mod numbers;
pub mod types;
