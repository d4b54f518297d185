//! Forward pass through the layers on one device: takes rows of the residual stream, and returns such rows or logits.
//!
//! Everything that changes from step to step (rows, positions, addresses of pages) is read from device memory, so
//! that the launches of a small step are recorded once as a graph and replayed. Within the layers of a step, the
//! device never waits for the host.

use super::adapters::{DeviceAdapters, Place};
use super::array::{Acts, Array, View};
use super::attend::{Attend, Kernels};
use super::context::{Context, Graph, Mark, Pinned};
use super::input::{ANGLES, Input, Plan, Section};
use super::kv::{Page, Pages, Pool};
use super::low_rank::{LowRank, Rows};
use super::multiply::{Middle, Product};
use super::ops::{self, Branch, Chosen, Ops};
use super::scratch::{Head, LOGIT_ROWS, MOST_BEST, Scratch};
use super::weights::{OnDevice, Source, Uploader, upload};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model_config::{self, ModelConfig, RouterSoftmax};
use crate::progress::ProgressBar;
use crate::runtime::adapters::Target;
use crate::runtime::device::{Answer, Cache, DevicePart, PartInfo, Step};
use crate::runtime::kv::PAGE;
use crate::runtime::layer::{Attention, Layer, Mlp, Moe, Operation};
use crate::runtime::profile::Stage;
use std::collections::HashMap;
use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of rows of a step that is recorded as a graph; larger steps have few launches compared to their work.
const GRAPH_ROWS: usize = 64;
/// Maximum number of graphs kept; a batch that shrinks row by row needs one graph for each size.
const GRAPHS: usize = 128;
/// Consecutive layers on a device, with the output matrix if the last layer is among them.
#[derive(Debug)]
pub struct CudaPart {
    context: Arc<Context>,
    ops: Ops,
    kernels: Kernels,
    config: ModelConfig,
    /// Layers of the model that the part computes.
    layers: Range<usize>,
    weights: Vec<Layer<OnDevice>>,
    head: Option<Head>,
    pool: Arc<Pool>,
    scratch: Scratch,
    adapters: DeviceAdapters,
    input: Input,
    output: Pinned,
    /// Graphs of small steps by plan; `None` = the plan occurred once and is recorded next time.
    graphs: HashMap<Plan, Option<Graph>>,
    busy: Duration,
}

impl DevicePart for CudaPart {
    fn info(&self) -> PartInfo {
        let memory_taken = self.context.memory().map_or(0, |(free, total)| total - free);
        PartInfo { layers: self.layers.clone(), device: Some(self.context.info.clone()), memory_taken }
    }

    fn new_cache(&self) -> Result<Cache> {
        Ok(Cache::new(Pages::default()))
    }

    fn owns(&self, cache: &Cache) -> bool {
        cache.get::<Pages>().is_some_and(|pages| pages.0.iter().all(|page| page.is_of(&self.pool)))
    }

    fn grow(&self, cache: &mut Cache, positions: Range<usize>) -> Result<()> {
        self.context.enter()?;
        self.pool.grow(&mut cache.get_mut::<Pages>().0, positions)
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
        source: &Source<'_>,
        layers: Range<usize>,
        bar: &ProgressBar,
    ) -> Result<CudaPart> {
        let Source { config, weights, arithmetic, rows, .. } = *source;
        context.enter()?;
        let ops = Ops::new(context)?;
        let mut uploader = Uploader::new(context, bar)?;
        let upload = |layer| upload(&mut uploader, layer, arithmetic);
        let uploaded = weights.layers[layers.clone()].iter().map(upload).collect::<Result<Vec<_>>>()?;
        let head = match layers.end == config.n_layers {
            true => Some(Head::upload(&mut uploader, source)?),
            false => None,
        };
        context.synchronize()?;
        let kernels = Kernels::new(&context.info, &source.kv.layers()[0], config.n_heads)?;
        let partial = kernels.partial_len(rows);
        let scratch = Scratch::new(source, context, &uploaded, head.as_ref(), partial)?;
        let output = match &head {
            Some(head) => 4 * head.logits.view().len().max(head.best.output_len()),
            None => 4 * rows * config.hidden,
        };
        let output = context.alloc_pinned(output)?;
        let top_k = |mlp| if let model_config::Mlp::Moe { top_k, .. } = mlp { top_k } else { 1 };
        let top_k = config.mlps().map(top_k).max().unwrap_or(1);
        Ok(CudaPart {
            context: context.clone(),
            ops,
            kernels,
            config: config.clone(),
            adapters: DeviceAdapters::new(layers.clone(), head.is_some(), top_k),
            pool: Pool::new(context, source.kv.part(layers.clone())),
            layers,
            weights: uploaded,
            head,
            scratch,
            input: Input::new(context),
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
        let pages = step.caches.iter().map(|cache| cache.get::<Pages>().expect("a cache of this part").0.as_slice());
        let pages: Vec<&[Page]> = pages.collect();
        let best = if let Answer::Best(k, _) = answer { k } else { 0 };
        let mut plan = Plan::new(step, &pages, best, self.config.hidden, &self.kernels);
        let changes = self.adapters.prepare(&self.context, step.groups, step.wanted, plan.rows)?;
        plan.changes = changes.plan;
        if self.input.reserve(&plan)? || changes.moved {
            self.graphs.clear();
        }
        self.input.send(step, &pages, &plan, &changes)?;
        let begin = self.context.mark()?;
        let small = plan.rows <= GRAPH_ROWS && plan.tiles == 0 && plan.wanted <= LOGIT_ROWS;
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
    fn start(&mut self, plan: &Plan) -> Result<()> {
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

    fn take_hidden(&mut self, plan: &Plan, begin: &Mark, hidden: &mut Vec<f32>) -> Result<()> {
        let len = plan.rows * self.config.hidden;
        self.input.read_x(plan, &mut self.output)?;
        self.finish(begin)?;
        hidden.clear();
        hidden.extend_from_slice(&bytemuck::cast_slice(self.output.bytes())[..len]);
        Ok(())
    }

    /// Copies the answer to the host, and computes it first unless it is already `computed`.
    fn take_answer(&mut self, plan: &Plan, begin: &Mark, answer: &mut Answer<'_>, computed: bool) -> Result<()> {
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
                Answer::Nothing => {}
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

    /// Starts the work of all layers of this part. The residual stream is updated in the memory of the input. If this
    /// part has the output matrix, the wanted rows after the final norm are written to `normed`.
    fn walk(&self, plan: &Plan) -> Result<()> {
        let n = plan.rows;
        let x = self.input.view(plan, Section::X);
        // The output of a block is added to the residual stream by the norm before the next block.
        let mut branch: Option<Branch<'_>> = None;
        for (index, layer) in self.weights.iter().enumerate() {
            for block in &layer.blocks {
                // `ops::check` refuses other inputs.
                self.norm(x, branch, block.input.norm(), None, n)?;
                let (y, chosen) = match &block.operation {
                    Operation::Attention(op) => (self.attend(plan, index, op)?, None),
                    Operation::Mlp(op) => (self.mlp(plan, index, op)?, None),
                    Operation::Moe(op) => self.mixture(plan, index, op)?,
                    Operation::Latent(_) | Operation::Input(_) => unreachable!("see `ops::check`"),
                };
                branch = Some(Branch { y, post: block.post_norm.as_ref(), chosen });
            }
        }
        match &self.head {
            None => self.norm(x, branch, None, None, n),
            Some(_) if plan.wanted == 0 => Ok(()),
            Some(head) => {
                self.norm(x, branch, Some(&head.norm), Some(self.input.view(plan, Section::Wanted)), plan.wanted)
            }
        }
    }

    /// Adds the output of a block to the residual stream, and normalizes the sum for the next block.
    fn norm(
        &self,
        x: View<f32>,
        branch: Option<Branch<'_>>,
        weight: Option<&Array<f32>>,
        rows: Option<View<u32>>,
        n: usize,
    ) -> Result<()> {
        let out = weight.map(|_| &self.scratch.normed);
        let (width, eps) = (self.config.hidden, self.config.norm_eps);
        self.ops.norm(&ops::Norm { x, branch, weight: weight.map(Array::view), rows, out, n, width, eps })
    }

    /// Computes the attention block of layer `index` of this part, including its projections, and returns its output.
    fn attend(&self, plan: &Plan, index: usize, op: &Attention<OnDevice>) -> Result<View<f32>> {
        let (s, shape, n) = (&self.scratch, &op.shape, plan.rows);
        let (Some(k), Some(v)) = (&op.k, &op.v) else { unreachable!("see `ops::check`") };
        let products = [(&op.q, s.q.view()), (k, s.k.view()), (v, s.v.view())];
        self.ops.matmuls(&products, &s.normed, n)?;
        self.adapt(plan, Place::Target(index, Target::Q), &products, &s.normed)?;
        let cache = self.pool.cache(index, self.input.view::<u64>(plan, Section::Tables).address(), plan.table_stride);
        self.ops.rope(&ops::Rope {
            q: s.q.view(),
            k: s.k.view(),
            v: s.v.view(),
            angles: self.input.view(plan, ANGLES[shape.rotary.unwrap_or(0)]),
            head_norms: op.head_norms.as_ref().map(|[q, k]| [q.view(), k.view()]),
            rows: self.input.view(plan, Section::Rows),
            cache,
            n,
            n_heads: shape.n_heads,
            eps: self.config.norm_eps,
            q_scale: shape.scale * LOG2_E,
        })?;
        let attend = Attend {
            q: s.q.view(),
            rows: self.input.view(plan, Section::Rows),
            tiles: self.input.view(plan, Section::Tiles),
            sinks: op.sinks.as_ref().map(Array::view),
            partial: s.partial.view(),
            out: &s.attended,
            cache,
            n,
            window: shape.window,
            softcap: shape.softcap.map(|cap| cap * LOG2_E),
            longest: plan.table_stride * PAGE,
        };
        self.ops.attend(&self.kernels, &attend)?;
        self.ops.matmul(&op.o, &s.attended, 0, s.branch.view(), n)?;
        self.adapt(plan, Place::Target(index, Target::O), &[(&op.o, s.branch.view())], &s.attended)?;
        Ok(s.branch.view())
    }

    /// Changes the results of products of all rows of `x` by adapters; `first` is the place of the first product.
    fn adapt(&self, plan: &Plan, first: Place, products: &[Product<'_>], x: &Acts) -> Result<()> {
        let changes = self.changes(plan, first, products, x, Rows::Batch(0..plan.rows));
        changes.map_or(Ok(()), |changes| self.ops.low_rank(&changes))
    }

    /// Returns the changes of products by adapters, if there are any; the places of the products follow `first`.
    fn changes<'a>(
        &self,
        plan: &Plan,
        first: Place,
        products: &'a [Product<'a>],
        x: &'a Acts,
        rows: Rows<'a>,
    ) -> Option<LowRank<'a>> {
        let (changes, index) = (plan.changes, self.adapters.index(first));
        let all = self.input.view(plan, Section::Adapted);
        let section = match first {
            Place::Target(..) | Place::Experts(..) => 0,
            Place::Head => 1,
            Place::Replaced => 2,
        };
        let task = || LowRank {
            plan: changes,
            adapted: all.part(section * changes.slots, changes.slots),
            index,
            products,
            x,
            rows,
            results: self.adapters.results(),
        };
        changes.has(first, products.len()).then(task)
    }

    fn mlp(&self, plan: &Plan, index: usize, op: &Mlp<OnDevice>) -> Result<View<f32>> {
        let (s, n) = (&self.scratch, plan.rows);
        let middle = Middle { activation: op.activation, out: &s.middle, intermediate: op.intermediate };
        let (gates, ups) = (s.gate.view(), s.up.view());
        let products = [(&op.gate, gates), (&op.up, ups)];
        let first = Place::Target(index, Target::Gate);
        if plan.changes.has(first, products.len()) {
            self.ops.matmuls(&products, &s.normed, n)?;
            self.adapt(plan, first, &products, &s.normed)?;
            self.ops.gated(&ops::gated(&middle, gates, Some(ups), n))?;
        } else {
            self.ops.gate_and_up(&products, &s.normed, &middle, n)?;
        }
        self.ops.matmul(&op.down, &s.middle, 0, s.branch.view(), n)?;
        self.adapt(plan, Place::Target(index, Target::Down), &[(&op.down, s.branch.view())], &s.middle)?;
        Ok(s.branch.view())
    }

    /// Computes a mixture of experts. Returns the outputs of the chosen experts, sorted by expert, and the choices.
    fn mixture(&self, plan: &Plan, index: usize, op: &Moe<OnDevice>) -> Result<(View<f32>, Option<Chosen>)> {
        let s = &self.scratch;
        let Moe { activation, intermediate, experts, top_k, .. } = *op;
        let e = s.experts.as_ref().expect("made for a mixture");
        let grouped = e.grouped(plan.rows, experts, top_k);
        let over_all = op.softmax == RouterSoftmax::All;
        let router = [(&op.router, e.logits.view())];
        let changes =
            self.changes(plan, Place::Target(index, Target::Router), &router, &s.normed, Rows::Batch(0..plan.rows));
        self.ops.route(router[0], &s.normed, &grouped, over_all, changes.as_ref())?;
        let middle = Middle { activation, out: &s.expert_middle, intermediate };
        let gate_up = [(&op.gate_up, s.gate.view())];
        match self.changes(plan, Place::Experts(index, 0), &gate_up, &s.normed, Rows::Pairs(&grouped, true)) {
            None => self.ops.matmul_experts(gate_up[0], &s.normed, true, Some(&middle), &grouped)?,
            Some(changes) => {
                self.ops.matmul_experts(gate_up[0], &s.normed, true, None, &grouped)?;
                self.ops.low_rank(&changes)?;
                self.ops.gated(&ops::gated(&middle, s.gate.view(), None, grouped.pairs))?;
            }
        }
        let down = [(&op.down, e.outputs.view())];
        self.ops.matmul_experts(down[0], &s.expert_middle, false, None, &grouped)?;
        let rows = Rows::Pairs(&grouped, false);
        if let Some(changes) = self.changes(plan, Place::Experts(index, 1), &down, &s.expert_middle, rows) {
            self.ops.low_rank(&changes)?;
        }
        Ok((e.outputs.view(), Some(grouped.chosen)))
    }

    /// Computes the logits of some of the wanted rows in `normed`, and finds the largest ones if these are wanted.
    fn answer(&self, plan: &Plan, rows: Range<usize>) -> Result<()> {
        let Some(head) = self.head.as_ref().filter(|_| !rows.is_empty()) else { return Ok(()) };
        let n = rows.len();
        let x = &self.scratch.normed;
        self.ops.matmul(&head.lm_head, x, rows.start, head.logits.view(), n)?;
        let product = [(&head.lm_head, head.logits.view())];
        if let Some(changes) = self.changes(plan, Place::Replaced, &product, x, Rows::Batch(rows.clone())) {
            self.ops.replace(&changes)?;
        }
        if let Some(changes) = self.changes(plan, Place::Head, &product, x, Rows::Batch(rows)) {
            self.ops.low_rank(&changes)?;
        }
        let (cap, logits) = (self.config.logit_softcap, head.logits.view());
        match plan.best {
            0 if cap.is_none() => Ok(()),
            0 | 1 => head.best.largest(&self.ops, logits, n, cap),
            k => {
                if cap.is_some() {
                    head.best.largest(&self.ops, logits, n, cap)?;
                }
                head.best.largest_of(&self.ops, logits, n, k)
            }
        }
    }
}
