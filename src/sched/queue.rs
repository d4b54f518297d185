//! Queue of waiting requests: one list per key and priority, in the order of arrival.
//!
//! Only the first request of a list can be the next, so the next one is found by a look at one request per list.

use super::keys::Keys;
use super::scheduler::Sequence;
use super::{KeyId, Micros, RequestId};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Key and priority.
pub type Class = (KeyId, i32);

/// Waiting requests.
#[derive(Debug, Default)]
pub struct Queue {
    pub waiting: HashMap<RequestId, Sequence>,
    /// Numbers of the requests of each class, ascending. No list is empty.
    pub classes: BTreeMap<Class, VecDeque<RequestId>>,
    /// Prompt tokens of all waiting requests.
    pub tokens: u64,
}

impl Queue {
    /// Adds a request. One that was in the batch before is placed before those that arrived after it.
    pub fn insert(&mut self, sequence: Sequence) {
        let list = self.classes.entry(sequence.class()).or_default();
        let at = match list.back() {
            Some(last) if *last > sequence.id => list.partition_point(|id| *id < sequence.id),
            _ => list.len(),
        };
        list.insert(at, sequence.id);
        self.tokens += u64::from(sequence.request.prompt);
        self.waiting.insert(sequence.id, sequence);
    }

    /// Removes a request.
    pub fn remove(&mut self, id: RequestId) -> Option<Sequence> {
        let sequence = self.waiting.remove(&id)?;
        let class = sequence.class();
        if let Some(list) = self.classes.get_mut(&class) {
            if let Ok(at) = list.binary_search(&id) {
                list.remove(at);
            }
            if list.is_empty() {
                self.classes.remove(&class);
            }
        }
        self.tokens -= u64::from(sequence.request.prompt);
        Some(sequence)
    }

    /// Returns the next request in the order of service.
    pub fn next(&self, now: Micros, aging: Micros, keys: &Keys) -> Option<RequestId> {
        self.heads(now, aging, keys).min_by(Rank::compare).map(|rank| rank.id)
    }

    /// Returns the first request of each class in the order of service.
    pub fn in_order(&self, now: Micros, aging: Micros, keys: &Keys) -> Vec<RequestId> {
        let mut ranks: Vec<Rank> = self.heads(now, aging, keys).collect();
        ranks.sort_by(Rank::compare);
        ranks.into_iter().map(|rank| rank.id).collect()
    }

    fn heads<'a>(&'a self, now: Micros, aging: Micros, keys: &'a Keys) -> impl Iterator<Item = Rank> + 'a {
        let firsts = self.classes.values().filter_map(|list| list.front());
        firsts.map(move |id| Rank::of(&self.waiting[id], now, aging, keys))
    }
}

/// Place of a request in the order of service.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rank {
    priority: i32,
    counter: f64,
    id: RequestId,
}

impl Rank {
    /// Computes the rank of a sequence.
    pub fn of(sequence: &Sequence, now: Micros, aging: Micros, keys: &Keys) -> Rank {
        let priority = sequence.aged(now, aging, keys.most_urgent);
        Rank { priority, counter: keys.all[sequence.request.key].counter, id: sequence.id }
    }

    /// Compares by priority, then the counter of the key, then arrival.
    pub fn compare(&self, other: &Rank) -> std::cmp::Ordering {
        let by_counter = self.counter.total_cmp(&other.counter);
        self.priority.cmp(&other.priority).then(by_counter).then(self.id.cmp(&other.id))
    }
}
