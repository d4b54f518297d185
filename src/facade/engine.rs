//! An opened model that answers requests of any number of threads.

use super::answer::Answer;
use super::options::{AdapterOptions, OpenOptions};
use super::request::{Request, RequestKind};
use super::stream::{Started, Stream};
use crate::api::body::Body;
use crate::api::job::{self, Job};
use crate::api::prepare::{self, Plan, Prepared};
use crate::api::settings::Limits;
use crate::error::{Error, Result};
use crate::host::engine::Shared;
use crate::host::metrics::EngineMetrics;
use crate::host::model::{Facts, Open, Served};
use crate::host::own::Host;
use crate::models::{self, embedded};
use crate::rng::random;
use crate::sched;
use crate::session::{Session, SessionOptions};
use serde::Serialize;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Largest number of answers to a prompt, and of most likely tokens at a place.
const MOST: usize = 1024;
/// Time between two attempts to find room for adapters.
const ROOM_TIME: Duration = Duration::from_millis(10);

/// An opened model. Threads may share it, and its clones are the same engine: requests that run at the same time share
/// the steps of the model, and each gets the same bits as alone. The last clone that is dropped cancels what is left
/// and frees the model.
///
/// ```
/// use iec::{Engine, OpenOptions, Request};
///
/// let engine = Engine::open_embedded(&OpenOptions::default())?;
/// let answer = engine.generate(&Request::text("Once upon a time").max_tokens(8).temperature(0.0))?;
/// assert_eq!(answer.text(), ", there was a little girl");
/// # Ok::<(), iec::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    host: Host,
    /// Adapters that the model has when it is opened again after a failure.
    adapters: Mutex<Vec<AdapterOptions>>,
}

/// Properties of an opened model.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ModelDescription {
    /// Family in lower case, such as `llama`.
    pub family: String,
    /// Longest prompt with its answer in tokens.
    pub context: usize,
    /// Size of the vocabulary.
    pub vocabulary: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of parameters.
    pub parameters: u64,
    /// Size of the weights in bytes.
    pub bytes: u64,
    /// Type of most weights.
    pub quantization: String,
    /// Tokens that end a text.
    pub end_tokens: Vec<u32>,
    /// Whether the model has a chat template.
    pub has_chat_template: bool,
    /// Whether its chat template has a known form of calls of tools.
    pub has_tools: bool,
    /// Name of everything that decides about the bits of an answer: pack, precision, version.
    pub fingerprint: String,
}

impl Engine {
    /// Opens a model: a pack, a checkpoint directory, a GGUF file, or `ORG/NAME` of a downloaded model. A model that is
    /// no pack is packed into the cache of the options first.
    ///
    /// # Errors
    /// Nothing has this name, or it cannot be packed or run with these options.
    pub fn open(model: impl AsRef<Path>, options: &OpenOptions) -> Result<Engine> {
        let (path, session, places) = (model.as_ref().to_path_buf(), options.session()?, options.places());
        let name = path.display().to_string();
        Engine::start(name, Box::new(move || models::open_session(&path, &session, &places)), options)
    }

    /// Opens the model that is embedded in the library: a small one that was trained on stories, for examples and
    /// tests.
    ///
    /// # Errors
    /// Its files cannot be written into the directory for temporary files.
    pub fn open_embedded(options: &OpenOptions) -> Result<Engine> {
        let session = SessionOptions { name: Some(embedded::NAME.into()), ..options.session()? };
        let home = tempfile::tempdir()?;
        let pack = embedded::pack_into(home.path())?;
        let open = move || {
            // The directory lives as long as the function.
            let _ = &home;
            Session::open(&pack, &session)
        };
        Engine::start(embedded::NAME.into(), Box::new(open), options)
    }

    fn start(name: String, open: Open, options: &OpenOptions) -> Result<Engine> {
        let shared = Shared { prefix_cache: options.prefix_cache, ..Shared::without_limits() };
        let limits = sched::Options { max_seqs: options.max_seqs.max(1), ..shared.limits };
        let template = options.chat_template.clone();
        let served = Served { name, open, template, plan: None, on_request: false };
        let host = Host::start(served, Shared { limits, ..shared })?;
        Ok(Engine { inner: Arc::new(Inner { host, adapters: Mutex::new(options.adapters.clone()) }) })
    }

    /// Answers a request, and returns when all of its texts have ended.
    ///
    /// # Errors
    /// A field of the request is unknown or has a wrong value, a prompt does not fit the context, or the engine failed.
    pub fn generate(&self, request: &Request) -> Result<Answer> {
        self.submit(request, false)?.finish()
    }

    /// Begins to answer a request, and returns the stream of its events.
    ///
    /// ```
    /// use iec::{Delta, Engine, OpenOptions, Request};
    ///
    /// let engine = Engine::open_embedded(&OpenOptions::default())?;
    /// let mut text = String::new();
    /// for event in engine.stream(&Request::text("Once upon a time").max_tokens(8).temperature(0.0))? {
    ///     if let Delta::Text(new) = event?.delta {
    ///         text += &new;
    ///     }
    /// }
    /// assert_eq!(text, ", there was a little girl");
    /// # Ok::<(), iec::Error>(())
    /// ```
    ///
    /// With the field `stream` = false, the request may choose the best of several texts (`best_of`): the events are those
    /// of all texts, and [`Stream::into_answer`] keeps the best.
    ///
    /// # Errors
    /// The same as those of [`Engine::generate`].
    pub fn stream(&self, request: &Request) -> Result<Stream> {
        self.submit(request, request.is_stream())
    }

    /// Encodes a text of any length; `special` adds the special tokens of the tokenizer, such as that of the beginning.
    ///
    /// # Errors
    /// The tokenizer would make the text many times longer.
    pub fn tokenize(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let text = text.to_string();
        self.inner.host.encode(move |encoder| {
            let tokenizer = encoder.tokenizer()?;
            if special { tokenizer.encode(&text) } else { tokenizer.encode_plain(&text) }
        })
    }

    /// Decodes tokens.
    ///
    /// # Errors
    /// A token is outside the vocabulary.
    pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let (ids, vocab) = (ids.to_vec(), self.inner.host.facts()?.vocab);
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::usage(format!("found the token id {id}, expected an id below {vocab}")));
        }
        self.inner.host.encode(move |encoder| encoder.tokenizer()?.decode(&ids, skip_special))
    }

    /// Returns the tokens of the prompt that a request has.
    ///
    /// # Errors
    /// The same as those of [`Engine::generate`].
    pub fn prompt_ids(&self, request: &Request) -> Result<Vec<u32>> {
        let (_, prepared) = self.prepare(request, false)?;
        Ok(prepared.prompts.into_iter().next().unwrap_or_default())
    }

    /// Loads an adapter, which requests may name from then on.
    ///
    /// # Errors
    /// There is an adapter of this name, its files are damaged, or it does not fit the model.
    pub fn load_adapter(&self, adapter: &AdapterOptions) -> Result<()> {
        let source = adapter.source()?;
        self.inner.host.encode(move |encoder| {
            let adapters = encoder.adapters();
            adapters.add(source.clone())?;
            adapters.set(&[(source.name.clone(), 1.0)]).map(drop).inspect_err(|_| {
                let _ = adapters.remove(&source.name);
            })
        })?;
        let mut adapters = self.inner.adapters.lock().unwrap_or_else(PoisonError::into_inner);
        adapters.push(adapter.clone());
        self.keep_adapters(&adapters)
    }

    /// Removes an adapter.
    ///
    /// # Errors
    /// There is none of this name, or requests use it.
    pub fn unload_adapter(&self, name: &str) -> Result<()> {
        let owned = name.to_string();
        self.inner.host.encode(move |encoder| encoder.adapters().remove(&owned))?;
        let mut adapters = self.inner.adapters.lock().unwrap_or_else(PoisonError::into_inner);
        adapters.retain(|adapter| adapter.name != name);
        self.keep_adapters(&adapters)
    }

    /// Returns the names of the adapters that requests may name.
    ///
    /// # Errors
    /// The engine has failed.
    pub fn adapters(&self) -> Result<Vec<String>> {
        self.inner.host.encode(|encoder| Ok(encoder.adapters().names()))
    }

    fn keep_adapters(&self, adapters: &[AdapterOptions]) -> Result<()> {
        self.inner.host.model.set_adapters(adapters.iter().map(AdapterOptions::source).collect::<Result<_>>()?);
        Ok(())
    }

    /// Returns the counters of the engine.
    pub fn metrics(&self) -> EngineMetrics {
        let host = &self.inner.host;
        let model = host.metrics.model(&host.model.name);
        model.map(|model| model.snapshot()).unwrap_or_default()
    }

    /// Returns all counters, with histograms of times, in the text format of Prometheus.
    pub fn prometheus(&self) -> String {
        self.inner.host.metrics.render()
    }

    /// Describes the model.
    ///
    /// # Errors
    /// The engine has failed.
    pub fn description(&self) -> Result<ModelDescription> {
        let facts = self.inner.host.facts()?;
        let details = &facts.details;
        Ok(ModelDescription {
            family: details.family.clone(),
            context: facts.context,
            vocabulary: facts.vocab,
            hidden_size: details.hidden,
            layers: details.layers,
            parameters: details.parameters,
            bytes: details.bytes,
            quantization: details.quantization.clone(),
            end_tokens: facts.eos.clone(),
            has_chat_template: facts.template.is_some(),
            has_tools: details.has_tools,
            fingerprint: facts.fingerprint.clone(),
        })
    }

    /// Finishes all requests, at the longest for `time`, and frees the model. Dropping the engine cancels them instead.
    /// Other clones of the engine answer no requests any more.
    ///
    /// # Errors
    /// The engine has failed.
    pub fn close(self, time: Duration) -> Result<()> {
        self.inner.host.close(time)
    }

    pub(super) fn host(&self) -> &Host {
        &self.inner.host
    }

    fn submit(&self, request: &Request, is_stream: bool) -> Result<Stream> {
        let arrived = Instant::now();
        let (plan, prepared) = self.prepare(request, is_stream)?;
        let best = (plan.texts.max(1), plan.settings.n);
        let Prepared { prompts, choices, shown, parsers, ignored } = prepared;
        let texts = choices.len();
        let echoed = |text: usize| shown.get(text / best.0).map(|prompt| prompt.text.clone());
        let beginnings = (0..texts).filter_map(echoed).collect();
        let adapters = plan.adapters.iter().map(|(name, _)| name.clone()).collect();
        let ticket = self.inner.host.submit(choices, adapters, arrived);
        Ok(Stream::new(Started {
            ticket,
            parsers,
            beginnings,
            texts,
            prompt_tokens: prompts.iter().map(Vec::len).sum(),
            stop_ids: plan.stop_ids(),
            best,
            seed: plan.seed,
            ignored,
        }))
    }

    /// Reads a request and encodes its prompts. Waits while there is no room for its adapters.
    fn prepare(&self, request: &Request, is_stream: bool) -> Result<(Plan, Prepared)> {
        let facts = self.inner.host.facts()?;
        let work = Arc::new(read(request, is_stream, facts)?);
        loop {
            let shared = work.clone();
            match self.inner.host.encode(move |encoder| Ok(prepare::prepare(encoder, &shared.0, &shared.1)))?? {
                Some(prepared) => {
                    let (_, plan) = Arc::try_unwrap(work)
                        .map_err(|_| Error::engine("the engine failed while it read the request"))?;
                    return Ok((plan, prepared));
                }
                None => std::thread::sleep(ROOM_TIME),
            }
        }
    }
}

/// Reads the fields of a request.
fn read(request: &Request, is_stream: bool, facts: Arc<Facts>) -> Result<(Vec<prepare::PromptSource>, Plan)> {
    let limits = Limits { max_n: MOST, max_logprobs: MOST, strict_fields: true, unloads: false };
    let mut body = Body::parse(request.to_json().as_bytes())?;
    body.set("stream", is_stream.into());
    let read = match request.kind() {
        RequestKind::Completion => job::completions,
        RequestKind::Chat => job::chat,
    };
    let job = read(&mut body, &limits).and_then(|job| job.wanted.check().map(|()| job));
    let names = body.names.clone();
    let job: Job = job.and_then(|job| body.rest(true).map(|_| job)).map_err(|e| names.shown(e))?;
    let wanted = job.wanted;
    let seed = wanted.settings.seed.unwrap_or_else(random);
    let adapters = wanted.settings.sampling.adapters.clone().unwrap_or_default();
    Ok(wanted.plan(facts, adapters, None, seed))
}
