//! dedup
