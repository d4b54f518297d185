//! Division of the processor between the models of a server.
//!
//! Each model has a thread that computes, and one of them computes at a time. When several want to, the one that has
//! used the least time goes first, so that models under load get equal time. A model without load saves no credit: it
//! continues with the smallest time of the others.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Turns of the models.
#[derive(Debug)]
pub struct Turns {
    state: Mutex<TurnState>,
    /// Notified when a turn ends.
    ended: Condvar,
}

#[derive(Debug)]
struct TurnState {
    busy: bool,
    /// Time that each model has used.
    used: Vec<Duration>,
    /// Whether each model waits for its turn.
    waits: Vec<bool>,
    /// Used time of the model that got the last turn. A model that returns continues from it.
    floor: Duration,
}

/// The turn of a model; it ends when this value is dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    turns: &'a Turns,
    model: usize,
    begin: Instant,
}

impl Turns {
    /// Creates the turns of `models` models.
    pub fn new(models: usize) -> Turns {
        let state = TurnState {
            busy: false,
            used: vec![Duration::ZERO; models],
            waits: vec![false; models],
            floor: Duration::ZERO,
        };
        Turns { state: Mutex::new(state), ended: Condvar::new() }
    }

    /// Waits until the model with this number may compute.
    pub fn take(&self, model: usize) -> Turn<'_> {
        let mut state = self.state();
        state.waits[model] = true;
        state.used[model] = state.used[model].max(state.floor);
        while state.busy || !state.is_next(model) {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waits[model] = false;
        state.busy = true;
        state.floor = state.used[model];
        Turn { turns: self, model, begin: Instant::now() }
    }

    fn state(&self) -> MutexGuard<'_, TurnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TurnState {
    /// Returns true if no waiting model has used less time.
    fn is_next(&self, model: usize) -> bool {
        let waiting = self.used.iter().zip(&self.waits).enumerate().filter(|(_, (_, waits))| **waits);
        waiting.min_by_key(|(i, (used, _))| (**used, *i)).is_some_and(|(i, _)| i == model)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        state.busy = false;
        state.used[self.model] += self.begin.elapsed();
        self.turns.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::thread;

    #[test]
    fn one_model_computes_at_a_time_and_each_gets_its_turns() {
        let (turns, inside, stop) = (Turns::new(3), AtomicUsize::new(0), AtomicBool::new(false));
        let counts = [const { AtomicUsize::new(0) }; 3];
        thread::scope(|scope| {
            for (model, count) in counts.iter().enumerate() {
                let (turns, inside, stop) = (&turns, &inside, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let _turn = turns.take(model);
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        thread::sleep(Duration::from_micros(200));
                        inside.fetch_sub(1, Ordering::SeqCst);
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            while counts.iter().any(|count| count.load(Ordering::Relaxed) < 20) {
                thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_model_that_returns_has_no_credit_for_the_time_without_load() {
        let turns = Turns::new(2);
        turns.state().used = vec![Duration::from_secs(100), Duration::ZERO];
        drop(turns.take(0));
        drop(turns.take(1));
        assert!(turns.state().used[1] >= Duration::from_secs(100));
    }
}
