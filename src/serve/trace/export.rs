//! Thread that posts spans to the collector, and the queue before it.

use super::{Finished, Tracer, otlp};
use crate::error::Result;
use crate::serve::app::App;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use ureq::Agent;

/// Time between two posts.
const EVERY: Duration = Duration::from_secs(1);
/// Time in which the collector must answer.
const POST_TIME: Duration = Duration::from_secs(5);
/// Largest number of requests that wait for a post; the spans of others are dropped.
const MOST_WAITING: usize = 2048;
/// Largest number of requests in a post.
const MOST_POSTED: usize = 128;
/// Bytes of an answer that are read, so that its connection can be used again.
const ANSWER_BYTES: u64 = 64 << 10;

/// Requests whose spans are not sent yet.
#[derive(Debug, Default)]
pub struct Queue {
    state: Mutex<ExportState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ExportState {
    waiting: Vec<Finished>,
    /// Number of requests that found the queue full.
    dropped: u64,
    /// Whether the server ends, and nothing more is waited for.
    is_ending: bool,
}

impl Queue {
    /// Adds a request, or drops it if too many wait.
    pub fn push(&self, finished: Finished) {
        let mut state = self.state();
        match state.waiting.len() < MOST_WAITING {
            true => state.waiting.push(finished),
            false => state.dropped += 1,
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Waits for requests and a second longer, then takes all of them and the number of those that were dropped.
    /// Returns `None` once the server ends and all were taken.
    pub fn take(&self) -> Option<(Vec<Finished>, u64)> {
        let idle = |state: &mut ExportState| state.waiting.is_empty() && !state.is_ending;
        let state = self.changed.wait_while(self.state(), idle).unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(state, EVERY, |state| !state.is_ending);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let taken = (std::mem::take(&mut state.waiting), std::mem::take(&mut state.dropped));
        (!taken.0.is_empty()).then_some(taken)
    }

    /// Lets [`Queue::take`] return without waiting.
    pub fn end(&self) {
        self.state().is_ending = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, ExportState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Thread that sends the spans of a server. When this value is dropped, it sends those that are left and ends.
pub struct Exporter {
    app: Arc<App>,
    thread: Option<JoinHandle<()>>,
}

impl Exporter {
    /// Starts the thread, if the server has a tracer.
    ///
    /// # Errors
    /// The system starts no more threads.
    pub fn start(app: &Arc<App>) -> Result<Exporter> {
        let of_thread = app.clone();
        let work = move || {
            if let Some(tracer) = &of_thread.tracer {
                Sender::new(tracer, &*of_thread.log).work();
            }
        };
        let thread = match app.tracer {
            Some(_) => Some(std::thread::Builder::new().name("iec-otlp".into()).spawn(work)?),
            None => None,
        };
        Ok(Exporter { app: app.clone(), thread })
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if let (Some(tracer), Some(thread)) = (&self.app.tracer, self.thread.take()) {
            tracer.queue.end();
            let _ = thread.join();
        }
    }
}

/// Connection to the collector.
pub(super) struct Sender<'a> {
    tracer: &'a Tracer,
    log: &'a dyn Fn(&str),
    agent: Agent,
    /// Number of requests whose spans were dropped since the last post that succeeded.
    dropped: u64,
    /// Whether the last post failed.
    is_failing: bool,
}

impl<'a> Sender<'a> {
    pub(super) fn new(tracer: &'a Tracer, log: &'a dyn Fn(&str)) -> Sender<'a> {
        let config = Agent::config_builder()
            .user_agent(concat!("iec/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_global(Some(POST_TIME))
            .build();
        Sender { tracer, log, agent: config.into(), dropped: 0, is_failing: false }
    }

    /// Sends spans until the server ends.
    pub(super) fn work(mut self) {
        while self.send_waiting() {}
    }

    /// Waits for spans, and sends them. Returns false once the server ends and all were sent.
    pub(super) fn send_waiting(&mut self) -> bool {
        let Some((finished, dropped)) = self.tracer.queue.take() else { return false };
        self.dropped += dropped;
        for (i, piece) in finished.chunks(MOST_POSTED).enumerate() {
            let result = self.post(piece);
            let failed = result.is_err();
            self.report(result, finished.len() - i * MOST_POSTED);
            if failed {
                // The other pieces would wait for the same failure.
                break;
            }
        }
        true
    }

    /// Sends spans.
    fn post(&self, finished: &[Finished]) -> std::result::Result<(), String> {
        let options = &self.tracer.options;
        let body = otlp::request(&options.service, finished).to_string();
        let mut request = self.agent.post(&options.url).content_type("application/json");
        for (name, value) in &options.headers {
            request = request.header(name, value);
        }
        let mut response = request.send(body).map_err(|e| e.to_string())?;
        let _ = response.body_mut().with_config().limit(ANSWER_BYTES).read_to_vec();
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(format!("it answered with status {}", status.as_u16())),
        }
    }

    /// Logs when the collector begins to fail, and when it answers again. `left` requests were not sent.
    fn report(&mut self, result: std::result::Result<(), String>, left: usize) {
        match result {
            Err(why) => {
                self.dropped += left as u64;
                if !self.is_failing {
                    let url = &self.tracer.options.url;
                    (self.log)(&format!("traces are dropped until {url} takes them: {why}"));
                }
                self.is_failing = true;
            }
            Ok(()) => {
                if self.dropped > 0 {
                    (self.log)(&format!("traces of {} requests were dropped", self.dropped));
                }
                (self.dropped, self.is_failing) = (0, false);
            }
        }
    }
}
