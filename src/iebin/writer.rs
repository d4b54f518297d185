//! Writes an artifact that can never be half there.
