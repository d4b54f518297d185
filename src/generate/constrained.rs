//! Masks of constrained texts. They are computed on threads of their own: the mask of the next token while the engine
//! computes the logits for it.
//!
//! A step waits for the masks of its texts, which usually take some ten microseconds. Some grammars take a
//! thousand times as long, and a step has no time for these: once a mask of a constraint has been slow, its texts
//! join a step only when their masks are ready, on a thread that rests while other texts are computed.

use super::constraint::{Constraint, ConstraintState, TokenMask};
use crate::error::{Cause, Error, Result};
use crate::resources;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::thread;
use std::time::Duration;

/// Processor time of a mask for which a step can wait.
const QUICK: Duration = Duration::from_millis(2);
/// Processor time of a mask with which a text ends. The work behind it grows with every token.
const LONGEST: Duration = Duration::from_millis(200);
/// Rest behind a slow mask while other texts are computed, as a multiple of the time that the mask took.
const REST: u32 = 3;

/// The threads that compute masks, for all texts of a run. They end with the last text.
#[derive(Default)]
pub(super) struct MaskThreads {
    quick: Option<Sender<Job>>,
    slow: Option<Sender<Job>>,
    /// Whether the last step had other texts than those that wait for a slow mask.
    others: Arc<AtomicBool>,
}

/// A state whose mask is needed, and where it is sent.
struct Job {
    state: ConstraintState,
    done: SyncSender<Computed>,
}

/// A state with its mask, and the processor time that the mask took.
type Computed = (ConstraintState, Result<TokenMask>, Duration);

/// Constraint of a text during generation.
pub(super) struct Constrained {
    quick: Sender<Job>,
    slow: Sender<Job>,
    next: Next,
    /// Logits with negative infinity for tokens that are not allowed: (vocab).
    masked: Vec<f32>,
    /// Whether a step does not wait for the next mask.
    is_slow: bool,
    /// Time of the masks so far that was not counted yet.
    spent: Duration,
}

/// Progress of the mask for the next token.
enum Next {
    Computing(Receiver<Computed>),
    Ready(ConstraintState, TokenMask),
    /// Every token is allowed.
    Free(ConstraintState),
    /// The mask has failed.
    Failed(Error),
    /// The text is complete.
    Ended,
}

impl MaskThreads {
    /// Begins a text with this constraint and the computation of its first mask.
    pub(super) fn begin(&mut self, constraint: &Constraint) -> Result<Constrained> {
        let quick = thread_of(&mut self.quick, "token masks", None)?;
        let slow = thread_of(&mut self.slow, "slow masks", Some(&self.others))?;
        let (next, masked, spent) = (Next::Ended, Vec::new(), Duration::ZERO);
        let mut constrained = Constrained { quick, slow, next, masked, is_slow: false, spent };
        constrained.submit(constraint.start())?;
        Ok(constrained)
    }

    /// Tells the threads whether other texts are computed than those that wait for a slow mask.
    pub(super) fn set_others(&self, are_some: bool) {
        self.others.store(are_some, Ordering::Relaxed);
    }
}

/// Returns where a thread receives its jobs; starts it for the first text.
fn thread_of(jobs: &mut Option<Sender<Job>>, name: &str, others: Option<&Arc<AtomicBool>>) -> Result<Sender<Job>> {
    if let Some(jobs) = jobs {
        return Ok(jobs.clone());
    }
    let (sender, received) = channel::<Job>();
    let others = others.cloned();
    resources::spawn(name, move || compute(&received, others.as_deref()))?;
    Ok(jobs.insert(sender).clone())
}

/// Computes masks until no text can send a state. Rests after each one as long as there are `others`.
fn compute(jobs: &Receiver<Job>, others: Option<&AtomicBool>) {
    for Job { mut state, done } in jobs {
        let begin = resources::thread_time();
        let mask = state.mask();
        let time = resources::thread_time().saturating_sub(begin);
        if time > QUICK {
            state.set_slow();
        }
        // A text that ended meanwhile receives nothing.
        let _ = done.send((state, mask, time));
        if others.is_some_and(|others| others.load(Ordering::Relaxed)) {
            thread::sleep(time.min(LONGEST) * REST);
        }
    }
}

impl Constrained {
    /// Returns the logits with negative infinity for tokens that are not allowed; `eos` are the tokens that end a text.
    ///
    /// # Errors
    /// No token can continue the text, or its mask takes more work than allowed.
    pub(super) fn mask<'a>(&'a mut self, logits: &'a [f32], eos: &[u32]) -> Result<&'a [f32]> {
        if self.is_free() {
            return Ok(logits);
        }
        self.wait();
        let mask = match &mut self.next {
            Next::Ready(_, mask) => mask,
            Next::Failed(error) => return Err(std::mem::replace(error, ended())),
            _ => return Err(ended()),
        };
        mask.apply(logits, eos, &mut self.masked);
        Ok(&self.masked)
    }

    /// Returns true if the next token needs no mask.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.next, Next::Free(_))
    }

    /// Returns true if the next mask takes longer than a step can wait, and is not ready.
    pub(super) fn is_waiting(&mut self) -> bool {
        let Next::Computing(done) = &self.next else { return false };
        match done.try_recv() {
            Ok(computed) => self.receive(computed),
            Err(TryRecvError::Disconnected) => self.next = Next::Failed(ended()),
            Err(TryRecvError::Empty) => return self.is_slow,
        }
        false
    }

    /// Waits for the next mask.
    pub(super) fn wait(&mut self) {
        let Next::Computing(done) = &self.next else { return };
        match done.recv() {
            Ok(computed) => self.receive(computed),
            Err(_) => self.next = Next::Failed(ended()),
        }
    }

    fn receive(&mut self, (state, mask, time): Computed) {
        self.spent += time;
        self.next = match mask {
            Ok(_) if time > LONGEST => {
                let found = format!(
                    "constraint: the next token took {} ms of processor time, expected at most {} ms",
                    time.as_millis(),
                    LONGEST.as_millis()
                );
                Next::Failed(Error::unsupported(found).help("use a simpler grammar, in which a text has one meaning"))
            }
            Ok(mask) => Next::Ready(state, mask),
            Err(error) => Next::Failed(error),
        };
    }

    /// Returns the time of the masks since the last call.
    pub(super) fn take_spent(&mut self) -> Duration {
        std::mem::take(&mut self.spent)
    }

    /// Adds the chosen token; returns true if the text is complete. Otherwise a thread begins to compute the next mask.
    ///
    /// # Errors
    /// The token is not allowed.
    pub(super) fn accept(&mut self, id: u32) -> Result<bool> {
        let mut state = match std::mem::replace(&mut self.next, Next::Ended) {
            Next::Free(state) => state,
            Next::Ready(state, mask) if mask.allows(id) => state,
            Next::Ready(..) => {
                let found = "constraint: found no allowed token with a probability above 0";
                return Err(Error::unsupported(found).help("check the pack with `iec inspect --stats`"));
            }
            _ => return Err(ended()),
        };
        state.accept(id)?;
        if state.is_complete() {
            return Ok(true);
        }
        self.submit(state)?;
        Ok(false)
    }

    /// Returns true if the text as it is now satisfies the constraint.
    pub(super) fn may_end(mut self) -> bool {
        self.wait();
        match self.next {
            Next::Ready(_, mask) => mask.ends(),
            Next::Free(_) => true,
            _ => false,
        }
    }

    fn submit(&mut self, state: ConstraintState) -> Result<()> {
        if state.is_free() {
            self.next = Next::Free(state);
            return Ok(());
        }
        let (done, computed) = sync_channel(1);
        let is_slow = state.is_slow();
        let jobs = if is_slow { &self.slow } else { &self.quick };
        jobs.send(Job { state, done }).map_err(|_| ended())?;
        self.next = Next::Computing(computed);
        self.is_slow = is_slow;
        Ok(())
    }
}

fn ended() -> Error {
    Error::new(Cause::Engine("the thread that computes token masks has ended".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::constraint::{ConstraintSource, Vocabulary};
    use crate::generate::text::spelling::{Leading, Spelling};

    fn constraint(source: ConstraintSource) -> Constraint {
        let bytes = (0..=u8::MAX).map(|byte| vec![byte]).collect();
        let vocabulary = Vocabulary::new(Spelling { bytes, leading: Leading::Kept }).unwrap();
        Constraint::compile(&source, &Arc::new(vocabulary)).unwrap()
    }

    #[test]
    fn texts_wait_for_masks_only_once_one_of_their_constraint_was_slow() {
        let logits = vec![0.0; 256];
        let constraint = constraint(ConstraintSource::Regex("[ab]*c".into()));
        let mut threads = MaskThreads::default();
        let mut quick = threads.begin(&constraint).unwrap();
        assert!(!quick.is_waiting(), "a step waits for it");
        quick.mask(&logits, &[]).unwrap();
        assert!(!quick.accept(u32::from(b'a')).unwrap());
        constraint.start().set_slow();
        let mut slow = threads.begin(&constraint).unwrap();
        threads.set_others(true);
        // It becomes ready by itself, and is not lost.
        while slow.is_waiting() {
            thread::yield_now();
        }
        let masked = slow.mask(&logits, &[]).unwrap();
        assert_eq!(masked.iter().filter(|logit| logit.is_finite()).count(), 3);
        assert!(slow.take_spent() > Duration::ZERO && slow.take_spent() == Duration::ZERO);
        assert!(slow.accept(u32::from(b'c')).unwrap(), "the text is complete");
        assert!(!slow.is_waiting() && !slow.may_end());
        quick.mask(&logits, &[]).unwrap();
        assert!(quick.accept(u32::from(b'c')).unwrap());
    }

    #[test]
    fn a_mask_that_takes_too_long_ends_its_text() {
        let constraint = constraint(ConstraintSource::Regex("[ab]*c".into()));
        let mut text = MaskThreads::default().begin(&constraint).unwrap();
        text.wait();
        let Next::Ready(state, mask) = std::mem::replace(&mut text.next, Next::Ended) else { panic!("it is ready") };
        text.receive((state, Ok(mask), LONGEST + QUICK));
        let error = text.mask(&[0.0; 256], &[]).unwrap_err();
        assert!(error.to_string().contains("202 ms of processor time"), "{error}");
        assert!(text.mask(&[0.0; 256], &[]).is_err());
    }
}
