//! Thread pool: persistent workers that run one parallel region at a time, with the caller as thread 0.
//!
//! A region is a closure `f(t)`, called once for each `t` of `0..threads`; each of these calls is a *share*. No result
//! may depend on which thread computes it, so none depends on timing. Each worker has a mailbox. The caller writes the
//! region once, posts it to the mailboxes it needs, runs its own share, then the shares that no worker has begun (on a
//! busy machine a worker may not be scheduled for milliseconds), and waits for the counter of open shares to reach
//! zero. A token of a small model takes more than a hundred regions, so caller and workers spin for some microseconds
//! before they sleep. They do not spin longer, so that an idle pool costs nothing and other programs on a busy machine
//! can run.
//!
//! More threads than processors would only preempt each other in the middle of a share. Therefore there are at most
//! as many threads as processors, and each runs several shares if more are requested.
#![allow(unsafe_code)]

use super::place::{Placement, granted_processors, set_processors};
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread, ThreadId};
use std::time::{Duration, Instant};

/// Time that a waiting thread spins before it sleeps: several times the usual wait between two regions of a decode
/// step, and far below a tick of the system's scheduler.
const SPIN: Duration = Duration::from_micros(40);

/// Mailbox state: there is nothing to do, and the worker is awake.
const IDLE: u32 = 0;
/// Mailbox state: the share is to be run, by the worker if it changes this to `BUSY` first, or by the caller if it
/// changes this to `IDLE` first.
const WORK: u32 = 1;
/// Mailbox state: there is nothing to do, and the worker sleeps and must be woken.
const ASLEEP: u32 = 2;
/// Mailbox state: the worker runs its share.
const BUSY: u32 = 3;
/// Mailbox state: the worker must end.
const EXIT: u32 = 4;

/// Flag in `Shared::open`: the caller sleeps and must be woken by the last worker.
const CALLER_SLEEPS: u32 = 1 << 31;

thread_local! {
    /// True while this thread runs a share of some region.
    static IN_REGION: Cell<bool> = const { Cell::new(false) };
}

type Region = *const (dyn Fn(usize) + Sync);

/// State that the caller shares with the workers.
struct Shared {
    /// Current region, written by the caller before it posts to any mailbox, and read by busy workers before they
    /// count down `open`.
    region: UnsafeCell<Option<Region>>,
    /// Number of shares of the region that workers have not finished, and the flag `CALLER_SLEEPS`.
    open: AtomicU32,
    caller: Mutex<Option<Thread>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    mailboxes: Vec<Mailbox>,
}

/// Mailbox of a worker, on a cache line of its own so that spinning workers do not disturb each other.
#[repr(align(128))]
struct Mailbox(AtomicU32);

// SAFETY: `region` is the only field that is not Sync by itself. It is written only by the caller that holds
// `Pool::one_region`, when no share is open, and read only by workers between taking the post from their mailbox
// (acquire) and their count-down of `open` (release, acquired by the caller before it goes on).
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `region` is only followed while the caller that owns the closure waits in `Pool::run`.
unsafe impl Send for Shared {}

/// Persistent threads, which end when the pool is dropped.
pub(super) struct Pool {
    /// Largest number of shares of a region: at least the number of workers plus the caller.
    threads: usize,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    one_region: Mutex<()>,
    /// True while the time that callers wait for workers is measured.
    pub(super) timed: AtomicBool,
    /// Nanoseconds that callers have waited while `timed` was true.
    pub(super) waited: AtomicU64,
    /// Thread that was pinned as thread 0, and the processors it could use before.
    pinned: Option<(ThreadId, Vec<usize>)>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

impl Pool {
    /// Starts `threads - 1` workers, but no more threads than processors, and pins them and the caller as `placement`
    /// says.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(super) fn new(threads: usize, placement: &Placement) -> std::io::Result<Pool> {
        let active = threads.min(placement.processors().unwrap_or_else(granted_processors));
        let shared = Arc::new(Shared {
            region: UnsafeCell::new(None),
            open: AtomicU32::new(0),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
            mailboxes: (1..active).map(|_| Mailbox(AtomicU32::new(IDLE))).collect(),
        });
        let pinned = placement.pin(0).map(|before| (std::thread::current().id(), before));
        let mut pool = Pool {
            threads,
            shared,
            workers: Vec::new(),
            one_region: Mutex::new(()),
            pinned,
            timed: AtomicBool::new(false),
            waited: AtomicU64::new(0),
        };
        for i in 0..active.saturating_sub(1) {
            let (shared, placement) = (pool.shared.clone(), placement.clone());
            let builder = std::thread::Builder::new().name(format!("iec-{}", i + 1));
            // If a thread cannot be started, dropping `pool` ends those that were.
            pool.workers.push(builder.spawn(move || {
                placement.pin(i + 1);
                shared.work(i);
            })?);
        }
        Ok(pool)
    }

    /// Returns the number of threads, including the caller.
    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f(t)` once for each `t` in `0..threads` (at most [`Pool::threads`]), `f(0)` on the calling thread, and
    /// returns when all calls have returned. Callers on several threads take turns. A panic in any share is resumed
    /// in the caller; the thread that panicked skips its remaining shares.
    ///
    /// # Panics
    /// `f` itself uses a pool: a region within a region would wait for itself.
    pub(super) fn run(&self, threads: usize, f: &(dyn Fn(usize) + Sync)) {
        assert!(!IN_REGION.get(), "a parallel region inside a parallel region");
        let shares = threads.min(self.threads());
        let active = shares.min(self.workers.len() + 1);
        if active == shares {
            self.run_active(active, f);
        } else {
            self.run_active(active, &|a| (shares * a / active..shares * (a + 1) / active).for_each(f));
        }
    }

    /// Runs a region like [`Pool::run`], with at most one share per thread (the workers and the caller).
    fn run_active(&self, threads: usize, f: &(dyn Fn(usize) + Sync)) {
        if threads <= 1 {
            return enter(f, 0).unwrap_or_else(|panic| resume_unwind(panic));
        }
        let turn = self.one_region.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: only the lifetime is changed. No worker follows the pointer after its count-down of `open`, and this
        // function does not return before all of them have counted down.
        let region: Region = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Region>(f) };
        // SAFETY: we hold `one_region` and no share is open, so no worker reads the cell.
        unsafe { *self.shared.region.get() = Some(region) };
        self.shared.open.store(threads as u32 - 1, Ordering::Relaxed);
        for (mailbox, worker) in self.shared.mailboxes.iter().zip(&self.workers).take(threads - 1) {
            if mailbox.0.swap(WORK, Ordering::AcqRel) == ASLEEP {
                worker.thread().unpark();
            }
        }
        let mut own = enter(f, 0);
        for (i, mailbox) in self.shared.mailboxes.iter().enumerate().take(threads - 1) {
            if mailbox.0.compare_exchange(WORK, IDLE, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                own = own.and(enter(f, i + 1));
                self.shared.open.fetch_sub(1, Ordering::AcqRel);
            }
        }
        let begin = self.timed.load(Ordering::Relaxed).then(Instant::now);
        self.shared.wait_for_workers();
        if let Some(begin) = begin {
            self.waited.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        let theirs = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(turn);
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for (mailbox, worker) in self.shared.mailboxes.iter().zip(&self.workers) {
            mailbox.0.store(EXIT, Ordering::Release);
            worker.thread().unpark();
        }
        for worker in self.workers.drain(..) {
            // Panics of shares are caught, so a worker ends by returning.
            let _ = worker.join();
        }
        if let Some((thread, before)) = &self.pinned
            && *thread == std::thread::current().id()
        {
            set_processors(before);
        }
    }
}

/// Runs one share with `IN_REGION` set, and returns its panic as an error.
fn enter(f: &(dyn Fn(usize) + Sync), t: usize) -> Result<(), Box<dyn Any + Send>> {
    let before = IN_REGION.replace(true);
    // The closure is not used again after a panic, and `Pool::run` resumes the panic, so no code sees broken state.
    let result = catch_unwind(AssertUnwindSafe(|| f(t)));
    IN_REGION.set(before);
    result
}

impl Shared {
    /// Runs the shares of worker `i`, which is thread `i + 1`, until the pool ends.
    fn work(&self, i: usize) {
        let mailbox = &self.mailboxes[i].0;
        while self.wait_for_post(mailbox) {
            // SAFETY: we took the post, so the region was written before and stays until we count down.
            let region = unsafe { (*self.region.get()).expect("a region is posted") };
            // SAFETY: the closure is borrowed by `Pool::run`, which waits for our count-down.
            if let Err(panic) = enter(unsafe { &*region }, i + 1) {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
            // This comes before the count-down, after which the caller may post again.
            mailbox.store(IDLE, Ordering::Relaxed);
            if self.open.fetch_sub(1, Ordering::AcqRel) == CALLER_SLEEPS | 1
                && let Some(caller) = &*self.caller.lock().unwrap_or_else(PoisonError::into_inner)
            {
                caller.unpark();
            }
        }
    }

    /// Waits for work and takes it; returns false when the pool ends.
    fn wait_for_post(&self, mailbox: &AtomicU32) -> bool {
        loop {
            Self::spin_until(|| matches!(mailbox.load(Ordering::Relaxed), WORK | EXIT));
            match mailbox.compare_exchange(WORK, BUSY, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(EXIT) => return false,
                Err(_) => {}
            }
            if mailbox.compare_exchange(IDLE, ASLEEP, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                while mailbox.load(Ordering::Relaxed) == ASLEEP {
                    std::thread::park();
                }
            }
        }
    }

    fn wait_for_workers(&self) {
        let done = || self.open.load(Ordering::Acquire) & !CALLER_SLEEPS == 0;
        if Self::spin_until(done) {
            return;
        }
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
        self.open.fetch_or(CALLER_SLEEPS, Ordering::AcqRel);
        while !done() {
            std::thread::park();
        }
    }

    /// Spins until `done` returns true, for at most [`SPIN`], and returns the last result of `done`.
    fn spin_until(done: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..16 {
                if done() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= SPIN {
                return done();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_share_runs_once_in_many_tiny_regions_even_with_more_threads_than_cores() {
        for threads in [1, 2, 3, 4, 9] {
            let pool = Pool::new(threads, &Placement::default()).unwrap();
            let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for round in 0..2000 {
                let wanted = 1 + round % threads;
                pool.run(wanted, &|t| {
                    assert!(t < wanted);
                    counts[t].fetch_add(1, Ordering::Relaxed);
                });
            }
            let total: usize = counts.iter().map(|c| c.load(Ordering::Relaxed)).sum();
            assert_eq!(total, (0..2000).map(|round| 1 + round % threads).sum::<usize>());
            assert_eq!(counts[0].load(Ordering::Relaxed), 2000);
        }
    }

    #[test]
    fn workers_and_caller_wake_from_sleep() {
        let pool = Pool::new(3, &Placement::default()).unwrap();
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(5));
            let sum = AtomicUsize::new(0);
            pool.run(3, &|t| {
                std::thread::sleep(Duration::from_millis(if t == 0 { 0 } else { 3 }));
                sum.fetch_add(t + 1, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 6);
        }
    }

    #[test]
    fn a_share_that_no_worker_begins_is_done_by_the_caller() {
        let pool = Pool::new(2, &Placement::default()).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        // The worker sleeps now; many tiny regions end before it wakes, and each share still runs exactly once.
        for _ in 0..1000 {
            let runs = [AtomicUsize::new(0), AtomicUsize::new(0)];
            pool.run(2, &|t| {
                runs[t].fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(runs.map(AtomicUsize::into_inner), [1, 1]);
        }
    }

    #[test]
    fn a_panic_in_any_share_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3, &Placement::default()).unwrap();
        for guilty in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(3, &|t| assert_ne!(t, guilty, "share {guilty} fails"));
            }));
            let message = *result.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains(&format!("share {guilty} fails")), "{message}");
        }
        let ran = AtomicUsize::new(0);
        pool.run(3, &|_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.into_inner(), 3);
    }

    #[test]
    fn a_region_inside_a_region_is_refused_instead_of_hanging() {
        for threads in [1, 2] {
            let pool = Pool::new(threads, &Placement::default()).unwrap();
            let result = catch_unwind(AssertUnwindSafe(|| pool.run(threads, &|_| pool.run(threads, &|_| ()))));
            assert!(result.is_err());
            pool.run(threads, &|_| ());
        }
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(2, &Placement::default()).unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(2, &|t| {
                            total.fetch_add(t + 1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 3 * 200 * 3);
    }
}
