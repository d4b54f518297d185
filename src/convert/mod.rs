//! How does a Hugging Face checkpoint become an artifact?

pub mod synth;
