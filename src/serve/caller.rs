//! Senders of requests.

use super::app::Tenants;
use super::keys::Key;
use crate::sched::KeyId;
use std::sync::Arc;

/// The sender of a request.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Keys at the time of the request; they may change while it is served.
    pub tenants: Arc<Tenants>,
    /// Index of the key.
    pub index: usize,
    /// Name of the request.
    pub id: String,
}

impl Caller {
    /// Returns the key, and its number in the schedulers.
    pub fn key(&self) -> (&Key, KeyId) {
        self.tenants.key(self.index)
    }
}
