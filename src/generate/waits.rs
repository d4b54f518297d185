//! Texts that do not decode for a while: their readers are slow, or their masks take longer than a step can wait.

use super::batch::Batch;
use super::slot::Slot;
use crate::sched::{self, Micros, RequestId};

impl Batch<'_> {
    /// Stops (`true`) or continues the decoding of a request whose reader is slow.
    pub fn pause(&mut self, id: RequestId, paused: bool) {
        if paused {
            self.paused.insert(id)
        } else {
            self.paused.remove(&id)
        };
        self.scheduler.pause(id, paused || self.masked.contains(&id));
    }

    /// Plans a step without the texts whose masks take longer than a step can wait. If there are no others, waits for
    /// one of them.
    pub(super) fn plan(&mut self, now: Micros) -> sched::Step {
        let mut waiting = Vec::new();
        for (id, slot) in &mut self.slots {
            let waits = slot.waits_for_mask();
            if waits != self.masked.contains(id) {
                if waits {
                    self.masked.insert(*id)
                } else {
                    self.masked.remove(id)
                };
                self.scheduler.pause(*id, waits || self.paused.contains(id));
            }
            if waits && !self.paused.contains(id) {
                waiting.push(*id);
            }
        }
        let mut step = self.scheduler.plan(now);
        self.masks.set_others(!step.work.is_empty());
        if let Some(id) = waiting.first().filter(|_| step.work.is_empty()) {
            self.slots.get_mut(id).into_iter().for_each(Slot::wait_for_mask);
            self.masked.remove(id);
            self.scheduler.pause(*id, false);
            let events = std::mem::take(&mut step.events);
            step = self.scheduler.plan(now);
            step.events.splice(0..0, events);
        }
        step
    }
}
