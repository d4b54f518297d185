//! Answer of a call: a stream of messages. A streamed answer has a chunk for the tokens that have come since the last
//! one, and a last message for each text with all of its tokens; another one has the last messages only.
//!
//! Tokens are ids. Those of a stop text and the end token of the model are among them, as in vLLM.

use super::proto::vllm::grpc::engine::generate_complete::MatchedStop;
use super::proto::vllm::grpc::engine::generate_response::Response as Part;
use super::proto::vllm::grpc::engine::{
    GenerateComplete, GenerateResponse, GenerateStreamChunk, InputLogProbs, InputTokenLogProb, OutputLogProbs,
    TopLogProbs,
};
use super::running::Entry;
use super::status::status_of;
use crate::api::answer::{Usage, failure, finish_reason, stop_reason};
use crate::api::error::{ApiError, ApiResult};
use crate::generate::Likelihood;
use crate::host::model::Ticket;
use crate::host::reply::{Done, Refusal, Reply, Token};
use crate::serve::log::Record;
use crate::serve::submit::Ready;
use serde_json::Value;
use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::Status;
use tonic::codegen::tokio_stream::Stream;

/// Largest number of messages that are built ahead of the connection.
const AHEAD: usize = 64;

/// Answer of a call. When it is dropped, the call is cancelled unless it has ended.
pub struct AnswerStream {
    /// `None` once all texts have ended.
    ticket: Option<Ticket>,
    texts: Texts,
    messages: VecDeque<GenerateResponse>,
    failed: Option<ApiError>,
    record: Record,
    entry: Entry,
}

/// Texts of an answer.
#[derive(Debug)]
pub struct Texts {
    /// Tokens of the prompt.
    prompt: Vec<u32>,
    texts: Vec<Text>,
    /// Number of texts that have not ended.
    left: usize,
    is_stream: bool,
    /// Number of most likely tokens that are reported with each token of the prompt.
    scored: Option<usize>,
    /// Tokens of the request that end a text.
    stop_ids: Vec<u32>,
    max_tokens: Option<usize>,
    usage: Usage,
    finish: &'static str,
}

/// A text, as far as it was generated.
#[derive(Debug, Default)]
struct Text {
    ids: Vec<u32>,
    /// Log-probabilities that were not sent.
    logprobs: Option<OutputLogProbs>,
    has_ended: bool,
}

impl Texts {
    /// Creates the texts of a request that was prepared. `scored` is the number of most likely tokens that the client
    /// wants to see with each token of the prompt.
    pub fn new(ready: &Ready, scored: Option<usize>) -> Texts {
        let (plan, prepared) = (&ready.plan, &ready.prepared);
        let prompt = prepared.prompts.first().cloned().unwrap_or_default();
        let usage = Usage { prompt: prompt.len(), ..Usage::default() };
        let is_stream = plan.settings.stream;
        let (stop_ids, max_tokens) = (plan.stop_ids(), plan.max_tokens);
        Texts {
            scored,
            is_stream,
            stop_ids,
            max_tokens,
            usage,
            ..Texts::without_prompt(prepared.choices.len(), prompt)
        }
    }

    /// Creates the texts of a call that ends before its prompt is encoded.
    pub fn without_prompt(count: usize, prompt: Vec<u32>) -> Texts {
        Texts {
            prompt,
            texts: (0..count).map(|_| Text::default()).collect(),
            left: count,
            is_stream: false,
            scored: None,
            stop_ids: Vec::new(),
            max_tokens: None,
            usage: Usage::default(),
            finish: "abort",
        }
    }

    /// Adds a token. It joins the chunk before it, if that is one of the same text.
    fn token(&mut self, token: Token, messages: &mut VecDeque<GenerateResponse>) {
        let text = &mut self.texts[token.choice];
        text.ids.push(token.id);
        self.usage.generated += 1;
        if let Some(likely) = &token.likely {
            push(text.logprobs.get_or_insert_default(), likely);
        }
        // The probabilities of the prompt belong into the first chunk, and are known at the end.
        if !self.is_stream || self.scored.is_some() {
            return;
        }
        let (index, new) = (token.choice as u32, text.logprobs.take());
        if let Some(GenerateResponse { response: Some(Part::Chunk(last)) }) = messages.back_mut()
            && last.index == index
        {
            last.token_ids.push(token.id);
            last.completion_tokens += 1;
            match (&mut last.output_logprobs, new) {
                (Some(all), Some(new)) => append(all, new),
                (all, new) => *all = new,
            }
            return;
        }
        messages.push_back(self.chunk(index, vec![token.id], new, None));
    }

    /// Ends a text.
    fn done(&mut self, done: Done, messages: &mut VecDeque<GenerateResponse>) -> ApiResult<()> {
        let (choice, completion) = (done.choice, done.completion);
        if let Some(error) = failure(&completion) {
            return Err(error);
        }
        self.left -= 1;
        let finish = if self.max_tokens == Some(0) { "length" } else { finish_reason(completion.finish) };
        if choice == 0 {
            self.usage.cached = completion.reused_tokens;
            self.finish = finish;
        }
        let scores = self.scored.map(|most| of_prompt(&self.prompt, &completion.scores, most > 0));
        let text = &mut self.texts[choice];
        text.has_ended = true;
        let (ids, logprobs) = (std::mem::take(&mut text.ids), text.logprobs.take());
        let matched = match stop_reason(&completion, &self.stop_ids) {
            Value::String(text) => Some(MatchedStop::MatchedStopStr(text)),
            Value::Number(id) => id.as_u64().map(|id| MatchedStop::MatchedTokenId(id as u32)),
            _ => None,
        };
        let mut last = self.complete(choice, ids, finish);
        (last.cached_tokens, last.matched_stop) = (completion.reused_tokens as u32, matched);
        let drafts = completion.drafts.total();
        (last.spec_draft_tokens, last.spec_accepted_tokens) = (drafts.tokens as u32, drafts.accepted as u32);
        match (self.is_stream, &scores) {
            (true, Some(_)) => {
                messages.push_back(self.chunk(choice as u32, last.output_ids.clone(), logprobs, scores));
            }
            (true, None) => {}
            (false, _) => (last.output_logprobs, last.input_logprobs) = (logprobs, scores),
        }
        messages.push_back(GenerateResponse { response: Some(Part::Complete(last)) });
        Ok(())
    }

    /// Ends all texts that have not ended, because the client aborted the call.
    fn abort(&mut self, messages: &mut VecDeque<GenerateResponse>) {
        for choice in 0..self.texts.len() {
            let text = &mut self.texts[choice];
            if std::mem::replace(&mut text.has_ended, true) {
                continue;
            }
            let (ids, logprobs) = (std::mem::take(&mut text.ids), text.logprobs.take());
            let mut last = self.complete(choice, ids, "abort");
            last.output_logprobs = logprobs.filter(|_| !self.is_stream);
            messages.push_back(GenerateResponse { response: Some(Part::Complete(last)) });
        }
        (self.left, self.finish) = (0, "abort");
    }

    fn chunk(
        &self,
        index: u32,
        token_ids: Vec<u32>,
        output_logprobs: Option<OutputLogProbs>,
        input_logprobs: Option<InputLogProbs>,
    ) -> GenerateResponse {
        let (prompt_tokens, completion_tokens) = (self.prompt.len() as u32, token_ids.len() as u32);
        let chunk = GenerateStreamChunk {
            token_ids,
            prompt_tokens,
            completion_tokens,
            cached_tokens: self.usage.cached as u32,
            output_logprobs,
            input_logprobs,
            index,
        };
        GenerateResponse { response: Some(Part::Chunk(chunk)) }
    }

    fn complete(&self, choice: usize, output_ids: Vec<u32>, finish: &str) -> GenerateComplete {
        GenerateComplete {
            completion_tokens: output_ids.len() as u32,
            output_ids,
            finish_reason: finish.into(),
            prompt_tokens: self.prompt.len() as u32,
            index: choice as u32,
            ..GenerateComplete::default()
        }
    }
}

/// Adds the probability of a token, and those of the most likely tokens at its place.
fn push(all: &mut OutputLogProbs, (own, top): &Likelihood) {
    all.token_logprobs.push(own.logprob as f32);
    all.token_ids.push(own.id);
    if !top.is_empty() {
        all.top_logprobs.push(top_of(top));
    }
}

fn append(all: &mut OutputLogProbs, new: OutputLogProbs) {
    all.token_logprobs.extend(new.token_logprobs);
    all.token_ids.extend(new.token_ids);
    all.top_logprobs.extend(new.top_logprobs);
}

fn top_of(top: &[crate::generate::sampler::Candidate]) -> TopLogProbs {
    TopLogProbs {
        values: top.iter().map(|one| one.logprob as f32).collect(),
        token_ids: top.iter().map(|one| one.id).collect(),
    }
}

/// Returns the probabilities of the tokens of a prompt. The first one has none.
fn of_prompt(prompt: &[u32], scores: &[Likelihood], has_top: bool) -> InputLogProbs {
    let values = scores.iter().map(|(own, _)| InputTokenLogProb { value: Some(own.logprob as f32) });
    let first = InputTokenLogProb { value: None };
    let top = scores.iter().map(|(_, top)| top_of(top));
    InputLogProbs {
        token_logprobs: std::iter::once(first).chain(values).collect(),
        token_ids: prompt.to_vec(),
        top_logprobs: if has_top { std::iter::once(TopLogProbs::default()).chain(top).collect() } else { Vec::new() },
    }
}

impl AnswerStream {
    /// Creates the answer of a call that the engine has taken.
    pub fn new(ticket: Ticket, texts: Texts, record: Record, entry: Entry) -> AnswerStream {
        AnswerStream { ticket: Some(ticket), texts, messages: VecDeque::new(), failed: None, record, entry }
    }

    /// Creates the answer of a call that its client aborted before the engine had it.
    pub fn aborted(count: usize, record: Record, entry: Entry) -> AnswerStream {
        let texts = Texts::without_prompt(count, Vec::new());
        let mut answer = AnswerStream { ticket: None, texts, messages: VecDeque::new(), failed: None, record, entry };
        answer.abort();
        answer
    }

    fn abort(&mut self) {
        self.texts.abort(&mut self.messages);
        self.end();
    }

    /// Takes what the engine reports.
    fn take(&mut self, reply: Option<Reply>) {
        let stopped = || Refusal::Stopped("the engine ended before the call".into());
        let failed = match reply {
            Some(Reply::Queued) => None,
            Some(Reply::Token(token)) => {
                self.texts.token(token, &mut self.messages);
                None
            }
            Some(Reply::Done(done)) => {
                self.record.choice(&done);
                self.texts.done(*done, &mut self.messages).err()
            }
            Some(Reply::Refused(refusal)) => Some(ApiError::of_refusal(&refusal)),
            None => Some(ApiError::of_refusal(&stopped())),
        };
        match failed {
            Some(error) => {
                self.record.fail(&error);
                (self.failed, self.ticket) = (Some(error), None);
            }
            None if self.texts.left == 0 => self.end(),
            None => {}
        }
    }

    fn end(&mut self) {
        self.record.finish(self.texts.usage, self.texts.finish);
        self.ticket = None;
    }
}

impl Stream for AnswerStream {
    type Item = Result<GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let answer = &mut *self;
        if answer.ticket.is_some() && answer.entry.is_aborted(context) {
            answer.abort();
        }
        while answer.messages.len() < AHEAD
            && let Some(ticket) = &mut answer.ticket
        {
            match ticket.inlet.poll(context) {
                Poll::Ready(reply) => answer.take(reply),
                Poll::Pending => break,
            }
        }
        if let Some(message) = answer.messages.pop_front() {
            return Poll::Ready(Some(Ok(message)));
        }
        match (answer.failed.take(), &answer.ticket) {
            (Some(error), _) => Poll::Ready(Some(Err(status_of(&error)))),
            (None, None) => Poll::Ready(None),
            (None, Some(_)) => Poll::Pending,
        }
    }
}
