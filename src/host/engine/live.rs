//! A choice that is queued or computed.

use crate::host::metrics::Phase;
use crate::host::reply::Outlet;
use crate::sched::{KeyId, RequestId};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// A choice of a request, from its arrival to its end.
#[derive(Debug)]
pub(super) struct Live {
    pub ticket: u64,
    /// Number of the choice in its request.
    pub choice: usize,
    /// Number of the choice in the batch.
    pub id: RequestId,
    pub outlet: Outlet,
    /// Number of the key.
    pub key_id: KeyId,
    /// Name of the key in metrics.
    pub key: Arc<str>,
    /// Names of the adapters.
    pub adapters: Arc<[String]>,
    pub prompt_tokens: usize,
    pub arrived: Instant,
    /// Time at which the choice first entered the batch.
    pub admitted: Option<Instant>,
    /// Tokens so far.
    pub generated: Cell<usize>,
    /// Largest number of tokens.
    pub most: usize,
    /// Time of the last token.
    pub last_token: Cell<Option<Instant>>,
    /// Time since which the text pauses because its reader is slow.
    pub paused: Option<Instant>,
}

impl Live {
    /// Returns what is being done for the choice.
    pub fn phase(&self) -> Phase {
        match (self.admitted, self.last_token.get()) {
            (None, _) => Phase::Queued,
            (Some(_), None) => Phase::Prefill,
            (Some(_), Some(_)) => Phase::Decode,
        }
    }
}

/// All choices, by the index that the events of their tokens carry.
#[derive(Debug, Default)]
pub(super) struct Lives {
    pub all: HashMap<usize, Live>,
    by_id: HashMap<RequestId, usize>,
    by_ticket: HashMap<u64, Vec<usize>>,
}

impl Lives {
    /// Adds a choice.
    pub fn add(&mut self, index: usize, live: Live) {
        self.by_id.insert(live.id, index);
        self.by_ticket.entry(live.ticket).or_default().push(index);
        self.all.insert(index, live);
    }

    /// Returns the choice with this number in the batch.
    pub fn with_id(&mut self, id: RequestId) -> Option<&mut Live> {
        self.all.get_mut(self.by_id.get(&id)?)
    }

    /// Removes a choice.
    pub fn remove(&mut self, index: usize) -> Option<Live> {
        let live = self.all.remove(&index)?;
        self.by_id.remove(&live.id);
        if let Some(others) = self.by_ticket.get_mut(&live.ticket) {
            others.retain(|other| *other != index);
            if others.is_empty() {
                self.by_ticket.remove(&live.ticket);
            }
        }
        Some(live)
    }

    /// Removes all choices of a request.
    pub fn remove_request(&mut self, ticket: u64) -> Vec<Live> {
        let indices = self.by_ticket.get(&ticket).cloned().unwrap_or_default();
        indices.into_iter().filter_map(|index| self.remove(index)).collect()
    }
}
