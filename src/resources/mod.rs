//! Memory and threads that the system may refuse. Every refusal becomes an error with [`Cause::OutOfMemory`].
//!
//! A failed allocation of Rust's collections ends the process, so a library cannot report it. Buffers whose size
//! depends on the input are therefore reserved with [`try_reserve`]. A program may install an allocator that reports a
//! failed allocation and ends the process; that allocator must ask [`refusal_is_handled`] first.
//!
//! Linux grants more memory than there is, and kills a process that uses too much. Caches therefore ask
//! [`is_left`] before they grow.

mod limits;

pub use limits::{memory_left, open_files, raise_open_files};

use crate::error::{Cause, Error, Result};
use crate::task;
use std::cell::Cell;
use std::collections::TryReserveError;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};
use std::time::Duration;

/// True once the system has refused a thread.
static THREAD_REFUSED: AtomicBool = AtomicBool::new(false);

/// Number of bytes that may be used before [`is_left`] reads the limits again. The same number must stay free.
const STEP: usize = 16 << 20;

thread_local! {
    /// True while this thread asks for memory in [`try_reserve`].
    static HANDLED: Cell<bool> = const { Cell::new(false) };
}

/// Reserves room for exactly `more` items.
///
/// # Errors
/// The system refuses the memory.
pub fn try_reserve<T>(items: &mut Vec<T>, more: usize) -> std::result::Result<(), TryReserveError> {
    let before = HANDLED.replace(true);
    let reserved = items.try_reserve_exact(more);
    HANDLED.set(before);
    reserved
}

/// Returns false if using this much more memory would come close to the limits of the machine or the container. Small
/// amounts are added up, because reading the limits takes a tenth of a millisecond.
pub fn is_left(bytes: usize) -> bool {
    static UNCHECKED: AtomicUsize = AtomicUsize::new(0);
    let unchecked = UNCHECKED.fetch_add(bytes, Ordering::Relaxed);
    if unchecked.saturating_add(bytes) < STEP {
        return true;
    }
    UNCHECKED.store(0, Ordering::Relaxed);
    memory_left().is_none_or(|left| left > bytes.saturating_add(STEP) as u64)
}

/// Returns true if the allocation that this thread makes now may fail, because its caller reports the refusal.
pub fn refusal_is_handled() -> bool {
    HANDLED.get()
}

/// Returns the processor time that this thread has used. Unlike elapsed time, it does not grow while the system runs
/// other threads.
pub fn thread_time() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// Starts a thread.
///
/// # Errors
/// The system refuses the thread or the memory of its stack.
pub fn spawn<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    let task = task::current();
    Builder::new().name(name.to_string()).spawn(move || task::run(task, work)).map_err(thread_refused)
}

/// Starts a thread with a stack of `bytes`, for recursion that the main thread's stack could not hold. Pages of the
/// stack that are not used take no memory.
///
/// # Errors
/// The system refuses the thread or the memory of its stack.
pub fn spawn_deep<T: Send + 'static>(
    name: &str,
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let task = task::current();
    let builder = Builder::new().name(name.to_string()).stack_size(bytes);
    builder.spawn(move || task::run(task, work)).map_err(thread_refused)
}

/// Starts a thread that ends before `scope`.
///
/// # Errors
/// The system refuses the thread or the memory of its stack.
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    let task = task::current();
    Builder::new().name(name.to_string()).spawn_scoped(scope, move || task::run(task, work)).map_err(thread_refused)
}

/// Returns true if the system has refused a thread. Threads that start at the same time may then lack memory, too.
pub fn was_thread_refused() -> bool {
    THREAD_REFUSED.load(Ordering::Relaxed)
}

/// Creates the error for a thread or process that the system refused to start, and remembers the refusal for
/// [`was_thread_refused`].
pub fn thread_refused(refusal: impl std::fmt::Display) -> Error {
    THREAD_REFUSED.store(true, Ordering::Relaxed);
    Error::new(Cause::OutOfMemory(format!("the system refuses another thread or process: {refusal}"))).help(
        "choose a smaller --threads, or raise the limits of memory and processes (`ulimit -v`, `ulimit -u`, or those \
         of the container)",
    )
}

/// Creates the error for a child process that could not be started.
pub fn child_refused(e: std::io::Error) -> Error {
    match () {
        () if e.kind() == ErrorKind::WouldBlock => thread_refused(e),
        () if is_exhausted(&e) => Error::new(Cause::OutOfMemory(format!("the system refuses another process: {e}")))
            .help("raise the limit of open files (`ulimit -n`), or that of the system"),
        () => e.into(),
    }
}

/// Returns true if an operation failed because the process or the system has no more open files, memory or processes
/// now; it may succeed later.
pub fn is_exhausted(e: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let exhausted = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN, Errno::NOBUFS];
    exhausted.iter().any(|errno| e.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_beyond_the_address_space_is_an_error_and_only_then_handled() {
        let mut bytes: Vec<u8> = Vec::new();
        assert!(try_reserve(&mut bytes, isize::MAX as usize).is_err());
        try_reserve(&mut bytes, 10).unwrap();
        assert!(bytes.capacity() >= 10 && !refusal_is_handled());
    }

    #[test]
    fn more_memory_than_the_machine_has_is_not_left() {
        assert!(is_left(1000));
        assert!(!is_left(1 << 50));
    }

    #[test]
    fn a_process_that_is_refused_for_want_of_files_has_the_exit_code_of_missing_memory() {
        for (errno, code) in [(24, 6), (23, 6), (12, 6), (11, 6), (2, 1)] {
            let error = child_refused(std::io::Error::from_raw_os_error(errno));
            assert_eq!(error.cause().exit_code(), code, "{errno}: {error}");
        }
    }

    #[test]
    fn a_refused_thread_has_the_exit_code_of_missing_memory() {
        let e = thread_refused(std::io::Error::from_raw_os_error(11));
        assert_eq!(e.cause().exit_code(), 6);
        assert_eq!(spawn("test", || 5).unwrap().join().unwrap(), 5);
        assert_eq!(std::thread::scope(|scope| spawn_scoped(scope, "test", || 6).unwrap().join().unwrap()), 6);
    }
}
