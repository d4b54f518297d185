//! How well does an artifact answer? Figures that other tools can be asked for, too.
//!
//! [`windows`] cuts a text as llama.cpp's perplexity tool does; [`perplexity()`] and [`divergence()`] walk the windows
//! through one engine or through two side by side, keeping a few numbers per token and no logits; [`likelihood`] scores
//! what may follow a context; [`tasks`] asks files of questions; [`stats`] sums up.

pub mod divergence;
pub mod likelihood;
pub mod perplexity;
pub mod stats;
pub mod tasks;
pub mod windows;

pub use divergence::{Divergence, Remembered, divergence};
pub use likelihood::{Likelihood, Request, likelihoods, rolling};
pub use perplexity::{Perplexity, perplexity};
pub use windows::Windows;
