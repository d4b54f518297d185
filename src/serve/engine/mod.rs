//! The thread that computes for a model: opens it, then drives its batch until the server ends.

mod live;
mod run;
#[cfg(test)]
mod tests;
mod weights;

use super::keys::KeyChange;
use super::log_line::LogLine;
use super::metrics::{Metrics, ModelInfo};
use super::model::{ChatFormat, Command, Facts, Model, Status};
use super::token_text::TokenTexts;
use super::turns::Turns;
use super::usage_log::UsageLog;
use crate::error::{Error, Result};
use crate::files;
use crate::iebin::JSON_NAME;
use crate::output::swap;
use crate::resources::spawn_scoped;
use crate::runtime::adapters::AdapterSet;
use crate::runtime::kv::PAGE;
use crate::runtime::sampler::Sampling;
use crate::sched::{self, KeyUsage};
use crate::session::Session;
use crate::session::chat::TemplateChoice;
use crate::session::chat::defaults::DefaultSampling;
use crate::session::recent::Recent;
use run::{End, Run};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// Number of threads that encode texts for a model. One of them encodes much faster than an engine computes.
const ENCODERS: usize = 2;
/// Number of failures of the engine within [`FAILURES_WITHIN`] that end the server.
const MOST_FAILURES: usize = 3;
/// Time within which failures of the engine are counted.
const FAILURES_WITHIN: Duration = Duration::from_secs(600);
/// Largest accepted `tokenizer_config.json` in bytes.
const FILE_LIMIT: u64 = 64 << 20;

/// State that the threads of all models share.
pub struct Shared {
    /// Receiver of log lines.
    pub log: LogLine,
    /// Whether weights are compared with their hashes while they are served.
    pub check_weights: bool,
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
    /// Log of the use of keys, if there is a state directory.
    pub usage_log: Option<Arc<UsageLog>>,
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
    loop {
        model.set_status(Status::Loading);
        let opened = (model.open)().and_then(|session| Ok((facts(&session)?, session)));
        let (facts, mut session) = match opened {
            Ok(opened) => opened,
            Err(e) => {
                model.set_status(Status::Failed);
                model.jobs.clear();
                return Err(e);
            }
        };
        let end = compute(model, commands, shared, &mut session, facts, &mut changes, usage)?;
        model.jobs.clear();
        match end {
            End::Drained { cut } => {
                // The process ends soon, and the system frees all memory at once.
                let unsaved = session.engine.save_prefixes().err();
                std::mem::forget(session);
                return Ok(Drained { cut, unsaved });
            }
            End::Failed(why) => {
                failures.retain(|time: &Instant| time.elapsed() < FAILURES_WITHIN);
                failures.push(Instant::now());
                if failures.len() >= MOST_FAILURES {
                    model.set_status(Status::Failed);
                    let failed = std::io::Error::other(format!("the engine failed {MOST_FAILURES} times: {why}"));
                    return Err(failed.into());
                }
            }
        }
    }
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
    let enabled = shared.prefix_cache && session.enable_prefix_cache();
    if let Some((dir, most)) = shared.state.as_ref().filter(|_| enabled) {
        session.engine.keep_prefixes_in(dir, *most)?;
    }
    let metrics = shared.metrics.add_model(&ModelInfo {
        name: model.name.clone(),
        max_model_len: facts.context,
        page_tokens: PAGE,
        pages: session.engine.kv_pages().total,
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
        model.set_status(Status::Ready(Arc::new(facts)));
        model.beat();
        let mut run = Run::new(model, shared, &metrics, parts, &encoder, &eos);
        run.restore(changes, std::mem::take(usage));
        let end = run.steps(commands, changes);
        *usage = run.usage();
        run.finish(matches!(end, End::Failed(_)));
        model.set_status(Status::Loading);
        Ok(end)
    })
}

/// Collects the properties of an open model.
fn facts(session: &Session) -> Result<Facts> {
    let tokenizer = session.tokenizer()?;
    let vocab = session.engine.config().vocab;
    let template = match TemplateChoice::Auto.open(session) {
        Ok(template) => {
            let (end_tokens, end_texts) = template.ends(session)?;
            Some(ChatFormat { template, end_tokens, end_texts })
        }
        Err(e) if matches!(e.cause(), crate::error::Cause::Unsupported(_)) => None,
        Err(e) => return Err(e),
    };
    let recommended = DefaultSampling::of(session)?;
    let sampling = match recommended.is_of_model() {
        true => recommended.sampling.clone(),
        false => {
            let Sampling { logit_bias, banned, .. } = recommended.sampling.clone();
            Sampling { temperature: 1.0, logit_bias, banned, ..Sampling::default() }
        }
    };
    let path = swap::member(&session.reader.dir.join(JSON_NAME), crate::runtime::text::chat::CONFIG_NAME);
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
        note: recommended.note(),
        template,
        root: session.reader.dir.clone(),
        tokens: TokenTexts::new(tokenizer, vocab),
        constraints: Recent::default(),
        breakers: Recent::default(),
        tokenizer_config,
    })
}
