//! Prompt of a prompts file with settings of its own.

use super::Encoder;
use super::sampling::{SamplingTexts, last_n};
use crate::error::{Error, Result};
use crate::generate::constraint::ConstraintSource;
use crate::generate::sampler::{Order, Sampling, SamplingFields, Stage, Version};
use crate::generate::text::{Message, UnicodeForm, Variables};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::BTreeMap;

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
    /// Variables of the chat template, such as `enable_thinking`, over those of the run.
    pub chat_template_kwargs: Variables,
    /// Largest number of tokens to generate.
    #[serde(alias = "max_tokens")]
    pub max_new: Option<usize>,
    /// Texts at which the generated text ends, in place of those of the run.
    #[serde(deserialize_with = "one_or_several")]
    pub stop: Option<Vec<String>>,
    /// Seed of this request. The seed of the run is that of its first request; request number i draws from seed + i.
    pub seed: Option<u64>,
    /// Order of computation, 0 by default: of the next 64 prompts, those with the lowest value are computed first.
    pub priority: i32,
    /// Adapters of this request by their names in the run, with their scales; none = `[]`, absent = all of the run.
    #[serde(deserialize_with = "adapters")]
    pub adapters: Option<Vec<(String, f32)>>,
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
    /// Number of last tokens that the three penalties consider; -1 = all.
    pub repeat_last_n: Option<i64>,
    /// Factor of the penalties of DRY; 0 = off.
    pub dry_multiplier: Option<f64>,
    /// Base of DRY.
    pub dry_base: Option<f64>,
    /// Longest sequence that DRY does not penalize, in tokens.
    pub dry_allowed_length: Option<usize>,
    /// Number of last tokens in which DRY searches; -1 = all.
    pub dry_penalty_last_n: Option<i64>,
    /// Texts that a repeated sequence of DRY must not contain.
    pub dry_sequence_breakers: Option<Vec<String>>,
    /// Probability with which XTC is applied to a token; 0 = off.
    pub xtc_probability: Option<f64>,
    /// Probability from which XTC counts a token as likely.
    pub xtc_threshold: Option<f64>,
    /// Version of Mirostat, 1 or 2; 0 = off.
    pub mirostat: Option<u8>,
    /// Target of Mirostat, in bits per token.
    pub mirostat_tau: Option<f64>,
    /// Learning rate of Mirostat.
    pub mirostat_eta: Option<f64>,
    /// Order of the sampling steps: their names with commas between.
    pub samplers: Option<String>,
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

/// Reads a list of names, or of objects with `name` and `scale`.
fn adapters<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<Vec<(String, f32)>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Scaled {
        name: String,
        #[serde(default = "one")]
        scale: f32,
    }
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected names of adapters, or objects with `name` and `scale`")]
    enum PromptEntry {
        Name(String),
        Scaled(Scaled),
    }
    let entries = Vec::<PromptEntry>::deserialize(from)?.into_iter().map(|entry| match entry {
        PromptEntry::Name(name) => (name, 1.0),
        PromptEntry::Scaled(Scaled { name, scale }) => (name, scale),
    });
    Ok(Some(entries.collect()))
}

fn one() -> f32 {
    1.0
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
    pub(super) fn conversation(&self, system: Option<&str>) -> Result<Option<Vec<Message>>> {
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

    /// Returns the constraints; [`PromptRequest::check`] allows one.
    pub(super) fn sources(&self) -> impl Iterator<Item = ConstraintSource> + '_ {
        let schema = self.json_schema.as_ref().map(|schema| match schema {
            Value::String(text) => ConstraintSource::JsonSchema(text.clone()),
            schema => ConstraintSource::JsonSchema(schema.to_string()),
        });
        let grammar = self.grammar.clone().map(ConstraintSource::Grammar);
        let regex = self.regex.clone().map(ConstraintSource::Regex);
        let choice = (!self.choice.is_empty()).then(|| ConstraintSource::Choice(self.choice.clone()));
        schema.into_iter().chain(grammar).chain(regex).chain(choice)
    }

    /// Returns the sampling of the request, over that of the run. The sequence breakers of DRY are those of the run.
    ///
    /// # Errors
    /// A value has another form.
    pub fn sampling(&self, encoder: &Encoder<'_>, plain: Sampling) -> Result<Sampling> {
        let fields = SamplingFields {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repeat_last_n: last_n("repeat_last_n", self.repeat_last_n)?,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_last_n: last_n("dry_penalty_last_n", self.dry_penalty_last_n)?,
            mirostat: self.mirostat()?,
            mirostat_tau: self.mirostat_tau,
            mirostat_eta: self.mirostat_eta,
            order: self.samplers.as_deref().map(Order::parse).transpose()?,
            // That of the request is a field of its own.
            seed: None,
        };
        let texts = SamplingTexts {
            logit_bias: self.logit_bias.iter().map(|(token, bias)| format!("{token}={bias}")).collect(),
            banned: self.bad_words.clone(),
            ..SamplingTexts::default()
        };
        texts.resolve_tokens(fields.over(plain), || encoder.tokenizer(), encoder.vocab())
    }

    /// Returns true if the request has a parameter of a stage.
    pub fn names(&self, stage: Stage) -> bool {
        match stage {
            Stage::Penalties => {
                [self.repeat_penalty, self.presence_penalty, self.frequency_penalty].iter().any(Option::is_some)
            }
            Stage::Dry => self.dry_multiplier.is_some(),
            Stage::Temperature => self.temperature.is_some(),
            Stage::TopK => self.top_k.is_some(),
            Stage::TopP => self.top_p.is_some(),
            Stage::MinP => self.min_p.is_some(),
            Stage::Typical => self.typical_p.is_some(),
            Stage::Xtc => self.xtc_probability.is_some(),
        }
    }

    fn mirostat(&self) -> Result<Option<Option<Version>>> {
        Ok(match self.mirostat {
            None => None,
            Some(0) => Some(None),
            Some(1) => Some(Some(Version::One)),
            Some(2) => Some(Some(Version::Two)),
            Some(other) => return Err(Error::corrupt(format!("found {other}, expected 0, 1 or 2")).setting("mirostat")),
        })
    }

    /// Checks that no field is without effect because the step to which it belongs is off.
    ///
    /// # Errors
    /// A field is without effect; the message names it.
    pub(super) fn check_effects(&self, sampling: &Sampling) -> Result<()> {
        let penalties = [sampling.repeat_penalty - 1.0, sampling.presence_penalty, sampling.frequency_penalty];
        let penalized = penalties.iter().any(|penalty| *penalty != 0.0);
        let (dry, mirostat) = (sampling.dry.multiplier != 0.0, sampling.mirostat.is_some());
        let idle = [
            ("repeat_last_n", "a penalty", self.repeat_last_n.is_some() && !penalized),
            ("dry_base", "`dry_multiplier`", self.dry_base.is_some() && !dry),
            ("dry_allowed_length", "`dry_multiplier`", self.dry_allowed_length.is_some() && !dry),
            ("dry_penalty_last_n", "`dry_multiplier`", self.dry_penalty_last_n.is_some() && !dry),
            ("dry_sequence_breakers", "`dry_multiplier`", self.dry_sequence_breakers.is_some() && !dry),
            ("xtc_threshold", "`xtc_probability`", self.xtc_threshold.is_some() && sampling.xtc.probability == 0.0),
            ("mirostat_tau", "`mirostat`", self.mirostat_tau.is_some() && !mirostat),
            ("mirostat_eta", "`mirostat`", self.mirostat_eta.is_some() && !mirostat),
        ];
        match idle.iter().find(|(.., idle)| *idle) {
            Some((field, needed, _)) => Err(Error::corrupt(format!("`{field}` has no effect without {needed}"))),
            None => Ok(()),
        }
    }
}
