//! Services of gRPC: their routes, with the checks of every call.

use super::check::{self, SMALL};
use super::engine::Engine;
use super::health::Readiness;
use super::proto::DESCRIPTORS;
use super::proto::vllm::grpc::engine::vllm_engine_server::VllmEngineServer;
use crate::serve::app::App;
use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use std::sync::Arc;
use tonic::Status;
use tonic::service::Routes;
use tonic_health::pb::health_server::HealthServer;
use tonic_reflection::server::Builder;

/// Builds the routes of all services.
pub fn router(app: Arc<App>) -> Router {
    let most = usize::try_from(app.settings.max_body.0).unwrap_or(usize::MAX);
    let described = || {
        let builder = Builder::configure().register_encoded_file_descriptor_set(DESCRIPTORS);
        builder.register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let engine = VllmEngineServer::new(Engine::new(app.clone())).max_decoding_message_size(most);
    let health = HealthServer::new(Readiness::new(app.clone())).max_decoding_message_size(SMALL);
    let mut routes = Routes::new(engine).add_service(health);
    // The descriptors are part of the program; a test reads them through both versions of the service.
    if let (Ok(v1), Ok(v1alpha)) = (described().build_v1(), described().build_v1alpha()) {
        routes = routes
            .add_service(v1.max_decoding_message_size(SMALL))
            .add_service(v1alpha.max_decoding_message_size(SMALL));
    }
    routes.into_axum_router().fallback(unknown).layer(from_fn_with_state(app, check::check))
}

/// Answers calls of services that do not exist.
async fn unknown() -> Response {
    Status::unimplemented("this server has no such service; reflection lists those that it has").into_http()
}
