//! `grpc.health.v1`: whether calls are served. The answer is the same as that of `GET /readyz`, at every moment.

use super::proto::ENGINE;
use crate::host::model::Status as ModelStatus;
use crate::serve::app::{App, Phase};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Interval, interval};
use tonic::codegen::tokio_stream::Stream;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// Time between two looks at the state for clients that watch it.
const LOOK: Duration = Duration::from_millis(100);

/// Service that tells whether calls are served.
pub struct Readiness {
    app: Arc<App>,
}

impl Readiness {
    /// Creates the service.
    pub fn new(app: Arc<App>) -> Readiness {
        Readiness { app }
    }
}

/// Returns the state of a service; `None` if there is no such service. The empty name is that of the whole server.
fn state_of(app: &App, service: &str) -> Option<ServingStatus> {
    match service {
        "" | ENGINE | "grpc.health.v1.Health" if app.is_ready() => Some(ServingStatus::Serving),
        "" | ENGINE | "grpc.health.v1.Health" => Some(ServingStatus::NotServing),
        _ => None,
    }
}

/// States of a service: the present one, then each change. The stream ends with the server.
pub struct States {
    app: Arc<App>,
    service: String,
    last: Option<ServingStatus>,
    look: Interval,
}

impl Stream for States {
    type Item = Result<HealthCheckResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let states = &mut *self;
        while states.look.poll_tick(context).is_ready() {
            let state = state_of(&states.app, &states.service).unwrap_or(ServingStatus::ServiceUnknown);
            if states.last != Some(state) {
                states.last = Some(state);
                return Poll::Ready(Some(Ok(HealthCheckResponse { status: state.into() })));
            }
            let has_ended = |status| matches!(status, ModelStatus::Unloaded | ModelStatus::Failed);
            let is_over = states.app.phase() == Phase::Draining;
            if is_over && states.app.models.iter().all(|model| has_ended(model.status())) {
                return Poll::Ready(None);
            }
        }
        Poll::Pending
    }
}

#[tonic::async_trait]
impl Health for Readiness {
    type WatchStream = States;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        match state_of(&self.app, &request.get_ref().service) {
            Some(state) => Ok(Response::new(HealthCheckResponse { status: state.into() })),
            None => Err(Status::not_found("this server has no such service")),
        }
    }

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<States>, Status> {
        let service = request.into_inner().service;
        Ok(Response::new(States { app: self.app.clone(), service, last: None, look: interval(LOOK) }))
    }
}
