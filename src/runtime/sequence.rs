//! Sequences, the states of texts, and what one call of the engine reads into them and returns.

use super::adapters::AdapterSet;
use super::state::{Cache, Piece};

/// State of one text: what the parts keep of the tokens read so far. A clone shares memory until one of the two reads
/// more tokens.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub(super) len: usize,
    /// Number of tokens that all parts hold. It is less than `len` if a part could only be rewound further back than
    /// was wanted; the engine then reads the tokens between again, before the next ones.
    pub(super) held: usize,
    /// State in each device part.
    pub(super) caches: Vec<Cache>,
    /// True if the keys are rotated with the LongRoPE factors for texts beyond the original context length.
    pub(super) long: bool,
    /// Number of tokens that the text is known to reach, or 0.
    pub(super) expected: usize,
    /// All tokens read; kept only for models that may have to read them again.
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
        self.restore(self.len.min(len));
    }

    /// Keeps what [`Sequence::truncate`] to the present length needs, so that it costs nothing.
    pub fn mark(&mut self) {
        self.caches.iter_mut().for_each(|cache| cache.contents_mut().mark());
    }

    /// Makes `len` tokens the text, all of which it had read, whatever the parts hold of them now.
    pub(super) fn restore(&mut self, len: usize) {
        (self.len, self.expected) = (len, 0);
        self.tokens.truncate(len);
        // Where one part has to go further back, all have to: each needs the tokens that the others read again.
        loop {
            let wanted = self.held.min(len);
            let reached = self.caches.iter_mut().map(|cache| cache.contents_mut().rewind(wanted));
            self.held = reached.min().unwrap_or(wanted);
            if self.held == wanted {
                break;
            }
        }
    }

    /// Returns the state of the text as far as it is held, and the number of its tokens.
    pub(crate) fn share(&self) -> (SharedState, usize) {
        let pages = self.caches.iter().map(|cache| cache.contents().pages()).collect();
        let snapshots = self.caches.iter().map(|cache| cache.contents().snapshot()).collect();
        (SharedState { pages, snapshots }, self.held)
    }

    /// Replaces the state by that of `tokens`, the beginning of another text.
    pub(super) fn adopt(&mut self, state: SharedState, tokens: usize) {
        for ((cache, pages), snapshot) in self.caches.iter_mut().zip(state.pages).zip(state.snapshots) {
            cache.contents_mut().adopt(pages, snapshot, tokens);
        }
        (self.len, self.held) = (tokens, tokens);
    }
}

/// State of the beginning of a text, shared by texts and the prefix cache.
#[derive(Debug, Default, Clone)]
pub(crate) struct SharedState {
    /// Pages of each part.
    pub pages: Vec<Vec<Piece>>,
    /// Memory of fixed size of each part, as it is after the last token; `None` for parts that have none.
    pub snapshots: Vec<Option<Piece>>,
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
    /// All logits of the rows that the feeds want, and the output of the final norm for every token of the feeds. Only
    /// for models whose last layers are on the CPU.
    Hidden {
        /// Logits: `(rows, vocab)`.
        logits: &'a mut Vec<f32>,
        /// Output of the final norm: `(tokens, hidden)`.
        hidden: &'a mut Vec<f32>,
    },
    /// Only the `k` largest logits of each row with their tokens, in descending order.
    Best(usize, &'a mut Vec<Vec<(u32, f32)>>),
}
