//! Forward pass through the layers on one device: takes rows of the residual stream, and returns such rows or logits.
//!
//! Everything that changes from step to step (rows, positions, addresses of pages) is read from device memory, so
//! that the launches of a small step are recorded once as a graph and replayed. Within the layers of a step, the
//! device never waits for the host.

use super::adapters::{AdaptedProduct, DeviceAdapters};
use super::attend::Kernels;
use super::context::{Context, Graph, MARGIN, Mark, Pinned};
use super::input::{Input, StepPlan};
use super::kv::{Pool, TextCache};
use super::low_rank::Rows;
use super::ops::Ops;
use super::scratch::{Head, Inputs, LOGIT_ROWS, MOST_BEST, Scratch};
use super::states::{StateLayout, TextState};
use super::weights::{OnDevice, UploadSource, Uploader, upload};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model_config::{Mlp, ModelConfig};
use crate::progress::ProgressBar;
use crate::runtime::device::{Answer, DevicePart, PartInfo, Step};
use crate::runtime::kv::PAGE;
use crate::runtime::layer::Layer;
use crate::runtime::profile::Stage;
use crate::runtime::state::{Cache, StatePool};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of rows of a step that is recorded as a graph; larger steps have few launches compared to their work.
const GRAPH_ROWS: usize = 64;
/// Maximum number of graphs kept; a batch that shrinks row by row needs one graph for each size.
const GRAPHS: usize = 128;
/// Number of states of recurrent layers for which memory is left beside the pages.
pub const SPARE_STATES: u64 = 4;

/// Consecutive layers on a device, with the output matrix if the last layer is among them.
#[derive(Debug)]
pub struct CudaPart {
    context: Arc<Context>,
    pub(super) ops: Ops,
    /// Kernels for the cache that each layer reads.
    pub(super) kernels: Vec<Kernels>,
    pub(super) config: ModelConfig,
    /// Layers of the model that the part computes.
    pub(super) layers: Range<usize>,
    pub(super) weights: Vec<Layer<OnDevice>>,
    pub(super) inputs: Option<Inputs>,
    pub(super) head: Option<Head>,
    pub(super) pool: Arc<Pool>,
    pub(super) scratch: Scratch,
    pub(super) adapters: DeviceAdapters,
    pub(super) input: Input,
    output: Pinned,
    /// Graphs of small steps by plan; `None` = the plan occurred once and is recorded next time.
    graphs: HashMap<StepPlan, Option<Graph>>,
    busy: Duration,
}

impl DevicePart for CudaPart {
    fn info(&self) -> PartInfo {
        let memory_taken = self.context.memory().map_or(0, |(free, total)| total - free);
        PartInfo { layers: self.layers.clone(), device: Some(self.context.info.clone()), memory_taken }
    }

    fn new_cache(&self) -> Result<Cache> {
        Ok(Cache::new(self.pool.new_cache()))
    }

    fn pool(&self) -> Box<dyn StatePool> {
        Box::new(self.pool.clone())
    }

    fn owns(&self, cache: &Cache) -> bool {
        cache.get::<TextCache>().is_some_and(|text| {
            let is_of = |state: &TextState| state.is_of(&self.pool);
            text.pages.iter().all(|page| page.is_of(&self.pool))
                && text.state.is_some() == (self.pool.states().bytes() > 0)
                && text.state.as_ref().is_none_or(is_of)
        })
    }

    fn grow(&self, cache: &mut Cache, positions: Range<usize>) -> Result<()> {
        self.context.enter()?;
        self.pool.grow(cache.get_mut::<TextCache>(), positions)
    }

    fn run(&mut self, mut step: Step<'_>, answer: Answer<'_>) -> Result<()> {
        let done = self.compute(&mut step, answer);
        step.profile.lap(Stage::Device);
        done
    }

    fn most_best(&self) -> usize {
        MOST_BEST
    }

    fn take_busy(&mut self) -> Duration {
        std::mem::take(&mut self.busy)
    }
}

impl CudaPart {
    /// Uploads layers to a device, with the output matrix if the last layer is among them.
    ///
    /// # Errors
    /// There is not enough device memory, or the driver reports an error.
    pub fn new(
        context: &Arc<Context>,
        source: &UploadSource<'_>,
        layers: Range<usize>,
        bar: &ProgressBar,
    ) -> Result<CudaPart> {
        let UploadSource { config, weights, arithmetic, rows, .. } = *source;
        context.enter()?;
        let of_layer = |layer: usize| {
            let description = config.layer(layer);
            // A layer without attention starts no kernels of it; any kernels will do.
            let any = || config.layers().position(|layer| layer.heads().is_some()).unwrap_or(layer);
            let owner = if description.heads().is_some() { description.kv_from().unwrap_or(layer) } else { any() };
            Kernels::new(&context.info, &source.kv.layers()[owner], config.n_heads)
        };
        let kernels = layers.clone().map(of_layer).collect::<Result<Vec<_>>>()?;
        let ops = Ops::new(context)?;
        let mut uploader = Uploader::new(context, bar)?;
        let upload = |layer| upload(&mut uploader, layer, arithmetic);
        let uploaded = weights.layers[layers.clone()].iter().map(upload).collect::<Result<Vec<_>>>()?;
        let head = match layers.end == config.n_layers {
            true => Some(Head::upload(&mut uploader, source)?),
            false => None,
        };
        let inputs = (weights.per_layer.as_ref()).map(|weights| Inputs::upload(&mut uploader, weights, source));
        let inputs = inputs.transpose()?;
        context.synchronize()?;
        let partial = kernels.iter().map(|kernels| kernels.partial_len(rows)).max().unwrap_or(0);
        let scratch = Scratch::new(source, context, &uploaded, inputs.as_ref(), head.as_ref(), partial)?;
        let output = match &head {
            Some(head) => 4 * head.logits.view().len().max(head.best.output_len()),
            None => 4 * rows * config.hidden,
        };
        let output = context.alloc_pinned(output)?;
        let top_k = |mlp| if let Mlp::Moe { top_k, .. } = mlp { top_k } else { 1 };
        let top_k = config.mlps().map(top_k).max().unwrap_or(1);
        Ok(CudaPart {
            context: context.clone(),
            ops,
            kernels,
            config: config.clone(),
            adapters: DeviceAdapters::new(layers.clone(), head.is_some(), top_k),
            pool: Pool::new(
                context,
                source.kv.part(layers.clone()),
                StateLayout::of(config, layers.clone()),
                most_pages(context, source, &layers)?,
            ),
            layers,
            weights: uploaded,
            inputs,
            head,
            scratch,
            input: Input::new(context, config.attention.position_scale),
            output,
            graphs: HashMap::new(),
            busy: Duration::ZERO,
        })
    }

    /// Computes a step: a small one through a graph, a larger one launch by launch.
    fn compute(&mut self, step: &mut Step<'_>, mut answer: Answer<'_>) -> Result<()> {
        if step.observer.is_some() || step.first_layer > self.layers.start {
            return Err(Error::engine("activations can be read only from layers on the CPU").help("use --device cpu"));
        }
        self.context.enter()?;
        let texts = step.caches.iter().map(|cache| cache.get::<TextCache>().expect("a cache of this part"));
        let texts: Vec<&TextCache> = texts.collect();
        let best = if let Answer::Best(k, _) = answer { k } else { 0 };
        let mut plan = StepPlan::new(step, &texts, best, self.config.hidden, &self.kernels);
        let changes = self.adapters.prepare(&self.context, step.groups, step.wanted, plan.rows)?;
        plan.changes = changes.plan;
        if self.input.reserve(&plan)? || changes.moved {
            self.graphs.clear();
        }
        self.input.send(step, &texts, &plan, &changes)?;
        let begin = self.context.mark()?;
        let small = plan.rows <= GRAPH_ROWS && plan.tiles[0] == 0 && plan.wanted <= LOGIT_ROWS;
        if small {
            self.start(&plan)?;
        } else {
            self.walk(&plan)?;
        }
        match &self.head {
            None => self.take_hidden(&plan, &begin, step.x),
            Some(_) => self.take_answer(&plan, &begin, &mut answer, small),
        }
    }

    /// Starts a small step. The first time its plan occurs, the step is started launch by launch, which also loads
    /// the kernels (loading cannot be recorded). The second time, the launches are recorded as a graph, which is
    /// replayed from then on.
    fn start(&mut self, plan: &StepPlan) -> Result<()> {
        let launches = |part: &CudaPart| part.walk(plan).and_then(|()| part.answer(plan, 0..plan.wanted));
        match self.graphs.get(plan) {
            None => {
                if self.graphs.len() >= GRAPHS {
                    self.graphs.clear();
                }
                self.graphs.insert(*plan, None);
                return launches(self);
            }
            Some(None) => {
                let graph = self.context.capture(|| launches(self))?;
                self.graphs.insert(*plan, Some(graph));
            }
            Some(Some(_)) => {}
        }
        let graph = self.graphs.get_mut(plan).and_then(Option::as_mut).expect("recorded above or before");
        self.ops.replay(graph)
    }

    fn take_hidden(&mut self, plan: &StepPlan, begin: &Mark, hidden: &mut Vec<f32>) -> Result<()> {
        let len = plan.rows * self.config.hidden;
        self.input.read_x(plan, &mut self.output)?;
        self.finish(begin)?;
        hidden.clear();
        hidden.extend_from_slice(&bytemuck::cast_slice(self.output.bytes())[..len]);
        Ok(())
    }

    /// Copies the answer to the host, and computes it first unless it is already `computed`.
    fn take_answer(&mut self, plan: &StepPlan, begin: &Mark, answer: &mut Answer<'_>, computed: bool) -> Result<()> {
        let vocab = self.config.vocab;
        for first in (0..plan.wanted).step_by(LOGIT_ROWS) {
            let rows = first..(first + LOGIT_ROWS).min(plan.wanted);
            if !computed {
                interrupt::check()?;
                self.answer(plan, rows.clone())?;
            }
            let head = self.head.as_ref().expect("called for the last part");
            match answer {
                Answer::Logits(logits) => {
                    let out = &mut logits[first * vocab..rows.end * vocab];
                    head.logits.copy_to(&mut self.output, 0, out.len())?;
                    self.context.synchronize()?;
                    out.copy_from_slice(&bytemuck::cast_slice(self.output.bytes())[..out.len()]);
                }
                // The engine refuses to ask for the hidden rows, see `finds_hidden`.
                Answer::Nothing | Answer::Hidden { .. } => {}
                Answer::Best(k, best) => {
                    best.extend(head.best.take(&self.context, &mut self.output, rows.len(), *k)?)
                }
            }
        }
        self.finish(begin)
    }

    /// Waits for the end of a step and adds its duration to `busy`.
    fn finish(&mut self, begin: &Mark) -> Result<()> {
        let end = self.context.mark()?;
        self.context.synchronize()?;
        self.busy += Duration::from_secs_f64(end.seconds_since(begin)?.max(0.0));
        Ok(())
    }

    /// Computes the logits of some of the wanted rows in `normed`, and finds the largest ones if these are wanted.
    fn answer(&self, plan: &StepPlan, rows: Range<usize>) -> Result<()> {
        let Some(head) = self.head.as_ref().filter(|_| !rows.is_empty()) else { return Ok(()) };
        let n = rows.len();
        let x = &self.scratch.normed;
        self.ops.matmul(&head.lm_head, x, rows.start, head.logits.view(), n)?;
        let product = [(&head.lm_head, head.logits.view())];
        if let Some(changes) = self.changes(plan, AdaptedProduct::Replaced, &product, x, Rows::Batch(rows.clone())) {
            self.ops.replace(&changes)?;
        }
        if let Some(changes) = self.changes(plan, AdaptedProduct::Head, &product, x, Rows::Batch(rows)) {
            self.ops.low_rank(&changes)?;
        }
        let (scale, cap, logits) = (self.config.logit_scale, self.config.logit_softcap, head.logits.view());
        if plan.best == 1 || cap.is_some() || scale != 1.0 {
            head.best.largest(&self.ops, logits, n, scale, cap)?;
        }
        match plan.best {
            0 | 1 => Ok(()),
            k => head.best.largest_of(&self.ops, logits, n, k),
        }
    }
}

/// Returns the largest number of KV pages of these layers on a device: that of the budget, or else what the device has
/// left, which is at least what the plan left for them.
///
/// # Errors
/// The driver reports an error.
fn most_pages(context: &Context, source: &UploadSource<'_>, layers: &Range<usize>) -> Result<usize> {
    let page = Pool::page_bytes(&source.kv.part(layers.clone())).max(1) as u64;
    // Pages make room for the states of texts, but a text has another one while it is written.
    let states = SPARE_STATES * StateLayout::of(source.config, layers.clone()).bytes() as u64;
    let planned = source.positions.div_ceil(PAGE);
    let left = || Ok(planned.max((context.memory()?.0.saturating_sub(MARGIN + states) / page) as usize));
    source.kv_pages.map_or_else(left, Ok)
}
