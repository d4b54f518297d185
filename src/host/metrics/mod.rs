//! Metrics of the server for Prometheus: what requests, the engine and the process do (`GET /metrics`).
//!
//! [`Metrics`] exists once per process, [`ModelMetrics`] once per model. Their methods are named after events and are
//! cheap enough for every token. [`Metrics::render`] writes all series as text, at any time. A series whose labels
//! change, such as that of the adapters in use, exists only with its latest labels.

mod buckets;
mod events;
mod families;
mod histogram;
mod model;
mod process;
mod snapshot;
#[cfg(test)]
mod tests;
mod text;

pub use events::{DiskPages, FinishedReason, Phase, Rejection, RequestTimes, StepRecord, TokenCounts, TokenKind};
pub use model::{ModelInfo, ModelMetrics};
pub use snapshot::EngineMetrics;

use families::{FAMILIES, Series};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use text::{MetricKind, MetricsText};

/// Content type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Largest number of keys with series of their own. Further ones are counted together as [`OTHER_KEYS`], so that
/// sub-keys named by clients cannot fill the memory of the server or of Prometheus.
const MOST_KEYS: usize = 1000;
/// Label of the keys above [`MOST_KEYS`].
const OTHER_KEYS: &str = "_other";

/// Tokens of a key by [`TokenKind`].
type KeyTokens = [u64; TokenKind::ALL.len()];

/// Metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    /// Models in the order in which they were added.
    models: Mutex<Vec<Arc<ModelMetrics>>>,
    keys: Mutex<BTreeMap<String, KeyTokens>>,
    ignored_fields: AtomicU64,
    /// Unix time of the start in seconds.
    start: f64,
}

/// Requests and memory at a moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Sequences in the batch.
    pub running: u64,
    /// Sequences that wait for a place in the batch.
    pub waiting: u64,
    /// Positions of the KV cache that running sequences use.
    pub used_tokens: u64,
    /// Positions of the whole KV cache; 0 without a limit.
    pub total_tokens: u64,
    /// Prompt tokens that were searched for in the prefix cache so far, and those that were found.
    pub prefix: (u64, u64),
}

impl Load {
    fn plus(self, model: &ModelMetrics) -> Load {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let page = of(&model.page_tokens);
        Load {
            running: self.running + of(&model.running),
            waiting: self.waiting + of(&model.waiting),
            used_tokens: self.used_tokens + of(&model.pages_used) * page,
            total_tokens: self.total_tokens + of(&model.pages_total) * page,
            prefix: (self.prefix.0 + of(&model.prefix_queries), self.prefix.1 + of(&model.prefix_hits)),
        }
    }
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

impl Metrics {
    /// Creates metrics without models. The time of the call is exported as the start of the process.
    pub fn new() -> Metrics {
        Metrics {
            models: Mutex::default(),
            keys: Mutex::default(),
            ignored_fields: AtomicU64::new(0),
            start: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
        }
    }

    /// Adds a model and returns its recorder. A model of the same name keeps its counts and gets the new number of
    /// pages.
    pub fn add_model(&self, info: &ModelInfo) -> Arc<ModelMetrics> {
        let mut models = lock(&self.models);
        if let Some(model) = models.iter().find(|model| model.name == info.name) {
            model.set_pages(info);
            return model.clone();
        }
        let model = Arc::new(ModelMetrics::new(info));
        models.push(model.clone());
        model
    }

    /// Returns the recorder of a model.
    pub fn model(&self, name: &str) -> Option<Arc<ModelMetrics>> {
        lock(&self.models).iter().find(|model| model.name == name).cloned()
    }

    /// Removes a model, and its series with it.
    pub fn remove_model(&self, name: &str) {
        lock(&self.models).retain(|model| model.name != name);
    }

    /// Returns the load of all models together.
    pub fn load(&self) -> Load {
        let models = lock(&self.models).clone();
        models.iter().fold(Load::default(), |load, model| load.plus(model))
    }

    /// Counts tokens that a key is charged for. `key` is the public name of the key.
    pub fn key_tokens(&self, key: &str, kind: TokenKind, tokens: u64) {
        let mut keys = lock(&self.keys);
        let name = if keys.contains_key(key) || keys.len() < MOST_KEYS { key } else { OTHER_KEYS };
        let counts = match keys.get_mut(name) {
            Some(counts) => counts,
            None => keys.entry(name.to_string()).or_default(),
        };
        counts[kind as usize] = counts[kind as usize].saturating_add(tokens);
    }

    /// Removes the series of the keys for which `keep` returns false, after keys were read again.
    pub fn retain_keys(&self, mut keep: impl FnMut(&str) -> bool) {
        lock(&self.keys).retain(|key, _| key == OTHER_KEYS || keep(key));
    }

    /// Counts fields of requests that the server does not know and ignored.
    pub fn ignored_fields(&self, fields: u64) {
        self.ignored_fields.fetch_add(fields, Ordering::Relaxed);
    }

    /// Writes all series in the text format of Prometheus.
    pub fn render(&self) -> String {
        let models = lock(&self.models).clone();
        let mut text = MetricsText::default();
        for family in FAMILIES {
            text.family(family.name, family.kind, family.help);
            models.iter().for_each(|model| (family.write)(model, &mut Series::new(&mut text, &model.name)));
        }
        text.family(
            "iec_key_tokens_total",
            MetricKind::Counter,
            "Tokens of each key, by kind; cached ones are in prompt, too.",
        );
        for (key, counts) in lock(&self.keys).iter() {
            for (kind, tokens) in TokenKind::ALL.iter().zip(counts) {
                text.value(&[("key", key), ("kind", kind.name())], tokens);
            }
        }
        text.family(
            "iec_ignored_fields_total",
            MetricKind::Counter,
            "Fields of requests that are unknown and were ignored.",
        );
        text.value(&[], self.ignored_fields.load(Ordering::Relaxed));
        text.family("iec_build_info", MetricKind::Gauge, "Version of the server; always 1.");
        text.value(&[("version", env!("CARGO_PKG_VERSION"))], 1);
        process::write(&mut text, self.start);
        text.finish()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
