//! Computes results on other threads, in order and at most a given number ahead of their use.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Results of the items `0..count`, computed by threads that call [`Ahead::work`] and taken by one that calls
/// [`Ahead::next`]. A thread that has computed `room` results ahead of the one to be taken next waits.
pub struct Ahead<T> {
    count: usize,
    room: usize,
    state: Mutex<AheadState<T>>,
    /// Signals that a result is ready, that there is room for one, or that no more are wanted.
    changed: Condvar,
}

struct AheadState<T> {
    /// Results from number `taken` on; `None` while one is being computed.
    ready: VecDeque<Option<T>>,
    /// Number of results that were taken.
    taken: usize,
    /// Whether the results that are not taken yet are still wanted.
    wanted: bool,
    /// Whether a thread panicked.
    failed: bool,
}

/// State of the result that is taken next.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken<T> {
    /// The result.
    Ready(T),
    /// The result is still being computed.
    Pending,
    /// All results were taken.
    End,
}

/// Ends the work of the threads when the results are no longer taken, also when that is because of a panic.
pub struct Stop<'a, T>(&'a Ahead<T>);

impl<T> Drop for Stop<'_, T> {
    fn drop(&mut self) {
        self.0.lock().wanted = false;
        self.0.changed.notify_all();
    }
}

/// Tells the thread that takes results about a panic in [`Ahead::work`].
struct Failure<'a, T>(&'a Ahead<T>);

impl<T> Drop for Failure<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut state = self.0.lock();
            (state.wanted, state.failed) = (false, true);
            self.0.changed.notify_all();
        }
    }
}

impl<T> Ahead<T> {
    /// Creates the list of results for `count` items, of which at most `room` (at least one) are computed ahead.
    pub fn new(count: usize, room: usize) -> Ahead<T> {
        let state = AheadState { ready: VecDeque::new(), taken: 0, wanted: true, failed: false };
        Ahead { count, room: room.max(1), state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Returns a guard that ends [`Ahead::work`] on all threads when it is dropped.
    pub fn stop(&self) -> Stop<'_, T> {
        Stop(self)
    }

    /// Computes results on this thread until all are computed or no more are wanted. If `compute` panics, so does
    /// [`Ahead::next`].
    pub fn work(&self, compute: impl Fn(usize) -> T) {
        let _failure = Failure(self);
        while let Some(item) = self.begin() {
            let result = compute(item);
            let mut state = self.lock();
            let place = item - state.taken;
            state.ready[place] = Some(result);
            self.changed.notify_all();
        }
    }

    /// Waits until there is room for another result, and returns its number.
    fn begin(&self) -> Option<usize> {
        let mut state = self.lock();
        loop {
            let item = state.taken + state.ready.len();
            if !state.wanted || item == self.count {
                return None;
            }
            if state.ready.len() < self.room {
                state.ready.push_back(None);
                return Some(item);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes the next result. With `wait`, waits until it is computed.
    pub fn next(&self, wait: bool) -> Taken<T> {
        let mut state = self.lock();
        loop {
            if state.taken == self.count {
                return Taken::End;
            }
            if let Some(result) = state.ready.front_mut().and_then(Option::take) {
                state.ready.pop_front();
                state.taken += 1;
                self.changed.notify_all();
                return Taken::Ready(result);
            }
            assert!(!state.failed, "a thread that computes results panicked");
            if !wait {
                return Taken::Pending;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, AheadState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    /// Takes all results that `threads` threads compute, and returns them with the largest number that was begun ahead.
    fn all(count: usize, room: usize, threads: usize) -> (Vec<usize>, usize) {
        let ahead = Ahead::new(count, room);
        let (taken, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let compute = |item: usize| {
            most.fetch_max(item - taken.load(Ordering::SeqCst), Ordering::SeqCst);
            if item.is_multiple_of(7) {
                thread::yield_now();
            }
            item * item
        };
        thread::scope(|scope| {
            let _stop = ahead.stop();
            (0..threads).for_each(|_| _ = scope.spawn(|| ahead.work(compute)));
            let mut results = Vec::new();
            loop {
                match ahead.next(results.len() % 3 > 0) {
                    Taken::Ready(result) => results.push(result),
                    Taken::Pending => _ = results.len().is_multiple_of(3).then(thread::yield_now),
                    Taken::End => break,
                }
                taken.store(results.len(), Ordering::SeqCst);
            }
            (results, most.load(Ordering::SeqCst))
        })
    }

    #[test]
    fn results_come_in_order_and_a_bounded_number_ahead() {
        for (count, room, threads) in [(0, 1, 2), (1, 1, 1), (100, 1, 3), (100, 5, 2), (10, 100, 4), (50, 0, 1)] {
            let (results, most) = all(count, room, threads);
            assert_eq!(results, (0..count).map(|item| item * item).collect::<Vec<_>>());
            // A result is counted as taken only after its place is free.
            assert!(most <= room.max(1), "{most} ahead with room for {room}");
        }
    }

    #[test]
    fn threads_end_when_no_more_results_are_wanted() {
        let ahead = Ahead::new(usize::MAX, 2);
        thread::scope(|scope| {
            let stop = ahead.stop();
            (0..3).for_each(|_| _ = scope.spawn(|| ahead.work(|item| item)));
            assert_eq!(ahead.next(true), Taken::Ready(0));
            drop(stop);
        });
    }

    #[test]
    fn a_panic_of_a_thread_does_not_block_the_one_that_takes_results() {
        let ahead: Ahead<usize> = Ahead::new(3, 1);
        let taken = thread::scope(|scope| {
            let _stop = ahead.stop();
            let worker = scope.spawn(|| ahead.work(|_| panic!("no result")));
            let taken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ahead.next(true)));
            worker.join().unwrap_err();
            taken
        });
        assert!(taken.is_err());
    }
}
