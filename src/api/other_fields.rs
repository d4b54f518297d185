//! Fields that other servers have: names for what this server has under another name, fields that would change the
//! answer and that this server does not have, and fields without effect on the answer.
//!
//! All other fields that an endpoint does not read are unknown: they are ignored and named, or refused.

use super::body::Body;
use super::error::{ApiError, ApiResult};
use serde_json::Value;

/// API of an endpoint that generates text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
}

/// Treatment of a field.
#[derive(Debug, Clone, Copy)]
pub enum Treatment {
    /// It is another name of this field.
    Means(&'static str),
    /// It is another name of this field, but -1 stands for as many tokens as the context holds.
    MeansLength(&'static str),
    /// It is an error, for this reason, unless its value is null, false, empty or one of `harmless`.
    Refused {
        /// Numbers with which the field has no effect.
        harmless: &'static [f64],
        /// Texts with which the field has no effect.
        harmless_texts: &'static [&'static str],
        /// Reason, and what to do.
        why: &'static str,
    },
    /// It has no effect on the answer.
    Inert,
}

/// A field of other servers.
#[derive(Debug)]
pub struct OtherField {
    /// Name.
    pub name: &'static str,
    /// APIs in which it is known.
    pub apis: &'static [Api],
    /// Its treatment.
    pub treatment: Treatment,
}

const ALL: &[Api] = &[Api::Completions, Api::Chat, Api::Responses, Api::Messages];
const OPENAI: &[Api] = &[Api::Completions, Api::Chat, Api::Responses];
const TEXTS: &[Api] = &[Api::Completions, Api::Chat];
/// The answer of the Responses API repeats some fields without effect, so its reader takes them.
const NOT_RESPONSES: &[Api] = &[Api::Completions, Api::Chat, Api::Messages];

const NOT_SUPPORTED: &str = "this server does not support it";

const fn means(name: &'static str, apis: &'static [Api], field: &'static str) -> OtherField {
    OtherField { name, apis, treatment: Treatment::Means(field) }
}

const fn refused(
    name: &'static str,
    apis: &'static [Api],
    harmless: &'static [f64],
    harmless_texts: &'static [&'static str],
    why: &'static str,
) -> OtherField {
    OtherField { name, apis, treatment: Treatment::Refused { harmless, harmless_texts, why } }
}

const fn absent(name: &'static str, harmless: &'static [f64]) -> OtherField {
    refused(name, ALL, harmless, &[], NOT_SUPPORTED)
}

const fn inert(name: &'static str, apis: &'static [Api]) -> OtherField {
    OtherField { name, apis, treatment: Treatment::Inert }
}

/// The fields.
pub const OTHER_FIELDS: &[OtherField] = &[
    // Names of llama.cpp, Text Generation Inference, transformers, Mistral and earlier APIs of OpenAI.
    means("repeat_penalty", ALL, "repetition_penalty"),
    means("typ_p", ALL, "typical_p"),
    means("random_seed", ALL, "seed"),
    means("min_new_tokens", ALL, "min_tokens"),
    means("stop_sequences", OPENAI, "stop"),
    means("stop_strings", ALL, "stop"),
    OtherField { name: "n_predict", apis: ALL, treatment: Treatment::MeansLength("max_tokens") },
    OtherField { name: "num_predict", apis: ALL, treatment: Treatment::MeansLength("max_tokens") },
    means("max_new_tokens", ALL, "max_tokens"),
    means("max_completion_tokens", &[Api::Completions], "max_tokens"),
    means("max_output_tokens", TEXTS, "max_tokens"),
    means("n_probs", &[Api::Completions], "logprobs"),
    // Parts of the answer that this server does not make.
    refused("suffix", &[Api::Chat, Api::Responses, Api::Messages], &[], &[""], "use it with /v1/completions"),
    absent("audio", &[]),
    refused("modalities", ALL, &[], &["text"], "this server answers with text only"),
    absent("web_search_options", &[]),
    refused("functions", ALL, &[], &[], "define `tools` in its place"),
    refused("function_call", ALL, &[], &["none"], "use `tools` and `tool_choice` in its place"),
    refused("prompt_logprobs", ALL, &[], &[], "use `echo` with `logprobs` of /v1/completions in its place"),
    refused("echo", &[Api::Chat, Api::Responses, Api::Messages], &[], &[], "this endpoint does not repeat its input"),
    refused("best_of", &[Api::Chat, Api::Responses, Api::Messages], &[1.0], &[], "use it with /v1/completions"),
    refused("n_probs", &[Api::Chat, Api::Responses, Api::Messages], &[0.0], &[], "use `top_logprobs` in its place"),
    absent("post_sampling_probs", &[]),
    absent("response_fields", &[]),
    absent("n_indent", &[0.0]),
    refused("t_max_predict_ms", ALL, &[0.0, -1.0], &[], "use the header `x-iec-deadline-ms` in its place"),
    refused("reasoning_format", ALL, &[], &["auto", "deepseek"], "reasoning is always divided from the content"),
    // Inputs besides texts, and other prompts.
    absent("prompt_embeds", &[]),
    absent("image_data", &[]),
    absent("multimodal_data", &[]),
    absent("mm_processor_kwargs", &[]),
    refused("chat_template", ALL, &[], &[], "the template is that of the model"),
    refused("add_special_tokens", &[Api::Chat, Api::Responses, Api::Messages], &[], &[], "the template adds them"),
    refused("documents", ALL, &[], &[], "put the texts of the documents into a message"),
    refused("lora", ALL, &[], &[], "name adapters in `adapters`, or one in `model`"),
    refused("extra_body", ALL, &[], &[], "send its members as fields of the request"),
    refused("options", ALL, &[], &[], "send its members as fields of the request"),
    // Other ways to generate.
    absent("use_beam_search", &[]),
    absent("num_beams", &[1.0]),
    absent("length_penalty", &[1.0]),
    absent("logits_processors", &[]),
    absent("structural_tag", &[]),
    absent("guided_whitespace_pattern", &[]),
    absent("no_repeat_ngram_size", &[0.0]),
    absent("encoder_repetition_penalty", &[1.0]),
    absent("guidance_scale", &[1.0]),
    absent("negative_prompt", &[]),
    absent("penalty_alpha", &[0.0]),
    absent("top_n_sigma", &[0.0, -1.0]),
    absent("dynatemp_range", &[0.0]),
    absent("tfs_z", &[1.0]),
    absent("top_a", &[0.0]),
    absent("epsilon_cutoff", &[0.0]),
    absent("eta_cutoff", &[0.0]),
    absent("smoothing_factor", &[0.0]),
    // Names for accounting, and hints for caches that this server does not need.
    inert("user", NOT_RESPONSES),
    inert("store", ALL),
    inert("metadata", NOT_RESPONSES),
    inert("service_tier", ALL),
    inert("safety_identifier", NOT_RESPONSES),
    inert("prompt_cache_key", NOT_RESPONSES),
    inert("prompt_cache_retention", ALL),
    inert("request_id", ALL),
    inert("cache_prompt", ALL),
];

/// Renames, refuses and drops the fields of other servers in the body of a request to `api`.
///
/// # Errors
/// A field would change the answer and cannot be honoured, or it is there by two names.
pub fn translate(body: &mut Body, api: Api) -> ApiResult<()> {
    for field in OTHER_FIELDS.iter().filter(|field| field.apis.contains(&api)) {
        match field.treatment {
            Treatment::Means(meant) => body.rename(field.name, meant, |value| value)?,
            Treatment::MeansLength(meant) => {
                let length = |value: Value| if value.as_i64() == Some(-1) { Value::from(usize::MAX) } else { value };
                body.rename(field.name, meant, length)?;
            }
            Treatment::Inert => drop(body.take(field.name)),
            Treatment::Refused { harmless, harmless_texts, why } => {
                let Some(value) = body.take(field.name) else { continue };
                let is_harmless =
                    value.as_f64().is_some_and(|number| harmless.contains(&number)) || has_only(&value, harmless_texts);
                if !is_off(&value) && !is_harmless {
                    return Err(ApiError::field(field.name, why).code("unsupported_parameter"));
                }
            }
        }
    }
    Ok(())
}

/// Returns true for values that stand for an absent field.
pub fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(members) => members.is_empty(),
        _ => false,
    }
}

/// Returns true if a value is one of the texts, or a list of them.
fn has_only(value: &Value, texts: &[&str]) -> bool {
    match value {
        Value::String(text) => texts.contains(&text.as_str()),
        Value::Array(list) => list.iter().all(|one| one.as_str().is_some_and(|text| texts.contains(&text))),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(text: &str, api: Api) -> ApiResult<Body> {
        let mut body = Body::parse(text.as_bytes()).unwrap();
        translate(&mut body, api).map(|()| body)
    }

    #[test]
    fn a_field_by_another_name_is_read_by_its_own() {
        let mut body = translated(r#"{"repeat_penalty": 1.5, "max_new_tokens": 3, "stop": null}"#, Api::Chat).unwrap();
        assert_eq!(body.take("repetition_penalty"), Some(Value::from(1.5)));
        assert_eq!(body.take("max_tokens"), Some(Value::from(3)));
        let error = body.names.shown(ApiError::field("repetition_penalty", "found 1.5"));
        assert_eq!(
            (error.param.as_deref(), error.message.as_str()),
            (Some("repeat_penalty"), "`repeat_penalty`: found 1.5")
        );
        let both = translated(r#"{"repeat_penalty": 1.5, "repetition_penalty": 1.2}"#, Api::Chat).unwrap_err();
        assert_eq!(both.param.as_deref(), Some("repeat_penalty"));
        assert!(translated(r#"{"n_predict": 3, "max_tokens": 3}"#, Api::Completions).is_ok());
        let mut all = translated(r#"{"n_predict": -1}"#, Api::Completions).unwrap();
        assert_eq!(all.count("max_tokens", 0, usize::MAX), Ok(Some(usize::MAX)));
        let mut messages = translated(r#"{"stop_sequences": ["x"]}"#, Api::Messages).unwrap();
        assert!(messages.take("stop_sequences").is_some());
    }

    #[test]
    fn every_field_that_would_change_the_answer_is_refused_unless_it_is_off() {
        for field in OTHER_FIELDS {
            let Treatment::Refused { harmless, harmless_texts, .. } = field.treatment else { continue };
            let texts = harmless_texts.iter().map(|text| Value::from(*text));
            let off = [Value::Null, Value::Bool(false), Value::Array(Vec::new())].into_iter();
            for value in off.chain(texts).chain(harmless.iter().map(|number| Value::from(*number))) {
                let body = serde_json::json!({ (field.name): value }).to_string();
                let rest = translated(&body, field.apis[0]).unwrap().rest(true);
                assert_eq!(rest, Ok(Vec::new()), "{body}");
            }
            let body = serde_json::json!({ (field.name): 7.5 }).to_string();
            let error = translated(&body, field.apis[0]).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(field.name), Some("unsupported_parameter")));
        }
    }

    #[test]
    fn no_api_has_a_field_twice_and_every_meaning_is_a_field() {
        for (i, field) in OTHER_FIELDS.iter().enumerate() {
            for other in &OTHER_FIELDS[i + 1..] {
                let both = field.apis.iter().any(|api| other.apis.contains(api));
                assert!(field.name != other.name || !both, "{}", field.name);
            }
            if let Treatment::Means(meant) = field.treatment {
                assert!(OTHER_FIELDS.iter().all(|other| other.name != meant || !other.apis.contains(&field.apis[0])));
            }
        }
    }
}
