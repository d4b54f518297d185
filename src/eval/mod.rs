//! Evaluation: perplexity, divergence, log-likelihoods and tasks, with figures comparable to those of other tools.
//!
//! [`windows`] divides a text as llama.cpp's perplexity tool does. [`perplexity()`] processes the windows with one
//! engine, [`divergence()`] with two side by side; both keep a few numbers per token but no logits. [`prediction`]
//! measures layers of multi-token prediction. [`likelihood`] scores continuations of a context, [`tasks`] evaluates
//! files of questions, and [`stats`] summarizes values.

pub mod divergence;
pub mod likelihood;
pub mod perplexity;
pub mod prediction;
pub mod stats;
pub mod tasks;
pub mod windows;

pub use divergence::{Divergence, Remembered, divergence};
pub use likelihood::{Likelihood, Request, likelihoods, rolling};
pub use perplexity::{Perplexity, perplexity};
pub use prediction::{DraftQuality, draft_quality};
pub use windows::Windows;
