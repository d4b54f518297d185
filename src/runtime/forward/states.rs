//! State of texts on the CPU: keys and values in pages, and what recurrent layers remember of the tokens.
//!
//! The memory of a gated short convolution is its inputs at the last positions. A few more positions than the next one
//! needs are kept, so that rejected drafts can be taken back; the inputs at the last mark are kept, too.

use crate::error::Result;
use crate::model_config::{ModelConfig, Recurrent};
use crate::runtime::kv::{KvCache, Line, Page, PagePool};
use crate::runtime::state::{Cache, PageCounts, PartCache, Piece, PieceMemory, StatePool};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// Number of positions that can be taken back without a mark.
const BACK: usize = 16;

/// State of one text in the layers of a part on the CPU.
#[derive(Debug, Clone)]
pub struct CpuCache {
    /// Keys and values.
    pub kv: KvCache,
    /// Memory of recurrent layers.
    pub states: States,
}

/// Memory of one text in the recurrent layers of a part.
#[derive(Debug, Clone)]
pub struct States {
    /// One entry per layer; `None` for layers that are not recurrent.
    layers: Vec<Option<Window>>,
}

/// Inputs of a convolution at the last positions of a text.
#[derive(Debug, Clone)]
pub struct Window {
    /// Values per position.
    channels: usize,
    /// Earlier positions that the next one reads.
    reach: usize,
    /// Positions that were read.
    end: usize,
    /// Inputs at the last positions: `(reach + BACK or fewer, channels)`.
    rows: Vec<f32>,
    /// Number of positions at the last mark, and the inputs that the next position needed.
    mark: (usize, Vec<f32>),
}

/// Sizes of the memory of texts in the recurrent layers of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    /// Values per position, and earlier positions that are read, of each layer.
    layers: Vec<Option<[usize; 2]>>,
}

impl StateLayout {
    /// Returns the layout of some layers of a model.
    pub fn of(config: &ModelConfig, layers: Range<usize>) -> StateLayout {
        let sizes = |layer| match config.layer(layer).recurrent()? {
            Recurrent::ShortConv(conv) => Some([config.hidden, conv.width - 1]),
        };
        StateLayout { layers: layers.map(sizes).collect() }
    }

    /// Reports whether a text's memory has these sizes.
    pub fn is_of(&self, states: &States) -> bool {
        let sizes = states.layers.iter().map(|window| window.as_ref().map(|window| [window.channels, window.reach]));
        self.layers.iter().copied().eq(sizes)
    }

    /// Returns the bytes of a snapshot of all layers; 0 without recurrent layers.
    pub fn bytes(&self) -> usize {
        let numbers: usize = self.layers.iter().flatten().map(|[channels, reach]| channels * reach).sum();
        (numbers + usize::from(fills_lines(numbers))) * size_of::<f32>()
    }

    /// Returns the bytes that a text takes at most, besides its keys and values.
    pub fn text_bytes(&self) -> usize {
        let most = |[channels, reach]: &[usize; 2]| channels * (2 * reach + BACK) * size_of::<f32>();
        self.layers.iter().flatten().map(most).sum()
    }

    /// Returns the memory before the first token.
    fn start(&self) -> States {
        let window =
            |[channels, reach]: [usize; 2]| Window { channels, reach, end: 0, rows: Vec::new(), mark: (0, Vec::new()) };
        States { layers: self.layers.iter().map(|sizes| sizes.map(window)).collect() }
    }
}

/// Reports whether so many numbers take whole lines, as pages do. A snapshot then has one number more, so that its
/// length tells it from a page.
fn fills_lines(numbers: usize) -> bool {
    numbers > 0 && (numbers * size_of::<f32>()).is_multiple_of(size_of::<Line>())
}

impl Window {
    /// Writes the inputs at the `reach` positions before the next one to `rows`, with zeros before the first position.
    pub fn read(&self, rows: &mut Vec<f32>) {
        let kept = &self.rows[self.rows.len().saturating_sub(self.reach * self.channels)..];
        rows.resize(rows.len() + self.reach * self.channels - kept.len(), 0.0);
        rows.extend_from_slice(kept);
    }

    /// Adds the inputs of the next positions: `(positions, channels)`.
    pub fn push(&mut self, rows: &[f32]) {
        self.end += rows.len() / self.channels;
        let most = (self.reach + BACK) * self.channels;
        self.rows.extend_from_slice(&rows[rows.len().saturating_sub(most)..]);
        self.rows.drain(..self.rows.len().saturating_sub(most));
    }

    /// Returns the number of the first position whose input is kept.
    fn first(&self) -> usize {
        self.end - self.rows.len() / self.channels
    }

    /// Reports whether the memory after `len` positions is known.
    fn reaches(&self, len: usize) -> bool {
        len <= self.end && self.first() <= len.saturating_sub(self.reach)
    }

    fn truncate(&mut self, len: usize) {
        self.rows.truncate((len - self.first()) * self.channels);
        self.end = len;
        self.forget_later_mark();
    }

    fn replace(&mut self, end: usize, rows: Vec<f32>) {
        (self.end, self.rows) = (end, rows);
        self.forget_later_mark();
    }

    /// Drops a mark beyond the end: the tokens that will be read there are others.
    fn forget_later_mark(&mut self) {
        if self.mark.0 > self.end {
            self.mark = (0, Vec::new());
        }
    }
}

impl States {
    /// Returns the memory of a layer, which is recurrent.
    pub fn layer(&mut self, layer: usize) -> &mut Window {
        self.layers[layer].as_mut().expect("a recurrent layer")
    }

    fn windows(&mut self) -> impl Iterator<Item = &mut Window> {
        self.layers.iter_mut().flatten()
    }

    fn mark(&mut self) {
        for window in self.windows() {
            let kept = window.rows.len().saturating_sub(window.reach * window.channels);
            window.mark = (window.end, window.rows[kept..].to_vec());
        }
    }

    /// Goes back to at most `len` positions, as [`PartCache::rewind`] does.
    fn rewind(&mut self, len: usize) -> usize {
        // A step that failed has been read by the first layers only.
        let len = self.windows().map(|window| window.end).fold(len, usize::min);
        if self.windows().all(|window| window.reaches(len)) {
            self.windows().for_each(|window| window.truncate(len));
            return len;
        }
        let mark = self.windows().map(|window| window.mark.0).max().filter(|mark| *mark <= len).unwrap_or(0);
        let is_marked = self.windows().all(|window| window.mark.0 == mark);
        for window in self.windows() {
            match is_marked {
                true => window.replace(mark, window.mark.1.clone()),
                false => window.replace(0, Vec::new()),
            }
        }
        if is_marked { mark } else { 0 }
    }

    fn bytes(&mut self) -> Vec<u8> {
        let mut rows = Vec::new();
        self.windows().for_each(|window| window.read(&mut rows));
        if fills_lines(rows.len()) {
            rows.push(0.0);
        }
        bytemuck::cast_slice(&rows).to_vec()
    }

    /// Replaces the memory by that of a snapshot after `len` positions.
    fn adopt(&mut self, bytes: &[u8], len: usize) {
        let mut rest: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        for window in self.windows() {
            let later = rest.split_off(window.reach * window.channels);
            let rows = std::mem::replace(&mut rest, later);
            let zeros = window.reach.saturating_sub(len) * window.channels;
            window.replace(len, rows[zeros..].to_vec());
            window.mark = (0, Vec::new());
        }
    }
}

/// Memory of recurrent layers as bytes.
#[derive(Debug)]
struct Snapshot(Vec<u8>);

impl PieceMemory for Snapshot {
    fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        Ok(Cow::Borrowed(&self.0))
    }
}

impl CpuCache {
    /// Creates the state before the first token.
    pub fn new(pool: &CpuPool) -> CpuCache {
        CpuCache { kv: KvCache::new(&pool.pages), states: pool.states.start() }
    }
}

impl PartCache for CpuCache {
    fn clone_cache(&self) -> Cache {
        Cache::new(self.clone())
    }

    fn mark(&mut self) {
        self.states.mark();
    }

    fn rewind(&mut self, len: usize) -> usize {
        let len = self.states.rewind(len);
        self.kv.truncate(len)
    }

    fn pages(&self) -> Vec<Piece> {
        self.kv.pages().iter().map(Page::piece).collect()
    }

    fn snapshot(&self) -> Option<Piece> {
        let bytes = self.states.clone().bytes();
        (!bytes.is_empty()).then(|| Piece::new(Arc::new(Snapshot(bytes))))
    }

    fn adopt(&mut self, pages: Vec<Piece>, snapshot: Option<Piece>, len: usize) {
        self.kv.share(pages.into_iter().map(Page::from_piece).collect(), len);
        let snapshot = snapshot.map(Piece::memory::<Snapshot>);
        self.states.adopt(snapshot.as_ref().map_or(&[], |snapshot| &snapshot.0), len);
    }
}

/// Memory for the states of texts on the CPU.
#[derive(Debug, Clone)]
pub struct CpuPool {
    /// Pages of keys and values.
    pub pages: Arc<PagePool>,
    /// Sizes of the memory of recurrent layers.
    pub states: StateLayout,
}

impl StatePool for CpuPool {
    fn page_bytes(&self) -> u64 {
        self.pages.page_bytes()
    }

    fn snapshot_bytes(&self) -> u64 {
        self.states.bytes() as u64
    }

    fn most(&self) -> Option<usize> {
        self.pages.most()
    }

    fn counts(&self) -> PageCounts {
        self.pages.counts()
    }

    fn memory_left(&self) -> Option<u64> {
        self.pages.memory_left()
    }

    fn restore(&self, bytes: &[u8]) -> Result<Piece> {
        match bytes.len() == self.states.bytes() {
            true => Ok(Piece::new(Arc::new(Snapshot(bytes.to_vec())))),
            false => self.pages.restore(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    const CHANNELS: usize = 3;

    fn layout() -> StateLayout {
        StateLayout { layers: vec![None, Some([CHANNELS, 2]), Some([CHANNELS, 6])] }
    }

    /// Reads tokens, each the value of all inputs at its position, into all layers.
    fn read(states: &mut States, tokens: &[f32]) {
        for window in states.windows() {
            let rows: Vec<f32> = tokens.iter().flat_map(|token| [*token; CHANNELS]).collect();
            window.push(&rows);
        }
    }

    /// Checks that the next position would read the inputs of the tokens before it.
    fn check(states: &mut States, text: &[f32]) {
        for window in states.windows() {
            let mut rows = Vec::new();
            window.read(&mut rows);
            let token = |i: usize| (text.len() + i).checked_sub(window.reach).map_or(0.0, |position| text[position]);
            let expected: Vec<f32> = (0..window.reach).flat_map(|i| [token(i); CHANNELS]).collect();
            assert_eq!((rows, window.end), (expected, text.len()));
        }
    }

    #[test]
    fn any_sequence_of_steps_leaves_the_inputs_before_the_next_position() {
        let (mut rng, mut states, mut text, mut mark) = (Rng::new(5), layout().start(), Vec::new(), 0);
        // Rows are kept from the first number on, and back from the second.
        let (mut since, mut peak) = (0, 0);
        for _ in 0..5000 {
            match rng.next_u64() % 4 {
                0 => {
                    states.mark();
                    mark = text.len();
                }
                1 => {
                    let wanted = rng.next_u64() as usize % (text.len() + 1);
                    let left = states.rewind(wanted);
                    let is_kept = wanted >= since && peak - wanted <= BACK;
                    assert!(left == wanted || !is_kept && (left == 0 || left == mark), "{left} of {wanted}");
                    assert!(left <= wanted && (left >= mark || wanted < mark), "{left} of {wanted}, {mark}");
                    if left != wanted {
                        (since, peak) = (left, left);
                    }
                    text.truncate(left);
                    mark = if mark <= left { mark } else { 0 };
                }
                2 => {
                    let bytes = states.bytes();
                    assert_eq!(bytes.len(), layout().bytes());
                    states = layout().start();
                    states.adopt(&bytes, text.len());
                    (mark, since, peak) = (0, text.len(), text.len());
                }
                _ => {
                    let more = rng.next_u64() as usize % if rng.next_u64().is_multiple_of(8) { 90 } else { 5 };
                    let tokens: Vec<f32> = (0..more).map(|_| rng.next_f64() as f32).collect();
                    read(&mut states, &tokens);
                    text.extend(tokens);
                    peak = peak.max(text.len());
                }
            }
            check(&mut states, &text);
        }
    }

    #[test]
    fn no_snapshot_has_the_length_of_a_page() {
        for (channels, reach) in [(16, 1), (64, 2), (66, 2), (7, 6)] {
            let layout = StateLayout { layers: vec![Some([channels, reach])] };
            assert!(!layout.bytes().is_multiple_of(size_of::<Line>()));
            let mut states = layout.start();
            let bytes = states.bytes();
            assert_eq!(bytes.len(), layout.bytes());
            states.adopt(&bytes, 9);
            assert_eq!(states.layer(0).end, 9);
        }
    }

    #[test]
    fn a_step_that_only_some_layers_have_read_is_taken_back() {
        let (mut states, text) = (layout().start(), [0.5; 40]);
        read(&mut states, &text);
        states.mark();
        states.layer(1).push(&[7.0; 30 * CHANNELS]);
        assert_eq!(states.rewind(40), 40);
        check(&mut states, &text);
    }
}
