//! Input of a step on a device, transferred by one copy: residual stream, angles, positions, and addresses of pages.

use super::adapters::{ChangePlan, StepChanges};
use super::args::{Adapted, Row, StateRun, Tile};
use super::array::View;
use super::attend::{Kernels, tile_rows, tiles};
use super::context::{Buffer, Context, Pinned};
use super::kv::TextCache;
use crate::error::Result;
use crate::model_config::PositionScale;
use crate::runtime::device::Step;
use std::sync::Arc;

/// Shape of a step; steps with equal plans start the same launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StepPlan {
    /// Number of rows of the residual stream.
    pub rows: usize,
    /// Number of rows whose logits are wanted.
    pub wanted: usize,
    /// Numbers of tiles of rows in attention, of both sizes; 0 if attention is computed row by row.
    pub tiles: [usize; 2],
    /// Number of largest logits wanted per row; 0 = all logits.
    pub best: usize,
    /// Number of entries per sequence in the page tables, a power of two.
    pub table_stride: usize,
    /// Maximum numbers of rows per tile, see [`tile_rows`]; 0 without tiles.
    pub tile_rows: [usize; 2],
    sequences: usize,
    /// Number of texts with rows, in models with recurrent layers; otherwise 0.
    states: usize,
    hidden: usize,
    angles: [usize; ROTATIONS],
    further: usize,
    /// Shape of the changes by adapters.
    pub changes: ChangePlan,
}

/// Maximum number of kinds of rotation (RoPE) that a model has.
pub const ROTATIONS: usize = 2;

/// Alignment in bytes of the sections of the input.
const ALIGN: usize = 256;

/// Sections of the input, in memory order.
#[derive(Clone, Copy)]
pub enum Section {
    /// The residual stream: f32 `(rows, hidden)`.
    X,
    /// Cosines and sines of the first kind of rotation: f32.
    Angles,
    /// Cosines and sines of the second kind of rotation: f32.
    OtherAngles,
    /// Embeddings of the further inputs of all layers, in models that have them: f32 `(rows, layers * width)`.
    Further,
    /// Sequence and position of each row: [`Row`].
    Rows,
    /// Indices of the rows whose logits are wanted: u32.
    Wanted,
    /// Tiles of attention, if it is computed by tiles: [`Tile`].
    Tiles,
    /// The same for kernels that take smaller tiles.
    SmallTiles,
    /// Page tables with the device addresses of the pages of each sequence: u64.
    Tables,
    /// Rows with adapters: [`Adapted`] `(3, slots)`.
    Adapted,
    /// States of the texts with rows, in models with recurrent layers: [`StateRun`].
    States,
}

/// Sections with the tiles of both sizes.
pub const TILES: [Section; 2] = [Section::Tiles, Section::SmallTiles];

/// Sections with the angles of each kind of rotation.
pub const ANGLES: [Section; ROTATIONS] = [Section::Angles, Section::OtherAngles];

impl StepPlan {
    /// Returns the plan for a step; `kernels` are those of all layers.
    pub fn new(step: &Step<'_>, texts: &[&TextCache], best: usize, hidden: usize, kernels: &[Kernels]) -> StepPlan {
        let tokens = step.runs.iter().map(|run| run.tokens);
        let tile_rows = tile_rows(kernels, tokens.clone());
        let longest = texts.iter().map(|text| text.pages.len()).max().unwrap_or(0);
        StepPlan {
            rows: tokens.clone().sum(),
            wanted: step.wanted.len(),
            best,
            tiles: tile_rows.map(|rows| tokens.clone().map(|tokens| tiles(0, tokens, rows).count()).sum()),
            table_stride: longest.max(1).next_power_of_two(),
            tile_rows,
            sequences: texts.len(),
            states: if texts.iter().any(|text| text.state.is_some()) { step.runs.len() } else { 0 },
            hidden,
            angles: std::array::from_fn(|i| step.angles.get(i).map_or(0, Vec::len)),
            further: step.further.len(),
            changes: ChangePlan::default(),
        }
    }

    /// Returns the bytes of each section.
    fn sizes(&self) -> [usize; 11] {
        [
            4 * self.rows * self.hidden,
            4 * self.angles[0],
            4 * self.angles[1],
            4 * self.further,
            size_of::<Row>() * self.rows,
            4 * self.wanted,
            size_of::<Tile>() * self.tiles[0],
            size_of::<Tile>() * self.tiles[1],
            8 * self.sequences * self.table_stride,
            3 * size_of::<Adapted>() * self.changes.slots,
            size_of::<StateRun>() * self.states,
        ]
    }

    /// Returns the bytes of the first `sections` sections, including their padding.
    fn len(&self, sections: usize) -> usize {
        self.sizes()[..sections].iter().map(|size| size.next_multiple_of(ALIGN)).sum()
    }

    /// Returns the offset of a section in bytes.
    fn offset(&self, section: Section) -> usize {
        self.len(section as usize)
    }
}

/// Pinned memory and device memory through which the input is transferred.
#[derive(Debug)]
pub struct Input {
    context: Arc<Context>,
    /// Growth of the queries with their positions.
    growth: Option<PositionScale>,
    memory: Option<(Pinned, Buffer)>,
}

impl Input {
    /// Creates an input without memory; the memory grows with the largest step.
    pub fn new(context: &Arc<Context>, growth: Option<PositionScale>) -> Input {
        Input { context: context.clone(), growth, memory: None }
    }

    /// Makes room for a plan. Returns true if the memory moved, so that graphs recorded with the old memory are
    /// invalid.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn reserve(&mut self, plan: &StepPlan) -> Result<bool> {
        let len = plan.len(plan.sizes().len());
        if self.memory.as_ref().is_some_and(|(_, buffer)| buffer.len() >= len) {
            return Ok(false);
        }
        self.memory = None;
        let len = len.next_power_of_two();
        self.memory = Some((self.context.alloc_pinned(len)?, self.context.alloc(len)?));
        Ok(true)
    }

    /// Starts copying the data of a step to the device; [`Input::reserve`] must have made room for its plan.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn send(
        &mut self,
        step: &Step<'_>,
        texts: &[&TextCache],
        plan: &StepPlan,
        changes: &StepChanges,
    ) -> Result<()> {
        let (pinned, buffer) = self.memory.as_mut().expect("reserved before");
        let bytes = pinned.bytes_mut();
        let mut put = |section, data: &[u8]| bytes[plan.offset(section)..][..data.len()].copy_from_slice(data);
        put(Section::X, bytemuck::cast_slice(step.x.as_slice()));
        for (section, angles) in ANGLES.into_iter().zip(step.angles) {
            put(section, bytemuck::cast_slice(angles));
        }
        put(Section::Further, bytemuck::cast_slice(step.further));
        let growth = self.growth;
        let rows = step.runs.iter().flat_map(|run| {
            (run.position..run.position + run.tokens).map(move |position| Row {
                sequence: run.sequence as u32,
                position: position as u32,
                q_factor: growth.map_or(1.0, |growth| growth.at(position)),
                unused: 0,
            })
        });
        put(Section::Rows, bytemuck::cast_slice(&rows.collect::<Vec<_>>()));
        let wanted: Vec<u32> = step.wanted.iter().map(|row| *row as u32).collect();
        put(Section::Wanted, bytemuck::cast_slice(&wanted));
        for (section, rows) in TILES.into_iter().zip(plan.tile_rows) {
            let tiles = step.runs.iter().flat_map(|run| tiles(run.first, run.tokens, rows));
            put(section, bytemuck::cast_slice(&tiles.collect::<Vec<_>>()));
        }
        put(Section::Adapted, bytemuck::cast_slice(&changes.entries));
        let states = step.runs.iter().filter_map(|run| {
            let [from, to] = texts[run.sequence].state.as_ref()?.addresses();
            Some(StateRun { from, to, first: run.first as u32, count: run.tokens as u32 })
        });
        put(Section::States, bytemuck::cast_slice(&states.collect::<Vec<_>>()));
        let mut table = vec![0u64; plan.table_stride];
        for (i, text) in texts.iter().enumerate() {
            table.iter_mut().zip(&text.pages).for_each(|(address, page)| *address = page.address());
            let at = plan.offset(Section::Tables) + 8 * i * plan.table_stride;
            bytes[at..][..8 * table.len()].copy_from_slice(bytemuck::cast_slice(&table));
        }
        buffer.copy_from(0, pinned, plan.len(plan.sizes().len()))
    }

    fn buffer(&self) -> &Buffer {
        &self.memory.as_ref().expect("reserved before").1
    }

    /// Returns a section on the device as elements of type `T`.
    pub fn view<T>(&self, plan: &StepPlan, section: Section) -> View<T> {
        self.buffer().view(plan.offset(section), plan.sizes()[section as usize] / size_of::<T>())
    }

    /// Starts copying the residual stream back to pinned memory.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn read_x(&self, plan: &StepPlan, to: &mut Pinned) -> Result<()> {
        self.buffer().copy_to(to, 0, plan.offset(Section::X), 4 * plan.rows * plan.hidden)
    }
}
