//! Engine: the entry point of the runtime. It opens a pack, creates sequences, reads tokens and returns logits.

use super::adapters::{self, AdapterBinder, AdapterSet};
use super::attention::AttentionKernel;
use super::cpu::place::Placement;
use super::device::{self, Answer, PartInfo, Run, Step};
use super::embed::Embedder;
use super::kv::KvType;
use super::observe::{Observer, ObserverRef};
use super::open::{EngineOptions, OpenedModel};
use super::precision::Precision;
use super::profile::{Profile, Stage, Stages};
use super::sequence::{Feed, Output, Sequence, SharedState, Want};
use super::state::{PageCounts, StatePool};
use super::weights::rebuilt::cache::Rebuilds;
use crate::error::{Context, Error, Result};
use crate::iebin::IebinReader;
use crate::interrupt;
use crate::model_config::{ModelConfig, RopeScaling};
use std::time::Duration;

/// An opened model, ready to compute.
#[derive(Debug)]
pub struct Engine {
    pub(super) model: OpenedModel,
    embedder: Embedder,
    batch: Batch,
    profile: Profile,
    /// Whether sequences keep their tokens, because some may have to be read again.
    keeps_tokens: bool,
    /// Adapters of new sequences.
    adapters: AdapterSet,
    /// Rows that a layer of multi-token prediction reads in the next step beside its tokens, `(tokens, hidden)`; empty
    /// for other models.
    pub(super) previous: Vec<f32>,
}

/// The rows of one step of the engine.
#[derive(Debug, Default)]
struct Batch {
    tokens: Vec<u32>,
    runs: Vec<Run>,
    /// Rows whose logits are wanted, ascending.
    wanted: Vec<usize>,
}

impl Engine {
    /// Binds the tensors of a pack, starts the threads and initializes the devices.
    ///
    /// # Errors
    /// The pack lacks a description or tensors or does not support the precision, or the context is longer than the
    /// model's maximum.
    pub fn open(reader: &IebinReader, options: &EngineOptions) -> Result<Engine> {
        OpenedModel::open(reader, options).map(Engine::new)
    }

    /// Creates an engine from an opened model.
    pub fn new(model: OpenedModel) -> Engine {
        let rotates = matches!(model.config.rope.scaling, RopeScaling::LongRope { .. });
        let keeps_tokens = rotates || model.parts.iter().any(|part| part.pool().snapshot_bytes() > 0);
        Engine {
            embedder: Embedder::new(&model.config, &model.weights),
            profile: Profile::new(model.cpu.clone()),
            batch: Batch::default(),
            keeps_tokens,
            adapters: AdapterSet::default(),
            previous: Vec::new(),
            model,
        }
    }

    /// Creates an empty sequence for this engine; its memory grows with its length.
    ///
    /// # Errors
    /// The keys and values of one page do not fit the address space.
    pub fn new_sequence(&self) -> Result<Sequence> {
        let caches = self.model.parts.iter().map(|part| part.new_cache()).collect::<Result<_>>()?;
        let (adapters, tokens) = (self.adapters.clone(), Vec::new());
        Ok(Sequence { len: 0, held: 0, caches, long: false, expected: 0, tokens, adapters })
    }

    /// Returns a sequence that has read `tokens`, of which another text has left this state. `len` is the length of the
    /// text that begins with them.
    ///
    /// # Errors
    /// The same as for [`Engine::new_sequence`].
    pub(crate) fn resume(&self, state: SharedState, tokens: &[u32], len: usize) -> Result<Sequence> {
        let mut sequence = self.new_sequence()?;
        sequence.adopt(state, tokens.len());
        if let RopeScaling::LongRope { original_max_position, .. } = self.config().rope.scaling {
            sequence.long = len > original_max_position;
        }
        if self.keeps_tokens {
            sequence.tokens = tokens.to_vec();
        }
        Ok(sequence)
    }

    /// Returns the memory of each part for the states of texts.
    pub(crate) fn pools(&self) -> Vec<Box<dyn StatePool>> {
        self.model.parts.iter().map(|part| part.pool()).collect()
    }

    /// Returns the largest number of pages that each part can have, if the memory of a part has a budget.
    pub fn most_pages(&self) -> Option<usize> {
        self.pools().iter().filter_map(|pool| pool.most()).min()
    }

    /// Counts the pages of all parts.
    pub fn kv_pages(&self) -> PageCounts {
        let counts = self.pools().into_iter().map(|pool| pool.counts());
        counts.fold(PageCounts::default(), |sum, part| PageCounts {
            total: sum.total + part.total,
            free: sum.free + part.free,
            used: sum.used + part.used,
        })
    }

    /// Computes one step: passes the tokens of all feeds, at most [`Engine::step_rows`], through the model once and
    /// appends what the feeds want to `output`, feed by feed.
    ///
    /// A step takes prompts, pieces of prompts and tokens of running texts of any sequences, in any mixture. Each
    /// result has the same bits as if its sequence were read alone, however the tokens are split into steps. A step
    /// with LongRoPE reads a sequence again when it passes the original context length; see [`Sequence::expect`].
    ///
    /// # Errors
    /// There are more tokens than a step takes, a feed is empty, a token is outside the vocabulary, a sequence would
    /// outgrow the context or belongs to another engine, there is not enough memory, or the user interrupted. The
    /// sequences and `output` are then as before the call.
    ///
    /// # Panics
    /// `output` asks for largest logits that the engine cannot select, see [`Engine::finds_best`].
    pub fn step(&mut self, feeds: &mut [Feed<'_>], output: Output<'_>) -> Result<()> {
        let tokens: usize = feeds.iter().map(|feed| feed.tokens.len()).sum();
        if tokens > self.step_rows() {
            let found = format!("found {tokens} tokens in one step, expected at most {}", self.step_rows());
            return Err(Error::usage(found));
        }
        match output {
            Output::Logits(logits) => {
                let (before, rows) = (logits.len(), feeds.iter().map(Feed::rows).sum::<usize>());
                logits.resize(before + rows * self.model.config.vocab, 0.0);
                let done = self.feed(feeds, None, Answer::Logits(&mut logits[before..]));
                if done.is_err() {
                    logits.truncate(before);
                }
                done
            }
            Output::Hidden { logits, hidden } => {
                self.check_hidden()?;
                let before = [logits.len(), hidden.len()];
                logits.resize(before[0] + feeds.iter().map(Feed::rows).sum::<usize>() * self.model.config.vocab, 0.0);
                hidden.resize(before[1] + tokens * self.model.config.hidden, 0.0);
                let answer = Answer::Hidden { logits: &mut logits[before[0]..], hidden: &mut hidden[before[1]..] };
                let done = self.feed(feeds, None, answer);
                if done.is_err() {
                    logits.truncate(before[0]);
                    hidden.truncate(before[1]);
                }
                done
            }
            Output::Best(k, best) => {
                assert!(self.finds_best(k), "see `finds_best`");
                let before = best.len();
                let done = self.feed(feeds, None, Answer::Best(k, best));
                if done.is_err() {
                    best.truncate(before);
                }
                done
            }
        }
    }

    /// Returns the largest number of tokens that [`Engine::step`] takes.
    pub fn step_rows(&self) -> usize {
        self.model.prefill_chunk
    }

    /// Reads any number of tokens, in as many steps as they need, and replaces the contents of `logits` by the wanted
    /// rows: `(rows, vocab)`, feed by feed.
    ///
    /// # Errors
    /// The same as [`Engine::step`], except for the number of tokens.
    pub fn forward(&mut self, feeds: &mut [Feed<'_>], logits: &mut Vec<f32>) -> Result<()> {
        logits.resize(feeds.iter().map(Feed::rows).sum::<usize>() * self.model.config.vocab, 0.0);
        self.feed(feeds, None, Answer::Logits(logits))
    }

    /// Returns true if the engine can return the output of the final norm.
    pub(super) fn finds_hidden(&self) -> bool {
        self.model.parts.last().is_some_and(|part| part.finds_hidden())
    }

    /// Refuses an engine that cannot return the output of the final norm.
    ///
    /// # Errors
    /// The last layers are on a GPU.
    pub(super) fn check_hidden(&self) -> Result<()> {
        if self.finds_hidden() {
            return Ok(());
        }
        let found = "found a GPU, which does not return what multi-token prediction reads";
        Err(Error::unsupported(found).help("use --device cpu"))
    }

    /// Returns true when the engine can return the `k` largest logits of a row without all the others.
    pub fn finds_best(&self, k: usize) -> bool {
        let most = self.model.parts.last().map_or(0, |part| part.most_best());
        (1..=most.min(self.model.config.vocab)).contains(&k)
    }

    /// Reads tokens as a new text and passes the inputs of all matrices to an observer.
    ///
    /// # Errors
    /// The same as [`Engine::forward`]; also if layers are on a GPU.
    pub(super) fn observe(&mut self, tokens: &[u32], observer: &mut (dyn Observer + 'static)) -> Result<()> {
        let mut sequence = self.new_sequence()?;
        let feed = Feed { sequence: &mut sequence, tokens, want: Want::All };
        self.feed(&mut [feed], Some(observer), Answer::Nothing)
    }

    /// Reads `tokens` as a new text in one step and passes activations to an observer. `start` may hold a layer and the
    /// residual stream at its input; without it, the computation starts with the embeddings.
    ///
    /// # Errors
    /// The same as [`Engine::observe`].
    pub(super) fn observe_from(
        &mut self,
        tokens: &[u32],
        start: Option<(usize, Vec<f32>)>,
        observer: &mut (dyn Observer + 'static),
    ) -> Result<()> {
        self.run_text(tokens, 0, start, observer, Answer::Nothing)
    }

    /// Replaces matrix number `matrix` of a tensor, by its canonical name, by one with these values, `(rows, cols)`;
    /// `None` brings the original back.
    ///
    /// # Errors
    /// The engine was not opened with [`EngineOptions::exchanged`], there is no such tensor of floats, or the values
    /// have another number.
    pub fn exchange(&self, tensor: &str, matrix: usize, values: Option<&[f32]>) -> Result<()> {
        let exchanges = self.model.weights.exchanges(tensor);
        let exchange = exchanges.get(matrix).ok_or_else(|| {
            Error::unsupported("found no matrix of floats in memory that could be replaced").tensor(tensor)
        })?;
        exchange.replace(values).tensor(tensor)
    }

    /// Reads `tokens` as a new text in one step and returns the logits of those from index `first` on, `(tokens -
    /// first, vocab)`. `start` may hold a layer and the residual stream at its input; without it, the computation
    /// starts with the embeddings.
    ///
    /// # Errors
    /// The same as [`Engine::observe`].
    pub(super) fn logits_from(
        &mut self,
        tokens: &[u32],
        first: usize,
        start: Option<(usize, Vec<f32>)>,
        observer: &mut (dyn Observer + 'static),
    ) -> Result<Vec<f32>> {
        let mut logits = vec![0.0; (tokens.len() - first) * self.model.config.vocab];
        self.run_text(tokens, first, start, observer, Answer::Logits(&mut logits))?;
        Ok(logits)
    }

    fn run_text(
        &mut self,
        tokens: &[u32],
        first: usize,
        start: Option<(usize, Vec<f32>)>,
        observer: &mut (dyn Observer + 'static),
        answer: Answer<'_>,
    ) -> Result<()> {
        let mut sequence = self.new_sequence()?;
        let mut feeds = [Feed { sequence: &mut sequence, tokens, want: Want::All }];
        self.check(&feeds[0])?;
        self.reread_for_longrope(&mut feeds, &mut Vec::new())?;
        self.grow(&mut sequence, tokens.len())?;
        let batch = Batch {
            tokens: tokens.to_vec(),
            runs: vec![Run { sequence: 0, first: 0, tokens: tokens.len(), position: 0 }],
            wanted: (first..tokens.len()).collect(),
        };
        self.run(&batch, &mut [&mut sequence], start, Some(observer), answer)
    }

    /// Checks the feeds and runs them. If that fails, restores the sequences.
    fn feed(&mut self, feeds: &mut [Feed<'_>], observer: ObserverRef<'_>, answer: Answer<'_>) -> Result<()> {
        for (i, feed) in feeds.iter().enumerate() {
            self.check(feed).tensor(&format!("sequence {i}"))?;
        }
        let before: Vec<usize> = feeds.iter().map(|f| f.sequence.len()).collect();
        let mut replaced = Vec::new();
        let done = self
            .reread_for_longrope(feeds, &mut replaced)
            .and_then(|()| self.reread_dropped(feeds))
            .and_then(|()| self.run_chunks(feeds, observer, answer));
        if done.is_err() {
            feeds.iter_mut().zip(before).for_each(|(feed, len)| feed.sequence.restore(len));
            replaced.into_iter().for_each(|(i, sequence)| *feeds[i].sequence = sequence);
        }
        done
    }

    /// Reads all tokens of a sequence again if it passes the original context length of LongRoPE, in either direction,
    /// because LongRoPE rotates all keys of a longer text by other factors. The index and the former state of such a
    /// sequence are added to `replaced`.
    fn reread_for_longrope(&mut self, feeds: &mut [Feed<'_>], replaced: &mut Vec<(usize, Sequence)>) -> Result<()> {
        let RopeScaling::LongRope { original_max_position: limit, .. } = self.model.config.rope.scaling else {
            return Ok(());
        };
        for (i, feed) in feeds.iter_mut().enumerate() {
            let long = (feed.sequence.len() + feed.tokens.len()).max(feed.sequence.expected) > limit;
            if feed.sequence.long != long {
                let adapters = feed.sequence.adapters.clone();
                let empty = Sequence { long, expected: feed.sequence.expected, adapters, ..self.new_sequence()? };
                let old = std::mem::replace(feed.sequence, empty);
                let tokens = old.tokens.clone();
                replaced.push((i, old));
                if !tokens.is_empty() {
                    let reread = Feed { sequence: feed.sequence, tokens: &tokens, want: Want::Nothing };
                    self.run_chunks(&mut [reread], None, Answer::Nothing)?;
                }
                feed.sequence.tokens = tokens;
            }
        }
        Ok(())
    }

    /// Reads the tokens again that the parts dropped in addition to those that were to be dropped.
    fn reread_dropped(&mut self, feeds: &mut [Feed<'_>]) -> Result<()> {
        if !self.keeps_tokens {
            return Ok(());
        }
        for feed in feeds {
            let sequence = &mut *feed.sequence;
            let dropped = sequence.tokens[sequence.held..sequence.len].to_vec();
            sequence.tokens.extend_from_slice(feed.tokens);
            if !dropped.is_empty() {
                sequence.len = sequence.held;
                self.run_chunks(
                    &mut [Feed { sequence, tokens: &dropped, want: Want::Nothing }],
                    None,
                    Answer::Nothing,
                )?;
            }
        }
        Ok(())
    }

    fn check(&self, feed: &Feed<'_>) -> Result<()> {
        if feed.tokens.is_empty() {
            return Err(Error::usage("found no tokens, expected at least one"));
        }
        if let Some(id) = feed.tokens.iter().find(|id| **id as usize >= self.model.config.vocab) {
            return Err(Error::usage(format!("token {id} is outside the vocabulary of {}", self.model.config.vocab)));
        }
        let caches = &feed.sequence.caches;
        if caches.len() != self.model.parts.len()
            || !self.model.parts.iter().zip(caches).all(|(part, cache)| part.owns(cache))
        {
            let found = "found a sequence of an engine of another shape (layers, devices or KV type)";
            return Err(Error::usage(format!("{found}, expected one of this engine")));
        }
        let len = feed.sequence.len() + feed.tokens.len();
        if len > self.model.context {
            let found = format!("{len} tokens do not fit the context of {}", self.model.context);
            let help = if self.model.context < self.model.config.max_context {
                format!("open the model with a longer context (--ctx), up to {}", self.model.config.max_context)
            } else {
                "use a shorter prompt or fewer new tokens".to_string()
            };
            return Err(Error::usage(found).help(help));
        }
        Ok(())
    }

    /// Splits the feeds into chunks of rows and runs them in order.
    fn run_chunks(
        &mut self,
        feeds: &mut [Feed<'_>],
        mut observer: ObserverRef<'_>,
        mut answer: Answer<'_>,
    ) -> Result<()> {
        let mut batch = std::mem::take(&mut self.batch);
        let (mut feed, mut fed, mut answered, mut done) = (0, 0, 0, 0);
        while feed < feeds.len() {
            batch.tokens.clear();
            batch.runs.clear();
            batch.wanted.clear();
            while feed < feeds.len() && batch.tokens.len() < self.model.prefill_chunk {
                let Feed { sequence, tokens, want } = &mut feeds[feed];
                let rest = &tokens[fed..];
                let count = rest.len().min(self.model.prefill_chunk - batch.tokens.len());
                let first = batch.tokens.len();
                batch.runs.push(Run { sequence: feed, first, tokens: count, position: sequence.len() });
                self.grow(sequence, count)?;
                batch.tokens.extend_from_slice(&rest[..count]);
                let last = count == rest.len();
                match want {
                    Want::All => batch.wanted.extend(first..first + count),
                    Want::Last if last => batch.wanted.push(first + count - 1),
                    Want::Last | Want::Nothing => (),
                }
                (feed, fed) = if last { (feed + 1, 0) } else { (feed, fed + count) };
            }
            let mut sequences: Vec<&mut Sequence> = feeds.iter_mut().map(|f| &mut *f.sequence).collect();
            let (wanted, rows) = (answered..answered + batch.wanted.len(), done..done + batch.tokens.len());
            (answered, done) = (wanted.end, rows.end);
            let answer = answer.rows(wanted, rows, &self.model.config);
            self.run(&batch, &mut sequences, None, observer.as_deref_mut(), answer)?;
        }
        self.batch = batch;
        Ok(())
    }

    /// Makes room for `count` more positions in all caches and counts them as read.
    fn grow(&self, sequence: &mut Sequence, count: usize) -> Result<()> {
        let positions = sequence.len..sequence.len + count;
        for (part, cache) in self.model.parts.iter().zip(&mut sequence.caches) {
            part.grow(cache, positions.clone())?;
        }
        (sequence.len, sequence.held) = (positions.end, positions.end);
        Ok(())
    }

    /// Runs the rows of a batch through all parts, starting with the embeddings or with a given residual stream at
    /// the input of a layer. The sequences have already grown.
    fn run(
        &mut self,
        batch: &Batch,
        sequences: &mut [&mut Sequence],
        start: Option<(usize, Vec<f32>)>,
        mut observer: ObserverRef<'_>,
        mut answer: Answer<'_>,
    ) -> Result<()> {
        self.profile.lap(Stage::Other);
        let adapted = |run: &Run| (run.first..run.first + run.tokens, &sequences[run.sequence].adapters);
        let groups = adapters::groups(batch.runs.iter().map(adapted));
        let first_layer = start.as_ref().map_or(0, |(layer, _)| *layer);
        match start {
            Some((_, stream)) => self.embedder.x = stream,
            None => self.embedder.embed(&batch.tokens, &groups)?,
        }
        self.profile.lap(Stage::Embedding);
        self.embedder.rotate(&batch.runs, |sequence| sequences[sequence].long);
        for (i, part) in self.model.parts.iter_mut().enumerate() {
            interrupt::check()?;
            let step = Step {
                x: &mut self.embedder.x,
                further: &self.embedder.further,
                previous: &self.previous,
                angles: &self.embedder.angles,
                runs: &batch.runs,
                groups: &groups,
                wanted: &batch.wanted,
                first_layer,
                caches: sequences.iter_mut().map(|sequence| &mut sequence.caches[i]).collect(),
                profile: &mut self.profile,
                observer: observer.as_deref_mut(),
            };
            part.run(step, answer.rows(0..batch.wanted.len(), 0..batch.tokens.len(), &self.model.config))?;
        }
        Ok(())
    }

    /// Returns what binds adapters to the model of the engine, also while the engine computes.
    pub fn adapter_binder(&self) -> AdapterBinder {
        AdapterBinder {
            config: self.model.config.clone(),
            weights: self.model.weights.clone(),
            exact: self.model.precision == Precision::Fp32,
            arithmetic: self.model.precision.arithmetic(),
            on_cpu: self.parts().into_iter().find(|part| part.device.is_none()).map_or(0..0, |part| part.layers),
        }
    }

    /// Sets the adapters of sequences that are created from now on, unless [`Sequence::adapt`] sets others.
    pub fn set_adapters(&mut self, adapters: AdapterSet) {
        self.adapters = adapters;
    }

    /// Returns the adapters of new sequences.
    pub fn adapters(&self) -> &AdapterSet {
        &self.adapters
    }

    /// Describes the parts in the order of layers.
    pub fn parts(&self) -> Vec<PartInfo> {
        self.model.parts.iter().map(|part| part.info()).collect()
    }

    /// Returns the reason why no GPU is in use although [`device::Devices::Auto`] was requested.
    pub fn without_gpu(&self) -> Option<&str> {
        self.model.without_gpu.as_deref()
    }

    /// Returns for how long GPUs computed since the last call.
    pub fn take_gpu_time(&mut self) -> Duration {
        self.model.parts.iter_mut().map(|part| part.take_busy()).sum()
    }

    /// Returns the names of the devices in use: `cpu`, or another kind with its device numbers, or both if the CPU
    /// computes the first layers.
    pub fn device(&self) -> String {
        device::names(&self.parts())
    }

    /// Enables or disables the measurement of stages and discards earlier measurements.
    pub fn profile(&mut self, on: bool) {
        self.profile.restart(on);
    }

    /// Returns true while stages are measured.
    pub fn profiles(&self) -> bool {
        self.profile.is_on()
    }

    /// Adds the time since the last lap to `stage`, if stages are measured.
    pub fn lap(&mut self, stage: Stage) {
        self.profile.lap(stage);
    }

    /// Returns the time of each stage since the last call.
    pub fn take_stages(&mut self) -> Stages {
        self.profile.take()
    }

    /// Returns the model's description.
    pub fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    /// Returns the number types in use.
    pub fn precision(&self) -> Precision {
        self.model.precision
    }

    /// Returns the type of cached keys and values.
    pub fn kv_type(&self) -> KvType {
        self.model.kv_layout.kind
    }

    /// Returns the implementation of attention in use on the CPU.
    pub fn attention(&self) -> AttentionKernel {
        self.model.attention
    }

    /// Returns the name of the instruction set in use.
    pub fn isa(&self) -> &'static str {
        self.model.cpu.isa()
    }

    /// Returns the number of threads.
    pub fn threads(&self) -> usize {
        self.model.cpu.threads()
    }

    /// Returns the placement of threads on processors.
    pub fn placement(&self) -> &Placement {
        &self.model.placement
    }

    /// Returns the length in tokens of the longest sequence.
    pub fn context(&self) -> usize {
        self.model.context
    }

    /// Returns how many more tokens a sequence can read such that [`Sequence::truncate`] can drop them at no cost.
    pub fn room(&self, sequence: &Sequence) -> usize {
        let end = match self.model.config.rope.scaling {
            // Passing this length in either direction requires all keys to be recomputed.
            RopeScaling::LongRope { original_max_position: limit, .. } if !sequence.long => {
                limit.min(self.model.context)
            }
            _ => self.model.context,
        };
        end.saturating_sub(sequence.len())
    }

    /// Returns the bytes of weights read to compute one token of one sequence; of experts only the chosen ones.
    pub fn weight_bytes_per_token(&self) -> u64 {
        self.model.weights.bytes_per_token(self.model.precision.arithmetic())
    }

    /// Returns counters of rebuilt weights; `None` if the pack has its `model.ie.bin`, so that nothing is rebuilt.
    pub fn rebuilds(&self) -> Option<Rebuilds> {
        self.model.weights.cache.as_ref().map(|cache| cache.rebuilds())
    }
}
