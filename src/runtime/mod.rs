//! How does an artifact answer? Weights are bound once, then tokens go in and logits come out.

pub mod cpu;
