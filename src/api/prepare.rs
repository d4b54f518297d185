//! Turns requests of clients into requests for the engine. This runs on the threads that encode texts.

use super::constrain::{self, Constrained};
use super::error::{ApiError, ApiResult};
use super::settings::{Settings, Truncation};
use crate::error::{Cause, Error};
use crate::generate::sampler::{Counted, Sampling};
use crate::generate::text::chat::check_variables;
use crate::generate::text::{Message, RenderOptions, TextStream};
use crate::generate::{Ends, Request};
use crate::host::model::Facts;
use crate::runtime::adapters::AdapterSet;
use crate::session::Encoder;
use crate::session::infill::{Gap, Infill};
use crate::session::prompt_request::PromptRequest;
use crate::tools::{OutputParser, Tool, ToolChoice};
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

/// A text to continue, before it is encoded.
#[derive(Debug)]
pub enum PromptSource {
    /// A text, with or without the special tokens that the tokenizer adds.
    Text(String, bool),
    /// Token ids.
    Ids(Vec<u32>),
    /// A conversation.
    Chat(Box<Conversation>),
    /// A text, which is a conversation if the model has a chat template.
    TextOrChat(String, Box<Conversation>),
    /// A gap to fill between two texts.
    Gap(Box<Gap>),
}

impl PromptSource {
    /// Returns the name of the field that errors name.
    fn field(&self) -> &'static str {
        match self {
            PromptSource::Text(..) | PromptSource::Ids(_) | PromptSource::Gap(_) => "prompt",
            PromptSource::Chat(chat) | PromptSource::TextOrChat(_, chat) => chat.field,
        }
    }

    /// Returns the conversation; `None` for a text.
    pub fn chat(&self, facts: &Facts) -> Option<&Conversation> {
        match self {
            PromptSource::Chat(chat) => Some(chat),
            PromptSource::TextOrChat(_, chat) => Some(chat).filter(|_| facts.template.is_some()).map(Box::as_ref),
            PromptSource::Text(..) | PromptSource::Ids(_) | PromptSource::Gap(_) => None,
        }
    }
}

/// A conversation to continue.
#[derive(Debug)]
pub struct Conversation {
    /// Name of the field that errors about the messages name.
    pub field: &'static str,
    /// Name of the field with the schema of a tool, behind the number of the tool.
    pub schema_field: &'static str,
    /// Messages.
    pub messages: Vec<Message>,
    /// Tools, and how the template is rendered.
    pub options: RenderOptions,
    /// Tools that the model may call.
    pub tools: Vec<Tool>,
    /// The tools of which it must call one.
    pub choice: ToolChoice,
    /// Whether it may call several.
    pub parallel: bool,
}

/// Texts to generate, in the words of a client.
#[derive(Debug)]
pub struct Wanted {
    /// Texts to continue.
    pub sources: Vec<PromptSource>,
    /// Settings of the client.
    pub settings: Settings,
    /// Largest number of tokens of an answer; `None` = as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Number of most likely tokens that are reported with each token of an answer.
    pub logprobs: Option<usize>,
    /// Number of most likely tokens that are reported with each token of the prompt.
    pub score: Option<usize>,
    /// Whether the answer shows the prompt.
    pub echo: bool,
    /// Number of texts that are generated for each prompt.
    pub texts: usize,
}

impl Wanted {
    /// Describes one text for each prompt, without probabilities and prompts in the answer.
    pub fn new(sources: Vec<PromptSource>, settings: Settings, max_tokens: Option<usize>) -> Wanted {
        Wanted { sources, settings, max_tokens, logprobs: None, score: None, echo: false, texts: 1 }
    }

    /// Checks settings against each other.
    ///
    /// # Errors
    /// An answer must have more tokens than it may have.
    pub fn check(&self) -> ApiResult<()> {
        match self.max_tokens.filter(|most| self.settings.min_tokens > *most) {
            Some(most) => {
                let found = self.settings.min_tokens;
                let message = format!("found {found}, expected at most the {most} of `max_tokens`");
                Err(ApiError::field("min_tokens", message))
            }
            None => Ok(()),
        }
    }

    /// Adds what the model and the server decide, and returns the texts to continue apart from their description.
    pub fn plan(
        self,
        facts: Arc<Facts>,
        adapters: Vec<(String, f32)>,
        owner: Option<String>,
        seed: u64,
    ) -> (Vec<PromptSource>, Plan) {
        let Wanted { sources, settings, max_tokens, logprobs, score, echo, texts } = self;
        (sources, Plan { settings, facts, max_tokens, logprobs, score, echo, texts, adapters, owner, seed })
    }
}

/// Description of the texts that are generated for each prompt.
#[derive(Debug)]
pub struct Plan {
    /// Settings of the client.
    pub settings: Settings,
    /// Properties of the model.
    pub facts: Arc<Facts>,
    /// Largest number of tokens of an answer; `None` = as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Number of most likely tokens that are reported with each token of an answer.
    pub logprobs: Option<usize>,
    /// Number of most likely tokens that are reported with each token of the prompt.
    pub score: Option<usize>,
    /// Whether the text of the prompt is shown.
    pub echo: bool,
    /// Number of texts that are generated for each prompt.
    pub texts: usize,
    /// Names and scales of adapters.
    pub adapters: Vec<(String, f32)>,
    /// Owner of the pages of the prefix cache; `None` = shared.
    pub owner: Option<String>,
    /// Seed of the first text.
    pub seed: u64,
}

impl Plan {
    /// Returns the tokens that end an answer because the request names them, and not because the model ends there.
    pub fn stop_ids(&self) -> Vec<u32> {
        let ends_anyway = |id: &u32| !self.settings.ignore_eos && self.facts.eos.contains(id);
        self.settings.stop_tokens.iter().copied().filter(|id| !ends_anyway(id)).collect()
    }
}

/// Requests for the engine.
#[derive(Debug, Default)]
pub struct Prepared {
    /// Tokens of each prompt.
    pub prompts: Vec<Vec<u32>>,
    /// Texts to generate, those of each prompt together.
    pub choices: Vec<Request>,
    /// Text of each prompt, if it is shown.
    pub shown: Vec<ShownPrompt>,
    /// State that divides the answers to conversations into parts, one for each text.
    pub parsers: Vec<OutputParser>,
    /// Paths of the parts of schemas that cannot be enforced.
    pub ignored: Vec<String>,
}

/// Text of a prompt in an answer.
#[derive(Debug, Clone, Default)]
pub struct ShownPrompt {
    /// The text.
    pub text: String,
    /// Number of characters before each token.
    pub offsets: Vec<usize>,
}

impl ShownPrompt {
    /// Decodes a prompt; one that was a text stays as it was.
    fn new(encoder: &Encoder<'_>, source: &PromptSource, ids: &[u32], show_special: bool) -> ApiResult<ShownPrompt> {
        let tokenizer = encoder.tokenizer()?;
        let mut stream = TextStream::new(!show_special);
        let (mut text, mut offsets, mut length) = (String::new(), Vec::with_capacity(ids.len()), 0);
        for id in ids {
            offsets.push(length);
            let piece = stream.push(tokenizer, *id)?;
            length += piece.chars().count();
            text += &piece;
        }
        text += &stream.finish(tokenizer)?;
        match source {
            PromptSource::Text(own, _) => Ok(ShownPrompt { text: own.clone(), offsets }),
            _ => Ok(ShownPrompt { text, offsets }),
        }
    }
}

/// Largest number of prompt tokens of a request, counted for each of its texts.
const MOST_TOKENS: usize = 1 << 22;
/// Largest number of log-probabilities of prompts in an answer.
const MOST_SCORES: usize = 1 << 18;
/// Largest number of log-probabilities in an answer that is not streamed.
const MOST_LOGPROBS: usize = 1 << 20;

/// Result of [`prepare`]: `None` if there is no room for the adapters until other requests have ended.
pub type MaybePrepared = ApiResult<Option<Prepared>>;

/// Encodes the prompts and builds a request for each text.
///
/// # Errors
/// A prompt does not fit the context, the template refuses it, or a setting is not valid for this model.
pub fn prepare(encoder: &Encoder<'_>, sources: &[PromptSource], plan: &Plan) -> MaybePrepared {
    let Some(adapters) = adapters(encoder, plan)? else { return Ok(None) };
    let sampling = sampling(encoder, plan)?;
    let (mut prepared, mut tokens) = (Prepared::default(), 0);
    for source in sources {
        let mut ids = encode(encoder, source, plan)?;
        if let Some(truncation) = plan.settings.truncate {
            truncate(&mut ids, truncation, plan);
        }
        check_length(source.field(), &ids, plan)?;
        tokens += ids.len() * plan.texts;
        check_size(source.field(), tokens, sources.len(), plan)?;
        let chat = source.chat(&plan.facts);
        let Constrained { constraint, ignored, spent } = constrain::constraint(encoder, source, &ids, plan)?;
        if prepared.prompts.is_empty() {
            prepared.ignored = ignored;
        }
        for text in 0..plan.texts {
            let seed = plan.seed.wrapping_add((prepared.prompts.len() * plan.texts + text) as u64);
            let request = Request {
                // A constraint describes the text without a space before its first word.
                continues: constraint.is_none() && chat.is_none(),
                constraint: constraint.clone(),
                spent: if text == 0 { spent } else { Duration::ZERO },
                adapters: Some(adapters.clone()),
                ..request(ids.clone(), sampling.clone(), seed, source, plan)
            };
            encoder.check(&request).map_err(|e| ApiError::of_field(source.field(), &e))?;
            prepared.choices.push(request);
            if let Some(chat) = chat {
                let tokenizer = encoder.tokenizer()?;
                let tools = if chat.choice == ToolChoice::None { &[] } else { &chat.tools[..] };
                let style = constrain::style_of(encoder, chat, plan)?;
                let parser = OutputParser::new(&style, tools, tokenizer, &ids, seed);
                prepared.parsers.push(if plan.settings.stream { parser } else { parser.not_streamed() });
            }
        }
        if plan.echo {
            prepared.shown.push(ShownPrompt::new(encoder, source, &ids, plan.settings.show_special)?);
        }
        prepared.prompts.push(ids);
    }
    Ok(Some(prepared))
}

/// Shortens a prompt.
fn truncate(ids: &mut Vec<u32>, truncation: Truncation, plan: &Plan) {
    let room = || plan.facts.context.saturating_sub(plan.max_tokens.unwrap_or(1)).max(1);
    let most = truncation.tokens.unwrap_or_else(room);
    if truncation.keeps_beginning {
        ids.truncate(most);
    } else {
        ids.drain(..ids.len().saturating_sub(most));
    }
}

fn request(ids: Vec<u32>, sampling: Sampling, seed: u64, source: &PromptSource, plan: &Plan) -> Request {
    let (settings, facts) = (&plan.settings, &plan.facts);
    let (mut stop, mut tokens) = (settings.stop.clone(), settings.stop_tokens.clone());
    let is_chat = source.chat(facts).is_some();
    if let Some(format) = facts.template.as_ref().filter(|_| is_chat && !settings.ignore_eos) {
        stop.extend(format.end_texts.iter().cloned());
        tokens.extend(&format.end_tokens);
    }
    if let (PromptSource::Gap(_), Some(infill), false) = (source, &facts.infill, settings.ignore_eos) {
        tokens.extend(&infill.ends);
    }
    let rest = facts.context.saturating_sub(ids.len());
    Request {
        max_new: plan.max_tokens.unwrap_or(rest).min(rest),
        sampling,
        seed: Some(seed),
        stop,
        logprobs: plan.logprobs,
        score: plan.score,
        priority: settings.sampling.priority,
        salt: salt(plan),
        ends: Ends {
            ignore_eos: settings.ignore_eos,
            tokens,
            min_new: settings.min_tokens,
            include_stop: settings.include_stop,
        },
        show_special: settings.show_special,
        allowed: settings.allowed.clone().into(),
        ids,
        ..Request::default()
    }
}

/// Returns what divides the prefix cache: the owner of the pages, and the salt of the request.
fn salt(plan: &Plan) -> Vec<u8> {
    let owner = plan.owner.as_deref().map_or(String::new(), |owner| format!("key:{owner}"));
    [&(owner.len() as u64).to_le_bytes(), owner.as_bytes(), plan.settings.salt.as_bytes()].concat()
}

fn encode(encoder: &Encoder<'_>, source: &PromptSource, plan: &Plan) -> ApiResult<Vec<u32>> {
    let plain = |text: &str| encoder.encode(text, true).map_err(|e| encode_error(source.field(), &e));
    match (source, source.chat(&plan.facts)) {
        (PromptSource::Ids(ids), _) => Ok(ids.clone()),
        (PromptSource::Text(text, add_special_tokens), _) => {
            let text = normalized(text, plan)?;
            encoder.encode(&text, *add_special_tokens).map_err(|e| encode_error(source.field(), &e))
        }
        (PromptSource::Gap(gap), _) => plain(&infill(plan)?.prompt(gap)),
        (PromptSource::TextOrChat(text, _), None) => plain(&normalized(text, plan)?),
        (PromptSource::TextOrChat(_, chat) | PromptSource::Chat(chat), _) => {
            let mut messages = Cow::Borrowed(&chat.messages[..]);
            if plan.settings.sampling.normalize.is_some() {
                for message in messages.to_mut() {
                    message.content = normalized(&message.content, plan)?.into_owned();
                }
            }
            encode_chat(encoder, &plan.facts, chat, &messages)
        }
    }
}

/// Renders and encodes a conversation, whose messages may be others than its own.
///
/// # Errors
/// The model has no template, or the template refuses the conversation; the message names the field.
pub fn encode_chat(
    encoder: &Encoder<'_>,
    facts: &Facts,
    chat: &Conversation,
    messages: &[Message],
) -> ApiResult<Vec<u32>> {
    let template = &facts.template.as_ref().ok_or_else(|| no_template(chat))?.template.template;
    check_variables(&chat.options.variables).map_err(|e| ApiError::of_field("chat_template_kwargs", &e))?;
    if chat.options.tools.is_some() && !template.reads_tools() {
        let found = "the chat template of the model has no place for tools; leave them out";
        return Err(ApiError::field("tools", found).code("unsupported_parameter"));
    }
    encoder.encode_chat(template, messages, &chat.options).map_err(|e| encode_error(chat.field, &e))
}

/// Converts the error of a prompt that cannot be encoded; `field` is that of the prompt.
pub fn encode_error(field: &str, error: &Error) -> ApiError {
    match error.cause() {
        Cause::Usage(found) if found.contains("tokens") || found.contains("bytes") => {
            ApiError::of_field(field, error).code("context_length_exceeded")
        }
        // The help is about the template, but the conversation is too long.
        Cause::Corrupt(found) if found.contains("the limit for the context") => {
            ApiError::field(field, found).code("context_length_exceeded")
        }
        _ => ApiError::of_field(field, error),
    }
}

/// Converts a text to the Unicode form that the request names.
fn normalized<'a>(text: &'a str, plan: &Plan) -> ApiResult<Cow<'a, str>> {
    match plan.settings.sampling.normalize {
        None => Ok(Cow::Borrowed(text)),
        Some(form) => Ok(Cow::Owned(form.of(text).map_err(|e| ApiError::of_field("normalize", &e))?)),
    }
}

/// Returns the form of prompts for fill-in-the-middle.
fn infill(plan: &Plan) -> ApiResult<&Infill> {
    plan.facts.infill.as_ref().ok_or_else(|| {
        let message = "the tokenizer of the model has no tokens for fill-in-the-middle; use a model that was trained \
                       for it, such as Qwen2.5-Coder";
        ApiError::field("suffix", message).code("unsupported_parameter")
    })
}

/// Builds the error for a conversation with a model that has no chat template.
pub fn no_template(chat: &Conversation) -> ApiError {
    ApiError::field(chat.field, "the model has no chat template; use /v1/completions").code("no_chat_template")
}

/// Checks the tokens of the prompt in `field`.
fn check_length(field: &str, ids: &[u32], plan: &Plan) -> ApiResult<()> {
    let (tokens, context) = (ids.len(), plan.facts.context);
    let needed = tokens + usize::from(plan.max_tokens != Some(0));
    if tokens == 0 {
        return Err(ApiError::field(field, "found no token, expected at least one"));
    }
    if needed > context {
        let message = format!("found {tokens} tokens, but the context of the model is {context}");
        return Err(ApiError::field(field, message).code("context_length_exceeded"));
    }
    match ids.iter().find(|id| **id as usize >= plan.facts.vocab) {
        Some(id) => {
            let most = plan.facts.vocab;
            Err(ApiError::field(field, format!("found the token id {id}, expected an id below {most}")))
        }
        None => Ok(()),
    }
}

/// Checks that the memory of a request and of its answer is bounded. `tokens` are those of the prompts so far, which
/// are the value of `field`.
fn check_size(field: &str, tokens: usize, prompts: usize, plan: &Plan) -> ApiResult<()> {
    if tokens > MOST_TOKENS {
        let message = format!("found more than {MOST_TOKENS} tokens of all prompts, counted for each answer");
        return Err(ApiError::field(field, message).code("too_large"));
    }
    let scores = plan.score.map_or(0, |k| tokens.saturating_mul(k + 1));
    let answers = plan.max_tokens.unwrap_or(plan.facts.context).min(plan.facts.context);
    let answers = answers.saturating_mul(prompts * plan.texts);
    let logprobs = plan.logprobs.map_or(0, |k| answers.saturating_mul(k + 1));
    if scores > MOST_SCORES || logprobs > MOST_LOGPROBS && !plan.settings.stream {
        let message =
            "the answer may have too many log-probabilities; ask for fewer, for fewer tokens, or for a stream";
        return Err(ApiError::field("logprobs", message).code("too_large"));
    }
    Ok(())
}

fn adapters(encoder: &Encoder<'_>, plan: &Plan) -> ApiResult<Option<AdapterSet>> {
    if plan.adapters.is_empty() {
        return Ok(Some(AdapterSet::default()));
    }
    // The help of an error may list the adapters, of which the key may not use all.
    encoder.adapters().set(&plan.adapters).map_err(|e| match e.cause() {
        Cause::Usage(found) => ApiError::field("adapters", found),
        _ => ApiError::of_field("adapters", &e),
    })
}

fn sampling(encoder: &Encoder<'_>, plan: &Plan) -> ApiResult<Sampling> {
    let (own, facts) = (&plan.settings.sampling, &plan.facts);
    let breakers = |texts: &Option<Vec<String>>| encoder.breakers(texts.as_deref());
    let mut sampling = own.sampling(encoder, facts.sampling.clone())?;
    sampling.add_bans(&facts.sampling);
    sampling.counted = Counted::Answer;
    if sampling.top_p == 0.0 {
        // Elsewhere, 0 stands for the most likely token.
        sampling.top_p = f64::MIN_POSITIVE;
    }
    if sampling.dry.is_active() {
        sampling.dry.breakers = facts.breakers.get(own.dry_sequence_breakers.clone(), breakers)?;
    }
    leave_out_defaults(&mut sampling, own);
    sampling.validate()?;
    Ok(sampling)
}

/// Turns off the steps of the model's recommended sampling that cannot be combined with the request.
fn leave_out_defaults(sampling: &mut Sampling, own: &PromptRequest) {
    for stage in sampling.excluded().into_iter().filter(|stage| !own.names(*stage)) {
        sampling.turn_off(stage);
    }
}
