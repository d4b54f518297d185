//! Server for models: the APIs of OpenAI and Anthropic over HTTP, and that of vLLM's engine over gRPC, for the sessions
//! of this program.
//!
//! [`run`] opens the sockets and starts the threads of [`crate::host`] for each model. The thread that called [`run`]
//! serves all connections: it reads requests with [`crate::api`], submits them, and writes their events.

mod adapters;
mod app;
mod bodies;
mod caller;
pub mod config;
#[cfg(feature = "grpc")]
mod grpc;
mod http;
pub mod keys;
mod loading;
mod log;
mod notify;
pub mod openapi;
pub mod origin;
pub mod page;
mod residency;
mod rights;
mod state;
mod submit;
mod toml_text;
#[cfg(feature = "otel")]
mod trace;
pub mod usage;
mod usage_log;

use crate::error::{Error, Result, Signal};
use crate::host::engine::{self, Drained, Shared, UsageOf};
use crate::host::metrics::Metrics;
use crate::host::model::{Command, Model, Served, Status};
use crate::host::{LogLine, turns};
use crate::interrupt;
use crate::resources::{raise_open_files, spawn_deep};
use crate::session::adapters::AdapterSource;
use app::{App, Phase};
use config::ServeSettings;
pub use http::Address;
use http::Listeners;
use keys::Keys;
use state::{StateLock, set_aside};
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
#[cfg(feature = "otel")]
pub use trace::TraceOptions;
use usage::Usage;
use usage_log::UsageLog;

/// Bytes of stack of the threads that compute.
const STACK: usize = 8 << 20;
/// Time in which an engine must tell the use of its keys; it answers between two steps.
const USAGE_TIME: Duration = Duration::from_secs(30);
/// Time after which a request is cancelled whose client takes nothing.
const SLOW_READER: Duration = Duration::from_secs(30);
/// Time that connections have to send the last bytes after all requests have ended.
const LAST_BYTES: Duration = Duration::from_secs(2);

/// Settings that can change while a server runs.
#[derive(Debug)]
pub struct Reloaded {
    /// Keys; `None` if they come from no file.
    pub keys: Option<Keys>,
    /// Adapters.
    pub loras: Vec<AdapterSource>,
}

/// Reads settings again, after their files were changed.
pub type Reload = Box<dyn Fn() -> Result<Reloaded> + Send + Sync>;
/// Receiver of the places at which the server listens.
pub type Announce = Box<dyn Fn(&Address) -> Result<()> + Send + Sync>;

/// Arguments of [`run`].
pub struct Server {
    /// Settings.
    pub settings: ServeSettings,
    /// Models.
    pub models: Vec<Served>,
    /// Keys.
    pub keys: Keys,
    /// Reads keys and adapters again.
    pub reload: Reload,
    /// Called once the sockets are open, before models are loaded.
    pub announce: Announce,
    /// Receiver of log lines.
    pub log: LogLine,
    /// Socket of systemd.
    pub notify: Option<OsString>,
    /// Signals; see [`signals`].
    pub signals: Signals,
    /// Collector of traces.
    #[cfg(feature = "otel")]
    pub traces: Option<TraceOptions>,
}

/// Message to a running server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerSignal {
    /// Tell load balancers, then finish all requests and end.
    Terminate,
    /// Finish all requests and end.
    Interrupt,
    /// Read keys and adapters again.
    Reload,
}

/// Sending half of the signals of a server. It may be used in any thread.
#[derive(Debug, Clone)]
pub struct SignalSender(UnboundedSender<ServerSignal>);

/// Receiving half of the signals of a server.
#[derive(Debug)]
pub struct Signals(UnboundedReceiver<ServerSignal>);

/// Creates the channel of the signals of a server.
pub fn signals() -> (SignalSender, Signals) {
    let (sender, receiver) = unbounded_channel();
    (SignalSender(sender), Signals(receiver))
}

impl SignalSender {
    /// Sends a signal. Once the server has ended, it is dropped.
    pub fn send(&self, signal: ServerSignal) {
        let _ = self.0.send(signal);
    }
}

/// Outcome of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// True if requests were ended for it.
    pub cut: bool,
}

/// End of a thread that computes.
struct EngineEnd {
    /// Number of its model.
    model: usize,
    /// End of its work, or the reason of the failure.
    result: Result<Drained>,
    /// Use of the keys.
    usage: UsageOf,
}

/// Serves models until a signal ends the server.
///
/// # Errors
/// A socket cannot be opened, a model cannot be opened, or an engine failed repeatedly.
pub fn run(server: Server) -> Result<Ended> {
    #[cfg(feature = "otel")]
    let tracer = server.traces.map(trace::Tracer::new);
    let Server { settings, models, keys, reload, announce, log, notify, signals, .. } = server;
    raise_open_files();
    let _state = settings.state_dir.as_deref().map(StateLock::take).transpose()?;
    let listeners = Listeners::open(&settings)?;
    announce(&listeners.address()?)?;
    let saved = settings.state_dir.as_deref().and_then(|dir| saved_usage(dir, &*log));
    let usage_log = settings.state_dir.as_deref().and_then(|dir| open_usage_log(dir, &*log)).map(Arc::new);
    let metrics = Arc::new(Metrics::new());
    let shared = Arc::new(shared(&settings, models.len(), metrics.clone(), usage_log.clone(), log.clone()));
    let (models, commands): (Vec<_>, Vec<_>) = models
        .into_iter()
        .enumerate()
        .map(|(number, served)| Model::new(number, served, settings.idle_unload.is_some()))
        .map(|(model, commands)| (Arc::new(model), commands))
        .unzip();
    let app = App::new(settings, models, keys, metrics, usage_log, log);
    #[cfg(feature = "otel")]
    let app = app.with_tracer(tracer);
    let app = Arc::new(app);
    // It is dropped after the runtime and its connections, and sends the last traces then.
    #[cfg(feature = "otel")]
    let _exporter = trace::Exporter::start(&app)?;
    adapters::list_settings(&app)?;
    let (sender, ends) = unbounded_channel();
    for (model, commands) in app.models.iter().zip(commands) {
        let usage = earlier_usage(&app, &model.name, saved.as_ref());
        start(model.clone(), commands, shared.clone(), usage, sender.clone())?;
    }
    drop(sender);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let life = Life { app, reload, notify, signals: signals.0, ends, ready: false, cut: false };
    runtime.block_on(life.run(&listeners))
}

/// Starts the thread of a model.
fn start(
    model: Arc<Model>,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    mut usage: UsageOf,
    ends: UnboundedSender<EngineEnd>,
) -> Result<()> {
    let name = format!("iec-{}", model.number);
    spawn_deep(&name, STACK, move || {
        let work = std::panic::AssertUnwindSafe(|| engine::work(&model, &commands, &shared, &mut usage));
        let result = std::panic::catch_unwind(work).unwrap_or_else(|_| {
            model.set_status(Status::Failed);
            Err(Error::engine("the thread of the model panicked"))
        });
        model.jobs.close();
        if result.is_ok() {
            model.set_status(Status::Unloaded);
        }
        let _ = ends.send(EngineEnd { model: model.number, result, usage });
    })
    .map(drop)
}

/// Returns what the threads of all models share.
fn shared(
    settings: &ServeSettings,
    models: usize,
    metrics: Arc<Metrics>,
    usage_log: Option<Arc<UsageLog>>,
    log: LogLine,
) -> Shared {
    Shared {
        log,
        check_weights: settings.check_weights,
        record_use: usage_log.map(recorder),
        shows_prompts: false,
        process_ends: true,
        slow_reader: Some(SLOW_READER),
        turns: turns::Turns::new(models),
        metrics,
        limits: settings.scheduler_options(0, 0),
        prefix_cache: settings.prefix_cache,
        max_adapters: settings.max_adapters,
        state: settings.state_dir.clone().map(|dir| (dir, settings.state_disk.0)),
    }
}

/// Returns the function that records the use of keys in a log.
fn recorder(log: Arc<UsageLog>) -> engine::RecordUse {
    Arc::new(move |model, key, day_used, at| log.record(model, key, day_used, at))
}

/// Reads the use of keys in earlier runs. A file that cannot be read is moved aside, so that it does not keep the
/// server from starting.
fn saved_usage(dir: &Path, log: &dyn Fn(&str)) -> Option<usage::Saved> {
    usage::Saved::load(dir).unwrap_or_else(|e| {
        set_aside(&dir.join(usage::FILE), &e, "limits per day count from the usage log on", log);
        None
    })
}

/// Opens the log of use. Without it, the use since the last save is lost if the server is killed.
fn open_usage_log(dir: &Path, log: &dyn Fn(&str)) -> Option<UsageLog> {
    let path = dir.join(usage_log::FILE);
    let earlier = usage_log::read(&path).unwrap_or_else(|e| {
        set_aside(&path, &e, "limits per day count from the last save on", log);
        usage_log::States::default()
    });
    let opened = UsageLog::open(&path, earlier);
    opened.map_err(|e| log(&format!("the use of keys is not recorded between two saves: {e}"))).ok()
}

/// Returns the use of all keys of a model in earlier runs: that of the last save, or of the log if it is later.
fn earlier_usage(app: &App, model: &str, saved: Option<&usage::Saved>) -> UsageOf {
    let (tenants, now) = (app.tenants(), SystemTime::now());
    let of = |key: &keys::Key| {
        let of_saved = saved.and_then(|saved| saved.usage_of(model, &key.name, &key.limits, now));
        let logged = app.usage_log.as_ref().and_then(|log| log.last(model, &key.name));
        match logged.filter(|logged| saved.is_none_or(|saved| logged.at >= saved.at)) {
            None => of_saved,
            Some(logged) => {
                let day_used = usage::still_used(logged.tokens, logged.at, &key.limits, now);
                Some(crate::sched::KeyUsage { day_used, ..of_saved.unwrap_or_default() })
            }
        }
    };
    tenants.keys.list().iter().map(of).collect()
}

/// The server while it runs.
struct Life {
    app: Arc<App>,
    reload: Reload,
    notify: Option<OsString>,
    signals: UnboundedReceiver<ServerSignal>,
    ends: UnboundedReceiver<EngineEnd>,
    /// Whether systemd knows that requests are served.
    ready: bool,
    cut: bool,
}

impl Life {
    /// Serves connections until the server ends.
    async fn run(mut self, listeners: &Listeners) -> Result<Ended> {
        let (stop, stopped) = watch::channel(false);
        let router = http::router(self.app.clone());
        #[cfg(feature = "grpc")]
        let calls = grpc::serve(self.app.clone(), listeners.grpc(), stopped.clone(), LAST_BYTES);
        #[cfg(not(feature = "grpc"))]
        let calls = std::future::ready(Ok::<(), Error>(()));
        let connections = listeners.serve(router, stopped, LAST_BYTES);
        let ends = async {
            let ended = self.until_end().await;
            let _ = stop.send(true);
            ended
        };
        let (served, called, ended) = tokio::join!(connections, calls, ends);
        served.and(called)?;
        ended
    }

    /// Follows signals and engines until all engines have ended.
    async fn until_end(&mut self) -> Result<Ended> {
        let mut running = self.app.models.len();
        let mut usage = Usage::default();
        let mut look = tokio::time::interval(Duration::from_millis(50));
        let mut save = tokio::time::interval(usage::SAVE_INTERVAL);
        save.tick().await;
        let mut idle = tokio::time::interval(self.app.settings.idle_unload.map_or(Duration::from_secs(1), idle_look));
        while running > 0 {
            tokio::select! {
                end = self.ends.recv() => {
                    running -= 1;
                    let Some(end) = end else { break };
                    add_usage(&self.app, &mut usage, end.model, end.usage);
                    let Drained { cut, unsaved } = end.result?;
                    self.cut |= cut;
                    if let Some(e) = unsaved {
                        (self.app.log)(&format!("not all pages of the prefix cache were saved: {e}"));
                    }
                    self.stop_loading();
                }
                signal = self.signals.recv() => match signal {
                    Some(ServerSignal::Reload) => self.reload().await,
                    Some(ServerSignal::Terminate) => self.leave(self.app.settings.drain_delay),
                    Some(ServerSignal::Interrupt) => self.leave(Duration::ZERO),
                    None => {}
                },
                _ = look.tick(), if !self.ready => self.look().await,
                _ = idle.tick() => loading::unload_idle(&self.app),
                // An engine answers after its step; signals do not wait for it.
                _ = save.tick() => drop(tokio::spawn(save_usage(self.app.clone()))),
            }
        }
        write_usage(&self.app, usage, SystemTime::now()).await;
        Ok(Ended { cut: self.cut })
    }

    /// Tells systemd once all models answer.
    async fn look(&mut self) {
        if self.app.is_ready() {
            self.ready = true;
            adapters::restore(&self.app).await;
            self.tell("READY=1");
            for model in &self.app.models {
                if let Status::Ready(facts) = model.status()
                    && let Some(note) = facts.recommended.note()
                {
                    (self.app.log)(&format!("{note} (model `{}`)", model.name));
                }
            }
            (self.app.log)("ready");
        }
    }

    /// Reads keys and adapters again. If one of them is not valid, the former ones stay.
    async fn reload(&self) {
        self.tell("RELOADING=1");
        let reloaded = match (self.reload)() {
            Ok(Reloaded { keys, loras }) => adapters::replace(&self.app, loras).await.map(|()| keys),
            Err(e) => Err(e.to_string()),
        };
        match reloaded {
            Ok(keys) => {
                keys.into_iter().for_each(|keys| self.app.set_keys(keys));
                (self.app.log)("keys and adapters were read again");
            }
            Err(e) => (self.app.log)(&format!("the former keys and adapters stay in use: {e}")),
        }
        self.tell("READY=1");
    }

    /// Ends the server: after `delay` no more requests are taken, and those that are left are finished.
    fn leave(&self, delay: Duration) {
        self.app.set_phase(Phase::Leaving);
        self.stop_loading();
        self.tell("STOPPING=1");
        let app = self.app.clone();
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            app.set_phase(Phase::Draining);
            let timeout = app.settings.drain_timeout;
            app.models.iter().for_each(|model| model.send(Command::Drain(timeout)));
        });
    }

    /// Ends the loading of models once the server ends and none computes any more.
    fn stop_loading(&self) {
        let is = |wanted: fn(&Status) -> bool| self.app.models.iter().any(|model| wanted(&model.status()));
        let computes = is(|status| matches!(status, Status::Ready(_) | Status::Unloading));
        if self.app.phase() != Phase::Running && !computes && is(|status| matches!(status, Status::Loading)) {
            // A model that is being packed stops where it leaves nothing half-written.
            interrupt::request(Signal::Terminate);
        }
    }

    fn tell(&self, message: &str) {
        if let Some(socket) = &self.notify
            && let Err(e) = notify::notify(socket, message)
        {
            (self.app.log)(&format!("systemd does not receive {message}: {e}"));
        }
    }
}

/// Returns the time between two looks for idle models.
fn idle_look(time: Duration) -> Duration {
    (time / 4).clamp(Duration::from_millis(20), Duration::from_secs(1))
}

/// Saves the use of the keys, if there is a directory for it.
async fn save_usage(app: Arc<App>) {
    // Without the use of each model, the former file is more complete.
    if app.settings.state_dir.is_none() || !app.is_ready() {
        return;
    }
    // What is recorded from now on may be missing in the answers of the engines.
    let (begin, mut usage) = (SystemTime::now(), Usage::default());
    for model in &app.models {
        let (sender, receiver) = std::sync::mpsc::channel();
        model.send(Command::Usage(sender));
        let answered = tokio::task::spawn_blocking(move || receiver.recv_timeout(USAGE_TIME).ok()).await;
        let Ok(Some(used)) = answered else { return };
        add_usage(&app, &mut usage, model.number, used);
    }
    write_usage(&app, usage, begin).await;
}

/// Adds the use of the keys of a model.
fn add_usage(app: &App, usage: &mut Usage, model: usize, used: UsageOf) {
    let (ids, model) = (app.key_ids(), &app.models[model].name);
    for (key, used) in used.into_iter().enumerate() {
        if let (Some(name), Some(used)) = (ids.name(key), used) {
            usage.set(model, name, used);
        }
    }
}

/// Writes the use of the keys at `time`, if there is a directory for it.
async fn write_usage(app: &App, usage: Usage, time: SystemTime) {
    let Some(dir) = app.settings.state_dir.clone() else { return };
    let usage_log = app.usage_log.clone();
    let save = move || {
        usage.save(&dir, time)?;
        usage_log.iter().for_each(|log| log.drop_before(time));
        Ok::<(), Error>(())
    };
    if let Ok(Err(e)) = tokio::task::spawn_blocking(save).await {
        (app.log)(&format!("the use of the keys was not saved: {e}"));
    }
}
