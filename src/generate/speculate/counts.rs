//! Numbers of draft tokens by what drafted them.

use serde::Serialize;

/// Source of draft tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drafter {
    /// Copies of passages of the text and of earlier texts.
    History,
    /// A small model.
    Small,
    /// A layer of multi-token prediction.
    Layer,
}

impl Drafter {
    /// All drafters, in the order of their declaration.
    pub const ALL: [Drafter; 3] = [Drafter::History, Drafter::Small, Drafter::Layer];

    /// Returns the name of the drafter in options, reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Drafter::History => "ngram",
            Drafter::Small => "draft",
            Drafter::Layer => "mtp",
        }
    }
}

/// Numbers of draft tokens of one drafter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DraftCount {
    /// Drafts, each of one or more tokens.
    pub drafts: usize,
    /// Tokens of the drafts, which were verified.
    pub tokens: usize,
    /// Tokens that were accepted.
    pub accepted: usize,
}

/// Numbers of draft tokens of all drafters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftCounts([DraftCount; Drafter::ALL.len()]);

impl DraftCounts {
    /// Counts a draft of `tokens` tokens, of which `accepted` were accepted.
    pub fn count(&mut self, drafter: Drafter, tokens: usize, accepted: usize) {
        let count = DraftCount { drafts: usize::from(tokens > 0), tokens, accepted };
        self.0[drafter as usize] = self.0[drafter as usize].plus(count);
    }

    /// Adds other numbers.
    pub fn add(&mut self, other: &DraftCounts) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, count)| *sum = sum.plus(count));
    }

    /// Returns the numbers of each drafter.
    pub fn each(&self) -> impl Iterator<Item = (Drafter, DraftCount)> {
        Drafter::ALL.into_iter().zip(self.0)
    }

    /// Returns the sums over all drafters.
    pub fn total(&self) -> DraftCount {
        self.0.into_iter().fold(DraftCount::default(), DraftCount::plus)
    }
}

impl DraftCount {
    fn plus(self, other: DraftCount) -> DraftCount {
        DraftCount {
            drafts: self.drafts + other.drafts,
            tokens: self.tokens + other.tokens,
            accepted: self.accepted + other.accepted,
        }
    }
}
