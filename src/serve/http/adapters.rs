//! Endpoints that load and unload adapters while the server runs.

use super::body::read_body;
use super::respond::{self, Ignored};
use crate::api::body::Body;
use crate::api::error::{ApiError, ApiResult};
use crate::serve::adapters;
use crate::serve::app::App;
use crate::serve::caller::Caller;
use crate::serve::rights::Usable;
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
    let (bytes, _room) = read_body(&app, &caller, request).await?;
    let mut body = Body::parse(&bytes)?;
    let (name, path) = (required(&mut body, "lora_name")?, required(&mut body, "lora_path")?);
    let in_place = body.flag("load_inplace", false)?;
    let (base, model) = (body.text("base_model_name")?, body.text("model")?);
    if base.is_some() && model.is_some() && base != model {
        return Err(ApiError::field("model", "found another name than in `base_model_name`, expected one of them"));
    }
    let ignored = Ignored::read(&app, body)?;
    let (model, _lease) = app.adapter_target(caller.key().0, base.or(model).as_deref(), &name).await?;
    adapters::load(&app, &model, &name, &path, in_place).await?;
    Ok(ignored.shown_in(format!("Success: LoRA adapter '{name}' added successfully.").into_response()))
}

/// Unloads an adapter that no request uses.
pub async fn unload(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> ApiResult<Response> {
    let (bytes, _room) = read_body(&app, &caller, request).await?;
    let mut body = Body::parse(&bytes)?;
    let name = required(&mut body, "lora_name")?;
    // Clients of vLLM may send the number of the adapter.
    let _ = body.take("lora_int_id");
    let ignored = Ignored::read(&app, body)?;
    if app.usable_as(caller.key().0, &name).is_none() {
        return Err(adapters::unknown(&name));
    }
    adapters::unload(&app, &name).await?;
    Ok(ignored.shown_in(format!("Success: LoRA adapter '{name}' removed successfully.").into_response()))
}

/// Lists the adapters that the caller may use.
pub async fn list(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Response {
    let (key, _) = caller.key();
    let object = |usable: &Usable| {
        let adapter = usable.adapter.as_ref()?;
        Some(json!({
            "name": usable.name,
            "path": adapter.source.dir,
            "scale": adapter.source.scale,
            "model": usable.parent(key),
            "created": adapter.created,
        }))
    };
    let all: Vec<Value> = app.usable(key).iter().filter_map(object).collect();
    respond::json(StatusCode::OK, &json!({"object": "list", "data": all}))
}

fn required(body: &mut Body, name: &str) -> ApiResult<String> {
    let text = body.text(name)?.filter(|text| !text.is_empty());
    text.ok_or_else(|| ApiError::field(name, "found none, expected a text"))
}
