//! Exact-match tasks such as GSM8K: generates an answer and compares the result extracted from it.

use super::TaskOptions;
use super::lines::{self, lacks, text};
use crate::error::{Error, Result};
use crate::eval::stats::Mean;
use crate::generate::speculate::Speculator;
use crate::generate::text::Tokenizer;
use crate::generate::{Options, Request, generate};
use crate::output::JsonLines;
use crate::progress;
use crate::runtime::Engine;
use regex::Regex;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

/// Regular expression of a number with thousands separators and a dollar sign.
const NUMBER: &str = r"-?[$0-9][0-9.,]*";

/// Prompt with the expected result.
struct ExactMatchTask {
    prompt: String,
    answer: String,
    pattern: Regex,
}

/// Options for the generation of answers and the extraction of results.
#[derive(Debug, Clone)]
pub struct Answers {
    /// Regular expression of a result; by default a number. The last match is used, or its first group if there is
    /// one.
    pub regex: Option<String>,
    /// Largest number of tokens of an answer.
    pub max_new: usize,
    /// Stop texts that end an answer.
    pub stop: Vec<String>,
    /// Number of answers generated in one batch.
    pub batch: usize,
}

/// Share of answers with the right result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExactMatch {
    /// Number of tasks.
    pub tasks: usize,
    /// Share of right results.
    pub share: Mean,
    /// Wall time of the generation in seconds.
    pub seconds: f64,
}

/// Generates answers to the tasks of a file greedily: `{"prompt", "answer", "regex"?}`, or `{"question", "answer"}`
/// as in GSM8K.
///
/// # Errors
/// A file cannot be read or written, a line is not a task, or the engine fails.
pub fn exact_match(
    engine: &mut Engine,
    speculator: &mut Speculator,
    tokenizer: &Tokenizer,
    file: &Path,
    answers: &Answers,
    options: &TaskOptions,
) -> Result<ExactMatch> {
    let usual = pattern(answers.regex.as_deref().unwrap_or(NUMBER))?;
    let mut tasks = lines::read(file, |value| parse(value, &usual))?;
    tasks.truncate(options.limit.unwrap_or(usize::MAX));
    let shots = options.shots()?;
    let mut requests = Vec::with_capacity(tasks.len());
    for task in &tasks {
        let ids = tokenizer.encode(&format!("{shots}{}", task.prompt))?;
        let max_new = answers.max_new.min(engine.context().saturating_sub(ids.len()).max(1));
        requests.push(Request { ids, max_new, stop: answers.stop.clone(), ..Request::default() });
    }
    let begin = Instant::now();
    let bar = progress::items("tokens", (answers.max_new * tasks.len()) as u64);
    let eos = engine.config().eos.clone();
    let generation = Options {
        tokenizer: Some(tokenizer),
        batch: answers.batch,
        eos: &eos,
        show_special: false,
        ..Options::default()
    };
    let outcome = generate(engine, None, speculator, requests, &generation, |_| {
        bar.inc(1);
        Ok(())
    })?;
    let mut details = options.details.as_ref().map(JsonLines::create).transpose()?;
    let mut right = Vec::with_capacity(tasks.len());
    for (index, (task, completion)) in tasks.iter().zip(&outcome.completions).enumerate() {
        let found = result(&task.pattern, &completion.text);
        right.push(found.as_deref() == Some(task.answer.as_str()));
        if let Some(details) = &mut details {
            details.line(&json!({
                "index": index, "text": completion.text, "found": found, "answer": task.answer, "right": right[index],
            }))?;
        }
    }
    details.map_or(Ok(()), JsonLines::commit)?;
    let share = Mean::share(right.iter().copied());
    Ok(ExactMatch { tasks: tasks.len(), share, seconds: begin.elapsed().as_secs_f64() })
}

fn pattern(text: &str) -> Result<Regex> {
    Regex::new(text).map_err(|e| Error::usage(format!("`{text:.80}` is not a regular expression: {e}")))
}

/// Parses a line: `{"prompt", "answer", "regex"?}`, or `{"question", "answer"}` as in GSM8K.
fn parse(value: &Value, usual: &Regex) -> Result<ExactMatchTask> {
    let prompt = match (text(value, &["prompt"]), text(value, &["question"])) {
        (Some(prompt), _) => prompt.to_string(),
        (None, Some(question)) => format!("Question: {question}\nAnswer:"),
        (None, None) => return Err(lacks("`prompt` or `question`")),
    };
    let answer = match &value["answer"] {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return Err(lacks("`answer`")),
    };
    let pattern = text(value, &["regex"]).map_or_else(|| Ok(usual.clone()), pattern)?;
    // GSM8K answers end with this marker and the result.
    let answer = answer.rsplit_once("####").map_or(answer.as_str(), |(_, result)| result);
    Ok(ExactMatchTask { prompt, answer: plain(answer), pattern })
}

/// Returns the last match in a text, cleaned by [`plain`]: its first group, or the whole match without a group.
fn result(pattern: &Regex, text: &str) -> Option<String> {
    let last = pattern.captures_iter(text).last()?;
    last.get(1).or_else(|| last.get(0)).map(|found| plain(found.as_str()))
}

/// Removes characters that do not affect a result: surrounding spaces, thousands separators, a dollar sign, a final
/// full stop.
fn plain(text: &str) -> String {
    text.trim().trim_start_matches('$').trim_end_matches('.').replace([',', '$'], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_compared_without_separators_and_signs() {
        let usual = pattern(NUMBER).unwrap();
        let task = parse(&json!({"question": "How much?", "answer": "6*7=42\n#### 1,042"}), &usual).unwrap();
        assert_eq!((task.prompt.as_str(), task.answer.as_str()), ("Question: How much?\nAnswer:", "1042"));
        assert_eq!(result(&task.pattern, "first 7, then $1,042.").as_deref(), Some("1042"));
        assert_eq!(result(&task.pattern, "none"), None);
        let own = json!({"prompt": "p", "answer": "B", "regex": "is \\(([A-D])\\)"});
        let own = parse(&own, &usual).unwrap();
        assert_eq!(result(&own.pattern, "It is (A), no, it is (B) and C").as_deref(), Some("B"));
        assert!(parse(&json!({"prompt": "p", "answer": "1", "regex": "("}), &usual).is_err());
        assert!(parse(&json!({"answer": "1"}), &usual).is_err() && parse(&json!({"prompt": "p"}), &usual).is_err());
        assert_eq!(parse(&json!({"prompt": "p", "answer": -3}), &usual).unwrap().answer, "-3");
    }
}
