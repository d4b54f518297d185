//! Requests for log-probabilities in the format of lm-evaluation-harness: a context and a continuation per JSON line.

use super::encoder::Encoder;
use super::lines::{self, lacks};
use crate::error::{Context, Error, Result};
use crate::eval::{Likelihood, Request, likelihoods, rolling};
use crate::progress;
use crate::runtime::Engine;
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::time::Instant;

/// Parsed line of the file: a request for the log-probability of a continuation.
struct Asked {
    /// `id` of the line, which is repeated in the answer.
    id: Value,
    question: Question,
}

/// Context and its continuation.
enum Question {
    /// Texts, which are encoded together as the harness does.
    Texts(String, String),
    /// Token ids.
    Ids(Vec<u32>, Vec<u32>),
}

/// Answer to one line of the file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answer {
    /// Index of the line among the non-blank lines, from 0.
    pub index: usize,
    /// Score of the continuation.
    #[serde(flatten)]
    pub likelihood: Likelihood,
    /// `id` of the line, if it has one.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub id: Value,
}

/// Summary of the answered requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Answered {
    /// Number of requests.
    pub requests: usize,
    /// Number of scored tokens.
    pub tokens: usize,
    /// Wall time of the scoring in seconds.
    pub seconds: f64,
}

/// Scores the requests of a file and calls `answer` with each result, in order and as soon as it is available. A
/// continuation without a context is scored in several windows if it is longer than the context length of the engine.
///
/// # Errors
/// The file cannot be read, a line is not a request, the engine fails, or `answer` fails.
pub fn loglikelihoods(
    engine: &mut Engine,
    encoder: &Encoder<'_>,
    file: &Path,
    mut answer: impl FnMut(&Answer) -> Result<()>,
) -> Result<Answered> {
    let asked = lines::read(file, parse)?;
    let context = engine.context();
    let mut requests: Vec<Request> = Vec::new();
    let mut parts: Vec<usize> = Vec::with_capacity(asked.len());
    for (number, line) in asked.iter().enumerate() {
        let made = windows(&line.question, encoder, context).tensor(&format!("request {number}")).at(file)?;
        parts.push(made.len());
        requests.extend(made);
    }
    let begin = Instant::now();
    let bar = progress::items("requests", requests.len() as u64);
    let (mut index, mut sum, mut tokens) = (0, Vec::new(), 0);
    let mut take = |found: Option<Likelihood>| -> Result<()> {
        sum.extend(found);
        while index < asked.len() && sum.len() == parts[index] {
            let likelihood = sum.drain(..).reduce(Likelihood::and).unwrap_or(Likelihood::none());
            tokens += likelihood.tokens;
            answer(&Answer { index, likelihood, id: asked[index].id.clone() })?;
            index += 1;
        }
        Ok(())
    };
    take(None)?;
    likelihoods(engine, &requests, |found| {
        bar.inc(1);
        take(Some(found))
    })?;
    Ok(Answered { requests: asked.len(), tokens, seconds: begin.elapsed().as_secs_f64() })
}

fn parse(value: &Value) -> Result<Asked> {
    let ids = |key: &str| -> Result<Option<Vec<u32>>> {
        let Some(list) = value[key].as_array() else { return Ok(None) };
        let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids: Option<Vec<u32>> = list.iter().map(id).collect();
        ids.map(Some).ok_or_else(|| Error::corrupt(format!("found no valid `{key}`, expected a list of token ids")))
    };
    let word = |key: &str| value[key].as_str().map(str::to_string);
    let question = match (ids("context_ids")?, ids("continuation_ids")?, word("context"), word("continuation")) {
        (context, Some(continuation), None, None) => Question::Ids(context.unwrap_or_default(), continuation),
        (None, None, context, Some(continuation)) => Question::Texts(context.unwrap_or_default(), continuation),
        _ => match (value[0].as_str(), value[1].as_str(), word("text")) {
            (Some(context), Some(continuation), _) => Question::Texts(context.into(), continuation.into()),
            (_, _, Some(text)) => Question::Texts(String::new(), text),
            _ => {
                return Err(lacks(
                    "`continuation` (with `context`), `continuation_ids` (with `context_ids`) or `text`",
                ));
            }
        },
    };
    Ok(Asked { id: value["id"].clone(), question })
}

/// Returns the requests that score one line.
fn windows(question: &Question, encoder: &Encoder<'_>, context: usize) -> Result<Vec<Request>> {
    let request = match question {
        Question::Ids(context, continuation) => {
            Request { context: context.clone(), continuation: continuation.clone() }
        }
        Question::Texts(context, continuation) if context.is_empty() => {
            Request { context: Vec::new(), continuation: encoder.tokenizer()?.encode_plain(continuation)? }
        }
        Question::Texts(context, continuation) => encoder.request(context, continuation)?,
    };
    match request.context.is_empty() {
        true => Ok(rolling(encoder.first()?, &request.continuation, context)),
        false => Ok(vec![request]),
    }
}
