//! Fields of requests, one row for each.

use super::reference;
use crate::api::other_fields::{Api, OTHER_FIELDS, Treatment};
use serde_json::{Map, Value, json};

/// Values of a field.
#[derive(Debug, Clone, Copy)]
pub enum FieldKind {
    /// A text.
    Text,
    /// A text of at least one character.
    Name,
    /// True or false.
    Flag,
    /// A whole number of at least the first and at most the second value.
    Whole(i64, Option<i64>),
    /// A number of at least the first and at most the second value.
    Number(Option<f64>, Option<f64>),
    /// A number of more than 0 and at most this value.
    Positive(Option<f64>),
    /// Token ids, at most this many.
    Ids(Option<usize>),
    /// Texts, at most this many.
    Texts(Option<usize>),
    /// An object with any members.
    Object,
    /// A list of objects of this schema.
    Objects(&'static str),
    /// A schema of the document.
    Schema(&'static str),
}

/// A field.
#[derive(Debug)]
pub struct Field {
    /// Name.
    pub name: &'static str,
    /// Values.
    pub kind: FieldKind,
    /// Meaning.
    pub about: &'static str,
}

const fn field(name: &'static str, kind: FieldKind, about: &'static str) -> Field {
    Field { name, kind, about }
}

const ANY_WHOLE: FieldKind = FieldKind::Whole(i64::MIN, None);
const ANY_NUMBER: FieldKind = FieldKind::Number(None, None);
const NOT_NEGATIVE: FieldKind = FieldKind::Number(Some(0.0), None);
const PROBABILITY: FieldKind = FieldKind::Number(Some(0.0), Some(1.0));

/// Fields of all requests.
pub const MODEL: &[Field] = &[field("model", FieldKind::Text, "Model or adapter; without a name, the only model.")];

/// Fields of sampling.
pub const SAMPLING: &[Field] = &[
    field("temperature", NOT_NEGATIVE, "Divisor of the logits; 0 = the most likely token."),
    field("top_p", PROBABILITY, "Total probability of the most likely tokens to sample from; 0 = the most likely one."),
    field("top_k", FieldKind::Whole(-1, None), "Number of most likely tokens to sample from; 0 or -1 = all."),
    field("min_p", PROBABILITY, "Smallest probability of tokens, as a fraction of that of the most likely one."),
    field("typical_p", FieldKind::Positive(Some(1.0)), "Total probability of the most typical tokens to sample from."),
    field("repetition_penalty", FieldKind::Positive(None), "Penalty for tokens that occurred; 1 = none."),
    field("presence_penalty", ANY_NUMBER, "Number subtracted from the logits of tokens of the answer so far."),
    field("frequency_penalty", ANY_NUMBER, "Number subtracted for each occurrence in the answer so far."),
    field("repeat_last_n", FieldKind::Whole(-1, None), "Number of last tokens that the penalties consider; -1 = all."),
    field("logit_bias", FieldKind::Schema("LogitBias"), "Numbers added to the logits of tokens."),
    field("bad_words", FieldKind::Texts(Some(1024)), "Texts that are not generated."),
    field("priority", FieldKind::Whole(-(1 << 31), Some((1 << 31) - 1)), "Lower values are computed first; default 0."),
    field("normalize", FieldKind::Schema("UnicodeForm"), "Unicode form to which texts are converted first."),
    field("adapters", FieldKind::Schema("AdapterScales"), "Adapters of the answer, at most 4."),
    field(
        "samplers",
        FieldKind::Text,
        "Order of the sampling steps: their names with commas between, or a list of them.",
    ),
    field("dry_multiplier", NOT_NEGATIVE, "Factor of the penalties of DRY; 0 = off."),
    field("dry_base", FieldKind::Number(Some(1.0), None), "Base of the penalties of DRY."),
    field("dry_allowed_length", FieldKind::Whole(0, None), "Longest sequence that DRY does not penalize, in tokens."),
    field("dry_penalty_last_n", FieldKind::Whole(-1, None), "Number of last tokens in which DRY searches; -1 = all."),
    field("dry_sequence_breakers", FieldKind::Texts(None), "Texts that a repeated sequence of DRY must not contain."),
    field("xtc_probability", PROBABILITY, "Probability with which XTC is applied to a token; 0 = off."),
    field("xtc_threshold", PROBABILITY, "Probability from which XTC counts a token as likely."),
    field("mirostat", FieldKind::Whole(0, Some(2)), "Version of Mirostat; 0 = off."),
    field("mirostat_tau", NOT_NEGATIVE, "Target of Mirostat, in bits per token."),
    field("mirostat_eta", NOT_NEGATIVE, "Learning rate of Mirostat."),
];

/// Settings of all requests that generate text.
pub const SETTINGS: &[Field] = &[
    field("stream", FieldKind::Flag, "Send the answer as events while it is generated."),
    field("stream_options", FieldKind::Schema("StreamOptions"), "What the events of a stream have."),
    field("n", FieldKind::Whole(1, None), "Number of answers to each prompt, at most --max-n."),
    field("seed", ANY_WHOLE, "Seed of the first answer; answer i draws from seed + i."),
    field("stop", FieldKind::Schema("Stop"), "Texts that end an answer."),
    field("stop_token_ids", FieldKind::Ids(Some(1024)), "Tokens that end an answer."),
    field("min_tokens", FieldKind::Whole(0, None), "Number of tokens before which an answer does not end."),
    field("ignore_eos", FieldKind::Flag, "Continue behind the end tokens of the model."),
    field("include_stop_str_in_output", FieldKind::Flag, "Show the text that ended the answer."),
    field("skip_special_tokens", FieldKind::Flag, "Leave special tokens out of the answer; default true."),
    field("allowed_token_ids", FieldKind::Schema("AllowedTokens"), "Tokens that may be generated; absent = all."),
    field(
        "cache_salt",
        FieldKind::Text,
        "Shares the prefix cache only with requests of the same value, of at most 256 bytes.",
    ),
    field("response_format", FieldKind::Schema("ResponseFormat"), "Form of the answer."),
    field("structured_outputs", FieldKind::Schema("StructuredOutputs"), "Constraint on the answer."),
    field("return_token_ids", FieldKind::Flag, "Report the token ids of prompt and answer."),
    field(
        "return_tokens_as_token_ids",
        FieldKind::Flag,
        "Name the tokens of log-probabilities by their ids, as `token_id:N`.",
    ),
    field(
        "truncate_prompt_tokens",
        FieldKind::Whole(-1, None),
        "Use only this many tokens of the prompt; -1 = as many as the context holds besides the answer.",
    ),
    field(
        "truncation_side",
        FieldKind::Schema("Side"),
        "Side at which tokens of the prompt are left out; default left.",
    ),
    field("guided_json", FieldKind::Schema("SchemaOrText"), "As `structured_outputs.json`."),
    field("guided_regex", FieldKind::Text, "As `structured_outputs.regex`."),
    field("guided_choice", FieldKind::Texts(Some(1 << 16)), "As `structured_outputs.choice`."),
    field("guided_grammar", FieldKind::Text, "As `structured_outputs.grammar`."),
    field("json_schema", FieldKind::Schema("SchemaOrText"), "As `structured_outputs.json`."),
    field("grammar", FieldKind::Text, "As `structured_outputs.grammar`."),
    field("format", FieldKind::Schema("Format"), "A JSON schema of the answer, or `json`."),
];

/// Other fields of `/v1/completions`.
pub const COMPLETION: &[Field] = &[
    field("prompt", FieldKind::Schema("Prompt"), "Texts or token ids to continue, at most 64."),
    field("max_tokens", FieldKind::Whole(0, None), "Largest number of tokens of an answer; default 16."),
    field("suffix", FieldKind::Text, "Text behind the answer, for models with tokens for fill-in-the-middle."),
    field("echo", FieldKind::Flag, "Begin the answer with the prompt."),
    field("logprobs", FieldKind::Whole(0, None), "Number of most likely tokens that are reported with each token."),
    field(
        "best_of",
        FieldKind::Whole(1, None),
        "Number of texts of which the `n` most likely are returned; not streamed.",
    ),
    field("add_special_tokens", FieldKind::Flag, "Add the special tokens of the tokenizer; default true."),
];

/// Other fields of `/v1/chat/completions`.
pub const CHAT: &[Field] = &[
    field("messages", FieldKind::Objects("ChatMessage"), "The conversation."),
    field("max_completion_tokens", FieldKind::Whole(1, None), "Largest number of tokens of an answer."),
    field("max_tokens", FieldKind::Whole(1, None), "The same by its old name."),
    field("logprobs", FieldKind::Flag, "Report the log-probability of each token."),
    field("top_logprobs", FieldKind::Whole(0, None), "Number of most likely tokens that are reported with each token."),
    field("tools", FieldKind::Objects("Tool"), "Functions that the model may call."),
    field("tool_choice", FieldKind::Schema("ToolChoice"), "Whether the model calls a function; default auto."),
    field("parallel_tool_calls", FieldKind::Flag, "Whether the model may call several functions; default true."),
    field("reasoning_effort", FieldKind::Text, "Variable of the chat template."),
    field("chat_template_kwargs", FieldKind::Object, "Variables of the chat template."),
    field("add_generation_prompt", FieldKind::Flag, "End the prompt with the beginning of an answer; default true."),
    field("continue_final_message", FieldKind::Flag, "Continue the last message."),
    field("include_reasoning", FieldKind::Flag, "Show the reasoning of the model; default true."),
    field("enable_thinking", FieldKind::Flag, "Variable of the chat template: whether the model reasons."),
    field("thinking", FieldKind::Schema("Thinking"), "Whether the model reasons, as other servers have it."),
    field("reasoning", FieldKind::Schema("Reasoning"), "How much the model reasons, as other servers have it."),
];

/// Fields of `/tokenize` for a text.
pub const TOKENIZE: &[Field] = &[
    field("prompt", FieldKind::Text, "Text to encode; without it, the fields are those of a conversation."),
    field("add_special_tokens", FieldKind::Flag, "Add the special tokens of the tokenizer; default true."),
    field("return_token_strs", FieldKind::Flag, "Report the tokens as texts, too."),
];

/// Fields of `/infill`.
pub const INFILL: &[Field] = &[
    field("input_prefix", FieldKind::Text, "Text before the answer."),
    field("input_suffix", FieldKind::Text, "Text behind the answer."),
    field("input_extra", FieldKind::Objects("InfillContext"), "Other texts that the answer may refer to."),
    field("prompt", FieldKind::Text, "Beginning of the answer."),
    field("n_predict", FieldKind::Whole(-1, None), "Largest number of tokens of the answer; -1 = no limit."),
    field("repeat_penalty", FieldKind::Positive(None), "The same as `repetition_penalty`."),
    field("cache_prompt", FieldKind::Flag, "No effect: the prefix cache works by itself."),
];

/// Fields of `/detokenize`.
pub const DETOKENIZE: &[Field] = &[
    field("tokens", FieldKind::Ids(None), "Tokens to decode."),
    field("skip_special_tokens", FieldKind::Flag, "Leave special tokens out; default false."),
];

/// Fields of `/v1/load_lora_adapter`.
pub const LOAD_ADAPTER: &[Field] = &[
    field("lora_name", FieldKind::Name, "Name of the adapter for requests."),
    field("lora_path", FieldKind::Name, "Directory of the adapter, below --adapter-dir."),
    field("load_inplace", FieldKind::Flag, "Replace an adapter of the same name."),
    field("base_model_name", FieldKind::Text, "Model of the adapter; without a name, the only model."),
    field("model", FieldKind::Text, "The same as base_model_name."),
];

/// Fields of `/v1/unload_lora_adapter`.
pub const UNLOAD_ADAPTER: &[Field] = &[
    field("lora_name", FieldKind::Name, "Name of the adapter."),
    field("lora_int_id", ANY_WHOLE, "No effect: the number that clients of vLLM send."),
];

/// A request: lists of fields, the names of the fields that it must have, and the API whose names for fields of other
/// servers it knows.
pub type Fields = (&'static str, &'static [&'static [Field]], &'static [&'static str], Option<Api>);

/// Fields of all requests, by the names of their schemas.
pub const REQUESTS: &[Fields] = &[
    ("CompletionRequest", &[MODEL, COMPLETION, SAMPLING, SETTINGS], &["prompt"], Some(Api::Completions)),
    ("ChatRequest", &[MODEL, CHAT, SAMPLING, SETTINGS], &["messages"], Some(Api::Chat)),
    ("TokenizeRequest", &[MODEL, TOKENIZE, CHAT, SAMPLING, SETTINGS], &[], Some(Api::Chat)),
    ("InfillRequest", &[MODEL, INFILL, SAMPLING, SETTINGS], &["input_prefix", "input_suffix"], None),
    ("DetokenizeRequest", &[MODEL, DETOKENIZE], &["tokens"], None),
    ("LoadAdapterRequest", &[LOAD_ADAPTER], &["lora_name", "lora_path"], None),
    ("UnloadAdapterRequest", &[UNLOAD_ADAPTER], &["lora_name"], None),
];

/// Builds the schema of a request.
pub fn schema(lists: &[&[Field]], required: &[&str], api: Option<Api>) -> Value {
    let described = |field: &Field| {
        let mut schema = field.kind.schema();
        schema["description"] = json!(field.about);
        (field.name.to_string(), schema)
    };
    let mut properties: Map<String, Value> = lists.iter().copied().flatten().map(described).collect();
    for other in OTHER_FIELDS.iter().filter(|other| api.is_some_and(|api| other.apis.contains(&api))) {
        let about = match other.treatment {
            Treatment::Means(field) | Treatment::MeansLength(field) => format!("Another name of `{field}`."),
            Treatment::Inert => "No effect on the answer.".into(),
            Treatment::Refused { .. } => continue,
        };
        properties.entry(other.name).or_insert_with(|| json!({"description": about}));
    }
    let about = "Fields that are null count as absent. Unknown fields are ignored and named in the header \
                 `x-iec-ignored`, or refused with --strict-fields.";
    json!({"type": "object", "description": about, "properties": properties, "required": required})
}

impl FieldKind {
    /// Returns the JSON schema of the values.
    pub fn schema(self) -> Value {
        let with = |schema: Value, name: &str, value: Option<Value>| {
            let mut schema = schema;
            if let Some(value) = value {
                schema[name] = value;
            }
            schema
        };
        let list = |items: Value, most: Option<usize>| {
            with(json!({"type": "array", "items": items}), "maxItems", most.map(|most| json!(most)))
        };
        match self {
            FieldKind::Text => json!({"type": "string"}),
            FieldKind::Name => json!({"type": "string", "minLength": 1}),
            FieldKind::Flag => json!({"type": "boolean"}),
            FieldKind::Whole(least, most) => {
                let least = Some(least).filter(|least| *least != i64::MIN);
                let schema = with(json!({"type": "integer"}), "minimum", least.map(|least| json!(least)));
                with(schema, "maximum", most.map(|most| json!(most)))
            }
            FieldKind::Number(least, most) => {
                let schema = with(json!({"type": "number"}), "minimum", least.map(|least| json!(least)));
                with(schema, "maximum", most.map(|most| json!(most)))
            }
            FieldKind::Positive(most) => {
                let schema = json!({"type": "number", "exclusiveMinimum": 0});
                with(schema, "maximum", most.map(|most| json!(most)))
            }
            FieldKind::Ids(most) => list(json!({"type": "integer", "minimum": 0, "maximum": u32::MAX}), most),
            FieldKind::Texts(most) => list(json!({"type": "string"}), most),
            FieldKind::Object => json!({"type": "object"}),
            FieldKind::Objects(name) => list(reference("schemas", name), None),
            FieldKind::Schema(name) => json!({"allOf": [reference("schemas", name)]}),
        }
    }
}
