//! Tests of pack.
