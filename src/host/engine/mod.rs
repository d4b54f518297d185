//! The thread that computes for a model: opens it, then drives its batch until the server ends.

mod live;
mod run;
#[cfg(test)]
mod tests;
mod unloaded;
mod weights;

use super::details::Details;
use super::lease::lock;
use super::log_line::LogLine;
use super::metrics::{Metrics, ModelInfo};
use super::model::{ChatFormat, Command, Facts, KeyChange, Model, Status};
use super::token_text::TokenTexts;
use super::turns::Turns;
use crate::error::{Cause, Error, Result};
use crate::files;
use crate::generate::sampler::Sampling;
use crate::iebin::JSON_NAME;
use crate::output::swap;
use crate::resources::spawn_scoped;
use crate::runtime::adapters::AdapterSet;
use crate::runtime::kv::PAGE;
use crate::sched::{self, KeyUsage};
use crate::session::Session;
use crate::session::chat_templates::TemplateChoice;
use crate::session::default_sampling::DefaultSampling;
use crate::session::infill::Infill;
use crate::session::recent::Recent;
use run::{End, Run};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant, SystemTime};

/// Number of threads that encode texts for a model. One of them encodes much faster than an engine computes.
const ENCODERS: usize = 2;
/// Number of failures of the engine within [`FAILURES_WITHIN`] that end the server.
const MOST_FAILURES: usize = 3;
/// Time within which failures of the engine are counted.
const FAILURES_WITHIN: Duration = Duration::from_secs(600);
/// Largest accepted `tokenizer_config.json` in bytes.
const FILE_LIMIT: u64 = 64 << 20;

/// Receiver of the use of a key: names of model and key, tokens that the limit per day lacks, and the time.
pub type RecordUse = Arc<dyn Fn(&str, &str, u64, SystemTime) + Send + Sync>;

/// State that the threads of all models share.
pub struct Shared {
    /// Receiver of log lines.
    pub log: LogLine,
    /// Whether weights are compared with their hashes while they are served.
    pub check_weights: bool,
    /// Whether a progress bar is shown while a long prompt is computed.
    pub shows_prompts: bool,
    /// Whether the process ends with the models, so that the system frees their memory at once.
    pub process_ends: bool,
    /// Time after which a request is cancelled whose reader takes nothing; `None` = its text pauses as long as that.
    pub slow_reader: Option<Duration>,
    /// Turns of the models.
    pub turns: Turns,
    /// Metrics of the server.
    pub metrics: Arc<Metrics>,
    /// Limits of the schedulers, without those of a model.
    pub limits: sched::Options,
    /// Whether texts that begin alike share the computation of their beginning.
    pub prefix_cache: bool,
    /// Largest number of adapters.
    pub max_adapters: usize,
    /// Called with the use of a key when a request of it arrives or ends, if its limits must survive a restart.
    pub record_use: Option<RecordUse>,
    /// Directory that keeps pages of the prefix cache, and its largest size in bytes.
    pub state: Option<(PathBuf, u64)>,
}

/// Use of the keys so far, in the order of their numbers.
pub type UsageOf = Vec<Option<KeyUsage>>;

/// End of the work for a model.
#[derive(Debug)]
pub struct Drained {
    /// True if requests were cut.
    pub cut: bool,
    /// Reason why pages of the prefix cache were not written to disk. No request is worse off.
    pub unsaved: Option<Error>,
}

/// Computes for a model until the server ends. `usage` is the use of its keys, at first that in earlier runs.
///
/// # Errors
/// The model cannot be opened, or the engine failed repeatedly.
pub fn work(model: &Arc<Model>, commands: &Receiver<Command>, shared: &Shared, usage: &mut UsageOf) -> Result<Drained> {
    let (mut failures, mut changes) = (Vec::new(), Vec::new());
    let mut waits = model.is_on_request();
    loop {
        if std::mem::take(&mut waits) && !unloaded::wait(commands, &mut changes, usage) {
            return Ok(Drained { cut: false, unsaved: None });
        }
        match load(model, commands, shared, &mut changes, usage) {
            Ok((End::Drained { cut }, unsaved)) => return Ok(Drained { cut, unsaved }),
            Ok((End::Unloaded, unsaved)) => {
                if let Some(e) = unsaved {
                    (shared.log)(&format!("not all pages of the prefix cache were saved: {e}"));
                }
                failures.clear();
                waits = true;
            }
            Ok((End::Failed(why), _)) => {
                failures.retain(|time: &Instant| time.elapsed() < FAILURES_WITHIN);
                failures.push(Instant::now());
                (shared.log)(&format!("the engine of model {} failed and is opened again: {why}", model.name));
                if failures.len() >= MOST_FAILURES {
                    let failed = std::io::Error::other(format!("the engine failed {MOST_FAILURES} times: {why}"));
                    fail(model, shared, failed.into())?;
                    failures.clear();
                    waits = true;
                }
            }
            Err(e) => {
                fail(model, shared, e)?;
                waits = true;
            }
        }
    }
}

/// Opens a model, and computes until it is removed from memory or the engine fails. Returns what ended it, and the
/// reason why pages of the prefix cache were not written to disk.
fn load(
    model: &Arc<Model>,
    commands: &Receiver<Command>,
    shared: &Shared,
    changes: &mut Vec<KeyChange>,
    usage: &mut UsageOf,
) -> Result<(End, Option<Error>)> {
    model.set_status(Status::Loading);
    let mut session = (model.open)()?;
    let facts = facts(&session, &model.template)?;
    let end = compute(model, commands, shared, &mut session, facts, changes, usage)?;
    model.jobs.clear();
    if matches!(end, End::Failed(_)) {
        return Ok((end, None));
    }
    let unsaved = session.prefixes.as_mut().and_then(|prefixes| prefixes.save(usize::MAX).err());
    match end {
        End::Drained { .. } if shared.process_ends => std::mem::forget(session),
        _ => {
            drop(session);
            model.set_status(Status::Unloaded);
        }
    }
    Ok((end, unsaved))
}

/// Records that a model cannot be used. Requests that wait for it are refused; the next one tries again.
///
/// # Errors
/// The error itself, if the model is one of those that are loaded at the start.
fn fail(model: &Model, shared: &Shared, error: Error) -> Result<()> {
    lock(&model.uses).failed = Some(Instant::now());
    model.set_status(Status::Failed);
    model.jobs.clear();
    if !model.is_on_request() {
        return Err(error);
    }
    (shared.log)(&format!("model {} cannot be loaded: {error}", model.name));
    Ok(())
}

/// Computes with an open session until the server ends or the engine fails.
fn compute(
    model: &Arc<Model>,
    commands: &Receiver<Command>,
    shared: &Shared,
    session: &mut Session,
    facts: Facts,
    changes: &mut Vec<KeyChange>,
    usage: &mut UsageOf,
) -> Result<End> {
    // Requests name their adapters; the engine holds none for others, which could not be unloaded.
    session.engine.set_adapters(AdapterSet::default());
    if shared.prefix_cache {
        let prefixes = session.enable_prefix_cache();
        shared.state.as_ref().map_or(Ok(()), |(dir, most)| prefixes.keep_in(dir, *most))?;
    }
    let metrics = shared.metrics.add_model(&ModelInfo {
        name: model.name.clone(),
        max_model_len: facts.context,
        page_tokens: PAGE,
        pages: session.engine.most_pages().unwrap_or(0),
    });
    if shared.check_weights && model.begin_check() {
        weights::start(model, &session.reader, &metrics, shared)?;
    }
    let eos = facts.eos.clone();
    let (parts, encoder) = session.parts();
    let group = model.jobs.group();
    model.restore_adapters(encoder.adapters());
    std::thread::scope(|scope| {
        // The scope waits for the threads, whatever ends it.
        let _stop = model.jobs.stop_later();
        for _ in 0..ENCODERS {
            spawn_scoped(scope, "iec-encode", || model.jobs.work(group, &encoder))?;
        }
        lock(&model.uses).last = Instant::now();
        model.set_status(Status::Ready(Arc::new(facts)));
        model.beat();
        let mut run = Run::new(model, shared, &metrics, parts, &encoder, &eos);
        run.restore(changes, std::mem::take(usage));
        let end = run.steps(commands, changes);
        *usage = run.usage();
        run.finish(matches!(end, End::Failed(_)));
        if !matches!(end, End::Unloaded) {
            model.set_status(Status::Loading);
        }
        Ok(end)
    })
}

/// Collects the properties of an open model.
fn facts(session: &Session, choice: &TemplateChoice) -> Result<Facts> {
    let tokenizer = session.tokenizer()?;
    let vocab = session.engine.config().vocab;
    let template = match choice.open(session) {
        Ok(template) => {
            let (end_tokens, end_texts) = template.ends(session)?;
            Some(ChatFormat { template, end_tokens, end_texts })
        }
        Err(e) if *choice == TemplateChoice::Auto && matches!(e.cause(), Cause::Unsupported(_)) => None,
        Err(e) => return Err(e),
    };
    let details = Details::of(session, template.as_ref().map(|format: &ChatFormat| &format.template))?;
    let recommended = DefaultSampling::of(session)?;
    let sampling = match recommended.is_of_model() {
        true => recommended.sampling.clone(),
        false => {
            let Sampling { logit_bias, banned, .. } = recommended.sampling.clone();
            Sampling { temperature: 1.0, logit_bias, banned, ..Sampling::default() }
        }
    };
    let path = swap::member(&session.reader.dir.join(JSON_NAME), crate::generate::text::chat::CONFIG_NAME);
    let tokenizer_config = match files::exists(&path)? {
        true => serde_json::from_slice(&files::read_limited(&path, FILE_LIMIT)?).unwrap_or_default(),
        false => serde_json::Value::Null,
    };
    Ok(Facts {
        context: session.engine.context(),
        vocab,
        eos: session.engine.config().eos.clone(),
        fingerprint: session.fingerprint(),
        sampling,
        recommended,
        template,
        details,
        infill: Infill::of(tokenizer),
        root: session.reader.dir.clone(),
        tokens: TokenTexts::new(tokenizer, vocab),
        constraints: Recent::default(),
        breakers: Recent::default(),
        tokenizer_config,
    })
}
