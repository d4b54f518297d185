//! Requests of a prompts file: a prompt with settings of its own, which replace those of the run.

use super::Session;
use super::sampling::SamplingTexts;
use crate::error::{Context, Error, Result};
use crate::runtime::constraint::{Constraint, ConstraintSource};
use crate::runtime::generate::Request;
use crate::runtime::sampler::Sampling;
use crate::runtime::text::{ChatTemplate, Message, UnicodeForm};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A prompt and the settings of its request. A setting that is absent is that of the run.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptRequest {
    /// Text to continue; as the message of a user if the run has a chat template.
    #[serde(alias = "text")]
    pub prompt: Option<String>,
    /// Conversation to answer, in place of `prompt`; the run must have a chat template.
    pub messages: Vec<Message>,
    /// True to continue `prompt` as it is, although the run has a chat template.
    pub raw: bool,
    /// False to leave out the special tokens that the tokenizer adds to a text, such as the beginning of the sequence.
    pub add_special_tokens: Option<bool>,
    /// Unicode form to which the texts are converted first.
    pub normalize: Option<UnicodeForm>,
    /// Largest number of tokens to generate.
    #[serde(alias = "max_tokens")]
    pub max_new: Option<usize>,
    /// Texts at which the generated text ends, in place of those of the run.
    #[serde(deserialize_with = "one_or_several")]
    pub stop: Option<Vec<String>>,
    /// Seed of this request. The seed of the run is that of its first request; request number i draws from seed + i.
    pub seed: Option<u64>,
    /// Divisor of the logits; 0 = greedy.
    pub temperature: Option<f64>,
    /// Number of most likely tokens to sample from; 0 = all.
    pub top_k: Option<usize>,
    /// Total probability of the most likely tokens to sample from.
    pub top_p: Option<f64>,
    /// Smallest probability of the tokens to sample from, as a fraction of that of the most likely one.
    pub min_p: Option<f64>,
    /// Total probability of the tokens with the most typical information content to sample from.
    pub typical_p: Option<f64>,
    /// Penalty for tokens that occurred; 1 = none.
    #[serde(alias = "repetition_penalty")]
    pub repeat_penalty: Option<f64>,
    /// Number subtracted from the logits of tokens that occurred.
    pub presence_penalty: Option<f64>,
    /// Number subtracted from the logits of tokens for each of their occurrences.
    pub frequency_penalty: Option<f64>,
    /// Numbers added to the logits of tokens; a key is an id or a text of one token.
    pub logit_bias: BTreeMap<String, f64>,
    /// Texts that are not generated.
    pub bad_words: Vec<String>,
    /// JSON schema of the generated text.
    pub json_schema: Option<Value>,
    /// Grammar of the generated text.
    pub grammar: Option<String>,
    /// Regular expression that matches the whole generated text.
    pub regex: Option<String>,
    /// Texts of which one is generated.
    pub choice: Vec<String>,
}

/// Reads a text or a list of texts.
fn one_or_several<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a text or a list of texts")]
    enum Texts {
        One(String),
        Several(Vec<String>),
    }
    Ok(Some(match Texts::deserialize(from)? {
        Texts::One(text) => vec![text],
        Texts::Several(texts) => texts,
    }))
}

impl From<String> for PromptRequest {
    fn from(prompt: String) -> PromptRequest {
        PromptRequest::new(prompt)
    }
}

impl PromptRequest {
    /// Creates the request of a text without settings.
    pub fn new(prompt: impl Into<String>) -> PromptRequest {
        PromptRequest { prompt: Some(prompt.into()), ..PromptRequest::default() }
    }

    /// Checks that there is one prompt and at most one constraint, and that no text of `stop` is empty.
    ///
    /// # Errors
    /// One of these is not the case; the message names the fields.
    pub fn check(&self) -> Result<()> {
        match (&self.prompt, self.messages.is_empty()) {
            (None, true) => return Err(Error::corrupt("found neither `prompt` nor `messages`, expected one of them")),
            (Some(_), false) => return Err(Error::corrupt("found `prompt` and `messages`, expected one of them")),
            (None, false) if self.raw => {
                return Err(Error::corrupt("found `raw` with `messages`, expected it with `prompt` only"));
            }
            _ => {}
        }
        if self.sources().count() > 1 {
            let fields = "`json_schema`, `grammar`, `regex` or `choice`";
            return Err(Error::corrupt(format!("found several constraints, expected at most one of {fields}")));
        }
        match self.stop.iter().flatten().any(String::is_empty) {
            true => Err(Error::corrupt("`stop`: found an empty text, expected at least one character")),
            false => Ok(()),
        }
    }

    /// Returns the text that stands for the prompt in reports: the prompt, or the last message.
    pub fn shown(&self) -> &str {
        let last = || self.messages.last().map(|message| message.content.as_str());
        self.prompt.as_deref().or_else(last).unwrap_or_default()
    }

    /// Returns the conversation that a chat template renders: the messages, or the prompt as the message of a user
    /// after the system text of the run; `None` if the prompt is continued as it is.
    ///
    /// # Errors
    /// A text cannot be converted to the Unicode form.
    fn conversation(&self, system: Option<&str>) -> Result<Option<Vec<Message>>> {
        let mut messages = match &self.prompt {
            _ if self.raw => return Ok(None),
            Some(prompt) => {
                let system = system.map(|text| Message::new("system", text));
                system.into_iter().chain([Message::new("user", prompt)]).collect()
            }
            None => self.messages.clone(),
        };
        if let Some(form) = self.normalize {
            for message in &mut messages {
                message.content = form.of(&message.content)?;
            }
        }
        Ok(Some(messages))
    }

    fn sources(&self) -> impl Iterator<Item = ConstraintSource> + '_ {
        let schema = self.json_schema.as_ref().map(|schema| match schema {
            Value::String(text) => ConstraintSource::JsonSchema(text.clone()),
            schema => ConstraintSource::JsonSchema(schema.to_string()),
        });
        let grammar = self.grammar.clone().map(ConstraintSource::Grammar);
        let regex = self.regex.clone().map(ConstraintSource::Regex);
        let choice = (!self.choice.is_empty()).then(|| ConstraintSource::Choice(self.choice.clone()));
        schema.into_iter().chain(grammar).chain(regex).chain(choice)
    }

    /// Returns the sampling of the request, over that of the run.
    fn sampling(&self, session: &Session, plain: Sampling) -> Result<Sampling> {
        let draws = [self.top_p, self.min_p, self.typical_p].iter().any(Option::is_some) || self.top_k.is_some();
        let unnamed = if draws && plain.temperature == 0.0 { 1.0 } else { plain.temperature };
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(unnamed),
            top_k: self.top_k.unwrap_or(plain.top_k),
            top_p: self.top_p.unwrap_or(plain.top_p),
            min_p: self.min_p.unwrap_or(plain.min_p),
            typical_p: self.typical_p.unwrap_or(plain.typical_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(plain.repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(plain.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(plain.frequency_penalty),
            ..plain
        };
        if self.logit_bias.is_empty() && self.bad_words.is_empty() {
            return Ok(sampling);
        }
        let texts = SamplingTexts {
            logit_bias: self.logit_bias.iter().map(|(token, bias)| format!("{token}={bias}")).collect(),
            banned: self.bad_words.clone(),
            dry_breakers: None,
        };
        // The sequence breakers of the run stay.
        let breakers = sampling.dry.breakers.clone();
        let mut sampling = texts.resolve(sampling, || session.tokenizer(), session.engine.config().vocab)?;
        sampling.dry.breakers = breakers;
        Ok(sampling)
    }
}

/// Returns the name of a prompt in messages.
fn name(i: usize) -> String {
    format!("prompt {i}")
}

/// Settings of a run that its requests may replace.
#[derive(Debug)]
pub struct RunSettings<'a> {
    /// Chat template that renders prompts and messages; `None` = prompts are continued as they are.
    pub template: Option<&'a ChatTemplate>,
    /// Texts that end a turn of the template, besides those of `stop`.
    pub ends: &'a [String],
    /// System text before a prompt that the template renders.
    pub system: Option<&'a str>,
    /// Request without a prompt: length, sampling, texts to stop at, constraint.
    pub plain: Request,
}

impl Session {
    /// Encodes prompts and builds their requests, each with its own settings over those of the run.
    ///
    /// # Errors
    /// A prompt has messages but the run has no template, the template fails, a prompt is too long to be encoded, or a
    /// constraint or a text of the sampling is invalid; the message names the number of the prompt.
    pub fn requests(&self, prompts: &[PromptRequest], run: &RunSettings<'_>) -> Result<Vec<Request>> {
        let mut compiled: Vec<(ConstraintSource, Arc<Constraint>)> = Vec::new();
        let ids = self.encode_requests(prompts, run)?;
        let build = |(i, (prompt, ids)): (usize, (&PromptRequest, Vec<u32>))| {
            self.request_of(prompt, ids, run, &mut compiled).tensor(&name(i))
        };
        prompts.iter().zip(ids).enumerate().map(build).collect()
    }

    fn encode_requests(&self, prompts: &[PromptRequest], run: &RunSettings<'_>) -> Result<Vec<Vec<u32>>> {
        let mut conversations = Vec::new();
        for (i, prompt) in prompts.iter().enumerate() {
            conversations.push(match run.template {
                Some(_) => prompt.conversation(run.system).tensor(&name(i))?,
                None if prompt.messages.is_empty() => None,
                None => {
                    return Err(Error::usage("found `messages`, expected `prompt` in a run without a chat template")
                        .tensor(name(i))
                        .help("add --chat-template auto, or the name of a built-in template"));
                }
            });
        }
        let rendered: Vec<Vec<Message>> = conversations.iter().flatten().cloned().collect();
        let mut rendered = match run.template {
            Some(template) if !rendered.is_empty() => self.encode_chats(template, &rendered)?,
            _ => Vec::new(),
        }
        .into_iter();
        let encode = |(i, prompt): (usize, &PromptRequest)| match &conversations[i] {
            Some(_) => Ok(rendered.next().expect("tokens for each conversation")),
            None => self.encode_raw(prompt).tensor(&name(i)),
        };
        prompts.iter().enumerate().map(encode).collect()
    }

    /// Encodes a prompt that is continued as it is.
    fn encode_raw(&self, prompt: &PromptRequest) -> Result<Vec<u32>> {
        let text = prompt.prompt.as_deref().unwrap_or_default();
        let text = prompt.normalize.map_or_else(|| Ok(text.to_string()), |form| form.of(text))?;
        self.encode_limited(&text, prompt.add_special_tokens.unwrap_or(true))
    }

    fn request_of(
        &self,
        prompt: &PromptRequest,
        ids: Vec<u32>,
        run: &RunSettings<'_>,
        compiled: &mut Vec<(ConstraintSource, Arc<Constraint>)>,
    ) -> Result<Request> {
        let plain = run.plain.clone();
        let constraint = match prompt.sources().next() {
            None => plain.constraint,
            Some(source) => Some(match compiled.iter().find(|(known, _)| *known == source) {
                Some((_, constraint)) => constraint.clone(),
                None => {
                    let constraint = self.constraint(&source)?;
                    compiled.push((source, constraint.clone()));
                    constraint
                }
            }),
        };
        let stop = prompt.stop.as_ref().unwrap_or(&plain.stop);
        let ends = if prompt.raw { &[] } else { run.ends };
        Ok(Request {
            ids,
            max_new: prompt.max_new.unwrap_or(plain.max_new),
            sampling: prompt.sampling(self, plain.sampling)?,
            seed: prompt.seed,
            stop: stop.iter().chain(ends).cloned().collect(),
            constraint,
            logprobs: plain.logprobs,
            prefix: None,
            salt: Vec::new(),
        })
    }
}
