//! `/v1/completions`.

use super::answer::{LOWEST, Usage, best_choices, failure, finish_reason, hides_end, stop_reason, token_name};
use super::body::{Body, Prompts};
use super::error::{ApiError, ApiResult};
use super::form::{Events, Form};
use super::job::Named;
use super::other_fields::Api;
use super::prepare::{Plan, Prepared, PromptSource, ShownPrompt};
use super::settings::{Limits, Settings};
use crate::generate::Likelihood;
use crate::host::model::Facts;
use crate::host::reply::{Done, Token};
use crate::session::infill::Gap;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Tokens of an answer unless the request says otherwise.
const MAX_TOKENS: usize = 16;

/// Request to continue texts.
#[derive(Debug)]
pub struct CompletionRequest {
    /// Texts to continue.
    pub sources: Vec<PromptSource>,
    /// Settings.
    pub settings: Settings,
    /// Largest number of tokens of an answer.
    pub max_tokens: usize,
    /// Whether the answer begins with the prompt.
    pub echo: bool,
    /// Number of most likely tokens that are reported with each token.
    pub logprobs: Option<usize>,
    /// Number of texts of which the best `n` are returned.
    pub best_of: usize,
}

impl CompletionRequest {
    /// Takes the fields of a body.
    ///
    /// # Errors
    /// A field has a wrong value, or two contradict each other.
    pub fn take(body: &mut Body, limits: &Limits) -> ApiResult<CompletionRequest> {
        body.begin(Api::Completions)?;
        let settings = Settings::take(body, limits)?;
        let special = body.flag("add_special_tokens", true)?;
        let sources = match body.take_prompts()? {
            None => return Err(ApiError::field("prompt", "found none, expected a text or token ids")),
            Some(Prompts::Texts(texts)) => texts.into_iter().map(|text| PromptSource::Text(text, special)).collect(),
            Some(Prompts::Ids(lists)) => lists.into_iter().map(PromptSource::Ids).collect::<Vec<_>>(),
        };
        let echo = body.flag("echo", false)?;
        let suffix = body.text("suffix")?.filter(|text| !text.is_empty());
        let sources = match suffix {
            Some(_) if echo => return Err(ApiError::field("suffix", "found it together with `echo`")),
            Some(suffix) => gaps(sources, &suffix)?,
            None => sources,
        };
        let max_tokens = body.count("max_tokens", 0, usize::MAX)?.unwrap_or(MAX_TOKENS);
        let logprobs = body.count("logprobs", 0, limits.max_logprobs)?;
        let best_of = body.count("best_of", 1, limits.max_n)?.unwrap_or(settings.n);
        if best_of < settings.n {
            return Err(ApiError::field("best_of", format!("found {best_of}, expected at least n = {}", settings.n)));
        }
        if best_of > settings.n && settings.stream {
            return Err(ApiError::field("best_of", "the best texts are known at the end only; leave `stream` out"));
        }
        Ok(CompletionRequest { sources, settings, max_tokens, echo, logprobs, best_of })
    }

    /// Returns the number of most likely tokens that the engine reports with each token of an answer.
    pub fn answer_logprobs(&self) -> Option<usize> {
        self.logprobs.or((self.best_of > self.settings.n).then_some(0))
    }

    /// Returns the number of most likely tokens that the engine reports with each token of the prompt.
    pub fn score(&self) -> Option<usize> {
        // Without an answer the prompt is computed, too.
        let scored = if self.echo { self.logprobs } else { None };
        scored.or((self.max_tokens == 0).then_some(0))
    }
}

/// Returns gaps between texts and a suffix.
fn gaps(sources: Vec<PromptSource>, suffix: &str) -> ApiResult<Vec<PromptSource>> {
    let gap = |source| match source {
        PromptSource::Text(prefix, _) => {
            Ok(PromptSource::Gap(Box::new(Gap { prefix, suffix: suffix.to_string(), ..Gap::default() })))
        }
        _ => Err(ApiError::field("suffix", "the prompt must be a text with it")),
    };
    sources.into_iter().map(gap).collect()
}

/// A text that is generated.
#[derive(Debug, Default)]
struct CompletionText {
    text: String,
    /// Bytes of `text` that were streamed.
    sent: usize,
    ids: Vec<u32>,
    /// Number of `ids` that were streamed.
    sent_ids: usize,
    logprobs: Logprobs,
    /// Sum of the log-probabilities of the tokens of the answer.
    sum: f64,
    begun: bool,
    finish: Option<&'static str>,
    stop_reason: Value,
}

/// Lists of the object `logprobs`.
#[derive(Debug, Default)]
struct Logprobs {
    /// Whether tokens are named by their ids.
    as_ids: bool,
    tokens: Vec<String>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
}

impl Logprobs {
    fn push(&mut self, facts: &Facts, id: u32, likely: Option<&Likelihood>, offset: usize) {
        self.tokens.push(token_name(facts, id, self.as_ids));
        self.text_offset.push(offset);
        self.token_logprobs.push(likely.map_or(Value::Null, |(own, _)| json!(own.logprob.max(LOWEST))));
        self.top_logprobs.push(likely.map_or(Value::Null, |(own, top)| {
            let mut named = Map::new();
            let missing = (!top.iter().any(|one| one.id == own.id)).then_some(own);
            for one in top.iter().chain(missing) {
                let text = token_name(facts, one.id, self.as_ids);
                let name = if named.contains_key(&text) { format!("token_id:{}", one.id) } else { text };
                named.insert(name, json!(one.logprob.max(LOWEST)));
            }
            Value::Object(named)
        }));
    }

    /// Removes the last tokens, which do not belong to a text of `length` characters.
    fn cut(&mut self, length: usize) {
        let kept = self.text_offset.iter().rposition(|offset| *offset < length).map_or(0, |last| last + 1);
        self.tokens.truncate(kept);
        self.token_logprobs.truncate(kept);
        self.top_logprobs.truncate(kept);
        self.text_offset.truncate(kept);
    }

    /// Appends the lists of a text that begins after `before` characters.
    fn append(&mut self, other: Logprobs, before: usize) {
        self.tokens.extend(other.tokens);
        self.token_logprobs.extend(other.token_logprobs);
        self.top_logprobs.extend(other.top_logprobs);
        self.text_offset.extend(other.text_offset.iter().map(|offset| offset + before));
    }

    fn take(&mut self) -> Value {
        let empty = Logprobs { as_ids: self.as_ids, ..Logprobs::default() };
        let Logprobs { tokens, token_logprobs, top_logprobs, text_offset, .. } = std::mem::replace(self, empty);
        json!({
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        })
    }
}

/// Answer of the endpoint.
#[derive(Debug)]
pub struct Completions {
    named: Named,
    facts: Arc<Facts>,
    request: Shown,
    /// Tokens of the request that end an answer.
    stop_ids: Vec<u32>,
    prompts: Vec<Vec<u32>>,
    /// Text of each prompt, and the characters before each of its tokens; empty without echo.
    shown_prompts: Vec<ShownPrompt>,
    texts: Vec<CompletionText>,
    usage: Usage,
}

/// Parts of the request that decide about the form of the answer.
#[derive(Debug, Clone, Copy)]
struct Shown {
    n: usize,
    best_of: usize,
    echo: bool,
    logprobs: Option<usize>,
    max_tokens: usize,
    stream: bool,
    include_usage: bool,
    continuous_usage: bool,
    return_token_ids: bool,
}

impl Completions {
    /// Creates the answer to a request that was prepared.
    pub fn new(named: Named, request: &CompletionRequest, plan: &Plan, prepared: &Prepared) -> Completions {
        let settings = &request.settings;
        let logprobs = || Logprobs { as_ids: settings.tokens_as_ids, ..Logprobs::default() };
        let texts = (0..prepared.choices.len())
            .map(|_| CompletionText { logprobs: logprobs(), ..CompletionText::default() })
            .collect();
        let prompt = prepared.prompts.iter().map(Vec::len).sum();
        Completions {
            named,
            facts: plan.facts.clone(),
            request: Shown {
                n: settings.n,
                best_of: request.best_of,
                echo: request.echo,
                logprobs: request.logprobs,
                max_tokens: request.max_tokens,
                stream: settings.stream,
                include_usage: settings.include_usage,
                continuous_usage: settings.continuous_usage,
                return_token_ids: settings.return_token_ids,
            },
            stop_ids: plan.stop_ids(),
            prompts: prepared.prompts.clone(),
            shown_prompts: prepared.shown.clone(),
            texts,
            usage: Usage { prompt, ..Usage::default() },
        }
    }

    fn prompt_of(&self, choice: usize) -> usize {
        choice / self.request.best_of
    }

    /// Begins a text with its prompt, if it is shown.
    fn begin(&mut self, choice: usize, scores: &[Likelihood]) {
        let prompt = self.prompt_of(choice);
        let text = &mut self.texts[choice];
        if std::mem::replace(&mut text.begun, true) || !self.request.echo {
            return;
        }
        let shown = &self.shown_prompts[prompt];
        text.text += &shown.text;
        if self.request.logprobs.is_some() {
            for (at, id) in self.prompts[prompt].iter().enumerate() {
                let likely = at.checked_sub(1).and_then(|before| scores.get(before));
                text.logprobs.push(&self.facts, *id, likely, shown.offsets.get(at).copied().unwrap_or(0));
            }
        }
    }

    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.named.id,
            "object": "text_completion",
            "created": self.named.created,
            "model": self.named.model,
            "system_fingerprint": self.facts.fingerprint,
            "choices": choices,
        })
    }

    /// Adds the event for the text that a choice has gained, if there is some or the choice has ended.
    fn chunk(&mut self, choice: usize, events: &mut Events) {
        let prompt = self.prompt_of(choice);
        let text = &mut self.texts[choice];
        if !self.request.stream || text.sent == text.text.len() && text.finish.is_none() {
            return;
        }
        let new = text.text[text.sent..].to_string();
        text.sent = text.text.len();
        let logprobs = self.request.logprobs.map_or(Value::Null, |_| text.logprobs.take());
        let mut part = json!({
            "index": choice,
            "text": new,
            "logprobs": logprobs,
            "finish_reason": text.finish,
            "stop_reason": text.stop_reason,
        });
        if self.request.return_token_ids {
            if text.sent_ids == 0 {
                part["prompt_token_ids"] = json!(self.prompts[prompt]);
            }
            part["token_ids"] = json!(text.ids[text.sent_ids..]);
            text.sent_ids = text.ids.len();
        }
        let mut object = self.object(json!([part]));
        if self.request.continuous_usage {
            object["usage"] = self.usage.to_json();
        } else if self.request.include_usage {
            object["usage"] = Value::Null;
        }
        events.data(|| object);
    }

    /// Returns true if the stream waits for the scores of the prompt, which are known at the end.
    fn holds(&self) -> bool {
        self.request.echo && self.request.logprobs.is_some()
    }

    /// Returns the choices that are returned: of each prompt the `n` texts with the largest mean log-probability.
    fn best(&self) -> Vec<usize> {
        let mean = |text: &CompletionText| text.sum / text.ids.len().max(1) as f64;
        let means: Vec<f64> = self.texts.iter().map(mean).collect();
        best_choices(&means, self.request.best_of, self.request.n)
    }
}

impl Form for Completions {
    fn token(&mut self, token: Token, events: &mut Events) {
        let choice = token.choice;
        if !self.holds() {
            self.begin(choice, &[]);
        }
        self.usage.generated += 1;
        let text = &mut self.texts[choice];
        text.ids.push(token.id);
        text.sum += token.likely.as_ref().map_or(0.0, |(own, _)| own.logprob);
        if self.request.logprobs.is_some() {
            let before = text.text.chars().count();
            text.logprobs.push(&self.facts, token.id, token.likely.as_ref(), before);
        }
        text.text += &token.text;
        if !self.holds() {
            self.chunk(choice, events);
        }
    }

    fn done(&mut self, done: Done, events: &mut Events) -> ApiResult<()> {
        let (choice, completion) = (done.choice, done.completion);
        if let Some(error) = failure(&completion) {
            return Err(error);
        }
        if choice.is_multiple_of(self.request.best_of) {
            self.usage.cached += completion.reused_tokens;
        }
        if hides_end(completion.finish) {
            let text = &mut self.texts[choice];
            text.logprobs.cut(text.text.chars().count());
        }
        let empty = Logprobs { as_ids: self.texts[choice].logprobs.as_ids, ..Logprobs::default() };
        let empty = CompletionText { logprobs: empty, ..CompletionText::default() };
        let answer = self.holds().then(|| std::mem::replace(&mut self.texts[choice], empty));
        self.begin(choice, &completion.scores);
        let text = &mut self.texts[choice];
        if let Some(answer) = answer {
            let before = text.text.chars().count();
            text.logprobs.append(answer.logprobs, before);
            text.text += &answer.text;
            (text.ids, text.sum) = (answer.ids, answer.sum);
        }
        text.finish = Some(if self.request.max_tokens == 0 { "length" } else { finish_reason(completion.finish) });
        text.stop_reason = stop_reason(&completion, &self.stop_ids);
        self.chunk(choice, events);
        Ok(())
    }

    fn end(&mut self, events: &mut Events) {
        if self.request.include_usage {
            events.data(|| {
                let mut object = self.object(json!([]));
                object["usage"] = self.usage.to_json();
                object
            });
        }
        events.done();
    }

    fn body(&mut self) -> Value {
        let mut choices = Vec::new();
        for (index, choice) in self.best().into_iter().enumerate() {
            let logprobs = self.request.logprobs.map_or(Value::Null, |_| self.texts[choice].logprobs.take());
            let text = &self.texts[choice];
            let mut object = json!({
                "index": index,
                "text": text.text,
                "logprobs": logprobs,
                "finish_reason": text.finish,
                "stop_reason": text.stop_reason,
            });
            if self.request.return_token_ids {
                object["token_ids"] = json!(text.ids);
                object["prompt_token_ids"] = json!(self.prompts[self.prompt_of(choice)]);
            }
            choices.push(object);
        }
        let mut object = self.object(Value::Array(choices));
        object["usage"] = self.usage.to_json();
        object
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn finish(&self) -> &'static str {
        self.texts.first().and_then(|text| text.finish).unwrap_or("none")
    }
}
