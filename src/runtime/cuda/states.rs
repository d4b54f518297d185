//! State of a text in the recurrent layers of a device: one buffer, which the kernels read before a step and write
//! after it. Marks, snapshots and clones share it; the next step then writes another buffer.

use super::context::Buffer;
use super::kv::Pool;
use super::recurrent::StatePlace;
use crate::error::Result;
use crate::model_config::{ModelConfig, Recurrent};
use crate::runtime::state::PieceMemory;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// Places of the recurrent layers of a part in the state of a text.
#[derive(Debug, Clone, Default)]
pub struct StateLayout {
    /// One place for each layer; `None` for layers that are not recurrent.
    layers: Vec<Option<StatePlace>>,
    /// Numbers of all layers.
    len: usize,
}

impl StateLayout {
    /// Returns the layout of some layers of a model.
    pub fn of(config: &ModelConfig, layers: Range<usize>) -> StateLayout {
        let mut len = 0;
        let mut place = |layer: usize| {
            let [window, matrix] = sizes(config.layer(layer).recurrent()?, config.hidden);
            let place = StatePlace { window: len, matrix: len + window };
            len += window + matrix;
            Some(place)
        };
        let layers: Vec<_> = layers.map(&mut place).collect();
        // Layers that remember nothing are computed run by run, too.
        let least = usize::from(layers.iter().any(Option::is_some));
        StateLayout { layers, len: len.max(least) }
    }

    /// Returns the place of a layer, counted from the first of the part on.
    ///
    /// # Panics
    /// The layer is not recurrent.
    pub fn place(&self, layer: usize) -> StatePlace {
        self.layers[layer].expect("a recurrent layer")
    }

    /// Returns the bytes of the state of a text; 0 without recurrent layers.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<f32>()
    }
}

/// Returns the numbers of the inputs of the convolution that a layer keeps, and of its matrices.
fn sizes(mixer: &Recurrent, hidden: usize) -> [usize; 2] {
    match mixer {
        Recurrent::ShortConv(conv) => [(conv.width - 1) * hidden, 0],
        Recurrent::GatedDeltaNet(net) => {
            [(net.width - 1) * net.channels(), net.value_heads * net.value_dim * net.key_dim]
        }
        Recurrent::Mamba2(mamba) => [(mamba.width - 1) * mamba.channels(), mamba.heads * mamba.head_dim * mamba.state],
    }
}

/// Shared ownership of the memory of a state.
#[derive(Debug, Clone)]
pub struct State(pub(super) Arc<StateMemory>);

#[derive(Debug)]
pub struct StateMemory {
    /// Memory; `None` only while it is dropped.
    pub(super) buffer: Option<Buffer>,
    pub(super) pool: Arc<Pool>,
}

impl Drop for StateMemory {
    fn drop(&mut self) {
        self.pool.give_state_back(self.buffer.take());
    }
}

impl StateMemory {
    pub(super) fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("taken by drop only")
    }
}

impl PieceMemory for StateMemory {
    fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        self.pool.enter()?;
        self.buffer().read().map(Cow::Owned)
    }
}

impl State {
    fn address(&self) -> u64 {
        self.0.buffer().address()
    }
}

/// State of one text.
#[derive(Debug, Clone, Default)]
pub struct TextState {
    /// Positions that were read.
    end: usize,
    /// State after them; `None` before the first.
    now: Option<State>,
    /// State that the last step read.
    before: Option<State>,
    /// Positions and state at the last mark.
    mark: Option<(usize, Option<State>)>,
}

impl TextState {
    /// Reports whether the state belongs to this pool.
    pub fn is_of(&self, pool: &Arc<Pool>) -> bool {
        self.now.as_ref().is_none_or(|state| Arc::ptr_eq(&state.0.pool, pool))
    }

    /// Prepares the step that reads up to position `end`: takes memory for the state after it, unless it may replace
    /// the present one.
    ///
    /// # Errors
    /// There is not enough device memory.
    pub fn grow(&mut self, pool: &Arc<Pool>, end: usize) -> Result<()> {
        self.before = None;
        match self.now.as_ref().filter(|now| Arc::strong_count(&now.0) == 1) {
            Some(now) => self.before = Some(now.clone()),
            None => {
                let next = pool.state()?;
                self.before = self.now.replace(next);
            }
        }
        self.end = end;
        Ok(())
    }

    /// Returns the addresses of the state that the prepared step reads, 0 for the beginning of a text, and writes.
    pub fn addresses(&self) -> [u64; 2] {
        [&self.before, &self.now].map(|state| state.as_ref().map_or(0, State::address))
    }

    pub fn mark(&mut self) {
        self.mark = Some((self.end, self.now.clone()));
    }

    /// Goes back to at most `len` positions, see [`PartCache::rewind`](crate::runtime::state::PartCache::rewind).
    pub fn rewind(&mut self, len: usize) -> usize {
        if len < self.end {
            let mark = self.mark.take().filter(|(end, _)| *end <= len);
            let (end, now) = mark.clone().unwrap_or_default();
            *self = TextState { end, now, before: None, mark };
        }
        self.end
    }

    pub fn snapshot(&self) -> Option<State> {
        self.now.clone()
    }

    pub fn adopt(&mut self, state: State, len: usize) {
        *self = TextState { end: len, now: Some(state), ..TextState::default() };
    }
}
