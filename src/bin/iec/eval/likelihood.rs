//! `iec eval --loglikelihood`: what lm-evaluation-harness asks a model, one JSON line per request.

use super::lines::{self, lacks};
use super::{Args, Encoder};
use crate::global::Global;
use crate::model::Model;
use iec::error::{Context, Error, Result};
use iec::eval::{Likelihood, Request, likelihoods, rolling};
use iec::progress;
use serde_json::{Value, json};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

/// A line of the file.
struct Asked {
    id: Value,
    question: Question,
}

enum Question {
    /// Texts, which are encoded together as the harness does.
    Texts(String, String),
    /// Tokens.
    Ids(Vec<u32>, Vec<u32>),
}

/// Answers all requests in order.
pub fn run(args: &Args, file: &Path, model: &mut Model, global: &Global) -> Result<()> {
    let asked = lines::read(file, parse)?;
    let encoder = Encoder::new(args, model)?;
    let context = model.engine.context();
    // One request may become several: a text longer than the context is scored window by window.
    let mut requests: Vec<Request> = Vec::new();
    let mut parts: Vec<usize> = Vec::with_capacity(asked.len());
    for (number, line) in asked.iter().enumerate() {
        let made = made(&line.question, &encoder, model, context).tensor(&format!("request {number}")).at(file)?;
        parts.push(made.len());
        requests.extend(made);
    }
    let begin = Instant::now();
    let bar = progress::items("requests", requests.len() as u64);
    let mut out = BufWriter::new(std::io::stdout().lock());
    let (mut index, mut sum, mut tokens) = (0, Vec::new(), 0);
    let mut print = |found: Option<Likelihood>| -> Result<()> {
        sum.extend(found);
        while index < asked.len() && sum.len() == parts[index] {
            let whole = sum
                .drain(..)
                .reduce(Likelihood::and)
                .unwrap_or(Likelihood { is_greedy: true, ..Likelihood::default() });
            tokens += whole.tokens;
            let mut line = json!({"index": index, "logprob": whole.logprob, "is_greedy": whole.is_greedy});
            line["tokens"] = whole.tokens.into();
            line["truncated"] = whole.truncated.into();
            if !asked[index].id.is_null() {
                line["id"] = asked[index].id.clone();
            }
            writeln!(out, "{line}")?;
            index += 1;
        }
        Ok(())
    };
    print(None)?;
    likelihoods(&mut model.engine, &requests, |found| {
        bar.inc(1);
        print(Some(found))
    })?;
    out.flush()?;
    bar.finish_and_clear();
    let seconds = begin.elapsed().as_secs_f64();
    global.note(format_args!("{} requests, {tokens} tokens scored, in {seconds:.1} s", asked.len()));
    Ok(())
}

fn parse(value: &Value) -> Result<Asked> {
    let ids = |key: &str| -> Result<Option<Vec<u32>>> {
        let Some(list) = value[key].as_array() else { return Ok(None) };
        let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids: Option<Vec<u32>> = list.iter().map(id).collect();
        ids.map(Some).ok_or_else(|| Error::corrupt("expected a list of token ids").tensor(key))
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

fn made(question: &Question, encoder: &Encoder, model: &Model, context: usize) -> Result<Vec<Request>> {
    let (before, continuation) = match question {
        Question::Ids(before, continuation) => (before.clone(), continuation.clone()),
        Question::Texts(before, continuation) if before.is_empty() => {
            (Vec::new(), model.tokenizer()?.encode_plain(continuation)?)
        }
        Question::Texts(before, continuation) => encoder.pair(model, before, continuation)?,
    };
    if before.is_empty() {
        return Ok(rolling(encoder.first()?, &continuation, context));
    }
    Ok(vec![Request { context: before, continuation }])
}
