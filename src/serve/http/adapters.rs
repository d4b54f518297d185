//! Endpoints that load and unload adapters while the server runs.

use super::check::Caller;
use super::generate::read_body;
use super::respond::{self, Ignored};
use crate::serve::adapters;
use crate::serve::api::body::Body;
use crate::serve::api::error::{ApiError, ApiResult};
use crate::serve::app::App;
use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// Loads an adapter. The answer comes when requests can use it.
pub async fn load(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> ApiResult<Response> {
    let (bytes, _permit) = read_body(&app, request).await?;
    let mut body = Body::parse(&bytes)?;
    let (name, path) = (required(&mut body, "lora_name")?, required(&mut body, "lora_path")?);
    let in_place = body.flag("load_inplace", false)?;
    let base = body.text("base_model_name")?;
    let ignored = Ignored::read(&app, body)?;
    let target = app.target(caller.key().0, base.as_deref(), &[])?;
    adapters::load(&app, &target.model, &name, &path, in_place).await?;
    Ok(ignored.shown_in(format!("Success: LoRA adapter '{name}' added successfully.").into_response()))
}

/// Unloads an adapter that no request uses.
pub async fn unload(State(app): State<Arc<App>>, request: Request) -> ApiResult<Response> {
    let (bytes, _permit) = read_body(&app, request).await?;
    let mut body = Body::parse(&bytes)?;
    let name = required(&mut body, "lora_name")?;
    // Clients of vLLM may send the number of the adapter.
    let _ = body.take("lora_int_id");
    let ignored = Ignored::read(&app, body)?;
    adapters::unload(&app, &name).await?;
    Ok(ignored.shown_in(format!("Success: LoRA adapter '{name}' removed successfully.").into_response()))
}

/// Lists the adapters.
pub async fn list(State(app): State<Arc<App>>) -> Response {
    let object = |(name, adapter): (&String, &crate::serve::app::Adapter)| {
        json!({
            "name": name,
            "path": adapter.source.dir,
            "scale": adapter.source.scale,
            "model": app.models.get(adapter.model).map(|model| model.name.as_str()),
            "created": adapter.created,
        })
    };
    let all: Vec<Value> = app.adapters().iter().map(object).collect();
    respond::json(StatusCode::OK, &json!({"object": "list", "data": all}))
}

fn required(body: &mut Body, name: &str) -> ApiResult<String> {
    let text = body.text(name)?.filter(|text| !text.is_empty());
    text.ok_or_else(|| ApiError::field(name, "found none, expected a text"))
}
