//! Answers about a model and about the server.

use super::proto::vllm::grpc::engine::{GetLoadsResponse, GetModelInfoResponse, GetServerInfoResponse, SchedulerLoad};
use crate::generate::sampler::Sampling;
use crate::host::model::Facts;
use crate::runtime::kv::PAGE;
use crate::serve::app::{App, Phase, Target};
use crate::serve::http::models::timestamp;
use serde_json::{Map, Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Describes a model. Its path is its name, because directories of the server are not for clients.
pub fn model(target: &Target) -> GetModelInfoResponse {
    let facts = &target.facts;
    let context = u32::try_from(facts.context).unwrap_or(u32::MAX);
    GetModelInfoResponse {
        model_path: target.shown.clone(),
        is_generation: true,
        max_context_length: context,
        vocab_size: facts.vocab as u32,
        supports_vision: false,
        served_model_name: target.shown.clone(),
        tokenizer_path: target.shown.clone(),
        model_type: facts.details.family.clone(),
        architectures: vec![facts.details.architecture.clone()],
        eos_token_ids: facts.eos.iter().map(|id| id.cast_signed()).collect(),
        pad_token_id: special(facts, "pad_token"),
        bos_token_id: special(facts, "bos_token"),
        max_req_input_len: i32::try_from(context.saturating_sub(1)).unwrap_or(i32::MAX),
        default_sampling_params_json: recommended(&facts.sampling),
    }
}

/// Returns the id of a special token by its name in the configuration of the tokenizer; 0 if there is none.
fn special(facts: &Facts, name: &str) -> i32 {
    let named = facts.tokenizer_config.get(name).map(|token| token.get("content").unwrap_or(token));
    let text = named.and_then(Value::as_str).filter(|text| !text.is_empty());
    let id = text.and_then(|text| (0..facts.vocab as u32).find(|id| facts.tokens.bytes(*id) == text.as_bytes()));
    id.map_or(0, u32::cast_signed)
}

/// Returns the sampling that the model recommends, as far as messages have fields for it; empty if there is none.
fn recommended(sampling: &Sampling) -> String {
    let neutral = Sampling { temperature: 1.0, ..Sampling::default() };
    let fields = [
        ("temperature", json!(sampling.temperature), sampling.temperature != neutral.temperature),
        ("top_p", json!(sampling.top_p), sampling.top_p != neutral.top_p),
        ("top_k", json!(sampling.top_k), sampling.top_k != neutral.top_k),
        ("min_p", json!(sampling.min_p), sampling.min_p != neutral.min_p),
        ("repetition_penalty", json!(sampling.repeat_penalty), sampling.repeat_penalty != neutral.repeat_penalty),
    ];
    let named = fields.into_iter().filter(|(_, _, differs)| *differs);
    let named: Map<String, Value> = named.map(|(name, value, _)| (name.into(), value)).collect();
    if named.is_empty() { String::new() } else { Value::Object(named).to_string() }
}

/// Describes the server after `uptime`; `last` is the time of the last call that asked for texts, in seconds since
/// 1970.
pub fn server(app: &App, uptime: Duration, last: f64) -> GetServerInfoResponse {
    let active: usize = app.models.iter().map(|model| model.load()).sum();
    GetServerInfoResponse {
        active_requests: u32::try_from(active).unwrap_or(u32::MAX),
        is_paused: app.phase() != Phase::Running,
        last_receive_timestamp: last,
        uptime_seconds: uptime.as_secs_f64(),
        // Name of the protocol, by which routers choose their client.
        server_type: "vllm-grpc".into(),
        data_parallel_size: 1,
        kv_cache_dtype: app.settings.kv.map_or("auto".into(), |kv| kv.to_string()),
        block_size: PAGE as i32,
        max_num_seqs: i32::try_from(app.settings.max_seqs).unwrap_or(i32::MAX),
        constrained_decoding_start: "first_token".into(),
        ..GetServerInfoResponse::default()
    }
}

/// Tells the load of all models together.
pub fn loads(app: &App) -> GetLoadsResponse {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let load = app.metrics.load();
    let number = |count: u64| i32::try_from(count).unwrap_or(i32::MAX);
    let share = |part: u64, all: u64| if all == 0 { 0.0 } else { part as f64 / all as f64 };
    let seqs = app.settings.max_seqs as u64 * app.models.len() as u64;
    let load = SchedulerLoad {
        num_running_reqs: number(load.running),
        num_waiting_reqs: number(load.waiting),
        num_total_reqs: number(load.running + load.waiting),
        num_used_tokens: number(load.used_tokens),
        max_total_num_tokens: number(load.total_tokens),
        token_usage: share(load.used_tokens, load.total_tokens),
        cache_hit_rate: share(load.prefix.1, load.prefix.0),
        utilization: share(load.running, seqs),
        max_running_requests: number(seqs),
        ..SchedulerLoad::default()
    };
    let version = format!("iec {}", env!("CARGO_PKG_VERSION"));
    GetLoadsResponse { timestamp: timestamp(now), version, dp_rank_count: 1, loads: vec![load] }
}
