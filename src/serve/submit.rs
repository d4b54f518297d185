//! Way of a request from its fields to the engine, the same for HTTP and gRPC: encodes its prompts on another thread,
//! then hands a request for each text to the engine.

use super::app::{App, Target};
use super::caller::Caller;
use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::api::prepare::{self, Plan, Prepared, Wanted};
use crate::host::model::{Arrival, Ticket};
use crate::rng::random;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time in which a constraint must be compiled and prompts encoded.
const PREPARE_TIME: Duration = Duration::from_secs(2);
/// Time between two attempts to find room for the adapters of a request.
const ROOM_TIME: Duration = Duration::from_millis(50);
/// Bits that a seed of the server leaves out, so that clients whose numbers are doubles can send it back, and the seeds
/// of the other answers, too.
const UNNEEDED_SEED_BITS: u32 = 12;

/// A request whose prompts are encoded.
pub struct Ready {
    /// Requests for the engine.
    pub prepared: Prepared,
    /// Description of the texts.
    pub plan: Plan,
    /// Seed that the server chose; `None` if the client named one.
    pub own_seed: Option<u64>,
    target: Target,
}

/// Encodes the prompts of a request on another thread. Waits if there is no room for its adapters.
///
/// # Errors
/// A setting is not valid for the model, a prompt does not fit, the preparation takes too long, or the engine ends.
pub async fn prepare(app: &App, caller: &Caller, wanted: Wanted, target: Target) -> ApiResult<Ready> {
    let named = wanted.settings.seed;
    let seed = named.unwrap_or_else(|| random() >> UNNEEDED_SEED_BITS);
    let owner = caller.key().0.cache_owner().map(String::from);
    let work = Arc::new(wanted.plan(target.facts.clone(), target.adapters.clone(), owner, seed));
    let begin = Instant::now();
    loop {
        let shared = work.clone();
        let encoded = target.model.encode(move |encoder| prepare::prepare(encoder, &shared.0, &shared.1));
        let prepared = match tokio::time::timeout(PREPARE_TIME, encoded).await {
            Ok(Some(prepared)) => prepared?,
            Ok(None) => return Err(app.engine_ended()),
            Err(_) => {
                let message = format!("the request took more than {} s to prepare", PREPARE_TIME.as_secs());
                return Err(ApiError::invalid(message).code("too_complex"));
            }
        };
        match prepared {
            Some(prepared) => {
                let (_, plan) = Arc::try_unwrap(work).map_err(|_| app.engine_ended())?;
                return Ok(Ready { prepared, plan, own_seed: named.is_none().then_some(seed), target });
            }
            None if begin.elapsed() > app.settings.queue_timeout => {
                let message = "the memory for adapters (--lora-memory) is in use by other requests";
                let error = ApiError::new(ApiStatus::TOO_MANY_REQUESTS, message).code("no_adapter_memory");
                return Err(ApiError { retry_after: Some(5), ..error });
            }
            None => tokio::time::sleep(ROOM_TIME).await,
        }
    }
}

impl Ready {
    /// Returns the number of tokens of all prompts.
    pub fn prompt_tokens(&self) -> usize {
        self.prepared.prompts.iter().map(Vec::len).sum()
    }

    /// Hands the texts to the engine, for a request that arrived at `arrived` and must end before `deadline`.
    pub fn submit(self, caller: &Caller, arrived: Instant, deadline: Option<Instant>) -> Ticket {
        let Ready { prepared, target, .. } = self;
        let (key, key_id) = caller.key();
        let adapters = target.adapters.into_iter().map(|(name, _)| name).collect();
        let key_name = key.name.as_str().into();
        let choices = prepared.choices;
        let mut ticket = target.model.submit(|ticket, outlet| Arrival {
            ticket,
            choices,
            key: key_id,
            key_name,
            adapters,
            deadline,
            arrived,
            outlet,
        });
        ticket.lease = Some(target.lease);
        ticket
    }
}
