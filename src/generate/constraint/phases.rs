//! Constraints of some parts of a text only, such as the arguments of a call within an answer.
//!
//! Such a text is a sequence of phases. In a free phase every token is allowed, until a marker has been written; then a
//! phase with a grammar follows, until nothing can continue its text, and so on. A free phase costs nothing: it has no
//! mask, except where the next token could run beyond the end of a marker and so begin the following phase with a text
//! that its grammar does not know. These tokens are not allowed; the marker can be completed by a shorter token.

use super::ConstraintSource;
use super::vocabulary::Vocabulary;
use llguidance::Matcher;
use std::sync::Mutex;

/// Phases of a text. The first one is number 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phases(pub Vec<Phase>);

/// A part of a text, and what follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Any text until a marker.
    Free {
        /// True if the text may end in this phase.
        ends: bool,
        /// Markers, each with the number of the phase that follows it.
        markers: Vec<(Marker, usize)>,
    },
    /// A text of a grammar.
    Grammar {
        /// Grammar in the dialect of [`ConstraintSource::Grammar`](super::ConstraintSource::Grammar). It may name
        /// tokens by their ids, as `<[17]>`.
        lark: String,
        /// Numbers of the phases that may follow when nothing continues the text of the grammar: the first whose marker
        /// ends the text, or that has no marker. If there is none, the whole text is complete.
        exits: Vec<(Option<Marker>, usize)>,
    },
    /// A text of another constraint, with which the whole text is complete.
    Answer {
        /// The constraint.
        source: Box<ConstraintSource>,
        /// Part of a grammar, in the same dialect, that may stand before the text of the constraint.
        before: String,
        /// Markers that may stand at the beginning instead, each with the number of the phase that follows it.
        openings: Vec<(Marker, usize)>,
    },
}

impl Phase {
    /// Lets the phase lead to another one wherever it leads to `from`.
    pub fn redirect(&mut self, from: usize, to: usize) {
        let markers = match self {
            Phase::Free { markers, .. } => markers,
            Phase::Answer { openings, .. } => openings,
            Phase::Grammar { exits, .. } => {
                exits.iter_mut().filter(|(_, next)| *next == from).for_each(|(_, next)| *next = to);
                return;
            }
        };
        markers.iter_mut().filter(|(_, next)| *next == from).for_each(|(_, next)| *next = to);
    }
}

/// A text or a token that ends a phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marker {
    /// Text of the marker.
    pub text: String,
    /// Token of the marker, which need not have a text.
    pub token: Option<u32>,
    /// Place where the marker counts.
    pub place: MarkerPlace,
}

/// Place of a marker in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MarkerPlace {
    /// Any place.
    Anywhere,
    /// The beginning of the phase. White space before the marker, and within one of JSON, is ignored.
    Start,
}

/// A phase that is ready to be followed.
pub(super) enum Compiled {
    Free(Free),
    Grammar {
        /// Matcher at the beginning of the phase.
        initial: Box<Mutex<Matcher>>,
        /// Markers that may begin the phase instead of a text of the grammar.
        openings: Free,
        exits: Vec<(Option<Marker>, usize)>,
    },
}

/// Markers, and whether the text may end: a free phase, or what may stand in place of a grammar.
#[derive(Default)]
pub(super) struct Free {
    ends: bool,
    markers: Vec<Reader>,
}

/// Finds a marker in a text.
struct Reader {
    marker: Marker,
    next: usize,
    /// Length of the longest prefix of the marker that is also a proper suffix of its first `n` bytes, for each `n`.
    borders: Vec<usize>,
    /// For each number of bytes of a marker at any place that were written: tokens that begin with the others, and are
    /// longer. For 0: tokens that have the marker within. Those of a marker at the beginning are searched when they are
    /// needed, because there may be hundreds of such markers, which are out of the question after a few tokens.
    beyond: Vec<Vec<u32>>,
}

/// Number of bytes of a marker at the end of the text so far; `None` for a marker that can no longer begin.
pub(super) type Progress = Option<usize>;

/// Effect of a token on a marker.
enum Read {
    Progress(Progress),
    /// The token ends with the marker.
    Complete,
    /// The marker is followed by other bytes of the token.
    Beyond,
}

impl Free {
    pub(super) fn new(ends: bool, markers: &[(Marker, usize)], vocabulary: &Vocabulary) -> Free {
        let reader = |(marker, next): &(Marker, usize)| Reader::new(marker.clone(), *next, vocabulary);
        Free { ends, markers: markers.iter().map(reader).collect() }
    }

    /// Returns the progress of each marker at the beginning of the phase.
    pub(super) fn start(&self) -> Vec<Progress> {
        vec![Some(0); self.markers.len()]
    }

    /// Returns true if the text may end in this phase.
    pub(super) fn ends(&self) -> bool {
        self.ends
    }

    /// Returns the tokens that are not allowed.
    pub(super) fn forbidden(&self, progress: &[Progress], vocabulary: &Vocabulary) -> Vec<u32> {
        let readers = self.markers.iter().zip(progress);
        readers.flat_map(|(reader, progress)| reader.beyond(*progress, vocabulary)).collect()
    }

    /// Returns the tokens that begin or continue a marker at the beginning.
    pub(super) fn continuing(&self, progress: &[Progress], vocabulary: &Vocabulary) -> Vec<u32> {
        let readers = self.markers.iter().zip(progress);
        let begun = readers.filter_map(|(reader, progress)| Some((reader, (*progress)?)));
        begun.flat_map(|(reader, written)| reader.continuing(written, vocabulary)).collect()
    }

    /// Reads a token; returns the number of the next phase if the token ends with a marker.
    pub(super) fn read(&self, progress: &mut [Progress], id: u32, bytes: &[u8]) -> Option<usize> {
        let mut next = None;
        for (reader, progress) in self.markers.iter().zip(progress) {
            match reader.read(*progress, bytes) {
                _ if reader.is_token(*progress, id) => next = next.or(Some(reader.next)),
                Read::Complete => next = next.or(Some(reader.next)),
                Read::Progress(later) => *progress = later,
                // Such a token is not allowed, so the marker cannot have begun.
                Read::Beyond => *progress = None,
            }
        }
        next
    }
}

impl Reader {
    fn new(marker: Marker, next: usize, vocabulary: &Vocabulary) -> Reader {
        let text = marker.text.as_bytes();
        let mut borders = vec![0; text.len() + 1];
        for n in 2..=text.len() {
            let mut border = borders[n - 1];
            while border > 0 && text[border] != text[n - 1] {
                border = borders[border];
            }
            borders[n] = border + usize::from(text[border] == text[n - 1]);
        }
        let states = if marker.place == MarkerPlace::Anywhere { text.len() } else { 0 };
        let mut reader = Reader { marker, next, borders, beyond: vec![Vec::new(); states] };
        if states > 0 {
            vocabulary.tokens().for_each(|(id, bytes)| reader.add_beyond(id, bytes));
        }
        reader
    }

    /// Adds a token to the lists of those that run beyond the end of a marker at any place.
    fn add_beyond(&mut self, id: u32, bytes: &[u8]) {
        let text = self.marker.text.as_bytes();
        let Some(first) = bytes.first() else { return };
        for written in 0..text.len() {
            if bytes.len() + written <= text.len() || written > 0 && *first != text[written] {
                continue;
            }
            let is_beyond = match written {
                0 => matches!(self.read(Some(0), bytes), Read::Beyond),
                _ => bytes.starts_with(&text[written..]),
            };
            if is_beyond {
                self.beyond[written].push(id);
            }
        }
    }

    /// Returns the tokens that run beyond the end of the marker.
    fn beyond(&self, progress: Progress, vocabulary: &Vocabulary) -> Vec<u32> {
        let Some(written) = progress.filter(|_| !self.marker.text.is_empty()) else { return Vec::new() };
        if self.marker.place == MarkerPlace::Start {
            return self.following(written, vocabulary).1;
        }
        let longer = |written: &usize| (*written > 0).then(|| self.borders[*written]);
        let states = std::iter::successors(Some(written), longer);
        states.filter_map(|written| self.beyond.get(written)).flatten().copied().collect()
    }

    /// Returns the tokens that continue a marker at the beginning, or are it.
    fn continuing(&self, written: usize, vocabulary: &Vocabulary) -> Vec<u32> {
        let mut ids = match self.marker.text.is_empty() {
            true => Vec::new(),
            false => self.following(written, vocabulary).0,
        };
        ids.extend(self.marker.token.filter(|_| written == 0));
        ids
    }

    /// Searches the tokens that may follow when `written` bytes of a marker at the beginning were written: those that
    /// continue or complete it, and those that run beyond its end. White space is skipped.
    fn following(&self, written: usize, vocabulary: &Vocabulary) -> (Vec<u32>, Vec<u32>) {
        let (mut within, mut beyond) = (Vec::new(), Vec::new());
        // Tokens in the order of their bytes whose first `depth` bytes were read.
        let mut open = vec![(vocabulary.sorted(), 0, written)];
        while let Some((ids, depth, reached)) = open.pop() {
            let ends = ids.partition_point(|id| vocabulary.bytes(*id).len() <= depth);
            if reached > written {
                within.extend(&ids[..ends]);
            }
            let longer = &ids[ends..];
            let Some(next) = self.marker.text.as_bytes().get(reached) else {
                beyond.extend(longer);
                continue;
            };
            let spaces =
                b" \n\r\t\x0c".iter().filter(|space| self.skips(**space, reached)).map(|space| (*space, reached));
            for (byte, reached) in spaces.chain([(*next, reached + 1)]) {
                let begin = longer.partition_point(|id| vocabulary.bytes(*id)[depth] < byte);
                let end = longer.partition_point(|id| vocabulary.bytes(*id)[depth] <= byte);
                if begin < end {
                    open.push((&longer[begin..end], depth + 1, reached));
                }
            }
        }
        (within, beyond)
    }

    fn is_token(&self, progress: Progress, id: u32) -> bool {
        self.marker.token == Some(id) && (self.marker.place == MarkerPlace::Anywhere || progress == Some(0))
    }

    /// Returns true for white space that does not count: before a marker at the beginning, and within JSON.
    fn skips(&self, byte: u8, written: usize) -> bool {
        let within = written == 0 || self.marker.text.starts_with(['{', ';']);
        self.marker.place == MarkerPlace::Start && within && byte.is_ascii_whitespace()
    }

    fn read(&self, progress: Progress, bytes: &[u8]) -> Read {
        let text = self.marker.text.as_bytes();
        let Some(mut written) = progress.filter(|_| !text.is_empty()) else { return Read::Progress(progress) };
        for (i, byte) in bytes.iter().enumerate() {
            if self.skips(*byte, written) {
                continue;
            }
            while written > 0 && text[written] != *byte && self.marker.place == MarkerPlace::Anywhere {
                written = self.borders[written];
            }
            match text[written] == *byte {
                true => written += 1,
                false if self.marker.place == MarkerPlace::Start => return Read::Progress(None),
                false => {}
            }
            if written == text.len() {
                return if i + 1 == bytes.len() { Read::Complete } else { Read::Beyond };
            }
        }
        Read::Progress(Some(written))
    }
}

/// Returns the phase that follows a grammar whose last token was `id`, and whose last bytes are `tail`.
pub(super) fn exit(exits: &[(Option<Marker>, usize)], id: u32, tail: &[u8]) -> Option<usize> {
    let is_met =
        |marker: &Marker| marker.token == Some(id) || !marker.text.is_empty() && tail.ends_with(marker.text.as_bytes());
    exits.iter().find(|(marker, _)| marker.as_ref().is_none_or(is_met)).map(|(_, next)| *next)
}

/// Returns the largest number of bytes at the end of a text that [`exit`] reads.
pub(super) fn exit_bytes(exits: &[(Option<Marker>, usize)]) -> usize {
    exits.iter().filter_map(|(marker, _)| Some(marker.as_ref()?.text.len())).max().unwrap_or(0)
}
