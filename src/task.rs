//! Work for a caller in the same process: where its progress is shown, and whether the caller has cancelled it.
//!
//! A program has one user, so signals ([`crate::interrupt`]) and the display of [`crate::progress`] are those of the
//! process. A library has many callers at the same time. [`run`] makes a [`Task`] that of the current thread, and the
//! threads that the library starts for it inherit it.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static CURRENT: RefCell<Option<Arc<Task>>> = const { RefCell::new(None) };
}

/// Unit of the counts of progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown with their rate.
    Bytes,
    /// Items of any other kind.
    Items,
}

/// Progress of a long call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress<'a> {
    /// A part of the work has come further, or begins.
    Advanced {
        /// Name of the part, such as `hash`.
        label: &'a str,
        /// Units that are done.
        done: u64,
        /// Units of the whole part.
        total: u64,
        /// Whether these are bytes or other items.
        unit: Unit,
    },
    /// A note for the user.
    Note(&'a str),
}

/// Receiver of progress. It returns false to cancel the work. Several threads may call it at the same time.
pub type Observer = Box<dyn Fn(Progress<'_>) -> bool + Send + Sync>;

/// Work for a caller.
pub struct Task {
    observer: Observer,
    is_cancelled: AtomicBool,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("is_cancelled", &self.is_cancelled).finish_non_exhaustive()
    }
}

impl Task {
    /// Creates a task whose progress `observer` receives.
    pub fn new(observer: Observer) -> Arc<Task> {
        Arc::new(Task { observer, is_cancelled: AtomicBool::new(false) })
    }

    /// Passes on progress.
    pub fn report(&self, progress: Progress<'_>) {
        if !(self.observer)(progress) {
            self.cancel();
        }
    }

    /// Cancels the work, which ends as after an interrupt.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Returns true if the work is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }
}

/// Returns the task of this thread.
pub fn current() -> Option<Arc<Task>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Does `work` as a part of `task`.
pub fn run<T>(task: Option<Arc<Task>>, work: impl FnOnce() -> T) -> T {
    /// Restores the former task, also after a panic.
    struct Former(Option<Arc<Task>>);
    impl Drop for Former {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }
    let _former = Former(CURRENT.replace(task));
    work()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::spawn;
    use crate::{interrupt, progress};
    use std::sync::Mutex;

    #[test]
    fn progress_reaches_the_caller_and_cancels_on_every_thread_of_the_task() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = seen.clone();
        let task = Task::new(Box::new(move |progress| {
            let Progress::Advanced { label, done, total, .. } = progress else { return true };
            kept.lock().unwrap().push((label.to_string(), done, total));
            done < 3
        }));
        run(Some(task), || {
            let bar = progress::items("steps", 4);
            bar.inc(2);
            interrupt::check().unwrap();
            spawn("helper", move || {
                bar.inc(1);
                assert!(interrupt::check().unwrap_err().is_sigint());
            })
            .unwrap()
            .join()
            .unwrap();
            assert!(interrupt::check().is_err());
        });
        interrupt::check().unwrap();
        let steps = |done| ("steps".to_string(), done, 4);
        assert_eq!(*seen.lock().unwrap(), [steps(0), steps(2), steps(3)]);
    }
}
