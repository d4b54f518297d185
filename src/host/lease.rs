//! Leases of models that are in memory. A request holds a lease of its model, from the time at which the model is found
//! loaded to the end of the answer. A model without leases may be unloaded.

use super::model::{Command, Facts, Model, Status};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Memory that a model needs, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// All of it.
    pub bytes: u64,
    /// Without weights that are read from their file again when memory is short.
    pub without_weights: u64,
}

/// Returns the memory that a model needs; `None` if it is not known.
pub type Plan = Box<dyn Fn() -> Option<Planned> + Send + Sync>;

/// Uses of a model.
#[derive(Debug)]
pub struct Uses {
    /// Number of leases.
    pub leases: usize,
    /// End of the last use.
    pub last: Instant,
    /// Idle time after which the model is unloaded, as the last request wants it; the inner `None` = never.
    keep: Option<Option<Duration>>,
    /// Time of the last failure to load.
    pub failed: Option<Instant>,
    /// Memory, once it was planned.
    pub planned: Option<Planned>,
}

impl Default for Uses {
    fn default() -> Uses {
        Uses { leases: 0, last: Instant::now(), keep: None, failed: None, planned: None }
    }
}

impl Uses {
    /// Returns the idle time after which the model is unloaded; `None` = never.
    pub fn keep(&self, default: Option<Duration>) -> Option<Duration> {
        self.keep.unwrap_or(default)
    }
}

/// Use of a model that is loaded. The model stays loaded while this value exists.
#[derive(Debug)]
pub struct Lease(Arc<Model>);

impl Lease {
    /// Sets the idle time after which the model is unloaded once this use has ended; `None` = never.
    pub fn keep(&self, time: Option<Duration>) {
        lock(&self.0.uses).keep = Some(time);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut uses = lock(&self.0.uses);
        uses.leases -= 1;
        uses.last = Instant::now();
    }
}

/// Locks the uses of a model.
pub fn lock(uses: &Mutex<Uses>) -> MutexGuard<'_, Uses> {
    uses.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a lease of a model if it is loaded.
pub fn lease(model: &Arc<Model>) -> Option<(Arc<Facts>, Lease)> {
    let mut uses = lock(&model.uses);
    let Status::Ready(facts) = model.status() else { return None };
    uses.leases += 1;
    uses.keep = None;
    Some((facts, Lease(model.clone())))
}

/// Begins to unload a model that is loaded and idle, if `may` allows it. Returns true if it begins.
pub fn unload(model: &Model, may: impl FnOnce(&Uses) -> bool) -> bool {
    let uses = lock(&model.uses);
    let begins = uses.leases == 0 && matches!(model.status(), Status::Ready(_)) && may(&uses);
    if begins {
        // No lease is taken from here on.
        model.set_status(Status::Unloading);
        model.send(Command::Unload);
    }
    begins
}
