//! Tests of inspect.
