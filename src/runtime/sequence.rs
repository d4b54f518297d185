//! Sequences, the state of texts, and what one call of the engine reads into them and returns.

use super::adapters::AdapterSet;
use super::device::Cache;

/// State of one text: the KV caches of the tokens read so far. A clone shares memory until one of the two reads more
/// tokens.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub(super) len: usize,
    /// KV cache of each device part.
    pub(super) caches: Vec<Cache>,
    /// True if the keys are rotated with the LongRoPE factors for texts beyond the original context length.
    pub(super) long: bool,
    /// Number of tokens that the text is known to reach, or 0.
    pub(super) expected: usize,
    /// All tokens read; kept only for models whose rotation depends on the text's length.
    pub(super) tokens: Vec<u32>,
    /// Adapters with which all tokens are computed.
    pub(crate) adapters: AdapterSet,
}

impl Sequence {
    /// Returns the number of tokens read.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Computes all tokens with these adapters.
    ///
    /// # Panics
    /// The sequence has read tokens already.
    pub fn adapt(&mut self, adapters: AdapterSet) {
        assert!(self.is_empty(), "adapters are chosen before the first token");
        self.adapters = adapters;
    }

    /// Returns true before the first token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Announces that the text will have at least `len` tokens, such as a prompt that is read in several steps. A
    /// model with LongRoPE then rotates the keys of a long text with the right factors from the first step on;
    /// otherwise, the step that passes the original context length reads all earlier tokens again.
    pub fn expect(&mut self, len: usize) {
        self.expected = len;
    }

    /// Drops all tokens from position `len` on, and the announced length.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.expected = 0;
        self.tokens.truncate(len);
        self.caches.iter_mut().for_each(|cache| cache.truncate(self.len));
    }
}

/// Tokens to be read into a sequence.
#[derive(Debug)]
pub struct Feed<'a> {
    /// Sequence that reads the tokens.
    pub sequence: &'a mut Sequence,
    /// Tokens to read; at least one.
    pub tokens: &'a [u32],
    /// Logits to return.
    pub want: Want,
}

impl Feed<'_> {
    /// Returns the number of rows of logits that the feed wants.
    pub fn rows(&self) -> usize {
        match self.want {
            Want::Nothing => 0,
            Want::Last => 1,
            Want::All => self.tokens.len(),
        }
    }
}

/// Selection of the logits that a feed gets back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// None: the tokens are part of a prompt, and more of it follows.
    Nothing,
    /// One row, after the last token.
    Last,
    /// One row per token.
    All,
}

/// Destination of the rows that the feeds of a step want. Rows are appended.
#[derive(Debug)]
pub enum Output<'a> {
    /// All logits: `(rows, vocab)`.
    Logits(&'a mut Vec<f32>),
    /// Only the `k` largest logits of each row with their tokens, in descending order.
    Best(usize, &'a mut Vec<Vec<(u32, f32)>>),
}
