//! Opens a pack for text generation: tokenizer, chat template, engine, source of draft tokens and default sampling.
//!
//! [`Session::open`] opens a pack by its path ([`crate::models::open_session`] whatever a user may name as a model),
//! [`Session::generate`] continues prompts, and [`Metrics`] reports the speed. The commands `run`, `bench`, `eval` and
//! `verify` are built on these types.

pub mod adapters;
mod ahead;
pub mod chat_templates;
pub mod dedup;
pub mod default_sampling;
mod encoder;
pub mod infill;
pub mod kv_gate;
mod memory;
pub mod metrics;
pub mod plan;
pub mod prompt_request;
pub mod prompts;
pub mod recent;
pub mod request;
pub mod sampling;
pub mod template;
pub mod trace;
pub mod usage;

use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::generate::constraint::{Constraint, ConstraintSource, Vocabulary};
use crate::generate::sampler::Sampling;
use crate::generate::speculate::Speculator;
use crate::generate::text::{ChatTemplate, Tokenizer, chat as template_files, tokenizer};
use crate::generate::{self, Event, Outcome, Request};
use crate::iebin::reader::{NAME_A_PACK, read_description};
use crate::iebin::{IebinReader, JSON_NAME, TOOL_TEMPLATE_NAME, tensor_map};
use crate::output::{Lease, swap};
use crate::progress;
use crate::runtime::cpu::place::physical_cores;
use crate::runtime::{Engine, EngineOptions, Precision, PrefixCache};
use crate::sha256::{Digest, Sha256, hex};
use crate::units::human_bytes;
use adapters::Adapters;
use dedup::DedupOptions;
pub use encoder::Encoder;
pub use metrics::{Latencies, Metrics};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use template::{RenderProcess, Renderer};
use usage::Usage;

/// Tokens generated per prompt unless a request says otherwise.
pub const MAX_NEW: usize = 128;

/// Options for opening a session.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// Weights file to use instead of the one that the description names.
    pub weights: Option<PathBuf>,
    /// Tokenizer file to use instead of `tokenizer.json` next to the description.
    pub tokenizer: Option<PathBuf>,
    /// True to compare every tensor and file of the pack with its recorded hash before the model is used.
    pub check: bool,
    /// Name of the model in reports; `None` = the path of its directory.
    pub name: Option<String>,
    /// Precision, threads (0 = all physical cores), context length, device and memory limits.
    pub engine: EngineOptions,
    /// True to use the type of the KV cache that `engine` names even if it was found to be worse: the session measures
    /// it.
    pub measures_kv: bool,
    /// Source of draft tokens.
    pub speculation: Speculation,
    /// Options for deduplicated packs.
    pub dedup: DedupOptions,
    /// Default sampling of requests.
    pub sampling: Sampling,
    /// Adapters to load. Requests that name none use all of them.
    pub adapters: Vec<adapters::AdapterSource>,
    /// Number type of the factors of adapters.
    pub adapter_precision: adapters::AdapterPrecision,
    /// Largest number of bytes of adapters in memory; `None` = all of them.
    pub adapter_memory: Option<u64>,
    /// Command line of processes of limited memory that render chat templates; `None` = render in this process,
    /// whose memory a hostile template can exhaust.
    pub template_process: Option<RenderProcess>,
}

/// Options for all physical cores, the fastest precision of the pack, greedy sampling and no speculation.
impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions {
            weights: None,
            tokenizer: None,
            check: false,
            name: None,
            engine: EngineOptions { threads: 0, ..EngineOptions::default() },
            measures_kv: false,
            speculation: Speculation::default(),
            dedup: DedupOptions::default(),
            sampling: Sampling::default(),
            adapters: Vec::new(),
            adapter_precision: adapters::AdapterPrecision::Auto,
            adapter_memory: None,
            template_process: None,
        }
    }
}

/// Source of draft tokens for speculative decoding: the model verifies several of them in one step. Speculation
/// changes the speed and never the text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Speculation {
    /// No speculation: one token per step.
    #[default]
    Off,
    /// Prompt lookup: draft tokens are copied from earlier occurrences of the same n-gram, in the text and in earlier
    /// texts of the same owner.
    Ngram,
    /// Draft model: the pack of a small model with the same vocabulary.
    Draft(PathBuf),
    /// The first layer of multi-token prediction in the pack.
    Mtp,
    /// For each text what saves the most time: prompt lookup, and the small model of this pack or else, if the model's
    /// pack has one and the CPU computes, the layer of multi-token prediction; nothing where none of them saves time.
    Auto(Option<PathBuf>),
}

/// Options that apply to all requests of one call of [`Session::generate`].
#[derive(Debug, Clone, Default)]
pub struct GenerateOptions {
    /// Number of texts decoded together (0 is treated as 1). Each text gets the same tokens as when it is decoded
    /// alone.
    pub batch: usize,
    /// Do not end a text at the model's end-of-sequence tokens or at `stop_tokens`.
    pub ignore_eos: bool,
    /// Tokens that end a text in addition to the model's end-of-sequence tokens, such as the end of a turn.
    pub stop_tokens: Vec<u32>,
    /// Show special tokens in the text.
    pub show_special: bool,
    /// Let an invalid request fail alone: its completion carries the error, and the others are generated.
    pub skip_invalid: bool,
}

/// Result of one call of [`Session::generate`]: the texts and the time they took.
#[derive(Debug)]
pub struct Generation {
    /// Completions, and the time spent in prefill and decode.
    pub outcome: Outcome,
    /// Wall time of the call.
    pub wall: Duration,
    /// Time during which GPUs computed.
    pub gpu: Duration,
    /// Processor time, page faults and context switches of the process during the call, where the system reports them.
    pub usage: Option<Usage>,
}

/// Opened model, ready to generate.
#[derive(Debug)]
pub struct Session {
    /// Engine that computes logits.
    pub engine: Engine,
    /// Prefix cache of the texts; see [`Session::enable_prefix_cache`].
    pub prefixes: Option<PrefixCache>,
    /// Source of draft tokens.
    pub speculator: Speculator,
    /// The opened pack.
    pub reader: IebinReader,
    /// Tokenizer of the pack, if it has one; without it the session still generates token ids.
    pub tokenizer: Option<Tokenizer>,
    /// Name of the model in reports.
    pub name: String,
    /// Options with which the engine was opened.
    pub engine_options: EngineOptions,
    /// Default sampling of requests.
    pub sampling: Sampling,
    /// Adapters that requests may name.
    pub adapters: Adapters,
    renderer: Option<Renderer>,
    /// Keeps the pack from being removed, if it is an entry of the cache of models.
    _lease: Option<Lease>,
    /// Tokens of the model, prepared for constraints when the first one is compiled.
    vocabulary: OnceLock<Arc<Vocabulary>>,
}

impl Session {
    /// Opens the pack at `path`, which is its directory or its description `model.ie.json`.
    ///
    /// # Errors
    /// There is no valid pack, a part of it is missing, or the engine cannot run it with these options.
    pub fn open(path: &Path, options: &SessionOptions) -> Result<Session> {
        let mut marks = vec![("", Instant::now())];
        let json = description_path(path)?;
        let description = read_description(&json).map_err(Error::while_opening_model)?;
        if description.is_older() {
            return Err(to_be_converted(&json));
        }
        let reader = options.open_described(description, &json)?;
        options.check_kv(&reader)?;
        options.check(&reader)?;
        let tokenizer = match &options.tokenizer {
            Some(path) => Some(path.clone()),
            None => files::first([reader.path(tokenizer::FILE_NAME)]).map_err(Error::while_opening_model)?,
        };
        if options.tokenizer.is_none() && tokenizer.is_some() {
            reader.check_file(tokenizer::FILE_NAME).map_err(Error::while_opening_model)?;
        }
        if reader.rebuilt().is_none() {
            options.dedup.note_options_without_effect();
        }
        let threads = if options.engine.threads == 0 { physical_cores() } else { options.engine.threads };
        let engine_options = EngineOptions { threads, ..options.engine };
        marks.push(("pack", Instant::now()));
        let engine = Engine::open(&reader, &engine_options).map_err(Error::while_opening_model)?;
        marks.push(("weights", Instant::now()));
        // The tokenizer is opened on this thread: the heap of another thread grows one page at a time, in 1400 system
        // calls, each of which waits for the page faults of all threads.
        let tokenizer = tokenizer.map(|path| Tokenizer::open(&path)).transpose().map_err(Error::while_opening_model)?;
        if let Some(tokenizer) = &tokenizer {
            let checked = tokenizer.bounds().check_vocabulary(engine.config().vocab).at(tokenizer.path());
            checked.map_err(Error::while_opening_model)?;
        }
        marks.push(("tokenizer", Instant::now()));
        let speculator =
            options.speculator(&engine, &reader, tokenizer.as_ref()).map_err(Error::while_opening_model)?;
        let dir = json.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let session = Session {
            engine,
            prefixes: None,
            speculator,
            reader,
            tokenizer,
            name: options.name.clone().unwrap_or_else(|| dir.display().to_string()),
            engine_options,
            sampling: options.sampling.clone(),
            adapters: Adapters::default(),
            renderer: options.template_process.clone().map(Renderer::new),
            _lease: None,
            vocabulary: OnceLock::new(),
        };
        let session = session.with_adapters(options)?;
        marks.push(("adapters and drafts", Instant::now()));
        progress::detail(1, || session.describe());
        progress::detail(1, || stages(&marks));
        Ok(session)
    }

    /// Keeps `lease` as long as the session.
    pub(crate) fn holding(self, lease: Option<Lease>) -> Session {
        Session { _lease: lease, ..self }
    }

    /// Returns the tokenizer.
    ///
    /// # Errors
    /// The pack has no tokenizer.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.encoder().tokenizer()
    }

    /// Reads the chat template of the pack.
    ///
    /// # Errors
    /// There is no template, or its file cannot be read.
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        [template_files::CONFIG_NAME, template_files::TEMPLATE_NAME, TOOL_TEMPLATE_NAME]
            .into_iter()
            .try_for_each(|name| self.reader.check_file(name))?;
        ChatTemplate::open(&self.reader.dir)
    }

    /// Encodes a prompt, with the special tokens that the tokenizer adds.
    ///
    /// # Errors
    /// The pack has no tokenizer, or the text is so long that it has more tokens than the context.
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>> {
        self.encoder().encode(prompt, true)
    }

    /// Returns the token that ends a turn of a conversation, if the template names one.
    ///
    /// # Errors
    /// The pack has no tokenizer.
    pub fn end_of_turn(&self, template: &ChatTemplate) -> Result<Option<u32>> {
        template.eos_token().map_or(Ok(None), |token| Ok(self.tokenizer()?.id(token)))
    }

    /// Compiles a constraint for requests to this model; see [`Encoder::constraint`].
    ///
    /// # Errors
    /// The same as those of [`Encoder::constraint`].
    pub fn constraint(&self, source: &ConstraintSource) -> Result<Arc<Constraint>> {
        self.encoder().constraint(source)
    }

    /// Creates the prefix cache for the following requests, and returns it.
    pub fn enable_prefix_cache(&mut self) -> &mut PrefixCache {
        let cache = PrefixCache::new(&self.engine, &pack_digest(&self.reader));
        self.prefixes.insert(cache)
    }

    /// Returns a short name of everything that decides about the bits of an answer, besides the request: the pack, its
    /// precision, the type of the KV cache, and the version of this program.
    pub fn fingerprint(&self) -> String {
        let engine = &self.engine;
        let parts = [pack_digest(&self.reader), engine.precision().to_string(), engine.kv_type().to_string()];
        let hash = Sha256::new_with_prefix(parts.join("/")).chain_update(env!("CARGO_PKG_VERSION"));
        format!("iec_{}", &hex(hash)[..16])
    }

    /// Builds a request for [`Session::generate`] that continues `ids`, with the default length and sampling.
    pub fn request(&self, ids: Vec<u32>) -> Request {
        Request { ids, max_new: MAX_NEW, sampling: self.sampling.clone(), ..Request::default() }
    }

    /// Continues all requests; `sink` is called with each token as it is generated.
    ///
    /// # Errors
    /// A request is invalid and `skip_invalid` is not set (checked before anything is computed), the engine fails,
    /// `sink` fails, or the user interrupts.
    pub fn generate(
        &mut self,
        requests: Vec<Request>,
        options: &GenerateOptions,
        sink: impl FnMut(&Event<'_>) -> Result<()>,
    ) -> Result<Generation> {
        self.parts().0.generate(options, |(engine, prefixes, speculator), run| {
            generate::generate(engine, prefixes, speculator, requests, run, sink)
        })
    }

    /// Returns the part of the session that encodes texts.
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder {
            tokenizer: self.tokenizer.as_ref(),
            renderer: self.renderer.as_ref(),
            vocabulary: &self.vocabulary,
            adapters: &self.adapters,
            dir: &self.reader.dir,
            context: self.engine.context(),
            vocab: self.engine.config().vocab,
        }
    }

    /// Returns the parts that compute and those that encode, which may be used at the same time.
    pub(crate) fn parts(&mut self) -> (Parts<'_>, Encoder<'_>) {
        let Session { engine, prefixes, speculator, tokenizer, renderer, vocabulary, adapters, reader, .. } = self;
        let tokenizer = tokenizer.as_ref();
        let (context, vocab) = (engine.context(), engine.config().vocab);
        let renderer = renderer.as_ref();
        let encoder = Encoder { tokenizer, renderer, vocabulary, adapters, dir: &reader.dir, context, vocab };
        (Parts { engine, prefixes: prefixes.as_mut(), speculator, tokenizer }, encoder)
    }

    /// Continues `prompt` by at most `max_new` tokens; returns the generated text.
    ///
    /// # Errors
    /// The same as those of [`Session::generate`], and the pack may have no tokenizer.
    pub fn complete(&mut self, prompt: &str, max_new: usize) -> Result<String> {
        let ids = self.encode(prompt)?;
        let request = Request { max_new, ..self.request(ids) };
        let generation = self.generate(vec![request], &GenerateOptions::default(), |_| Ok(()))?;
        Ok(generation.outcome.completions.into_iter().map(|completion| completion.text).collect())
    }

    /// Prints, with `--verbose`, how often weights of a deduplicated pack were rebuilt.
    pub fn note_rebuilds(&self) {
        note_rebuilds(&self.name, &self.engine);
    }

    fn describe(&self) -> String {
        let engine = &self.engine;
        format!(
            "{}: {} in {}, {} threads with {}, context {} in {}, {} of weights per token",
            self.name,
            engine.config().architecture,
            engine.precision(),
            engine.threads(),
            engine.isa(),
            engine.context(),
            engine.kv_type(),
            human_bytes(engine.weight_bytes_per_token())
        )
    }
}

/// Prints, with `--verbose`, how often weights of the deduplicated pack of an engine were rebuilt.
pub fn note_rebuilds(name: &str, engine: &Engine) {
    let Some(rebuilds) = engine.rebuilds() else { return };
    progress::detail(1, || {
        format!(
            "{name}: rebuilt {} matrices ({}), released {} of them, kept at most {} in memory",
            rebuilds.matrices,
            human_bytes(rebuilds.bytes),
            rebuilds.evicted,
            human_bytes(rebuilds.peak_bytes)
        )
    });
}

/// Engine, prefix cache (if there is one) and source of draft tokens, as generation uses them.
pub(crate) type Computing<'a> = (&'a mut Engine, Option<&'a mut PrefixCache>, &'a mut Speculator);

/// Parts of a session that compute.
pub(crate) struct Parts<'a> {
    pub(crate) engine: &'a mut Engine,
    pub(crate) prefixes: Option<&'a mut PrefixCache>,
    pub(crate) speculator: &'a mut Speculator,
    tokenizer: Option<&'a Tokenizer>,
}

impl Parts<'_> {
    /// Calls `generate` with the options for the runtime, and measures its time.
    fn generate(
        self,
        options: &GenerateOptions,
        generate: impl FnOnce(Computing<'_>, &generate::Options<'_>) -> Result<Outcome>,
    ) -> Result<Generation> {
        let eos = match options.ignore_eos {
            true => Vec::new(),
            false => [&self.engine.config().eos[..], &options.stop_tokens].concat(),
        };
        let run = generate::Options {
            tokenizer: self.tokenizer,
            batch: options.batch,
            waiting: 0,
            eos: &eos,
            show_special: options.show_special,
            skip_invalid: options.skip_invalid,
        };
        self.engine.take_gpu_time();
        let (begin, before) = (Instant::now(), Usage::now());
        let outcome = generate((self.engine, self.prefixes, self.speculator), &run)?;
        let wall = begin.elapsed();
        let usage = Usage::now().zip(before).map(|(now, before)| now.since(&before));
        Ok(Generation { outcome, wall, gpu: self.engine.take_gpu_time(), usage })
    }
}

impl SessionOptions {
    /// Opens the pack at `path` without an engine.
    ///
    /// # Errors
    /// There is no valid pack.
    pub fn open_pack(&self, path: &Path) -> Result<IebinReader> {
        let json = description_path(path)?;
        let description = read_description(&json).map_err(Error::while_opening_model)?;
        self.open_described(description, &json)
    }

    /// Opens only the tokenizer of the pack at `path`.
    ///
    /// # Errors
    /// There is no tokenizer, or its file is not valid.
    pub fn open_tokenizer(&self, path: &Path) -> Result<Tokenizer> {
        let path = match &self.tokenizer {
            Some(path) => path.clone(),
            None => swap::member(&description_path(path)?, tokenizer::FILE_NAME),
        };
        Tokenizer::open(&path).map_err(Error::while_opening_model)
    }

    /// Sets the precision to `precision` if none is set and the pack at `path` supports it.
    ///
    /// # Errors
    /// There is no valid pack.
    pub fn prefer(&mut self, precision: Precision, path: &Path) -> Result<()> {
        if self.engine.precision.is_none() {
            self.engine.precision = Precision::resolve(Some(precision), &self.open_pack(path)?).ok();
        }
        Ok(())
    }

    /// Opens the pack of a description from its binary or its deduplicated files.
    fn open_described(&self, description: crate::iebin::Description, json: &Path) -> Result<IebinReader> {
        (self.dedup.open(description, json, self.weights.as_deref()))
            .help(NAME_A_PACK)
            .map_err(Error::while_opening_model)
    }

    /// Compares a pack with its recorded hashes, if this is requested.
    fn check(&self, reader: &IebinReader) -> Result<()> {
        if self.check { tensor_map::refuse_damage(reader).map_err(Error::while_opening_model) } else { Ok(()) }
    }

    /// Opens a draft model; fails unless its vocabulary contains that of `tokenizer`.
    fn open_draft(&self, dir: &Path, tokenizer: Option<&Tokenizer>, threads: usize) -> Result<Engine> {
        let reader = DedupOptions::default().open_pack(dir).help(NAME_A_PACK)?;
        self.check(&reader)?;
        let path = reader.path(tokenizer::FILE_NAME);
        if let Some(tokenizer) = tokenizer
            && !Tokenizer::open(&path)?.has_tokens_of(tokenizer)
        {
            let found = "found other tokens than those of the model, expected the same vocabulary";
            return Err(Error::usage(found).at(&path).help("name a draft model with the same tokenizer"));
        }
        Engine::open(&reader, &EngineOptions { threads, ..EngineOptions::default() })
    }

    /// Opens the source of draft tokens for `engine`, whose vocabulary is that of `tokenizer`.
    fn speculator(&self, engine: &Engine, reader: &IebinReader, tokenizer: Option<&Tokenizer>) -> Result<Speculator> {
        let small = |dir| {
            Ok(Speculator::draft(self.open_draft(dir, tokenizer, engine.threads())?, engine)) as Result<Speculator>
        };
        let layer = || Speculator::layer(engine.predictors(reader)?.remove(0), engine);
        match &self.speculation {
            Speculation::Off => Ok(Speculator::off()),
            Speculation::Ngram => Ok(Speculator::ngram()),
            Speculation::Draft(dir) => small(dir),
            Speculation::Mtp => layer(),
            Speculation::Auto(Some(dir)) => Ok(small(dir)?.with_history()),
            Speculation::Auto(None) if engine.predicts() => Ok(layer()?.with_history()),
            Speculation::Auto(None) => Ok(Speculator::ngram()),
        }
    }
}

/// Returns the digest of a pack's description, which contains the hashes of all tensors.
pub fn pack_digest(reader: &IebinReader) -> String {
    let description = &reader.description;
    description.sha256.clone().unwrap_or_else(|| hex(Sha256::new_with_prefix(description.to_text())))
}

/// Returns a line with the time of each stage of opening a model. A stage ends at its mark and begins at the one before.
fn stages(marks: &[(&str, Instant)]) -> String {
    let times: Vec<Duration> = marks.windows(2).map(|pair| pair[1].1 - pair[0].1).collect();
    let ms = |time: Duration| format!("{:.1}", 1e3 * time.as_secs_f64());
    let each: Vec<String> =
        marks[1..].iter().zip(&times).map(|(mark, time)| format!("{} {}", mark.0, ms(*time))).collect();
    format!("opened in {} ms: {}", ms(times.iter().sum()), each.join(", "))
}

/// Returns the path of the description of the pack at `path`.
fn description_path(path: &Path) -> Result<PathBuf> {
    if files::begins_with(path, b"GGUF") {
        let help = format!("make a pack of it: `iec import-gguf {} --out-dir DIR`", path.display());
        return Err(Error::new(Cause::Model("found a GGUF file, expected a pack".into())).at(path).help(help));
    }
    let is_description = match files::find(path).map_err(Error::while_opening_model)? {
        Some(found) => !found.is_dir(),
        None => path.extension().is_some_and(|e| e == "json"),
    };
    Ok(if is_description { path.to_path_buf() } else { path.join(JSON_NAME) })
}

/// Builds the error for a pack of an older program, which holds a checkpoint's tensors and no description of the
/// model.
fn to_be_converted(json: &Path) -> Error {
    let dir = json.parent().unwrap_or(Path::new(""));
    let old = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let new = match dir.file_name() {
        Some(name) => dir.with_file_name(format!("{}-iec", name.to_string_lossy())),
        None => PathBuf::from("../converted"),
    };
    let config = if matches!(files::exists(&dir.join("config.json")), Ok(true)) { "" } else { " --config CONFIG_JSON" };
    Error::new(Cause::Model("found a pack of an older program, which does not describe its model".into()))
        .at(json)
        .help(format!("convert it once: iec pack --hf-dir {}{config} --out-dir {}", shell_word(old), shell_word(&new)))
}

/// Quotes a path for a shell, if necessary.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = text.chars().all(|c| c.is_alphanumeric() || "_./-".contains(c));
    if plain { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}
