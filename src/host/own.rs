//! A model and its thread, for a program whose requests all come from itself.

use super::engine::{self, Drained, Shared, UsageOf};
use super::metrics::Metrics;
use super::model::{Arrival, Command, Facts, KeyChange, Model, Served, Status, Ticket};
use super::turns::Turns;
use crate::error::{Error, Result};
use crate::generate::Request;
use crate::resources::spawn_deep;
use crate::sched::{self, KeyLimits};
use crate::session::Encoder;
use crate::task;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of stack of the thread that computes.
const STACK: usize = 8 << 20;

/// A model and the thread that computes for it. When this value is dropped, all requests are cancelled and the model is
/// freed.
#[derive(Debug)]
pub struct Host {
    /// The model.
    pub model: Arc<Model>,
    /// Metrics of the model.
    pub metrics: Arc<Metrics>,
    thread: Mutex<Option<JoinHandle<Result<Drained>>>>,
}

impl Shared {
    /// Returns the state for requests without limits of number and time: the process goes on after the model, and
    /// nothing is written.
    pub fn without_limits() -> Shared {
        Shared {
            log: Arc::new(|_| {}),
            check_weights: false,
            shows_prompts: false,
            process_ends: false,
            slow_reader: None,
            turns: Turns::new(1),
            metrics: Arc::new(Metrics::new()),
            limits: sched::Options {
                max_queue: usize::MAX,
                // The largest number would be replaced by one that depends on the speed.
                max_queue_tokens: u64::MAX - 1,
                queue_timeout: sched::Micros::MAX,
                ..sched::Options::with_pages(0, 0)
            },
            prefix_cache: true,
            max_adapters: usize::MAX,
            record_use: None,
            state: None,
        }
    }
}

impl Host {
    /// Starts the thread, and waits until it has opened the model.
    ///
    /// # Errors
    /// The model cannot be opened.
    pub fn start(served: Served, shared: Shared) -> Result<Host> {
        // The task of the caller is that of the first opening, and not of the steps later.
        let caller = Mutex::new(task::current());
        let inner = served.open;
        let open = move || {
            let caller = caller.lock().unwrap_or_else(PoisonError::into_inner).take();
            task::run(caller, &inner)
        };
        let (model, commands) = Model::new(0, Served { open: Box::new(open), ..served }, false);
        let (model, metrics) = (Arc::new(model), shared.metrics.clone());
        model.send(Command::Keys(vec![KeyChange::Add(KeyLimits { max_priority: i32::MIN, ..KeyLimits::default() })]));
        let of_thread = model.clone();
        let start = || {
            spawn_deep("iec-engine", STACK, move || {
                let work = || engine::work(&of_thread, &commands, &shared, &mut UsageOf::new());
                let done = catch_unwind(AssertUnwindSafe(work));
                let done = done.unwrap_or_else(|_| Err(Error::engine("the thread of the model panicked")));
                of_thread.jobs.close();
                of_thread.set_status(if done.is_ok() { Status::Unloaded } else { Status::Failed });
                done
            })
        };
        let thread = task::run(None, start)?;
        let host = Host { model, metrics, thread: Mutex::new(Some(thread)) };
        let is_open = host.model.wait(|status| match status {
            Status::Ready(_) => Some(true),
            Status::Failed => Some(false),
            _ => None,
        });
        match is_open {
            true => Ok(host),
            false => Err(host.end().err().unwrap_or_else(|| Error::engine("the model cannot be opened"))),
        }
    }

    /// Returns the properties of the model. While it is opened again after a failure, waits for that.
    ///
    /// # Errors
    /// The engine has failed, or was closed.
    pub fn facts(&self) -> Result<Arc<Facts>> {
        self.model.wait(|status| match status {
            Status::Ready(facts) => Some(Ok(facts.clone())),
            Status::Loading => None,
            Status::Unloading | Status::Unloaded | Status::Failed => Some(Err(ended())),
        })
    }

    /// Runs `work` on a thread that encodes texts, and waits for its result.
    ///
    /// # Errors
    /// The engine has failed, or was closed; and the errors of `work`.
    pub fn encode<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Encoder<'_>) -> Result<T> + Send + 'static,
    {
        self.facts()?;
        self.model.encode_and_wait(work).unwrap_or_else(|| Err(ended()))
    }

    /// Hands a request with these choices to the engine. `adapters` are the names of its adapters, for metrics.
    pub fn submit(&self, choices: Vec<Request>, adapters: Vec<String>, arrived: Instant) -> Ticket {
        self.model.submit(|ticket, outlet| Arrival {
            ticket,
            choices,
            key: 0,
            key_name: "default".into(),
            adapters,
            deadline: None,
            arrived,
            outlet,
        })
    }

    /// Finishes all requests, at the longest for `time`, and frees the model.
    ///
    /// # Errors
    /// The engine has failed.
    pub fn close(&self, time: Duration) -> Result<()> {
        self.model.send(Command::Drain(time));
        self.end()
    }

    /// Waits for the end of the thread.
    fn end(&self) -> Result<()> {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        match thread.map(JoinHandle::join) {
            None | Some(Ok(Ok(_))) => Ok(()),
            Some(Ok(Err(e))) => Err(e),
            Some(Err(_)) => Err(Error::engine("the thread of the model panicked")),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.close(Duration::ZERO);
    }
}

fn ended() -> Error {
    Error::engine("the engine has ended").help("open the model again")
}
