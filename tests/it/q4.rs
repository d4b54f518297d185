//! Tests of q4.
