//! Tests of loading on request and unloading, with threads of models that open the embedded one.

use super::*;
use crate::error::{Error, Result};
use crate::host::engine::{self, Shared, UsageOf};
use crate::host::lease::Plan;
use crate::host::metrics::Metrics;
use crate::host::model::Served;
use crate::host::turns::Turns;
use crate::models::embedded;
use crate::serve::config::ServeSettings;
use crate::serve::keys::Keys;
use crate::serve::residency::Residency;
use crate::session::chat_templates::TemplateChoice;
use crate::session::{Session, SessionOptions};
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// Longest time to wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// Pack of the embedded model.
static PACK: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let home = tempfile::tempdir().unwrap();
    let pack = embedded::pack_into(home.path()).unwrap();
    (home, pack)
});

/// A model that is loaded on request, with the number of attempts to open it.
struct Fake {
    /// Bytes that it needs.
    bytes: u64,
    /// Attempts that fail.
    fails: usize,
    /// Time of an attempt.
    takes: Duration,
    on_request: bool,
}

impl Default for Fake {
    fn default() -> Fake {
        Fake { bytes: 0, fails: 0, takes: Duration::ZERO, on_request: true }
    }
}

/// Models with their threads.
struct Running {
    app: Arc<App>,
    opened: Vec<Arc<AtomicUsize>>,
    threads: Vec<JoinHandle<Result<engine::Drained>>>,
}

impl Running {
    fn start(fakes: Vec<Fake>, settings: ServeSettings, budget: Option<u64>) -> Running {
        let shared = Arc::new(Shared {
            log: Arc::new(|_| {}),
            check_weights: false,
            record_use: None,
            shows_prompts: false,
            process_ends: true,
            slow_reader: None,
            turns: Turns::new(fakes.len()),
            metrics: Arc::new(Metrics::new()),
            limits: settings.scheduler_options(0, 0),
            prefix_cache: true,
            max_adapters: 1,
            state: None,
        });
        let (mut models, mut opened, mut threads) = (Vec::new(), Vec::new(), Vec::new());
        for (number, Fake { bytes, fails, takes, on_request }) in fakes.into_iter().enumerate() {
            let count = Arc::new(AtomicUsize::new(0));
            let attempts = count.clone();
            let open = Box::new(move || {
                std::thread::sleep(takes);
                match attempts.fetch_add(1, Ordering::SeqCst) < fails {
                    true => Err(Error::corrupt("the file is damaged")),
                    false => Session::open(&PACK.1, &SessionOptions::default()),
                }
            });
            let plan: Plan = Box::new(move || Some(Planned { bytes, without_weights: bytes / 2 }));
            let (name, template) = (format!("m{number}"), TemplateChoice::Auto);
            let served = Served { name, open, template, plan: Some(plan), on_request };
            let (model, commands) = Model::new(number, served, settings.idle_unload.is_some());
            let (model, shared) = (Arc::new(model), shared.clone());
            models.push(model.clone());
            opened.push(count);
            threads.push(std::thread::spawn(move || engine::work(&model, &commands, &shared, &mut UsageOf::new())));
        }
        let residency = Residency::new(settings.max_queue, budget);
        let mut app = App::new(settings, models, Keys::open(), Arc::new(Metrics::new()), None, Arc::new(|_| {}));
        app.residency = residency;
        Running { app: Arc::new(app), opened, threads }
    }

    fn model(&self, number: usize) -> &Arc<Model> {
        &self.app.models[number]
    }

    fn opened(&self, number: usize) -> usize {
        self.opened[number].load(Ordering::SeqCst)
    }

    fn state(&self, number: usize) -> &'static str {
        self.model(number).status().name()
    }

    /// Waits until a model has a state.
    async fn wait(&self, number: usize, state: &str) {
        let begin = Instant::now();
        while self.state(number) != state || matches!(self.model(number).status(), Status::Unloading) {
            assert!(begin.elapsed() < PATIENCE, "m{number} is {}, expected {state}", self.state(number));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends the threads, which must not have failed.
    fn end(self) {
        self.app.set_phase(Phase::Draining);
        self.app.models.iter().for_each(|model| model.send(Command::Drain(Duration::ZERO)));
        for thread in self.threads {
            assert!(!thread.join().unwrap().unwrap().cut, "requests were cut");
        }
    }
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
}

fn settings(queue: usize, wait_ms: u64, idle_ms: Option<u64>) -> ServeSettings {
    ServeSettings {
        max_queue: queue,
        queue_timeout: Duration::from_millis(wait_ms),
        idle_unload: idle_ms.map(Duration::from_millis),
        ..ServeSettings::default()
    }
}

#[test]
fn the_first_requests_load_a_model_once() {
    let slow = Fake { takes: Duration::from_millis(100), ..Fake::default() };
    let running = Running::start(vec![slow, Fake::default()], settings(16, 60_000, None), None);
    run(async {
        assert_eq!((running.state(0), running.app.is_ready()), ("unloaded", true));
        let model = running.model(0);
        let (a, b, c) = tokio::join!(running.app.lease(model), running.app.lease(model), running.app.lease(model));
        assert!(a.is_ok() && b.is_ok() && c.is_ok());
        assert_eq!((running.opened(0), running.opened(1), running.state(0)), (1, 0, "loaded"));
        unload_idle(&running.app);
        assert_eq!(running.state(0), "loaded", "models stay loaded without --idle-unload");
    });
    running.end();
}

#[test]
fn a_model_is_unloaded_when_it_is_idle_and_loaded_again() {
    for on_request in [true, false] {
        let fake = Fake { on_request, ..Fake::default() };
        let running = Running::start(vec![fake], settings(16, 60_000, Some(30)), None);
        run(async {
            if !on_request {
                running.wait(0, "loaded").await;
            }
            let (facts, lease) = running.app.lease(running.model(0)).await.unwrap();
            tokio::time::sleep(Duration::from_millis(60)).await;
            unload_idle(&running.app);
            assert_eq!(running.state(0), "loaded", "a model in use stays");
            lease.keep(None);
            drop(lease);
            tokio::time::sleep(Duration::from_millis(60)).await;
            unload_idle(&running.app);
            assert_eq!(running.state(0), "loaded", "the last request wants it to stay");
            let (_, lease) = running.app.lease(running.model(0)).await.unwrap();
            lease.keep(Some(Duration::ZERO));
            drop(lease);
            unload_idle(&running.app);
            running.wait(0, "unloaded").await;
            assert!(running.app.is_ready(), "the next request loads it");
            let (again, _lease) = running.app.lease(running.model(0)).await.unwrap();
            assert_eq!((running.opened(0), again.fingerprint == facts.fingerprint), (2, true));
        });
        running.end();
    }
}

#[test]
fn a_failure_reaches_all_who_wait_and_the_next_request_tries_again() {
    let fake = Fake { fails: 1, takes: Duration::from_millis(50), ..Fake::default() };
    let running = Running::start(vec![fake], settings(16, 60_000, None), None);
    run(async {
        let model = running.model(0);
        let (a, b) = tokio::join!(running.app.lease(model), running.app.lease(model));
        for error in [a.err().unwrap(), b.err().unwrap()] {
            assert_eq!((error.status.as_u16(), error.code), (503, Some("failed")), "{error:?}");
        }
        assert_eq!((running.opened(0), running.state(0)), (1, "failed"));
        assert!(running.app.lease(model).await.is_ok());
        assert_eq!(running.opened(0), 2);
    });
    running.end();
}

#[test]
fn the_model_that_was_used_least_recently_makes_room() {
    let of = |bytes| Fake { bytes, ..Fake::default() };
    let running = Running::start(vec![of(40), of(40), of(40), of(150), of(300)], settings(16, 300, None), Some(100));
    run(async {
        let lease = async |number| running.app.lease(running.model(number)).await;
        drop(lease(0).await.unwrap());
        drop(lease(1).await.unwrap());
        drop(lease(0).await.unwrap());
        let held = lease(2).await.unwrap();
        let states: Vec<&str> = (0..3).map(|number| running.state(number)).collect();
        assert_eq!(states, ["loaded", "unloaded", "loaded"]);
        let other = lease(0).await.unwrap();
        let error = lease(1).await.err().unwrap();
        assert_eq!((error.status.as_u16(), error.code), (503, Some("loading")), "both are in use: {error:?}");
        assert_eq!((running.opened(1), running.state(0), running.state(2)), (1, "loaded", "loaded"));
        drop((held, other));
        assert!(lease(1).await.is_ok());
        assert!(lease(3).await.is_ok(), "without the weights it fits alone");
        assert_eq!((running.state(3), running.state(1)), ("loaded", "unloaded"));
        let error = lease(4).await.err().unwrap();
        assert_eq!((error.code, error.final_refusal), (Some("out_of_memory"), true), "{error:?}");
        assert_eq!((running.opened(4), running.state(3)), (0, "loaded"), "nothing is unloaded in vain");
    });
    running.end();
}

#[test]
fn models_of_the_start_are_not_unloaded_for_others() {
    let fakes = vec![Fake { bytes: 80, on_request: false, ..Fake::default() }, Fake { bytes: 40, ..Fake::default() }];
    let running = Running::start(fakes, settings(16, 60_000, None), Some(100));
    run(async {
        running.wait(0, "loaded").await;
        let error = running.app.lease(running.model(1)).await.err().unwrap();
        assert_eq!(
            (error.code, running.state(0), running.opened(1)),
            (Some("out_of_memory"), "loaded", 0),
            "{error:?}"
        );
    });
    running.end();
}

#[test]
fn the_number_and_the_time_of_waiting_requests_are_bounded() {
    let slow = Fake { takes: Duration::from_millis(400), ..Fake::default() };
    let running = Running::start(vec![slow], settings(1, 100, None), None);
    run(async {
        let model = running.model(0);
        let (a, b) = tokio::join!(running.app.lease(model), running.app.lease(model));
        let (a, b) = (a.err().unwrap(), b.err().unwrap());
        assert_eq!((a.status.as_u16(), a.code), (503, Some("loading")), "{a:?}");
        assert_eq!((b.status.as_u16(), b.code), (429, Some("queue_full")), "{b:?}");
        running.wait(0, "loaded").await;
        assert!(running.app.lease(model).await.is_ok(), "the model was loaded nevertheless");
        assert_eq!(running.opened(0), 1);
    });
    running.end();
}

#[test]
fn a_server_that_ends_refuses_requests_that_wait() {
    let slow = Fake { takes: Duration::from_millis(300), ..Fake::default() };
    let running = Running::start(vec![slow, Fake::default()], settings(16, 60_000, None), None);
    run(async {
        let begin = Instant::now();
        let end = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            running.app.set_phase(Phase::Draining);
        };
        let (refused, ()) = tokio::join!(running.app.lease(running.model(0)), end);
        assert_eq!(refused.err().unwrap().code, Some("draining"));
        assert!(begin.elapsed() < PATIENCE);
    });
    running.end();
}
