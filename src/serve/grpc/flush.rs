//! Empties the prefix caches of models, once no request uses them.

use super::proto::smg::grpc::common::FlushCacheResponse;
use crate::api::error::{ApiError, ApiResult};
use crate::host::channel::channel;
use crate::host::model::{Command, Model};
use crate::serve::app::{App, unavailable};
use crate::serve::caller::Caller;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time to wait for an idle engine.
const LONGEST: f32 = 3600.0;
/// Time in which an engine must answer; it answers between two steps.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Time between two attempts.
const AGAIN: Duration = Duration::from_millis(20);

/// Empties the prefix cache of each loaded model that a key may use. Waits at most `seconds` until their engines have
/// nothing to compute.
///
/// # Errors
/// The time is not valid, or an engine does not answer.
pub async fn flush(app: &App, caller: &Caller, seconds: f32) -> ApiResult<FlushCacheResponse> {
    if !(0.0..=LONGEST).contains(&seconds) {
        return Err(ApiError::field("timeout_s", format!("found {seconds}, expected 0 to {LONGEST}")));
    }
    let end = Instant::now() + Duration::from_secs_f32(seconds);
    let key = caller.key().0;
    let models = app.models.iter().filter(|model| model.is_ready() && key.may_use_model(&model.name));
    let mut flushed = 0;
    for model in models {
        while !attempt(app, model).await? {
            if Instant::now() >= end {
                let message = format!("requests use the prefix cache; {flushed} models before it were emptied");
                return Ok(FlushCacheResponse { success: false, message });
            }
            tokio::time::sleep(AGAIN).await;
        }
        flushed += 1;
    }
    Ok(FlushCacheResponse { success: true, message: format!("the prefix caches of {flushed} models were emptied") })
}

/// Empties the prefix cache of a model if its engine has nothing to compute. Returns whether it did.
async fn attempt(app: &App, model: &Arc<Model>) -> ApiResult<bool> {
    let (sender, mut receiver) = channel();
    model.send(Command::FlushPrefixes(sender));
    match tokio::time::timeout(ANSWER_TIME, receiver.receive()).await {
        Ok(Some(is_flushed)) => Ok(is_flushed),
        Ok(None) => Err(app.engine_ended()),
        Err(_) => Err(unavailable("the engine does not answer", "busy", 5)),
    }
}
