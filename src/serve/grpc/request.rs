//! Messages that ask for texts: their fields become the same settings as those of a JSON body.
//!
//! A message of proto3 cannot say that a number is absent, so the numbers of sampling are read as vLLM reads them: 0 is
//! 1.0 for `top_p` and `repetition_penalty`, and off for the others; an absent temperature is 1.0. The sampling that
//! the model recommends is not used: routers learn it by `GetModelInfo` and send it.

use super::proto::vllm::grpc::engine::generate_request::Input;
use super::proto::vllm::grpc::engine::sampling_params::Constraint;
use super::proto::vllm::grpc::engine::{GenerateRequest, SamplingParams};
use crate::api::body::{Body, FieldNames};
use crate::api::constraint_fields::of_value;
use crate::api::error::{ApiError, ApiResult};
use crate::api::prepare::{PromptSource, Wanted};
use crate::api::settings::{Limits, Settings};
use serde_json::{Map, Number, Value, json};

/// Returns the names by which clients know the fields that errors name.
pub fn names_of(request: &GenerateRequest) -> FieldNames {
    let mut names = FieldNames::default();
    names.call("prompt", if matches!(request.input, Some(Input::Text(_))) { "text" } else { "tokenized.input_ids" });
    if let Some(constraint) = request.sampling_params.as_ref().and_then(|params| params.constraint.as_ref()) {
        names.call("response_format", name_of(constraint));
    }
    names.call("model", "x-iec-model");
    names
}

/// Reads a message.
///
/// # Errors
/// A field has a wrong value, or would change the answer and cannot be honoured.
pub fn read(request: GenerateRequest, limits: &Limits) -> ApiResult<Wanted> {
    refuse(&request)?;
    let source = match request.input {
        Some(Input::Text(text)) => PromptSource::Text(text, true),
        Some(Input::Tokenized(tokenized)) => PromptSource::Ids(tokenized.input_ids),
        None => return Err(ApiError::field("input", "found none, expected `tokenized` or `text`")),
    };
    let mut params = request.sampling_params.unwrap_or_default();
    let constraint = params.constraint.take();
    let mut body = Body::of(fields_of(params)?);
    body.set("stream", json!(request.stream));
    let most = limits.max_logprobs;
    let logprobs = body.count("logprobs", 0, most)?;
    let prompt_logprobs = body.count("prompt_logprobs", 0, most)?;
    let max_tokens = body.count("max_tokens", 0, usize::MAX)?;
    let mut settings = Settings::take(&mut body, limits)?;
    (settings.constraint, settings.schema_field) = match constraint {
        None => (None, ""),
        Some(constraint) => (source_of(constraint)?, "json_schema"),
    };
    let wanted = Wanted {
        logprobs,
        // Without an answer the prompt is computed, too.
        score: prompt_logprobs.or((max_tokens == Some(0)).then_some(0)),
        texts: settings.n,
        ..Wanted::new(vec![source], settings, max_tokens)
    };
    wanted.check().map(|()| wanted)
}

/// Refuses fields that would change the answer and that this server does not have.
fn refuse(request: &GenerateRequest) -> ApiResult<()> {
    let no_media = "this server reads no images, videos and sounds";
    let no_transfer = "this server does not move KV caches between machines";
    let has_transfer = request.kv_transfer_params_json.as_ref().is_some_and(|text| !text.is_empty());
    let refused = [
        ("mm_inputs", request.mm_inputs.is_some(), no_media),
        ("extra_mm_inputs", !request.extra_mm_inputs.is_empty(), no_media),
        ("media_refs", request.media_refs.is_some(), no_media),
        ("kv_transfer_params", request.kv_transfer_params.is_some(), no_transfer),
        ("kv_transfer_params_json", has_transfer, no_transfer),
        ("data_parallel_rank", request.data_parallel_rank.is_some_and(|rank| rank != 0), "this server has rank 0 only"),
    ];
    match refused.into_iter().find(|(_, is_given, _)| *is_given) {
        Some((field, _, why)) => Err(ApiError::field(field, why).code("unsupported_parameter")),
        None => Ok(()),
    }
}

/// Returns the fields of a JSON body with the same meaning. `spaces_between_special_tokens` is left out, because an
/// answer has no text, and so is `grammar_from_first_token`, because constraints begin there in any case.
fn fields_of(params: SamplingParams) -> ApiResult<Map<String, Value>> {
    let or_one = |value: f32| if value == 0.0 { 1.0 } else { value };
    let mut fields = Map::new();
    for (name, value) in [
        ("temperature", params.temperature.unwrap_or(1.0)),
        ("top_p", or_one(params.top_p)),
        ("min_p", params.min_p),
        ("frequency_penalty", params.frequency_penalty),
        ("presence_penalty", params.presence_penalty),
        ("repetition_penalty", or_one(params.repetition_penalty)),
    ] {
        fields.insert(name.into(), decimal(name, value)?);
    }
    let mut bias = Map::new();
    for (token, value) in &params.logit_bias {
        bias.insert(token.to_string(), decimal("logit_bias", *value)?);
    }
    for (name, value) in [
        ("top_k", json!(params.top_k)),
        ("max_tokens", json!(params.max_tokens)),
        ("min_tokens", json!(params.min_tokens)),
        ("stop", json!(params.stop)),
        ("stop_token_ids", json!(params.stop_token_ids)),
        ("skip_special_tokens", json!(params.skip_special_tokens)),
        ("ignore_eos", json!(params.ignore_eos)),
        ("n", json!(params.n.max(1))),
        ("logprobs", json!(params.logprobs)),
        ("prompt_logprobs", json!(params.prompt_logprobs)),
        ("seed", json!(params.seed)),
        ("include_stop_str_in_output", json!(params.include_stop_str_in_output)),
        ("logit_bias", Value::Object(bias)),
        ("truncate_prompt_tokens", json!(params.truncate_prompt_tokens)),
    ] {
        fields.insert(name.into(), value);
    }
    Ok(fields)
}

/// Returns the number with the shortest decimal text that a float stands for, which is the one that its sender wrote:
/// 0.7, not 0.699999988079071.
fn decimal(name: &str, value: f32) -> ApiResult<Value> {
    let number = value.to_string().parse().ok().and_then(Number::from_f64);
    number.map(Value::Number).ok_or_else(|| ApiError::field(name, format!("found {value}, expected a finite number")))
}

/// Returns the name of the field of a constraint.
fn name_of(constraint: &Constraint) -> &'static str {
    match constraint {
        Constraint::JsonSchema(_) => "json_schema",
        Constraint::Regex(_) => "regex",
        Constraint::Grammar(_) => "grammar",
        Constraint::StructuralTag(_) => "structural_tag",
        Constraint::JsonObject(_) => "json_object",
        Constraint::Choice(_) => "choice",
    }
}

/// Returns the constraint on the text.
fn source_of(constraint: Constraint) -> ApiResult<Option<crate::generate::constraint::ConstraintSource>> {
    let name = name_of(&constraint);
    match constraint {
        Constraint::JsonSchema(text) => of_value(name, "json", json!(text)),
        Constraint::Regex(text) => of_value(name, "regex", json!(text)),
        Constraint::Grammar(text) => of_value(name, "grammar", json!(text)),
        Constraint::JsonObject(true) => of_value(name, "format", json!("json")),
        Constraint::JsonObject(false) => Ok(None),
        Constraint::Choice(choice) => of_value(name, "choice", json!(choice.choices)),
        Constraint::StructuralTag(_) => {
            let why = "this server does not support it; send a schema, a regular expression or a grammar";
            Err(ApiError::field(name, why).code("unsupported_parameter"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::vllm::grpc::engine::{ChoiceConstraint, MediaRefs, TokenizedInput};
    use super::*;
    use crate::generate::constraint::ConstraintSource;

    const LIMITS: Limits = Limits { max_n: 4, max_logprobs: 20, strict_fields: true, unloads: false };

    fn request(params: SamplingParams) -> GenerateRequest {
        let input = Some(Input::Tokenized(TokenizedInput { input_ids: vec![1, 2], ..Default::default() }));
        GenerateRequest { input, sampling_params: Some(params), ..Default::default() }
    }

    #[test]
    fn fields_get_the_values_that_their_sender_wrote() {
        let params = SamplingParams {
            temperature: Some(0.7),
            top_k: 5,
            seed: Some(-1),
            stop: vec!["x".into()],
            logit_bias: [(3, -0.1)].into(),
            skip_special_tokens: true,
            truncate_prompt_tokens: Some(-1),
            max_tokens: Some(0),
            ..Default::default()
        };
        let Ok(wanted) = read(request(params), &LIMITS) else { panic!("refused") };
        let sampling = &wanted.settings.sampling;
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (Some(0.7), Some(5), Some(1.0)));
        assert_eq!((sampling.repeat_penalty, sampling.logit_bias["3"]), (Some(1.0), -0.1));
        assert_eq!((wanted.settings.seed, wanted.texts, wanted.max_tokens), (Some(u64::MAX), 1, Some(0)));
        assert!(!wanted.settings.show_special && wanted.settings.truncate.is_some());
        assert_eq!(wanted.score, Some(0), "a prompt without an answer is computed");
        let Ok(wanted) = read(request(SamplingParams::default()), &LIMITS) else { panic!("refused") };
        assert_eq!((wanted.settings.sampling.temperature, wanted.max_tokens), (Some(1.0), None));
    }

    #[test]
    fn constraints_are_those_of_structured_outputs() {
        let of = |constraint| {
            read(request(SamplingParams { constraint: Some(constraint), ..Default::default() }), &LIMITS)
                .map(|wanted| wanted.settings.constraint)
        };
        let choices = ChoiceConstraint { choices: vec!["a".into()] };
        assert_eq!(of(Constraint::Choice(choices)), Ok(Some(ConstraintSource::Choice(vec!["a".into()]))));
        assert_eq!(of(Constraint::Regex("a".into())), Ok(Some(ConstraintSource::Regex("a".into()))));
        assert_eq!(of(Constraint::JsonSchema("{}".into())), Ok(Some(ConstraintSource::JsonSchema("{}".into()))));
        assert_eq!(of(Constraint::JsonObject(false)), Ok(None));
        assert_eq!(of(Constraint::StructuralTag("{}".into())).unwrap_err().param.as_deref(), Some("structural_tag"));
    }

    #[test]
    fn wrong_and_foreign_fields_are_refused_by_their_names() {
        let with = |change: fn(&mut GenerateRequest)| {
            let mut request = request(SamplingParams::default());
            change(&mut request);
            let names = names_of(&request);
            read(request, &LIMITS).err().and_then(|e| names.shown(e).param).unwrap_or_default()
        };
        let params = |request: &mut GenerateRequest, change: fn(&mut SamplingParams)| {
            change(request.sampling_params.as_mut().unwrap());
        };
        assert_eq!(with(|request| request.input = None), "input");
        assert_eq!(with(|request| request.media_refs = Some(MediaRefs::default())), "media_refs");
        assert_eq!(with(|request| request.data_parallel_rank = Some(1)), "data_parallel_rank");
        assert_eq!(with(|request| request.data_parallel_rank = Some(0)), "");
        assert_eq!(with(|request| request.kv_transfer_params_json = Some("{}".into())), "kv_transfer_params_json");
        type Case = (&'static str, fn(&mut SamplingParams));
        let cases: [Case; 8] = [
            ("temperature", |params| params.temperature = Some(f32::NAN)),
            ("min_p", |params| params.min_p = f32::INFINITY),
            ("n", |params| params.n = 5),
            ("logprobs", |params| params.logprobs = Some(-1)),
            ("prompt_logprobs", |params| params.prompt_logprobs = Some(21)),
            ("stop", |params| params.stop = vec![String::new()]),
            ("min_tokens", |params| (params.min_tokens, params.max_tokens) = (2, Some(1))),
            ("truncate_prompt_tokens", |params| params.truncate_prompt_tokens = Some(0)),
        ];
        for (name, change) in cases {
            let mut request = request(SamplingParams::default());
            params(&mut request, change);
            assert_eq!(read(request, &LIMITS).err().and_then(|e| e.param).as_deref(), Some(name));
        }
    }
}
