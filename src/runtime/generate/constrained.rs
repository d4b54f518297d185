//! Masks of constrained texts. They are computed on a thread of their own: the mask of the next token while the engine
//! computes the logits for it.

use crate::error::{Cause, Error, Result};
use crate::resources;
use crate::runtime::constraint::{Constraint, ConstraintState, TokenMask};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

/// The thread that computes masks, for all texts of a run. It ends with the last text.
#[derive(Default)]
pub(super) struct MaskThread {
    jobs: Option<Sender<Job>>,
}

/// A state whose mask is needed, and where it is sent.
struct Job {
    state: ConstraintState,
    done: SyncSender<Computed>,
}

type Computed = (ConstraintState, Result<TokenMask>);

/// Constraint of a text during generation.
pub(super) struct Constrained {
    jobs: Sender<Job>,
    next: Next,
    /// Logits with negative infinity for tokens that are not allowed: (vocab).
    masked: Vec<f32>,
}

/// Progress of the mask for the next token.
enum Next {
    Computing(Receiver<Computed>),
    Ready(ConstraintState, TokenMask),
    /// Every token is allowed.
    Free(ConstraintState),
    /// The text is complete, or its mask has failed.
    Ended,
}

impl MaskThread {
    /// Begins a text with this constraint and the computation of its first mask.
    pub(super) fn begin(&mut self, constraint: &Constraint) -> Result<Constrained> {
        let jobs = match &self.jobs {
            Some(jobs) => jobs.clone(),
            None => {
                let (jobs, received) = channel::<Job>();
                resources::spawn("token masks", move || compute(&received))?;
                self.jobs.insert(jobs).clone()
            }
        };
        let mut constrained = Constrained { jobs, next: Next::Ended, masked: Vec::new() };
        constrained.submit(constraint.start())?;
        Ok(constrained)
    }
}

/// Computes masks until no text can send a state.
fn compute(jobs: &Receiver<Job>) {
    for Job { mut state, done } in jobs {
        let mask = state.mask();
        // A text that ended meanwhile receives nothing.
        let _ = done.send((state, mask));
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
        if let Next::Computing(done) = &self.next {
            let (state, mask) = done.recv().map_err(|_| ended())?;
            self.next = Next::Ready(state, mask?);
        }
        let Next::Ready(_, mask) = &self.next else { return Err(ended()) };
        mask.apply(logits, eos, &mut self.masked);
        Ok(&self.masked)
    }

    /// Returns true if the next token needs no mask.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.next, Next::Free(_))
    }

    /// Adds the chosen token; returns true if the text is complete. Otherwise the thread begins to compute the next
    /// mask.
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
    pub(super) fn may_end(self) -> bool {
        match self.next {
            Next::Computing(done) => done.recv().is_ok_and(|(_, mask)| mask.is_ok_and(|mask| mask.ends())),
            Next::Ready(_, mask) => mask.ends(),
            Next::Free(_) => true,
            Next::Ended => false,
        }
    }

    fn submit(&mut self, state: ConstraintState) -> Result<()> {
        if state.is_free() {
            self.next = Next::Free(state);
            return Ok(());
        }
        let (done, computed) = sync_channel(1);
        self.jobs.send(Job { state, done }).map_err(|_| ended())?;
        self.next = Next::Computing(computed);
        Ok(())
    }
}

fn ended() -> Error {
    Error::new(Cause::Engine("the thread that computes token masks has ended".into()))
}
