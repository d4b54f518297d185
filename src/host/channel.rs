//! Channels and values that a thread or a task may wait for: a thread sleeps on a condition variable, a task of any
//! asynchronous runtime leaves its waker.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Sending half of a channel without a limit. It may be cloned.
#[derive(Debug)]
pub struct Sender<T>(Arc<Channel<T>>);

/// Receiving half of a channel.
#[derive(Debug)]
pub struct Receiver<T>(Arc<Channel<T>>);

#[derive(Debug)]
struct Channel<T> {
    state: Mutex<ChannelState<T>>,
    sent: Condvar,
}

#[derive(Debug)]
struct ChannelState<T> {
    queue: VecDeque<T>,
    /// Waker of the task that waits.
    waker: Option<Waker>,
    senders: usize,
    /// Whether the receiver exists.
    is_read: bool,
}

impl<T> Channel<T> {
    fn state(&self) -> MutexGuard<'_, ChannelState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates a channel.
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let state = ChannelState { queue: VecDeque::new(), waker: None, senders: 1, is_read: true };
    let shared = Arc::new(Channel { state: Mutex::new(state), sent: Condvar::new() });
    (Sender(shared.clone()), Receiver(shared))
}

impl<T> Sender<T> {
    /// Sends a message. It is dropped if the receiver is gone.
    pub fn send(&self, message: T) {
        let mut state = self.0.state();
        if !state.is_read {
            return;
        }
        state.queue.push_back(message);
        self.0.wake(state);
    }

    /// Returns true if the receiver is gone.
    pub fn is_closed(&self) -> bool {
        !self.0.state().is_read
    }
}

impl<T> Channel<T> {
    /// Wakes the receiver. The lock is released first, so that the receiver does not wait for it.
    fn wake(&self, mut state: MutexGuard<'_, ChannelState<T>>) {
        let waker = state.waker.take();
        drop(state);
        self.sent.notify_one();
        waker.into_iter().for_each(Waker::wake);
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Sender<T> {
        self.0.state().senders += 1;
        Sender(self.0.clone())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.senders -= 1;
        if state.senders == 0 {
            self.0.wake(state);
        }
    }
}

impl<T> Receiver<T> {
    /// Waits for the next message on this thread; `None` if no sender is left.
    pub fn wait(&mut self) -> Option<T> {
        let mut state = self.0.state();
        loop {
            match state.queue.pop_front() {
                Some(message) => return Some(message),
                None if state.senders == 0 => return None,
                None => state = self.0.sent.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits for the next message until `time` has passed.
    ///
    /// # Errors
    /// No message came in this time. `Ok(None)`: no sender is left.
    pub fn wait_for(&mut self, time: Duration) -> Result<Option<T>, TimedOut> {
        let until = Instant::now() + time;
        let mut state = self.0.state();
        loop {
            if let Some(message) = state.queue.pop_front() {
                return Ok(Some(message));
            }
            if state.senders == 0 {
                return Ok(None);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TimedOut);
            }
            state = self.0.sent.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the next message if there is one; otherwise the task of `context` is woken by the next one.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.0.state();
        match state.queue.pop_front() {
            Some(message) => Poll::Ready(Some(message)),
            None if state.senders == 0 => Poll::Ready(None),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Waits for the next message in a task; `None` if no sender is left.
    pub async fn receive(&mut self) -> Option<T> {
        poll_fn(|context| self.poll(context)).await
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_read = false;
        let rest = std::mem::take(&mut state.queue);
        drop(state);
        // What messages own is dropped without the lock.
        drop(rest);
    }
}

/// No message came in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedOut;

/// A value that others see, and for whose next change they may wait.
#[derive(Debug)]
pub struct Watched<T> {
    state: Mutex<WatchedState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct WatchedState<T> {
    value: T,
    /// Number of changes so far.
    version: u64,
    wakers: Vec<Waker>,
}

impl<T: Clone> Watched<T> {
    /// Creates a value.
    pub fn new(value: T) -> Watched<T> {
        Watched { state: Mutex::new(WatchedState { value, version: 0, wakers: Vec::new() }), changed: Condvar::new() }
    }

    /// Returns the value.
    pub fn get(&self) -> T {
        self.state().value.clone()
    }

    /// Sets the value.
    pub fn set(&self, value: T) {
        let mut state = self.state();
        let former = std::mem::replace(&mut state.value, value);
        state.version += 1;
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        drop(former);
        self.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits for the next change in a task.
    pub async fn change(&self) {
        let seen = self.state().version;
        poll_fn(|context| {
            let mut state = self.state();
            if state.version != seen {
                return Poll::Ready(());
            }
            if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                state.wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// Waits on this thread until `find` returns something about the value.
    pub fn wait<R>(&self, mut find: impl FnMut(&T) -> Option<R>) -> R {
        let mut state = self.state();
        loop {
            match find(&state.value) {
                Some(found) => return found,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, WatchedState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Count>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_thread_receives_all_messages_of_several_senders_in_their_order() {
        let (sender, mut receiver) = channel();
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let sender = sender.clone();
                std::thread::spawn(move || (0..1000).for_each(|at| sender.send((thread, at))))
            })
            .collect();
        drop(sender);
        let mut next = [0; 4];
        while let Some((thread, at)) = receiver.wait() {
            assert_eq!(at, next[thread]);
            next[thread] += 1;
        }
        assert_eq!(next, [1000; 4]);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn a_task_is_woken_by_a_message_and_by_the_last_sender() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let (sender, mut receiver) = channel();
        assert!(receiver.poll(&mut context).is_pending());
        sender.send(1);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert_eq!(receiver.poll(&mut context), Poll::Ready(Some(1)));
        assert!(receiver.poll(&mut context).is_pending());
        drop(sender.clone());
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        drop(sender);
        assert_eq!(count.0.load(Ordering::SeqCst), 2);
        assert_eq!(receiver.poll(&mut context), Poll::Ready(None));
        assert_eq!(receiver.wait(), None);
    }

    #[test]
    fn a_wait_with_a_limit_ends() {
        let (sender, mut receiver) = channel();
        assert_eq!(receiver.wait_for(Duration::from_millis(1)), Err(TimedOut));
        sender.send(1);
        assert_eq!(receiver.wait_for(Duration::ZERO), Ok(Some(1)));
        drop(sender);
        assert_eq!(receiver.wait_for(Duration::ZERO), Ok(None));
    }

    #[test]
    fn messages_to_a_receiver_that_is_gone_are_dropped() {
        let (sender, receiver) = channel();
        let message = Arc::new(());
        sender.send(message.clone());
        drop(receiver);
        assert!(sender.is_closed());
        sender.send(message.clone());
        assert_eq!(Arc::strong_count(&message), 1);
    }

    #[test]
    fn a_change_wakes_threads_and_tasks() {
        let watched = Arc::new(Watched::new(0));
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        let mut change = pin!(watched.change());
        for _ in 0..3 {
            assert!(change.as_mut().poll(&mut context).is_pending());
        }
        let thread = {
            let watched = watched.clone();
            std::thread::spawn(move || watched.wait(|value| (*value > 0).then_some(*value)))
        };
        watched.set(5);
        assert_eq!((thread.join().unwrap(), count.0.load(Ordering::SeqCst), watched.get()), (5, 1, 5));
        assert!(change.as_mut().poll(&mut context).is_ready());
    }
}
