//! State of texts on the CPU: keys and values in pages, and what recurrent layers remember of the tokens.

pub mod folded;
pub mod window;

use crate::error::Result;
use crate::model_config::{ModelConfig, Recurrent};
use crate::runtime::kv::{KvCache, Line, Page, PagePool};
use crate::runtime::state::{Cache, PageCounts, PartCache, Piece, PieceMemory, StatePool};
use folded::{Folded, FoldedSizes, Kept, padded};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use window::Window;

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
    layers: Vec<Option<LayerState>>,
}

/// Memory of one text in a recurrent layer.
#[derive(Debug, Clone)]
pub struct LayerState {
    /// Inputs of the convolution.
    pub window: Window,
    /// Sums of products of keys and values, in mixers that have them.
    pub folded: Option<Folded>,
}

/// Sizes of the memory of a text in a recurrent layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LayerSizes {
    /// Inputs of the convolution per position.
    channels: usize,
    /// Earlier positions that the convolution reads.
    reach: usize,
    folded: Option<FoldedSizes>,
}

/// Sizes of the memory of texts in the recurrent layers of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    layers: Vec<Option<LayerSizes>>,
}

impl LayerSizes {
    fn of(mixer: &Recurrent, hidden: usize) -> LayerSizes {
        let folded = |groups, per_group, key, value| Some(FoldedSizes { groups, per_group, key, value: padded(value) });
        match mixer {
            Recurrent::ShortConv(conv) => LayerSizes { channels: hidden, reach: conv.width - 1, folded: None },
            Recurrent::GatedDeltaNet(net) => LayerSizes {
                channels: net.channels(),
                reach: net.width - 1,
                folded: folded(net.key_heads, net.per_key(), net.key_dim, net.value_dim),
            },
            Recurrent::Mamba2(mamba) => LayerSizes {
                channels: mamba.channels(),
                reach: mamba.width - 1,
                folded: folded(mamba.groups, mamba.heads / mamba.groups, mamba.state, mamba.head_dim),
            },
        }
    }

    /// Returns the number of values of a snapshot.
    fn snapshot_values(&self) -> usize {
        let folded = self.folded.map_or(0, |sizes| sizes.matrix_values() + sizes.row_values());
        self.channels * self.reach + folded
    }

    /// Returns the largest number of values of a text: sums before and after a border, and those of its last snapshot.
    fn most_values(&self) -> usize {
        let folded = self.folded.map_or(0, |sizes| 3 * (sizes.matrix_values() + sizes.row_values()));
        Window::most_values(self.channels, self.reach) + folded
    }

    /// Returns the memory before the first token.
    fn start(&self) -> LayerState {
        LayerState { window: Window::new(self.channels, self.reach), folded: self.folded.map(Folded::new) }
    }
}

impl StateLayout {
    /// Returns the layout of some layers of a model.
    pub fn of(config: &ModelConfig, layers: Range<usize>) -> StateLayout {
        let sizes = |layer| Some(LayerSizes::of(config.layer(layer).recurrent()?, config.hidden));
        StateLayout { layers: layers.map(sizes).collect() }
    }

    /// Reports whether a text's memory has these sizes.
    pub fn is_of(&self, states: &States) -> bool {
        let sizes = |state: &LayerState| {
            let [channels, reach] = state.window.sizes();
            LayerSizes { channels, reach, folded: state.folded.as_ref().map(Folded::sizes) }
        };
        self.layers.iter().copied().eq(states.layers.iter().map(|state| state.as_ref().map(sizes)))
    }

    /// Returns the bytes of a snapshot of all layers; 0 without recurrent layers.
    pub fn bytes(&self) -> usize {
        let values: usize = self.layers.iter().flatten().map(LayerSizes::snapshot_values).sum();
        (values + usize::from(fills_lines(values))) * size_of::<f32>()
    }

    /// Returns the bytes that a text takes at most, besides its keys and values.
    pub fn text_bytes(&self) -> usize {
        self.layers.iter().flatten().map(|sizes| sizes.most_values() * size_of::<f32>()).sum()
    }

    /// Returns the memory before the first token.
    fn start(&self) -> States {
        States { layers: self.layers.iter().map(|sizes| sizes.as_ref().map(LayerSizes::start)).collect() }
    }

    /// Returns the snapshot with these bytes.
    fn snapshot(&self, bytes: &[u8]) -> Snapshot {
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let mut rest = &values[..];
        let layer = |sizes: &LayerSizes| {
            let (inputs, behind) = rest.split_at(sizes.channels * sizes.reach);
            rest = behind;
            let folded = sizes.folded.map(|sizes| {
                let (kept, behind) = Kept::from_values(&sizes, rest);
                rest = behind;
                kept
            });
            LayerSnapshot { inputs: inputs.to_vec(), folded }
        };
        Snapshot { layers: self.layers.iter().flatten().map(layer).collect() }
    }
}

/// Reports whether so many numbers take whole lines, as pages do. A snapshot then has one number more, so that its
/// length tells it from a page.
fn fills_lines(numbers: usize) -> bool {
    numbers > 0 && (numbers * size_of::<f32>()).is_multiple_of(size_of::<Line>())
}

impl LayerState {
    fn end(&self) -> usize {
        self.window.end()
    }

    fn mark(&mut self) {
        self.window.mark();
        self.folded.iter_mut().for_each(Folded::mark);
    }

    /// Reports whether the memory after `len` positions is known.
    fn reaches(&self, len: usize) -> bool {
        self.window.reaches(len) && self.folded.as_ref().is_none_or(|folded| folded.reaches(len))
    }

    fn truncate(&mut self, len: usize) {
        self.window.truncate(len);
        self.folded.iter_mut().for_each(|folded| folded.truncate(len));
    }

    /// Reports whether the memory at the mark, after `len` positions, is known.
    fn is_marked(&self, len: usize) -> bool {
        self.window.marked() == len && self.folded.as_ref().is_none_or(|folded| folded.reaches(len))
    }

    fn return_to_mark(&mut self) {
        self.window.return_to_mark();
        let len = self.end();
        self.folded.iter_mut().for_each(|folded| folded.truncate(len));
    }

    /// Forgets all positions.
    fn clear(&mut self) {
        let [channels, reach] = self.window.sizes();
        self.window = Window::new(channels, reach);
        self.folded.iter_mut().for_each(|folded| *folded = Folded::new(folded.sizes()));
    }

    fn snapshot(&self) -> LayerSnapshot {
        let mut inputs = Vec::new();
        self.window.read(&mut inputs);
        LayerSnapshot { inputs, folded: self.folded.as_ref().map(|folded| folded.kept().clone()) }
    }

    /// Replaces the memory by that of a snapshot after `len` positions.
    fn adopt(&mut self, snapshot: &LayerSnapshot, len: usize) {
        self.window.replace(len, &snapshot.inputs);
        for (folded, kept) in self.folded.iter_mut().zip(&snapshot.folded) {
            folded.replace(len, kept.clone());
        }
    }
}

impl States {
    /// Returns the memory of a layer, which is recurrent.
    pub fn layer(&mut self, layer: usize) -> &mut LayerState {
        self.layers[layer].as_mut().expect("a recurrent layer")
    }

    fn recurrent(&mut self) -> impl Iterator<Item = &mut LayerState> {
        self.layers.iter_mut().flatten()
    }

    fn mark(&mut self) {
        self.recurrent().for_each(LayerState::mark);
    }

    /// Goes back to at most `len` positions, as [`PartCache::rewind`] does.
    fn rewind(&mut self, len: usize) -> usize {
        // A step that failed has been read by the first layers only.
        let len = self.recurrent().map(|state| state.end()).fold(len, usize::min);
        if self.recurrent().all(|state| state.reaches(len)) {
            self.recurrent().for_each(|state| state.truncate(len));
            return len;
        }
        let mark = self.recurrent().map(|state| state.window.marked()).max().filter(|mark| (1..=len).contains(mark));
        match mark.filter(|mark| self.recurrent().all(|state| state.is_marked(*mark))) {
            Some(mark) => {
                self.recurrent().for_each(LayerState::return_to_mark);
                mark
            }
            None => {
                self.recurrent().for_each(LayerState::clear);
                0
            }
        }
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot { layers: self.layers.iter().flatten().map(LayerState::snapshot).collect() }
    }

    /// Replaces the memory by that of a snapshot after `len` positions.
    fn adopt(&mut self, snapshot: &Snapshot, len: usize) {
        self.recurrent().zip(&snapshot.layers).for_each(|(state, snapshot)| state.adopt(snapshot, len));
    }
}

/// Memory of all recurrent layers after some position.
#[derive(Debug)]
struct Snapshot {
    /// One entry per recurrent layer.
    layers: Vec<LayerSnapshot>,
}

/// Memory of a recurrent layer after some position.
#[derive(Debug)]
struct LayerSnapshot {
    /// Inputs of the convolution: `(reach, channels)`.
    inputs: Vec<f32>,
    folded: Option<Kept>,
}

impl PieceMemory for Snapshot {
    fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        let mut values = Vec::new();
        for layer in &self.layers {
            values.extend_from_slice(&layer.inputs);
            layer.folded.iter().flat_map(Kept::values).for_each(|part| values.extend_from_slice(part));
        }
        if fills_lines(values.len()) {
            values.push(0.0);
        }
        Ok(Cow::Owned(bytemuck::cast_slice(&values).to_vec()))
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
        let snapshot = self.states.snapshot();
        (!snapshot.layers.is_empty()).then(|| Piece::new(Arc::new(snapshot)))
    }

    fn adopt(&mut self, pages: Vec<Piece>, snapshot: Option<Piece>, len: usize) {
        self.kv.share(pages.into_iter().map(Page::from_piece).collect(), len);
        if let Some(snapshot) = snapshot {
            self.states.adopt(&snapshot.memory::<Snapshot>(), len);
        }
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
            true => Ok(Piece::new(Arc::new(self.states.snapshot(bytes)))),
            false => self.pages.restore(bytes),
        }
    }
}

#[cfg(test)]
mod tests;
