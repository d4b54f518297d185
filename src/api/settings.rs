//! Settings that all endpoints share which generate text.

use super::body::{Body, expected};
use super::constraint_fields;
use super::error::{ApiError, ApiResult};
use crate::generate::constraint::ConstraintSource;
use crate::session::prompt_request::PromptRequest;
use serde_json::{Map, Value, json};

/// Limits of requests.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Largest number of answers to a prompt.
    pub max_n: usize,
    /// Largest number of most likely tokens that are reported with each token.
    pub max_logprobs: usize,
    /// Whether unknown fields are refused.
    pub strict_fields: bool,
    /// Whether idle models are unloaded.
    pub unloads: bool,
}

/// Largest number of stop texts of a request.
const MOST_STOPS: usize = 16;
/// Longest stop text in bytes.
const LONGEST_STOP: usize = 256;
/// Largest number of logit biases, and of tokens in a list of tokens.
const MOST_TOKENS: usize = 1024;
/// Largest number of banned texts.
const MOST_BANNED: usize = 1024;
/// Largest number of adapters of a text.
const MOST_ADAPTERS: usize = 4;
/// Longest `cache_salt` in bytes.
const LONGEST_SALT: usize = 256;

/// Fields of sampling, with the names and meanings of a prompts file ([`PromptRequest`]).
pub(crate) const SAMPLING: [&str; 25] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "repeat_last_n",
    "logit_bias",
    "bad_words",
    "priority",
    "normalize",
    "adapters",
    "samplers",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
];

/// Lists of token ids that the library checks with the vocabulary of the model.
pub(super) const TOKEN_LISTS: [&str; 2] = ["stop_token_ids", "allowed_token_ids"];

/// Settings of a request.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Sampling, priority and adapters; absent fields are those of the model.
    pub sampling: PromptRequest,
    /// Number of answers to each prompt.
    pub n: usize,
    /// Seed of the first answer.
    pub seed: Option<u64>,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<u32>,
    /// Number of tokens before which an answer does not end.
    pub min_tokens: usize,
    /// Continue behind the end tokens of the model.
    pub ignore_eos: bool,
    /// Show the stop text.
    pub include_stop: bool,
    /// Show special tokens.
    pub show_special: bool,
    /// Tokens that may be generated; empty = all.
    pub allowed: Vec<u32>,
    /// Divides the prefix cache further.
    pub salt: String,
    /// Constraint on the text.
    pub constraint: Option<ConstraintSource>,
    /// Path of the field with its schema, if it has one.
    pub schema_field: &'static str,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether a stream ends with the number of tokens.
    pub include_usage: bool,
    /// Whether every chunk of a stream has the number of tokens so far.
    pub continuous_usage: bool,
    /// Whether token ids are reported.
    pub return_token_ids: bool,
    /// Whether tokens of reported probabilities are named by their ids.
    pub tokens_as_ids: bool,
    /// Number of tokens to which a prompt is shortened.
    pub truncate: Option<Truncation>,
}

impl Settings {
    /// Takes the settings of a body.
    ///
    /// # Errors
    /// A field has a wrong value.
    pub fn take(body: &mut Body, limits: &Limits) -> ApiResult<Settings> {
        let stream = body.flag("stream", false)?;
        let mut options = body.object("stream_options")?.unwrap_or_default();
        if !stream && !options.is_empty() {
            return Err(ApiError::field("stream_options", "it needs `stream`: true"));
        }
        let mut option = |name: &str| match options.remove(name) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(other) => Err(expected(&format!("stream_options.{name}"), "true or false", &other)),
        };
        let (include_usage, continuous_usage) = (option("include_usage")?, option("continuous_usage_stats")?);
        let (constraint, schema_field) = constraint_fields::take(body)?;
        Ok(Settings {
            sampling: take_sampling(body)?,
            n: body.count("n", 1, limits.max_n)?.unwrap_or(1),
            seed: take_seed(body)?,
            stop: take_stop(body, "stop")?,
            stop_tokens: body.ids("stop_token_ids", MOST_TOKENS)?.unwrap_or_default(),
            min_tokens: body.count("min_tokens", 0, usize::MAX)?.unwrap_or(0),
            ignore_eos: body.flag("ignore_eos", false)?,
            include_stop: body.flag("include_stop_str_in_output", false)?,
            show_special: !body.flag("skip_special_tokens", true)?,
            allowed: take_allowed(body)?,
            salt: take_salt(body)?,
            constraint,
            schema_field,
            stream,
            include_usage,
            continuous_usage,
            return_token_ids: body.flag("return_token_ids", false)?,
            tokens_as_ids: body.flag("return_tokens_as_token_ids", false)?,
            truncate: take_truncation(body)?,
        })
    }
}

/// Rule by which a prompt is shortened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncation {
    /// Number of tokens that are left; `None` = as many as the context holds besides the answer.
    pub tokens: Option<usize>,
    /// Whether the beginning of the prompt is left, and not its end.
    pub keeps_beginning: bool,
}

/// Takes to how many tokens a prompt is shortened, and at which side.
fn take_truncation(body: &mut Body) -> ApiResult<Option<Truncation>> {
    let keeps_beginning = match body.text("truncation_side")?.as_deref() {
        None | Some("left") => false,
        Some("right") => true,
        Some(other) => return Err(expected("truncation_side", "left or right", &json!(other))),
    };
    let tokens = match body.take("truncate_prompt_tokens") {
        None => return Ok(None),
        Some(value) if value == json!(-1) => None,
        Some(value) => {
            let tokens = value.as_u64().filter(|tokens| *tokens > 0).map(|tokens| tokens as usize);
            Some(tokens.ok_or_else(|| expected("truncate_prompt_tokens", "1 or more, or -1", &value))?)
        }
    };
    Ok(Some(Truncation { tokens, keeps_beginning }))
}

/// Takes the fields of sampling. Each is parsed alone first, so that an error names it.
fn take_sampling(body: &mut Body) -> ApiResult<PromptRequest> {
    let mut all = Map::new();
    for name in SAMPLING {
        let Some(value) = body.take(name) else { continue };
        let value = match name {
            // Elsewhere, -1 stands for all tokens.
            "top_k" if value == json!(-1) => json!(0),
            // The forms of llama.cpp.
            "samplers" => names_with_commas(value),
            "logit_bias" => bias_by_token(value)?,
            _ => value,
        };
        let alone = Map::from_iter([(name.to_string(), value.clone())]);
        if let Err(e) = serde_json::from_value::<PromptRequest>(Value::Object(alone)) {
            return Err(ApiError::field(name, words_of(&e)));
        }
        all.insert(name.into(), value);
    }
    let sampling: PromptRequest =
        serde_json::from_value(Value::Object(all)).map_err(|e| ApiError::invalid(e.to_string()))?;
    let checks = [
        ("logit_bias", sampling.logit_bias.len(), MOST_TOKENS),
        ("bad_words", sampling.bad_words.len(), MOST_BANNED),
        ("adapters", sampling.adapters.as_ref().map_or(0, Vec::len), MOST_ADAPTERS),
    ];
    if let Some((name, found, most)) = checks.iter().find(|(_, found, most)| found > most) {
        return Err(ApiError::field(name, format!("found {found} entries, expected at most {most}")));
    }
    match sampling.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(*bias)) {
        Some((token, bias)) => {
            Err(ApiError::field("logit_bias", format!("found {bias} for `{token}`, expected -100 to 100")))
        }
        None => Ok(sampling),
    }
}

/// Returns a list of names as a text with commas between them.
fn names_with_commas(value: Value) -> Value {
    let names = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
    names.map(|names| json!(names.join(","))).unwrap_or(value)
}

/// Returns logit biases as an object by token; a list has pairs of a token (an id or a text) and a number or false,
/// which excludes the token.
fn bias_by_token(value: Value) -> ApiResult<Value> {
    let members: Map<String, Value> = match value {
        Value::Array(list) => {
            let pair = |pair: &Value| {
                let [token, bias] = pair.as_array()?.as_slice() else { return None };
                let token = token.as_str().map_or_else(|| token.to_string(), String::from);
                Some((token, if *bias == json!(false) { json!(-100) } else { bias.clone() }))
            };
            let pairs: Option<_> = list.iter().map(pair).collect();
            pairs
                .ok_or_else(|| ApiError::field("logit_bias", "expected an object, or a list of tokens with numbers"))?
        }
        Value::Object(members) => members,
        other => return Err(expected("logit_bias", "an object of tokens and numbers", &other)),
    };
    match members.contains_key("") {
        true => Err(ApiError::field("logit_bias", "found an empty key, expected a token id or a text of one token")),
        false => Ok(Value::Object(members)),
    }
}

/// Returns the message of an error about a value, in the form of other messages.
fn words_of(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let kinds = ["invalid type: ", "invalid value: "];
    kinds.iter().find_map(|kind| text.strip_prefix(kind)).map_or(text.clone(), |rest| format!("found {rest}"))
}

/// Takes the seed; a negative one is the number of the same bits.
fn take_seed(body: &mut Body) -> ApiResult<Option<u64>> {
    let Some(value) = body.take("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    seed.map(Some).ok_or_else(|| expected("seed", "a whole number", &value))
}

/// Takes a text or a list of texts at which answers end.
///
/// # Errors
/// The field is something else, or there are too many, or one is empty or too long.
pub fn take_stop(body: &mut Body, name: &str) -> ApiResult<Vec<String>> {
    let stops = match body.take(name) {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![text],
        Some(value) => {
            let text = |value: &Value| value.as_str().map(String::from);
            let texts: Option<Vec<String>> = value.as_array().and_then(|list| list.iter().map(text).collect());
            texts.ok_or_else(|| expected(name, "a text or a list of texts", &value))?
        }
    };
    if stops.len() > MOST_STOPS {
        return Err(ApiError::field(name, format!("found {} texts, expected at most {MOST_STOPS}", stops.len())));
    }
    match stops.iter().find(|stop| stop.is_empty() || stop.len() > LONGEST_STOP) {
        Some(stop) => {
            let found = stop.len();
            Err(ApiError::field(name, format!("found a text of {found} bytes, expected 1 to {LONGEST_STOP}")))
        }
        None => Ok(stops),
    }
}

fn take_allowed(body: &mut Body) -> ApiResult<Vec<u32>> {
    let Some(mut ids) = body.ids("allowed_token_ids", 1 << 16)? else { return Ok(Vec::new()) };
    if ids.is_empty() {
        return Err(ApiError::field("allowed_token_ids", "found no token, expected at least one"));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn take_salt(body: &mut Body) -> ApiResult<String> {
    let salt = body.text("cache_salt")?.unwrap_or_default();
    match salt.len() > LONGEST_SALT {
        true => Err(ApiError::field("cache_salt", format!("expected at most {LONGEST_SALT} bytes"))),
        false => Ok(salt),
    }
}

/// Reads the object `response_format`. A schema without `"strict": true` is followed as far as it can be enforced; with
/// it, objects have no properties but those that it lists, unless it says so.
///
/// # Errors
/// Its type is unknown, or its schema is missing.
pub fn of_format(format: &Map<String, Value>) -> ApiResult<Option<ConstraintSource>> {
    let name = "response_format";
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => {
            // Llama.cpp has a schema here.
            let schema = format.get("schema").filter(|schema| schema.is_object());
            Ok(Some(match schema {
                Some(schema) => ConstraintSource::JsonSchemaHint(schema.to_string()),
                None => ConstraintSource::JsonSchema(r#"{"type": "object"}"#.into()),
            }))
        }
        Some("json_schema") => {
            // The Responses API has the schema in the format itself.
            let schema = format.get("json_schema").and_then(|inner| inner.get("schema")).or(format.get("schema"));
            let schema = schema.filter(|schema| schema.is_object() || schema.is_boolean());
            let schema = schema.ok_or_else(|| ApiError::field(name, "found no schema in `json_schema.schema`"))?;
            let strict = format.get("json_schema").unwrap_or(&Value::Null).get("strict").or(format.get("strict"));
            Ok(Some(match strict == Some(&Value::Bool(true)) {
                true => ConstraintSource::ClosedJsonSchema(schema.to_string()),
                false => ConstraintSource::JsonSchemaHint(schema.to_string()),
            }))
        }
        _ => Err(ApiError::field(name, "expected the type text, json_object or json_schema")),
    }
}

/// Reads the object `structured_outputs`; returns the name of its only member with it.
///
/// # Errors
/// It has another form.
pub fn of_structured(mut structured: Map<String, Value>) -> ApiResult<(String, ConstraintSource)> {
    structured.retain(|_, value| !value.is_null());
    let mut members = structured.into_iter();
    let expected =
        || ApiError::field("structured_outputs", "expected exactly one of `json`, `regex`, `grammar` and `choice`");
    let (Some((kind, value)), None) = (members.next(), members.next()) else { return Err(expected()) };
    if !["json", "regex", "grammar", "choice"].contains(&kind.as_str()) {
        return Err(expected());
    }
    let source = constraint_fields::of_value(&format!("structured_outputs.{kind}"), &kind, value)?;
    source.map(|source| (kind, source)).ok_or_else(expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::other_fields::Api;

    const LIMITS: Limits = Limits { max_n: 4, max_logprobs: 20, strict_fields: true, unloads: true };

    fn settings(text: &str) -> ApiResult<Settings> {
        let mut body = Body::parse(text.as_bytes())?;
        body.begin(Api::Completions)?;
        let settings = Settings::take(&mut body, &LIMITS)?;
        body.rest(true).map(|_| settings)
    }

    #[test]
    fn fields_have_the_names_of_openai_and_vllm() {
        let all = settings(
            r#"{"temperature": 0.5, "top_k": -1, "n": 2, "seed": -1, "stop": "x", "stop_token_ids": [3],
                "min_tokens": 2, "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true},
                "logit_bias": {"5": -100}, "bad_words": ["no"], "allowed_token_ids": [4, 2, 4], "cache_salt": "s",
                "include_stop_str_in_output": true, "skip_special_tokens": false, "repetition_penalty": 1.1,
                "adapters": [{"name": "a", "scale": 0.5}], "priority": 3, "truncate_prompt_tokens": 7,
                "truncation_side": "right",
                "response_format": {"type": "json_object"}, "user": "u", "top_p": null}"#,
        )
        .unwrap();
        assert_eq!((all.sampling.temperature, all.sampling.top_k, all.n), (Some(0.5), Some(0), 2));
        assert_eq!(
            (all.seed, all.stop.as_slice(), all.stop_tokens.as_slice()),
            (Some(u64::MAX), &["x".into()][..], &[3][..])
        );
        assert_eq!((all.allowed.as_slice(), all.sampling.priority), (&[2, 4][..], 3));
        assert_eq!(all.truncate, Some(Truncation { tokens: Some(7), keeps_beginning: true }));
        let pairs = settings(r#"{"logit_bias": [[5, 1.5], ["a", false]], "samplers": ["top_k", "min_p"]}"#).unwrap();
        let biases = [("5".to_string(), 1.5), ("a".to_string(), -100.0)];
        assert_eq!(pairs.sampling.logit_bias.into_iter().collect::<Vec<_>>(), biases);
        assert_eq!(pairs.sampling.samplers.as_deref(), Some("top_k,min_p"));
        assert!(all.stream && all.include_usage && all.ignore_eos && all.include_stop && all.show_special);
        assert_eq!(all.sampling.adapters, Some(vec![("a".into(), 0.5)]));
        assert!(matches!(all.constraint, Some(ConstraintSource::JsonSchema(_))));
    }

    #[test]
    fn strict_schemas_are_closed_and_others_are_hints() {
        let of = |format: &str| settings(&format!(r#"{{"response_format": {format}}}"#)).unwrap().constraint.unwrap();
        let named = r#"{"type": "json_schema", "json_schema": {"name": "a", "strict": STRICT, "schema": {}}}"#;
        let closed = ConstraintSource::ClosedJsonSchema("{}".into());
        assert_eq!(of(&named.replace("STRICT", "true")), closed);
        assert_eq!(of(r#"{"type": "json_schema", "strict": true, "schema": {}}"#), closed);
        for not in ["false", "null"] {
            assert_eq!(of(&named.replace("STRICT", not)), ConstraintSource::JsonSchemaHint("{}".into()));
        }
    }

    #[test]
    fn wrong_values_are_refused_by_the_name_of_their_field() {
        let cases = [
            (r#"{"temperature": "hot"}"#, "temperature"),
            (r#"{"n": 0}"#, "n"),
            (r#"{"n": 5}"#, "n"),
            (r#"{"seed": 1.5}"#, "seed"),
            (r#"{"stop": [1]}"#, "stop"),
            (r#"{"stop": ""}"#, "stop"),
            (r#"{"logit_bias": {"1": 101}}"#, "logit_bias"),
            (r#"{"allowed_token_ids": []}"#, "allowed_token_ids"),
            (r#"{"stream": 1}"#, "stream"),
            (r#"{"stream": true, "stream_options": {"include_usage": 1}}"#, "stream_options.include_usage"),
            (r#"{"stream_options": {"include_usage": true}}"#, "stream_options"),
            (r#"{"truncate_prompt_tokens": 0}"#, "truncate_prompt_tokens"),
            (r#"{"truncation_side": "both"}"#, "truncation_side"),
            (r#"{"logit_bias": {"": 1}}"#, "logit_bias"),
            (r#"{"logit_bias": [1]}"#, "logit_bias"),
            (r#"{"response_format": {"type": "xml"}}"#, "response_format"),
            (r#"{"response_format": {"type": "json_schema"}}"#, "response_format"),
            (r#"{"structured_outputs": {"json": {}, "regex": "a"}}"#, "structured_outputs"),
            (r#"{"structured_outputs": {"choice": "a"}}"#, "structured_outputs.choice"),
            (r#"{"adapters": ["a", "b", "c", "d", "e"]}"#, "adapters"),
            (r#"{"min_tokens": -1}"#, "min_tokens"),
        ];
        for (text, field) in cases {
            let error = settings(text).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{text}: {error:?}");
        }
    }
}
