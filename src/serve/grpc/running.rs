//! Calls that are computed, by the names that their clients gave them: `Abort` ends them.

use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::host::channel::{Receiver, Sender, channel};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

/// Longest name of a call in bytes.
const LONGEST_ID: usize = 256;

/// Name of the key of a call, and name of the call.
type Name = (String, String);

/// Calls that are computed. Calls of different keys may have the same name.
#[derive(Debug, Default)]
pub struct Running(Mutex<HashMap<Name, Sender<()>>>);

/// A call that is computed. It leaves the list when this value is dropped.
#[derive(Debug)]
pub struct Entry {
    running: Arc<Running>,
    name: Name,
    aborted: Receiver<()>,
}

impl Running {
    /// Adds a call.
    ///
    /// # Errors
    /// The name is too long, or that of another call of the key.
    pub fn enter(self: &Arc<Self>, key: &str, id: &str) -> ApiResult<Entry> {
        if id.len() > LONGEST_ID {
            let found = id.len();
            return Err(ApiError::field("request_id", format!("found {found} bytes, expected at most {LONGEST_ID}")));
        }
        let name = (key.to_string(), id.to_string());
        let (sender, aborted) = channel();
        let mut calls = self.calls();
        if calls.contains_key(&name) {
            let error = ApiError::field("request_id", "found the name of a call that is computed, expected another");
            return Err(ApiError { status: ApiStatus::CONFLICT, ..error });
        }
        calls.insert(name.clone(), sender);
        drop(calls);
        Ok(Entry { running: self.clone(), name, aborted })
    }

    /// Ends a call of a key, if it is computed.
    pub fn abort(&self, key: &str, id: &str) {
        if let Some(sender) = self.calls().get(&(key.to_string(), id.to_string())) {
            sender.send(());
        }
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<Name, Sender<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// Waits until the call is aborted.
    pub async fn aborted(&mut self) {
        self.aborted.receive().await;
    }

    /// Returns true if the call was aborted; otherwise the task of `context` is woken when it is.
    pub fn is_aborted(&mut self, context: &mut Context<'_>) -> bool {
        matches!(self.aborted.poll(context), Poll::Ready(Some(())))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.running.calls().remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_aborts_its_own_calls_only() {
        let (running, mut context) = (Arc::<Running>::default(), Context::from_waker(std::task::Waker::noop()));
        let mut call = running.enter("alice", "a").unwrap();
        assert_eq!(running.enter("alice", "a").unwrap_err().status, ApiStatus::CONFLICT);
        let other = running.enter("bob", "a").unwrap();
        running.abort("bob", "a");
        running.abort("bob", "b");
        assert!(!call.is_aborted(&mut context));
        running.abort("alice", "a");
        assert!(call.is_aborted(&mut context));
        drop((call, other));
        assert!(running.calls().is_empty() && running.enter("alice", "a").is_ok());
        assert_eq!(running.enter("alice", &"x".repeat(257)).unwrap_err().param.as_deref(), Some("request_id"));
    }
}
