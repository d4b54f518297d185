//! The door of the runtime: opens an artifact, hands out sequences, feeds them tokens and returns logits.

use super::attention::{MAX_HEAD, Run};
use super::cache::Rebuilds;
use super::cpu::Cpu;
use super::cpu::place::{Affinity, Numa, Placement, allowed_processors};
use super::cpu::topology::{SYSTEM_ROOT, Topology};
use super::cuda::gpus::{Gpus, Offload, Source};
use super::cuda::{Answer, MOST_BEST, Page, Step};
use super::forward::{Chunk, Model, Scratch};
use super::kv::{KvCache, KvLayout, KvType, PAGE};
use super::observe::Gatherer;
use super::precision::Precision;
use super::profile::{Stage, Stages};
use super::residency::{Residency, lock, read_whole};
use super::rope::Rotary;
use super::weights::Weights;
use crate::error::{Context, Error, Result};
use crate::iebin::{IebinReader, JSON_NAME};
use crate::model_config::{ModelConfig, RopeScaling};
use std::path::Path;
use std::time::Duration;

/// Tokens computed at once during prefill, unless the options say otherwise.
pub const PREFILL_CHUNK: usize = 512;

/// Positions that caches on a GPU must have room for, unless the caller says how long texts get.
const USUAL_CONTEXT: usize = 4096;

/// How an engine is to be made.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Number types; `None` = the fastest the pack holds.
    pub precision: Option<Precision>,
    /// Threads, the caller's included.
    pub threads: usize,
    /// Longest sequence in tokens; `None` = what the model was made for.
    pub context: Option<usize>,
    /// Type of cached keys and values; `None` = what [`Precision::kv_type`] says.
    pub kv: Option<KvType>,
    /// Most tokens computed at once; bounds the memory of a prefill and changes no bit of its result.
    pub prefill_chunk: usize,
    /// When weights come into memory.
    pub residency: Residency,
    /// How threads are bound to processors.
    pub affinity: Affinity,
    /// On which memory nodes threads run and weights lie.
    pub numa: Numa,
    /// How much of the model runs on GPUs.
    pub offload: Offload,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            precision: None,
            threads: 1,
            context: None,
            kv: None,
            prefill_chunk: PREFILL_CHUNK,
            residency: Residency::default(),
            affinity: Affinity::default(),
            numa: Numa::default(),
            offload: Offload::default(),
        }
    }
}

/// An opened model, ready to compute.
#[derive(Debug)]
pub struct Engine {
    pub(super) model: Model,
    precision: Precision,
    context: usize,
    prefill_chunk: usize,
    pub(super) scratch: Scratch,
    tokens: Vec<u32>,
    runs: Vec<Run>,
    wanted: Vec<usize>,
    placement: Placement,
    gpus: Option<Gpus>,
    without_gpu: Option<String>,
}

/// The state of one text: what the model has read so far. A clone shares memory until one of the two reads on.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub(super) cache: KvCache,
    /// The keys are rotated for a text beyond LongRoPE's border.
    pub(super) long: bool,
    /// What was read, kept by models whose rotation depends on the length.
    tokens: Vec<u32>,
    /// Keys and values on GPUs, device by device.
    pages: Vec<Vec<Page>>,
}

impl Sequence {
    /// Number of tokens read.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// True before the first token.
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }

    /// Forgets all tokens from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.cache.truncate(len);
        self.tokens.truncate(len);
        self.pages.iter_mut().for_each(|pages| pages.truncate(len.div_ceil(PAGE)));
    }

    /// Bytes of keys and values held, those on GPUs included.
    pub fn kv_bytes(&self) -> usize {
        self.cache.bytes() + self.pages.iter().flatten().map(Page::bytes).sum::<usize>()
    }
}

/// Tokens for a sequence.
#[derive(Debug)]
pub struct Feed<'a> {
    /// Reads the tokens.
    pub sequence: &'a mut Sequence,
    /// At least one.
    pub tokens: &'a [u32],
}

/// Which logits a call returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// One row per feed: after its last token.
    Last,
    /// One row per token, feed by feed.
    All,
}

impl Engine {
    /// Binds the tensors of an artifact and starts the threads.
    ///
    /// # Errors
    /// The pack lacks a description or tensors, cannot serve the precision, or the context is longer than the model's.
    pub fn open(reader: &IebinReader, options: &EngineOptions) -> Result<Engine> {
        let json = reader.dir.join(JSON_NAME);
        let config = (reader.description.model.clone())
            .ok_or_else(|| Error::corrupt("missing; the runtime is built from it").tensor("model").at(&json))?;
        let precision = Precision::resolve(options.precision, reader)?;
        let context = options.context.unwrap_or(config.max_context);
        if context == 0 || context > config.max_context {
            return Err(Error::engine(format!(
                "a context of {context} tokens; the model has 1 to {}",
                config.max_context
            )));
        }
        let kv_layout = KvLayout::new(&config, options.kv.unwrap_or(precision.kv_type()));
        if kv_layout.value_stride() > MAX_HEAD {
            let found = format!("heads of {} values; the runtime takes up to {MAX_HEAD}", config.head_dim);
            return Err(Error::engine(found).tensor("head_dim").at(&json));
        }
        let (allowed, threads) = (allowed_processors(), options.threads.max(1));
        let topology = Topology::probe(Path::new(SYSTEM_ROOT));
        let placement = Placement::plan(&topology, &allowed, options.affinity, options.numa, threads)?;
        placement.take_memory()?;
        // `auto` runs what the pack holds as it is, also where it mixes float types.
        let convert = options.precision.and_then(Precision::float_dtype);
        let cpu = Cpu::placed(threads, &placement)?;
        // What is computed with as it is stored has no bytes that could go to a GPU.
        let found = options.offload.find()?;
        let in_place = cpu.unpacks() && found.is_err();
        let weights = Weights::bind(reader, &config, convert, in_place)?;
        let source = Source {
            config: &config,
            weights: &weights,
            kv: kv_layout,
            arithmetic: precision.arithmetic(),
            positions: options.context.unwrap_or(context.min(USUAL_CONTEXT)),
            rows: options.prefill_chunk.clamp(1, PREFILL_CHUNK),
        };
        let opened = match found {
            Ok(found) => Gpus::open(found, &options.offload, &source)?,
            Err(why) => Err(why),
        };
        let (gpus, without_gpu) = opened.map_or_else(|why| (None, why), |gpus| (Some(gpus), None));
        let own_layers = gpus.as_ref().map_or(config.n_layers, Gpus::first_layer);
        if options.residency != Residency::OnDemand {
            reader.files().iter().try_for_each(read_whole)?;
        }
        if let Some((_, keep)) = reader.rebuilt() {
            weights.rebuild(keep, options.residency)?;
        }
        if options.residency == Residency::Locked {
            lock(reader, &weights).help("raise the limit of locked memory (`ulimit -l`), or leave out --pin")?;
        }
        let forms = weights.forms(precision.arithmetic());
        let kv_layout = KvLayout { layers: own_layers, ..kv_layout };
        let model = Model {
            rotary: Rotary::new(&config.rope, config.head_dim),
            local_rotary: config.local_rope.as_ref().map(|rope| Rotary::new(rope, config.head_dim)),
            weights,
            kv_layout,
            cpu,
            arithmetic: precision.arithmetic(),
            forms,
            own_layers,
            config,
        };
        let most_rows = if gpus.is_some() { PREFILL_CHUNK } else { usize::MAX };
        Ok(Engine {
            model,
            precision,
            context,
            prefill_chunk: options.prefill_chunk.clamp(1, most_rows),
            scratch: Scratch::default(),
            tokens: Vec::new(),
            runs: Vec::new(),
            wanted: Vec::new(),
            placement,
            gpus,
            without_gpu,
        })
    }

    /// An empty sequence for this engine; it takes memory as it grows.
    ///
    /// # Errors
    /// Its keys and values could never fit the address space.
    pub fn new_sequence(&self) -> Result<Sequence> {
        let pages = self.gpus.as_ref().map(Gpus::new_pages).unwrap_or_default();
        Ok(Sequence { cache: KvCache::new(self.model.kv_layout)?, long: false, tokens: Vec::new(), pages })
    }

    /// Feeds each sequence its tokens and writes `(rows, vocab)` logits: the last position of each feed, or all of them.
    ///
    /// Feeds may have different lengths; every result is the same bits as if its sequence were fed alone, in any chunks.
    ///
    /// # Errors
    /// A feed is empty, a token is outside the vocabulary, a sequence would outgrow the context or belongs to another
    /// engine, memory could not be had, or the user interrupted. The sequences are then as before the call.
    pub fn forward(&mut self, feeds: &mut [Feed<'_>], want: Want, logits: &mut Vec<f32>) -> Result<()> {
        let rows = match want {
            Want::Last => feeds.len(),
            Want::All => feeds.iter().map(|f| f.tokens.len()).sum(),
        };
        logits.resize(rows * self.model.config.vocab, 0.0);
        self.feed(feeds, want, &mut Answer::Logits(logits))
    }

    /// True when the engine finds the `k` largest logits of a row without handing over the others.
    pub fn finds_best(&self, k: usize) -> bool {
        self.gpus.is_some() && k <= MOST_BEST.min(self.model.config.vocab)
    }

    /// [`Engine::forward`], but of each row only the `k` largest logits with their tokens are added to `best`, the largest first.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    ///
    /// # Panics
    /// The engine does not find so many, see [`Engine::finds_best`].
    pub fn forward_best(
        &mut self,
        feeds: &mut [Feed<'_>],
        want: Want,
        k: usize,
        best: &mut Vec<Vec<(u32, f32)>>,
    ) -> Result<()> {
        assert!(self.finds_best(k), "asked before");
        self.feed(feeds, want, &mut Answer::Best(k, best))
    }

    /// Checks the feeds, runs them, and takes everything back if that fails.
    fn feed(&mut self, feeds: &mut [Feed<'_>], want: Want, answer: &mut Answer<'_>) -> Result<()> {
        for (i, feed) in feeds.iter().enumerate() {
            self.check(feed).tensor(&format!("sequence {i}"))?;
        }
        let before: Vec<usize> = feeds.iter().map(|f| f.sequence.len()).collect();
        let mut replaced = Vec::new();
        let done = self.cross_border(feeds, &mut replaced).and_then(|()| self.run_chunks(feeds, want, answer));
        if done.is_err() {
            feeds.iter_mut().zip(before).for_each(|(feed, len)| feed.sequence.truncate(len));
            replaced.into_iter().for_each(|(i, sequence)| *feeds[i].sequence = sequence);
        }
        done
    }

    /// LongRoPE rotates by other factors once a text is longer than the model's first training, all of it: a sequence that
    /// crosses that border, in either direction, is read again. What it was before goes to `replaced`.
    pub(super) fn cross_border(&mut self, feeds: &mut [Feed<'_>], replaced: &mut Vec<(usize, Sequence)>) -> Result<()> {
        let RopeScaling::LongRope { original_max_position: border, .. } = self.model.config.rope.scaling else {
            return Ok(());
        };
        for (i, feed) in feeds.iter_mut().enumerate() {
            let long = feed.sequence.len() + feed.tokens.len() > border;
            if feed.sequence.long != long {
                let again = Sequence { long, ..self.new_sequence()? };
                let old = std::mem::replace(feed.sequence, again);
                let tokens = old.tokens.clone();
                replaced.push((i, old));
                if !tokens.is_empty() {
                    let again = Feed { sequence: feed.sequence, tokens: &tokens };
                    let mut unused = vec![0.0; self.model.config.vocab];
                    self.run_chunks(&mut [again], Want::Last, &mut Answer::Logits(&mut unused))?;
                }
                feed.sequence.tokens = tokens;
            }
            feed.sequence.tokens.extend_from_slice(feed.tokens);
        }
        Ok(())
    }

    pub(super) fn check(&self, feed: &Feed<'_>) -> Result<()> {
        let config = &self.model.config;
        if feed.tokens.is_empty() {
            return Err(Error::usage("no tokens to read"));
        }
        if let Some(id) = feed.tokens.iter().find(|id| **id as usize >= config.vocab) {
            return Err(Error::usage(format!("token {id} is outside the vocabulary of {}", config.vocab)));
        }
        let on_gpus = self.gpus.as_ref().map_or(feed.sequence.pages.is_empty(), |gpus| gpus.own(&feed.sequence.pages));
        if *feed.sequence.cache.layout() != self.model.kv_layout || !on_gpus {
            return Err(Error::usage("the sequence belongs to an engine of another shape"));
        }
        let len = feed.sequence.len() + feed.tokens.len();
        if len > self.context {
            let found = format!("{len} tokens do not fit the context of {}", self.context);
            let help = if self.context < config.max_context {
                format!("this model can be opened with a context of up to {}", config.max_context)
            } else {
                "use a shorter prompt or fewer new tokens".to_string()
            };
            return Err(Error::usage(found).help(help));
        }
        Ok(())
    }

    /// Cuts the feeds into chunks of rows, in order, and runs them.
    fn run_chunks(&mut self, feeds: &mut [Feed<'_>], want: Want, answer: &mut Answer<'_>) -> Result<()> {
        let (mut feed, mut fed, mut answered) = (0, 0, 0);
        while feed < feeds.len() {
            self.tokens.clear();
            self.runs.clear();
            self.wanted.clear();
            while feed < feeds.len() && self.tokens.len() < self.prefill_chunk {
                let Feed { sequence, tokens } = &mut feeds[feed];
                let rest = &tokens[fed..];
                let count = rest.len().min(self.prefill_chunk - self.tokens.len());
                let first = self.tokens.len();
                self.runs.push(Run { sequence: feed, first, tokens: count, position: sequence.len() });
                sequence.cache.grow(count)?;
                if let Some(gpus) = &self.gpus {
                    let len = sequence.cache.len();
                    gpus.grow(&mut sequence.pages, len - count, len)?;
                }
                self.tokens.extend_from_slice(&rest[..count]);
                let last = count == rest.len();
                match want {
                    Want::All => self.wanted.extend(first..first + count),
                    Want::Last if last => self.wanted.push(first + count - 1),
                    Want::Last => (),
                }
                (feed, fed) = if last { (feed + 1, 0) } else { (feed, fed + count) };
            }
            let mut sequences: Vec<&mut Sequence> = feeds.iter_mut().map(|f| &mut *f.sequence).collect();
            let chunk = Chunk { tokens: &self.tokens, runs: &self.runs, wanted: &self.wanted };
            self.model.layers(&chunk, &mut sequences, &mut self.scratch)?;
            let rows = answered..answered + self.wanted.len();
            answered = rows.end;
            if let Some(gpus) = &mut self.gpus {
                let [x, angles, local_angles] = self.scratch.stream();
                let step = Step { x, angles, local_angles, runs: &self.runs, wanted: &self.wanted, pages: &[] };
                let pages: Vec<&[Vec<Page>]> = sequences.iter().map(|sequence| sequence.pages.as_slice()).collect();
                gpus.run(&step, &pages, &mut answer.rows(rows, self.model.config.vocab))?;
                self.scratch.profile.lap(Stage::Device, &self.model.cpu);
            } else if let Answer::Logits(logits) = answer.rows(rows, self.model.config.vocab)
                && !logits.is_empty()
            {
                self.model.logits(&mut self.scratch, logits)?;
            }
        }
        Ok(())
    }

    /// Reads a text of its own and shows `gatherer` what the matrices read; it is handed back.
    ///
    /// # Errors
    /// As [`Engine::forward`]; what was gathered is lost then.
    pub(super) fn observe(&mut self, tokens: &[u32], gatherer: Gatherer) -> Result<Gatherer> {
        let mut sequence = self.new_sequence()?;
        let mut feeds = [Feed { sequence: &mut sequence, tokens }];
        self.check(&feeds[0])?;
        self.cross_border(&mut feeds, &mut Vec::new())?;
        let layers = self.model.config.n_layers;
        self.scratch.watch.0 = Some(gatherer);
        let mut done = Ok(());
        for part in tokens.chunks(self.prefill_chunk) {
            let run = Run { sequence: 0, first: 0, tokens: part.len(), position: sequence.len() };
            let wanted: Vec<usize> = (0..part.len()).collect();
            let chunk = Chunk { tokens: part, runs: &[run], wanted: &wanted };
            done = done
                .and_then(|()| sequence.cache.grow(part.len()))
                .and_then(|()| self.model.layers(&chunk, &mut [&mut sequence], &mut self.scratch));
            if done.is_ok() && !self.scratch.watch.is_over(layers) {
                self.model.show_head(&mut self.scratch);
            }
        }
        let gatherer = self.scratch.watch.0.take();
        done.map(|()| gatherer.expect("nobody else takes it"))
    }

    /// The GPUs in use, if there are any.
    pub fn gpus(&self) -> Option<&Gpus> {
        self.gpus.as_ref()
    }

    /// Why no GPU is in use, though one would have been.
    pub fn without_gpu(&self) -> Option<&str> {
        self.without_gpu.as_deref()
    }

    /// How long GPUs computed since the last call.
    pub fn take_gpu_time(&mut self) -> Duration {
        self.gpus.as_mut().map_or(Duration::ZERO, Gpus::take_busy)
    }

    /// Where it computes: `cpu`, `cuda:0`, `cuda:0,1`, or `cpu+cuda:0` where the CPU has the first layers.
    pub fn device(&self) -> String {
        let Some(gpus) = &self.gpus else { return "cpu".into() };
        let numbers: Vec<String> = gpus.used().iter().map(|used| used.info.ordinal.to_string()).collect();
        let cpu = if gpus.first_layer() > 0 { "cpu+" } else { "" };
        format!("{cpu}cuda:{}", numbers.join(","))
    }

    /// Measures from now on what the stages of the work cost, or stops it; what was measured before is forgotten.
    pub fn profile(&mut self, on: bool) {
        self.scratch.profile.restart(on, &self.model.cpu);
    }

    /// True while it is measured.
    pub fn profiles(&self) -> bool {
        self.scratch.profile.is_on()
    }

    /// Gives the time since the last lap to `stage`, if it is measured.
    pub fn lap(&mut self, stage: Stage) {
        self.scratch.profile.lap(stage, &self.model.cpu);
    }

    /// Hands over what was measured since the last call.
    pub fn take_stages(&mut self) -> Stages {
        self.scratch.profile.take()
    }

    /// The model's description.
    pub fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    /// The number types in use.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The type of cached keys and values.
    pub fn kv_type(&self) -> KvType {
        self.model.kv_layout.kind
    }

    /// Name of the instruction set in use.
    pub fn isa(&self) -> &'static str {
        self.model.cpu.isa()
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.model.cpu.threads()
    }

    /// Where the threads run.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Longest sequence in tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens that a sequence can read and give back again with [`Sequence::truncate`] at no cost.
    pub fn room(&self, sequence: &Sequence) -> usize {
        let end = match self.model.config.rope.scaling {
            // Beyond the border all keys are others, and back again.
            RopeScaling::LongRope { original_max_position: border, .. } if !sequence.long => border.min(self.context),
            _ => self.context,
        };
        end.saturating_sub(sequence.len())
    }

    /// Bytes of weights read to compute one token of one sequence; of experts only the chosen ones.
    pub fn weight_bytes_per_token(&self) -> u64 {
        self.model.weights.bytes_per_token(&self.model.config)
    }

    /// What became of weights that are rebuilt, where the pack is without its binary.
    pub fn rebuilds(&self) -> Option<Rebuilds> {
        self.model.weights.cache.as_ref().map(|cache| cache.rebuilds())
    }

    /// Bytes of working memory held between calls (weights and caches not counted).
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.bytes()
    }
}
