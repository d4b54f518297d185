//! Models that are loaded when a request names them, and unloaded when they are idle or another model needs their
//! memory.
//!
//! The thread of a model that is unloaded drops its session and waits until it is asked to load again. Models are
//! loaded one after the other, so that the memory of each is counted before the next one is planned.

use super::app::{App, Phase, unavailable};
use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::host::lease::{Lease, Planned, Uses, lease, lock, unload};
use crate::host::model::{Command, Facts, Model, Status};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Time between two looks at models whose memory another one needs, and at the life of the server.
const LOOK: Duration = Duration::from_millis(20);

/// Unloads the models that have been idle for long enough.
pub fn unload_idle(app: &App) {
    let Some(default) = app.settings.idle_unload else { return };
    for model in &app.models {
        let is_due = |uses: &Uses| uses.keep(Some(default)).is_some_and(|time| uses.last.elapsed() >= time);
        if unload(model, is_due) {
            (app.log)(&format!("model {} is unloaded, because it is idle", model.name));
        }
    }
}

/// Returns the time at which a model will be unloaded if no request uses it; `None` = never.
pub fn expires(app: &App, model: &Model) -> Option<SystemTime> {
    let uses = lock(&model.uses);
    let keep = uses.keep(Some(app.settings.idle_unload?))?;
    let idle = if uses.leases == 0 { uses.last.elapsed() } else { Duration::ZERO };
    SystemTime::now().checked_add(keep.saturating_sub(idle))
}

impl App {
    /// Takes a lease of a model. One that is loaded on request is loaded first.
    ///
    /// # Errors
    /// The model is loading at the start of the server, cannot be loaded, or does not become ready in time; there is no
    /// memory for it; too many requests wait; or the server ends.
    pub async fn lease(&self, model: &Arc<Model>) -> ApiResult<(Arc<Facts>, Lease)> {
        let arrived = Instant::now();
        self.check_phase()?;
        if model.is_damaged() {
            return Err(unavailable("the weights of the model differ from their recorded hashes", "damaged", 30));
        }
        if let Some(leased) = lease(model) {
            return Ok(leased);
        }
        if !model.is_on_request() {
            return Err(match model.status() {
                Status::Failed => unavailable("the model cannot be used; see the log", "failed", 30),
                _ => unavailable("the model is loading", "loading", 2),
            });
        }
        let Ok(_place) = self.residency.places.try_acquire() else {
            let error = ApiError::new(ApiStatus::TOO_MANY_REQUESTS, "too many requests wait for models");
            return Err(ApiError { retry_after: Some(5), ..error.code("queue_full") });
        };
        let loaded = tokio::time::timeout(self.settings.queue_timeout, self.load(model, arrived)).await;
        loaded.unwrap_or_else(|_| Err(unavailable("the model is not loaded yet", "loading", 5)))
    }

    /// Loads a model, after those that others have asked for before.
    async fn load(&self, model: &Arc<Model>, arrived: Instant) -> ApiResult<(Arc<Facts>, Lease)> {
        let _one = self.residency.loads.lock().await;
        loop {
            self.check_phase()?;
            if let Some(leased) = lease(model) {
                return Ok(leased);
            }
            match model.status() {
                Status::Loading | Status::Unloading => self.change_of(model).await?,
                // Requests that waited for the same attempt get the same answer.
                Status::Failed if lock(&model.uses).failed.is_some_and(|failed| failed >= arrived) => {
                    return Err(unavailable("the model cannot be loaded; see the log", "failed", 30));
                }
                Status::Unloaded | Status::Failed => {
                    self.make_room(model).await?;
                    model.set_status(Status::Loading);
                    model.send(Command::Load);
                }
                Status::Ready(_) => {}
            }
        }
    }

    /// Waits until a model is neither being loaded nor being unloaded.
    async fn change_of(&self, model: &Model) -> ApiResult<()> {
        while matches!(model.status(), Status::Loading | Status::Unloading) {
            self.check_phase()?;
            let _ = tokio::time::timeout(LOOK, model.change()).await;
        }
        Ok(())
    }

    /// Unloads idle models, the least recently used first, until there is memory for another one.
    async fn make_room(&self, model: &Arc<Model>) -> ApiResult<()> {
        let (Some(budget), Some(needed)) = (self.residency.budget, planned(model).await) else { return Ok(()) };
        loop {
            self.check_phase()?;
            let is_loaded = |other: &&Arc<Model>| {
                let status = other.status();
                other.number != model.number && matches!(status, Status::Ready(_) | Status::Loading | Status::Unloading)
            };
            let others: Vec<&Arc<Model>> = self.models.iter().filter(is_loaded).collect();
            let (mut used, mut fixed) = (0u64, 0u64);
            for other in &others {
                let bytes = planned(other).await.map_or(0, |planned| planned.bytes);
                used = used.saturating_add(bytes);
                fixed = fixed.saturating_add(if other.may_unload() { 0 } else { bytes });
            }
            if used.saturating_add(needed.bytes) <= budget {
                return Ok(());
            }
            let left = budget.saturating_sub(fixed);
            if others.is_empty() && needed.without_weights <= budget {
                // It runs, and reads weights from their file again.
                return Ok(());
            }
            if needed.bytes > left && (needed.without_weights > left || fixed > 0) {
                let needed = needed.bytes;
                let message =
                    format!("the model needs {needed} bytes of memory, and at most {left} can be free for it");
                let error = ApiError::new(ApiStatus::SERVICE_UNAVAILABLE, message).code("out_of_memory");
                return Err(ApiError { final_refusal: true, ..error });
            }
            let mut idle: Vec<&&Arc<Model>> = others.iter().filter(|other| other.may_unload()).collect();
            idle.sort_by_key(|other| lock(&other.uses).last);
            match idle.into_iter().find(|other| unload(other, |_| true)) {
                Some(other) => {
                    (self.log)(&format!("model {} is unloaded, because {} needs its memory", other.name, model.name));
                    self.change_of(other).await?;
                }
                // All of them are in use.
                None => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// Checks that the server takes requests.
    fn check_phase(&self) -> ApiResult<()> {
        match self.phase() {
            Phase::Draining => Err(unavailable("the server is shutting down", "draining", 30)),
            Phase::Running | Phase::Leaving => Ok(()),
        }
    }
}

/// Returns the memory that a model needs; `None` if it is not known.
async fn planned(model: &Arc<Model>) -> Option<Planned> {
    if let Some(planned) = lock(&model.uses).planned {
        return Some(planned);
    }
    let of = model.clone();
    // The tokenizer is read for it, which takes a while.
    let planned = tokio::task::spawn_blocking(move || (of.plan.as_ref()?)()).await.ok()??;
    lock(&model.uses).planned = Some(planned);
    Some(planned)
}

#[cfg(test)]
mod tests;
