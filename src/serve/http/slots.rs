//! Endpoints of llama.cpp's server that tell about a model and about the requests that it computes.

use super::models::query;
use super::respond;
use crate::api::error::ApiResult;
use crate::host::channel::channel;
use crate::host::model::{Command, Slot};
use crate::serve::app::{App, Target, unavailable};
use crate::serve::caller::Caller;
use axum::Extension;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Time in which an engine must tell its requests; it answers between two steps.
const SLOTS_TIME: Duration = Duration::from_secs(10);

/// Finds the model that a query names.
async fn target(app: &App, caller: &Caller, text: Option<&str>) -> ApiResult<Target> {
    let name = query(text.unwrap_or_default()).find(|(name, _)| *name == "model").map(|(_, value)| value);
    app.target(caller.key().0, name.as_deref(), &[]).await
}

/// Tells the properties of a model.
pub async fn props(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    RawQuery(query): RawQuery,
) -> ApiResult<Response> {
    let target = target(&app, &caller, query.as_deref()).await?;
    let facts = &target.facts;
    let token = |id: Option<&u32>| id.map_or(String::new(), |id| facts.tokens.text(*id));
    let bos = facts.tokenizer_config.get("bos_token").map(|token| token.get("content").unwrap_or(token));
    let sampling = &facts.sampling;
    let object = json!({
        "default_generation_settings": {
            "n_ctx": facts.context,
            "params": {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p},
        },
        "total_slots": app.settings.max_seqs,
        "model_alias": target.shown,
        "model_path": target.shown,
        "chat_template": facts.template.as_ref().map_or("", |format| format.template.template.source()),
        "bos_token": bos.and_then(Value::as_str).unwrap_or_default(),
        "eos_token": token(facts.eos.first()),
        "modalities": {"vision": false, "audio": false},
        "build_info": format!("iec {}", env!("CARGO_PKG_VERSION")),
    });
    Ok(respond::json(StatusCode::OK, &object))
}

/// Tells the requests that a model computes, without their texts.
pub async fn slots(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    RawQuery(query): RawQuery,
) -> ApiResult<Response> {
    let target = target(&app, &caller, query.as_deref()).await?;
    let (sender, mut receiver) = channel();
    target.model.send(Command::Slots(sender));
    let running = match tokio::time::timeout(SLOTS_TIME, receiver.receive()).await {
        Ok(Some(running)) => running,
        Ok(None) => return Err(app.engine_ended()),
        Err(_) => return Err(unavailable("the engine does not answer", "busy", 5)),
    };
    let slots: Vec<Value> = slot_list(&running, app.settings.max_seqs, target.facts.context);
    Ok(respond::json(StatusCode::OK, &Value::Array(slots)))
}

/// Returns the objects of all slots: those in use first.
fn slot_list(running: &[Slot], slots: usize, context: usize) -> Vec<Value> {
    let count = slots.max(running.len());
    let object = |id: usize| {
        let slot = running.get(id);
        json!({
            "id": id,
            "id_task": slot.map_or(-1, |slot| i64::try_from(slot.task).unwrap_or(i64::MAX)),
            "n_ctx": context,
            "is_processing": slot.is_some(),
            "n_prompt_tokens": slot.map_or(0, |slot| slot.prompt_tokens),
            "next_token": [{
                "has_next_token": slot.is_some(),
                "n_decoded": slot.map_or(0, |slot| slot.generated),
                "n_remain": slot.map_or(-1, |slot| slot.most.saturating_sub(slot.generated) as i64),
            }],
        })
    };
    (0..count).map(object).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_in_use_come_first() {
        let running = [Slot { task: 7, prompt_tokens: 5, generated: 2, most: 9 }];
        let list = slot_list(&running, 2, 64);
        assert_eq!((list.len(), &list[0]["id_task"], &list[0]["next_token"][0]["n_remain"]), (2, &json!(7), &json!(7)));
        assert_eq!((&list[0]["is_processing"], &list[1]["is_processing"]), (&json!(true), &json!(false)));
        assert_eq!((&list[1]["id_task"], &list[1]["n_ctx"]), (&json!(-1), &json!(64)));
        assert_eq!(slot_list(&running, 0, 64).len(), 1, "a request may be computed while the setting shrinks");
    }
}
