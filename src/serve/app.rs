//! State that all connections share.

use super::bodies::Bodies;
use super::config::ServeSettings;
use super::keys::{Key, KeyIds, Keys};
use super::origin::HostPolicy;
use super::residency::Residency;
use super::usage_log::UsageLog;
use crate::api::error::{ApiError, ApiStatus};
use crate::api::settings::Limits;
use crate::host::LogLine;
use crate::host::lease::Lease;
use crate::host::metrics::Metrics;
use crate::host::model::{Command, Facts, Model};
use crate::resources::memory_left;
use crate::rng::random;
use crate::sched::KeyId;
use crate::session::adapters::AdapterSource;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// State of the server.
pub struct App {
    /// Settings.
    pub settings: ServeSettings,
    /// Limits of requests.
    pub limits: Limits,
    /// Models.
    pub models: Vec<Arc<Model>>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Names of this server that a browser may use.
    pub hosts: HostPolicy,
    /// Room for bodies of requests.
    pub bodies: Arc<Bodies>,
    /// Use of keys since the last save, if there is a state directory.
    pub usage_log: Option<Arc<UsageLog>>,
    /// Receiver of log lines.
    pub log: LogLine,
    /// Tracer of requests, if there is a collector.
    #[cfg(feature = "otel")]
    pub tracer: Option<super::trace::Tracer>,
    /// Rules for the memory of all models.
    pub residency: Residency,
    /// Held while an adapter is loaded.
    pub adapter_loads: tokio::sync::Mutex<()>,
    tenants: RwLock<Arc<Tenants>>,
    key_ids: Mutex<KeyIds>,
    adapters: Mutex<BTreeMap<String, Adapter>>,
    /// Adapters that the settings list.
    listed: Mutex<Vec<AdapterSource>>,
    phase: AtomicU8,
    requests: AtomicU64,
}

/// An adapter that requests may name.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// Number of its model.
    pub model: usize,
    /// Place and scale.
    pub source: AdapterSource,
    /// Time at which it was added, in seconds since 1970.
    pub created: u64,
}

/// Keys with their numbers in the schedulers.
#[derive(Debug)]
pub struct Tenants {
    /// The keys.
    pub keys: Keys,
    ids: Vec<KeyId>,
}

impl Tenants {
    /// Returns a key and its number in the schedulers.
    pub fn key(&self, index: usize) -> (&Key, KeyId) {
        (&self.keys.list()[index], self.ids[index])
    }
}

/// Part of the life of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It takes requests.
    Running,
    /// It tells that it is about to end, and still takes requests.
    Leaving,
    /// It finishes requests and takes no more.
    Draining,
}

/// A model with the adapters that a request named.
#[derive(Debug)]
pub struct Target {
    /// The model.
    pub model: Arc<Model>,
    /// Its properties.
    pub facts: Arc<Facts>,
    /// Names and scales of adapters.
    pub adapters: Vec<(String, f32)>,
    /// Name as the client wrote it.
    pub shown: String,
    /// Keeps the model loaded.
    pub lease: Lease,
}

impl App {
    /// Creates the state of a server that is starting.
    pub fn new(
        settings: ServeSettings,
        models: Vec<Arc<Model>>,
        keys: Keys,
        metrics: Arc<Metrics>,
        usage_log: Option<Arc<UsageLog>>,
        log: LogLine,
    ) -> App {
        let mut key_ids = KeyIds::default();
        let changes = key_ids.update(&keys);
        models.iter().for_each(|model| model.send(Command::Keys(changes.clone())));
        let tenants = Tenants { ids: key_ids.ids(&keys), keys };
        let limits = Limits {
            max_n: settings.max_n,
            max_logprobs: settings.max_logprobs,
            strict_fields: settings.strict_fields,
            unloads: settings.idle_unload.is_some(),
        };
        App {
            hosts: HostPolicy::of(&settings, !tenants.keys.is_open()),
            bodies: Bodies::new(settings.max_body.0),
            limits,
            models,
            metrics,
            usage_log,
            log,
            #[cfg(feature = "otel")]
            tracer: None,
            residency: Residency::new(settings.max_queue, memory_left()),
            adapter_loads: tokio::sync::Mutex::default(),
            tenants: RwLock::new(Arc::new(tenants)),
            key_ids: Mutex::new(key_ids),
            adapters: Mutex::default(),
            listed: Mutex::new(settings.loras.clone()),
            phase: AtomicU8::new(0),
            requests: AtomicU64::new(0),
            settings,
        }
    }

    /// Sets the tracer.
    #[cfg(feature = "otel")]
    pub fn with_tracer(self, tracer: Option<super::trace::Tracer>) -> App {
        App { tracer, ..self }
    }

    /// Returns the keys.
    pub fn tenants(&self) -> Arc<Tenants> {
        self.tenants.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the keys.
    pub fn set_keys(&self, keys: Keys) {
        let mut ids = self.key_ids();
        let changes = ids.update(&keys);
        self.models.iter().for_each(|model| model.send(Command::Keys(changes.clone())));
        let tenants = Tenants { ids: ids.ids(&keys), keys };
        self.metrics.retain_keys(|name| tenants.keys.list().iter().any(|key| key.name == name));
        *self.tenants.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(tenants);
    }

    /// Returns the numbers of all keys so far.
    pub fn key_ids(&self) -> MutexGuard<'_, KeyIds> {
        self.key_ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the adapters by name.
    pub fn adapters(&self) -> MutexGuard<'_, BTreeMap<String, Adapter>> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the adapters that the settings list.
    pub fn listed(&self) -> MutexGuard<'_, Vec<AdapterSource>> {
        self.listed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the adapters that the settings list, and returns the former ones.
    pub fn set_listed(&self, loras: Vec<AdapterSource>) -> Vec<AdapterSource> {
        std::mem::replace(&mut *self.listed(), loras)
    }

    /// Returns the part of the life of the server.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Running,
            1 => Phase::Leaving,
            _ => Phase::Draining,
        }
    }

    /// Moves on to a later part.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.fetch_max(phase as u8, Ordering::Relaxed);
    }

    /// Returns true if all models answer requests, or are loaded on request.
    pub fn is_ready(&self) -> bool {
        let answers = |model: &Arc<Model>| model.is_ready() || model.is_on_request();
        self.phase() == Phase::Running && self.models.iter().all(answers)
    }

    /// Returns the error of a request that the engine did not take or finish. During the shutdown, another server can
    /// answer it.
    pub fn engine_ended(&self) -> ApiError {
        engine_ended(self.phase())
    }

    /// Tells a model its adapters, for the case that it is opened again.
    pub fn keep_adapters(&self, model: &Model) {
        let own = |adapter: &&Adapter| adapter.model == model.number;
        model.set_adapters(self.adapters().values().filter(own).map(|adapter| adapter.source.clone()).collect());
    }

    /// Returns a name for an answer or a request that no other one has.
    pub fn new_id(&self, beginning: &str) -> String {
        format!("{beginning}{:016x}{:08x}", random(), self.requests.fetch_add(1, Ordering::Relaxed))
    }
}

/// Builds the error for a server or a model that takes no requests now.
pub fn unavailable(message: &str, code: &'static str, wait: u64) -> ApiError {
    let error = ApiError::new(ApiStatus::SERVICE_UNAVAILABLE, message).code(code);
    ApiError { retry_after: Some(wait), ..error }
}

fn engine_ended(phase: Phase) -> ApiError {
    match phase {
        Phase::Draining => unavailable("the server is shutting down", "draining", 30),
        Phase::Running | Phase::Leaving => {
            ApiError::new(ApiStatus::INTERNAL_SERVER_ERROR, "the engine ended before the request")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_comes_too_late_for_the_engine_is_for_another_server() {
        let late = engine_ended(Phase::Draining);
        assert_eq!((late.status.as_u16(), late.code, late.retry_after), (503, Some("draining"), Some(30)));
        assert_eq!(engine_ended(Phase::Running).status.as_u16(), 500);
    }
}
