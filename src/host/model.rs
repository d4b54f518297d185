//! A model as its users see it: its state, and the queues to the threads that work for it.

use super::channel::{self, Watched};
use super::engine::UsageOf;
use super::jobs::Jobs;
use super::lease::{Lease, Plan, Uses};
use super::reply::{Inlet, Outlet, channel};
use crate::error::Result;
use crate::generate::Request;
use crate::generate::constraint::{Constraint, ConstraintSource};
use crate::generate::sampler::{Breakers, Sampling};
use crate::runtime::Engine;
use crate::sched::{KeyId, KeyLimits};
use crate::session::adapters::{AdapterSource, Adapters};
use crate::session::chat_templates::{Template, TemplateChoice};
use crate::session::default_sampling::DefaultSampling;
use crate::session::infill::Infill;
use crate::session::recent::Recent;
use crate::session::{Encoder, Session};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel as commands};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Opens a model. It may be called again, after a failure.
pub type Open = Box<dyn Fn() -> Result<Session> + Send + Sync>;

/// A model to serve.
pub struct Served {
    /// Name by which requests refer to it.
    pub name: String,
    /// Opens the model.
    pub open: Open,
    /// Chat template.
    pub template: TemplateChoice,
    /// Plans the memory, where that is possible.
    pub plan: Option<Plan>,
    /// Whether the model is loaded when a request names it, not at the start.
    pub on_request: bool,
}

/// Properties of a model that is loaded.
#[derive(Debug)]
pub struct Facts {
    /// Largest number of tokens of prompt and answer.
    pub context: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// Name of everything that decides about the bits of an answer: pack, precision, version.
    pub fingerprint: String,
    /// Sampling of requests that name none.
    pub sampling: Sampling,
    /// Sampling of conversations that name none.
    pub recommended: DefaultSampling,
    /// Chat template, with the tokens and texts that end a turn; `None` if the model has none.
    pub template: Option<ChatFormat>,
    /// Form of prompts for fill-in-the-middle; `None` if the tokenizer has no tokens for it.
    pub infill: Option<Infill>,
    /// Path of the model.
    pub root: PathBuf,
    /// Family, size and abilities.
    pub details: super::details::Details,
    /// Text of each token.
    pub tokens: super::token_text::TokenTexts,
    /// Constraints of the last requests.
    pub constraints: Recent<ConstraintSource, Constraint>,
    /// Sequence breakers of the last requests.
    pub breakers: Recent<Option<Vec<String>>, Breakers>,
    /// Content of `tokenizer_config.json`; null if there is none.
    pub tokenizer_config: serde_json::Value,
}

/// Chat template of a model, and what ends a turn.
#[derive(Debug, Clone)]
pub struct ChatFormat {
    /// The template.
    pub template: Template,
    /// Tokens that end a turn.
    pub end_tokens: Vec<u32>,
    /// Texts that end a turn.
    pub end_texts: Vec<String>,
}

/// State of a model.
#[derive(Debug, Clone)]
pub enum Status {
    /// Its files are being opened.
    Loading,
    /// It answers requests.
    Ready(Arc<Facts>),
    /// It is being removed from memory.
    Unloading,
    /// It is loaded when a request names it.
    Unloaded,
    /// It cannot be opened.
    Failed,
}

impl Status {
    /// Returns the name in lists of models.
    pub fn name(&self) -> &'static str {
        match self {
            Status::Loading => "loading",
            Status::Ready(_) => "loaded",
            Status::Unloading | Status::Unloaded => "unloaded",
            Status::Failed => "failed",
        }
    }
}

/// A model of the server.
pub struct Model {
    /// Name by which requests refer to it.
    pub name: String,
    /// Number of the model in the server.
    pub number: usize,
    /// Time of the start, in seconds since 1970.
    pub created: u64,
    /// Opens the model.
    pub open: Open,
    /// Chat template.
    pub template: TemplateChoice,
    /// Plans the memory, where that is possible.
    pub plan: Option<Plan>,
    /// Uses of the model.
    pub uses: Mutex<Uses>,
    /// Texts to encode and other work that needs no engine.
    pub jobs: Jobs,
    status: Watched<Status>,
    /// Whether requests wait until the model is loaded.
    on_request: AtomicBool,
    /// Whether it may be unloaded.
    may_unload: bool,
    /// Adapters once clients or a reload changed them; `None` = those with which the model is opened.
    adapters: Mutex<Option<Vec<AdapterSource>>>,
    commands: Sender<Command>,
    tickets: AtomicU64,
    /// Milliseconds since the start at which the engine last showed that it is alive.
    beat: AtomicU64,
    /// Number of choices that are queued or computed.
    load: AtomicUsize,
    /// True once the comparison of the weights with their hashes has begun.
    check_began: AtomicBool,
    /// True once a weight was found to differ from its hash.
    damaged: AtomicBool,
    started: Instant,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("name", &self.name).field("number", &self.number).finish_non_exhaustive()
    }
}

/// Change of a key in a scheduler.
#[derive(Debug, Clone, PartialEq)]
pub enum KeyChange {
    /// Adds the key with the next number.
    Add(KeyLimits),
    /// Replaces the limits of a key, and enables it if it is disabled.
    Set(KeyId, KeyLimits),
    /// Disables a key: its requests in the scheduler end normally, new ones are refused.
    Disable(KeyId),
}

/// Computation with the engine of a model.
pub struct Compute(pub Box<dyn FnOnce(&mut Engine) + Send>);

impl fmt::Debug for Compute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compute")
    }
}

/// Message to the thread that computes.
#[derive(Debug)]
pub enum Command {
    /// Computes the choices of a request.
    Arrive(Arrival),
    /// Ends all choices of a request whose reader has left.
    Cancel(u64),
    /// Changes keys.
    Keys(Vec<KeyChange>),
    /// Computes something with the engine between two steps.
    Compute(Compute),
    /// Asks for the requests that are computed.
    Slots(channel::Sender<Vec<Slot>>),
    /// Asks for the use of all keys, in the order of their numbers.
    Usage(Sender<UsageOf>),
    /// Empties the prefix cache, in memory and on disk, unless requests are queued or computed; the answer says whether
    /// it was emptied.
    FlushPrefixes(channel::Sender<bool>),
    /// Loads the model.
    Load,
    /// Removes the model from memory once its batch is empty.
    Unload,
    /// Ends when all requests have ended, at the latest after this time.
    Drain(Duration),
    /// Makes the next step panic.
    #[cfg(test)]
    Panic,
}

/// A choice that is computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Number of the choice among all so far.
    pub task: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answer so far.
    pub generated: usize,
    /// Largest number of tokens of the answer.
    pub most: usize,
}

/// A request for the thread that computes.
#[derive(Debug)]
pub struct Arrival {
    /// Number by which the request is cancelled.
    pub ticket: u64,
    /// Choices, in their order.
    pub choices: Vec<Request>,
    /// Key that the request counts for.
    pub key: KeyId,
    /// Name of the key in metrics.
    pub key_name: Arc<str>,
    /// Names of the adapters, for metrics.
    pub adapters: Vec<String>,
    /// Time at which the request ends if it has not ended before.
    pub deadline: Option<Instant>,
    /// Time at which the request came.
    pub arrived: Instant,
    /// Receiver of the answers.
    pub outlet: Outlet,
}

/// A request that was handed to the engine. When this value is dropped, the request is cancelled unless it has ended.
#[derive(Debug)]
pub struct Ticket {
    number: u64,
    commands: Sender<Command>,
    /// Messages about the request.
    pub inlet: Inlet,
    /// Keeps the model loaded.
    pub lease: Option<Lease>,
}

impl Ticket {
    /// Returns a handle that cancels the request from another thread.
    pub fn canceller(&self) -> Canceller {
        Canceller { number: self.number, commands: self.commands.clone() }
    }
}

/// Handle that cancels a request.
#[derive(Debug, Clone)]
pub struct Canceller {
    number: u64,
    commands: Sender<Command>,
}

impl Canceller {
    /// Cancels the request, unless it has ended. No message about it follows.
    pub fn cancel(&self) {
        let _ = self.commands.send(Command::Cancel(self.number));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Cancel(self.number));
    }
}

impl Model {
    /// Creates a model with the queue that its engine reads. `unloads` allows to unload it when it is idle.
    pub fn new(number: usize, served: Served, unloads: bool) -> (Model, Receiver<Command>) {
        let Served { name, open, template, plan, on_request } = served;
        let (sender, receiver) = commands();
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let model = Model {
            name,
            number,
            created,
            open,
            template,
            plan,
            uses: Mutex::default(),
            jobs: Jobs::default(),
            status: Watched::new(if on_request { Status::Unloaded } else { Status::Loading }),
            on_request: AtomicBool::new(on_request),
            may_unload: on_request || unloads,
            adapters: Mutex::default(),
            commands: sender,
            tickets: AtomicU64::new(0),
            beat: AtomicU64::new(0),
            load: AtomicUsize::new(0),
            check_began: AtomicBool::new(false),
            damaged: AtomicBool::new(false),
            started: Instant::now(),
        };
        (model, receiver)
    }

    /// Returns the state.
    pub fn status(&self) -> Status {
        self.status.get()
    }

    /// Sets the state.
    pub fn set_status(&self, status: Status) {
        // A model that was unloaded once is loaded again by the next request.
        if matches!(status, Status::Unloading | Status::Unloaded) {
            self.on_request.store(true, Ordering::Relaxed);
        }
        self.status.set(status);
    }

    /// Waits until the state changes.
    pub async fn change(&self) {
        self.status.change().await;
    }

    /// Returns true if requests wait until the model is loaded. Others find it loaded, or are refused while the server
    /// starts.
    pub fn is_on_request(&self) -> bool {
        self.on_request.load(Ordering::Relaxed)
    }

    /// Returns true if the model may be unloaded when it is idle.
    pub fn may_unload(&self) -> bool {
        self.may_unload
    }

    /// Returns true if requests are answered.
    pub fn is_ready(&self) -> bool {
        matches!(self.status(), Status::Ready(_)) && !self.is_damaged()
    }

    /// Returns true the first time, to the one who then compares the weights with their hashes.
    pub fn begin_check(&self) -> bool {
        !self.check_began.swap(true, Ordering::Relaxed)
    }

    /// Records that a weight differs from its hash.
    pub fn set_damaged(&self) {
        self.damaged.store(true, Ordering::Relaxed);
    }

    /// Returns true if a weight differs from its hash.
    pub fn is_damaged(&self) -> bool {
        self.damaged.load(Ordering::Relaxed)
    }

    /// Sets the adapters that the model has when it is opened again.
    pub fn set_adapters(&self, adapters: Vec<AdapterSource>) {
        *self.adapters.lock().unwrap_or_else(PoisonError::into_inner) = Some(adapters);
    }

    /// Gives a model that was opened again the adapters that it had. One whose files are gone is not there any more.
    pub fn restore_adapters(&self, adapters: &Adapters) {
        let kept = self.adapters.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(kept) = kept else { return };
        for name in adapters.names() {
            if !kept.iter().any(|source| source.name == name) {
                let _ = adapters.remove(&name);
            }
        }
        let known = adapters.names();
        for source in kept.into_iter().filter(|source| !known.contains(&source.name)) {
            let _ = adapters.add(source);
        }
    }

    /// Records that the engine is alive.
    pub fn beat(&self) {
        self.beat.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Returns the time since the engine showed that it is alive.
    pub fn silence(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_millis(self.beat.load(Ordering::Relaxed)))
    }

    /// Sets the number of choices that are queued or computed.
    pub fn set_load(&self, load: usize) {
        self.load.store(load, Ordering::Relaxed);
    }

    /// Returns the number of choices that are queued or computed.
    pub fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// Sends a message to the engine.
    pub fn send(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// Hands a request to the engine. `arrival` builds it with the number of its ticket and its channel.
    pub fn submit(&self, arrival: impl FnOnce(u64, Outlet) -> Arrival) -> Ticket {
        let number = self.tickets.fetch_add(1, Ordering::Relaxed);
        let (outlet, inlet) = channel();
        self.send(Command::Arrive(arrival(number, outlet)));
        Ticket { number, commands: self.commands.clone(), inlet, lease: None }
    }

    /// Waits on this thread until `find` returns something about the state.
    pub fn wait<R>(&self, find: impl FnMut(&Status) -> Option<R>) -> R {
        self.status.wait(find)
    }

    /// Runs `work` with the engine between two steps, and waits on this thread for its result; `None` if the engine
    /// ends meanwhile. Other requests wait for it.
    pub fn compute<T, F>(&self, work: F) -> Option<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Engine) -> T + Send + 'static,
    {
        let (sender, mut receiver) = channel::channel();
        self.send(Command::Compute(Compute(Box::new(move |engine| sender.send(work(engine))))));
        receiver.wait()
    }

    /// Runs `work` on a thread that encodes texts, and waits for its result; `None` if the engine ends meanwhile.
    pub async fn encode<T, F>(&self, work: F) -> Option<T>
    where
        T: Send + 'static,
        F: FnOnce(&Encoder<'_>) -> T + Send + 'static,
    {
        let mut receiver = self.start_encoding(work);
        receiver.receive().await
    }

    /// Runs `work` on a thread that encodes texts, and waits on this thread for its result; `None` if the engine ends
    /// meanwhile.
    pub fn encode_and_wait<T, F>(&self, work: F) -> Option<T>
    where
        T: Send + 'static,
        F: FnOnce(&Encoder<'_>) -> T + Send + 'static,
    {
        self.start_encoding(work).wait()
    }

    fn start_encoding<T, F>(&self, work: F) -> channel::Receiver<T>
    where
        T: Send + 'static,
        F: FnOnce(&Encoder<'_>) -> T + Send + 'static,
    {
        let (sender, receiver) = channel::channel();
        self.jobs.push(Box::new(move |encoder| {
            // The caller may have left.
            if !sender.is_closed() {
                sender.send(work(encoder));
            }
        }));
        receiver
    }
}
