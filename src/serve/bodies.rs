//! Room for the bodies of requests.
//!
//! Bytes are counted when they have arrived, and given back when their request was prepared. A body that was only
//! announced takes no room. When there is none left, a body that is still being read is evicted: of the key that holds
//! the most bytes, the one that comes slowest. A key of several may hold half of the room, so that it cannot take what
//! others need.

use crate::sched::KeyId;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Bytes of bodies that are held at the same time, unless two of the largest size need more.
const ROOM: u64 = 128 << 20;
/// Largest number of bodies of a key that are being read: a quarter of the connections of a server.
const MOST_READING: usize = 1024;
/// Time for which a body cannot be made to give way.
const GRACE: Duration = Duration::from_secs(1);

/// Room for bodies.
#[derive(Debug)]
pub struct Bodies {
    most: u64,
    state: Mutex<BodiesState>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct BodiesState {
    /// Number of bodies so far.
    bodies: u64,
    held: u64,
    /// Bytes that each key holds, and the number of its bodies that are being read.
    keys: HashMap<KeyId, (u64, usize)>,
    entries: BTreeMap<u64, BodyEntry>,
}

/// A body in the room.
#[derive(Debug)]
struct BodyEntry {
    key: KeyId,
    bytes: u64,
    begin: Instant,
    is_read: bool,
    /// Notified when the body must give way.
    evicted: Arc<Notify>,
}

/// Place of a body. Its bytes are given back when it is dropped.
#[derive(Debug)]
pub struct BodyRoom {
    bodies: Arc<Bodies>,
    number: u64,
    key: KeyId,
    /// Largest number of bytes of the key.
    share: u64,
    evicted: Arc<Notify>,
}

/// Outcome of [`BodyRoom::take`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// The bytes are counted.
    Yes,
    /// There is no room now.
    Full,
    /// The body had to give way to others.
    Evicted,
}

impl Bodies {
    /// Creates the room of a server whose bodies have at most `max_body` bytes.
    pub fn new(max_body: u64) -> Arc<Bodies> {
        Arc::new(Bodies { most: ROOM.max(max_body.saturating_mul(2)), state: Mutex::default(), freed: Notify::new() })
    }

    /// Begins to read a body. `is_only` tells that the server has no other key. Returns `None` if the key sends too
    /// many bodies at once.
    pub fn begin(self: &Arc<Self>, key: KeyId, is_only: bool, now: Instant) -> Option<BodyRoom> {
        let mut state = self.state();
        while state.keys.get(&key).is_some_and(|(_, reading)| *reading >= MOST_READING) {
            let slowest = state.slowest(key, None, now)?;
            state.evict(slowest);
        }
        let number = state.bodies;
        state.bodies += 1;
        let evicted = Arc::<Notify>::default();
        let entry = BodyEntry { key, bytes: 0, begin: now, is_read: false, evicted: evicted.clone() };
        state.entries.insert(number, entry);
        state.keys.entry(key).or_default().1 += 1;
        let share = if is_only { self.most } else { self.most / 2 };
        Some(BodyRoom { bodies: self.clone(), number, key, share, evicted })
    }

    /// Returns a future that ends when bytes are given back after this call.
    pub fn freed(&self) -> Notified<'_> {
        self.freed.notified()
    }

    fn state(&self) -> MutexGuard<'_, BodiesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BodyRoom {
    /// Counts bytes that have arrived. Other bodies give way if they come slowly.
    pub fn take(&self, bytes: u64, now: Instant) -> Taken {
        let mut state = self.bodies.state();
        loop {
            if !state.entries.contains_key(&self.number) {
                return Taken::Evicted;
            }
            let own = state.keys.get(&self.key).map_or(0, |(held, _)| *held);
            let (is_over, is_own_over) = (state.held + bytes > self.bodies.most, own + bytes > self.share);
            if !is_over && !is_own_over {
                state.add(self.number, bytes);
                return Taken::Yes;
            }
            let largest = || state.keys.iter().filter(|(_, (_, reading))| *reading > 0).max_by_key(|(_, of)| of.0);
            let key = if is_own_over { Some(self.key) } else { largest().map(|(key, _)| *key) };
            match key.and_then(|key| state.slowest(key, Some(self.number), now)) {
                Some(slowest) => state.evict(slowest),
                None => return Taken::Full,
            }
        }
    }

    /// Records that the whole body has arrived; it does not give way any more.
    pub fn finish(&self) {
        self.bodies.state().finish(self.number);
    }

    /// Waits until the body must give way.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

impl Drop for BodyRoom {
    fn drop(&mut self) {
        self.bodies.state().remove(self.number);
        self.bodies.freed.notify_waiters();
    }
}

impl BodiesState {
    fn add(&mut self, number: u64, bytes: u64) {
        let Some(entry) = self.entries.get_mut(&number) else { return };
        entry.bytes += bytes;
        self.held += bytes;
        self.keys.entry(entry.key).or_default().0 += bytes;
    }

    fn finish(&mut self, number: u64) {
        let Some(entry) = self.entries.get_mut(&number).filter(|entry| !entry.is_read) else { return };
        entry.is_read = true;
        self.keys.entry(entry.key).or_default().1 -= 1;
    }

    fn remove(&mut self, number: u64) -> Option<BodyEntry> {
        self.finish(number);
        let entry = self.entries.remove(&number)?;
        self.held -= entry.bytes;
        let held = self.keys.entry(entry.key).or_default();
        held.0 -= entry.bytes;
        if *held == (0, 0) {
            self.keys.remove(&entry.key);
        }
        Some(entry)
    }

    fn evict(&mut self, number: u64) {
        if let Some(entry) = self.remove(number) {
            entry.evicted.notify_one();
        }
    }

    /// Returns the body of a key that comes slowest, of those that are being read for some time.
    fn slowest(&self, key: KeyId, except: Option<u64>, now: Instant) -> Option<u64> {
        let rate = |entry: &BodyEntry| entry.bytes as f64 / now.duration_since(entry.begin).as_secs_f64();
        let candidates = self.entries.iter().filter(|(number, entry)| {
            let is_old = now.duration_since(entry.begin) >= GRACE;
            entry.key == key && !entry.is_read && is_old && except != Some(**number)
        });
        candidates.min_by(|(_, a), (_, b)| rate(a).total_cmp(&rate(b))).map(|(number, _)| *number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn announced_bodies_take_no_room() {
        let (bodies, now) = (Bodies::new(8 * MIB), Instant::now());
        let open: Vec<BodyRoom> = (0..MOST_READING).map(|_| bodies.begin(1, false, now).unwrap()).collect();
        assert!(bodies.begin(1, false, now).is_none(), "the largest number of bodies");
        let other = bodies.begin(2, false, now).unwrap();
        assert_eq!(other.take(8 * MIB, now), Taken::Yes);
        let later = bodies.begin(1, false, now + GRACE).expect("an old one is evicted");
        assert_eq!(later.take(MIB, now), Taken::Yes);
        assert_eq!(open.iter().filter(|room| room.take(1, now) == Taken::Evicted).count(), 1);
    }

    #[test]
    fn a_key_holds_half_of_the_room_and_its_slowest_body_gives_way() {
        let (bodies, now) = (Bodies::new(8 * MIB), Instant::now());
        let slow: Vec<BodyRoom> = (0..8).map(|_| bodies.begin(1, false, now).unwrap()).collect();
        for room in &slow {
            assert_eq!(room.take(8 * MIB - 1, now), Taken::Yes);
        }
        let next = bodies.begin(1, false, now).unwrap();
        assert_eq!(next.take(MIB, now), Taken::Full, "no body is old enough to give way");
        let other = bodies.begin(2, false, now).unwrap();
        assert_eq!(other.take(8 * MIB, now), Taken::Yes);
        assert_eq!(next.take(MIB, now + GRACE), Taken::Yes);
        assert_eq!(slow.iter().filter(|room| room.take(0, now) == Taken::Evicted).count(), 1);
        slow.iter().for_each(BodyRoom::finish);
        let last = bodies.begin(1, false, now).unwrap();
        assert_eq!(last.take(8 * MIB, now + 2 * GRACE), Taken::Yes, "`next` is slower");
        assert_eq!(last.take(8 * MIB, now + 2 * GRACE), Taken::Full, "whole bodies stay");
    }

    #[test]
    fn a_body_of_the_key_that_holds_most_is_evicted_for_others() {
        let (bodies, now) = (Bodies::new(8 * MIB), Instant::now());
        let of = |key: KeyId, count: usize| -> Vec<BodyRoom> {
            (0..count).map(|_| bodies.begin(key, false, now).unwrap()).collect()
        };
        let (first, second) = (of(1, 8), of(2, 7));
        first.iter().chain(&second).for_each(|room| assert_eq!(room.take(8 * MIB, now), Taken::Yes));
        let third = bodies.begin(3, false, now).unwrap();
        assert_eq!(third.take(8 * MIB, now), Taken::Yes);
        assert_eq!(third.take(1, now + GRACE), Taken::Yes);
        assert!(first.iter().any(|room| room.take(0, now) == Taken::Evicted));
        assert!(second.iter().all(|room| room.take(0, now) == Taken::Yes));
    }

    #[test]
    fn all_bytes_are_given_back() {
        let (bodies, now) = (Bodies::new(1), Instant::now());
        for _ in 0..3 {
            let room = bodies.begin(0, true, now).unwrap();
            assert_eq!((room.take(ROOM, now), room.take(1, now)), (Taken::Yes, Taken::Full));
            room.finish();
        }
        let state = bodies.state();
        assert_eq!((state.held, state.keys.len(), state.entries.len()), (0, 0, 0));
    }
}
