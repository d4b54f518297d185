//! Tests of bench.
