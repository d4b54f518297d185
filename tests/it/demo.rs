//! Tests of demo.
