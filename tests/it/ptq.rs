//! Tests of ptq.
