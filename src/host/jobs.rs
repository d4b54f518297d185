//! Queue of work for the threads that encode texts of a model.

use crate::session::Encoder;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Work for a thread that encodes texts.
pub type Job = Box<dyn FnOnce(&Encoder<'_>) + Send>;

/// Queue of work for the threads that encode texts.
#[derive(Default)]
pub struct Jobs {
    state: Mutex<JobState>,
    changed: Condvar,
}

#[derive(Default)]
struct JobState {
    waiting: VecDeque<Job>,
    /// Number of groups of threads that were stopped.
    stops: u64,
    /// Whether no group of threads follows.
    is_closed: bool,
}

impl Jobs {
    /// Adds work. It is dropped if no thread will do it, which wakes the caller that waits for its result.
    pub fn push(&self, job: Job) {
        let mut state = self.state();
        if !state.is_closed {
            state.waiting.push_back(job);
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Returns the number of the current group of threads, which [`Jobs::stop_later`] ends.
    pub fn group(&self) -> u64 {
        self.state().stops
    }

    /// Works until the group of threads is stopped. A panic of a job ends that job only.
    pub fn work(&self, group: u64, encoder: &Encoder<'_>) {
        while let Some(job) = self.next(group) {
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(encoder)));
        }
    }

    fn next(&self, group: u64) -> Option<Job> {
        let mut state = self.state();
        loop {
            if state.stops != group {
                return None;
            }
            if let Some(job) = state.waiting.pop_front() {
                return Some(job);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the current group of threads. Work that waits is kept for the next one.
    fn stop(&self) {
        self.state().stops += 1;
        self.changed.notify_all();
    }

    /// Returns a guard that ends the current group of threads when it is dropped, also by a panic or an error.
    pub fn stop_later(&self) -> StopLater<'_> {
        StopLater(self)
    }

    /// Drops the work that waits.
    pub fn clear(&self) {
        let dropped = std::mem::take(&mut self.state().waiting);
        drop(dropped);
    }

    /// Drops the work that waits and all that comes later, because the model has ended.
    pub fn close(&self) {
        self.state().is_closed = true;
        self.clear();
    }

    fn state(&self) -> MutexGuard<'_, JobState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the threads that encode when it is dropped.
pub struct StopLater<'a>(&'a Jobs);

impl Drop for StopLater<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn work_for_a_model_that_has_ended_is_dropped() {
        let (jobs, kept) = (Jobs::default(), Arc::new(()));
        let job = || {
            let kept = kept.clone();
            Box::new(move |_: &Encoder<'_>| drop(kept)) as Job
        };
        jobs.push(job());
        assert_eq!(Arc::strong_count(&kept), 2);
        jobs.close();
        jobs.push(job());
        assert_eq!(Arc::strong_count(&kept), 1);
    }
}
