//! Exact-match tasks such as GSM8K: generates an answer and compares the result extracted from it.

use super::answerer::{Answerer, Answers, TaskAnswers};
use super::form::TaskForm;
use super::lines::{lacks, text};
use crate::error::{Error, Result};
use crate::generate::{Completion, Options, Request, generate};
use crate::progress;
use regex::Regex;
use serde_json::{Value, json};
use std::time::Instant;

/// Regular expression of a number with thousands separators and a dollar sign.
const NUMBER: &str = r"-?[$0-9][0-9.,]*";

/// Prompt with the expected result.
#[derive(Debug, Clone)]
pub(super) struct ExactMatchTask {
    pub form: TaskForm,
    prompt: String,
    answer: String,
    pattern: Regex,
}

/// Generates answers to all tasks greedily, each behind `shots` and its prompt. Calls `each` with a description of each
/// answer.
///
/// # Errors
/// A prompt is longer than the context, the engine fails, or `each` fails.
pub(super) fn score(
    model: &mut Answerer<'_>,
    tasks: &[ExactMatchTask],
    shots: &str,
    answers: &Answers,
    each: &mut dyn FnMut(Value) -> Result<()>,
) -> Result<TaskAnswers> {
    let begin = Instant::now();
    let completions = complete(model, tasks.iter().map(|task| format!("{shots}{}", task.prompt)), answers)?;
    let mut right = Vec::with_capacity(tasks.len());
    for (index, (task, completion)) in tasks.iter().zip(&completions).enumerate() {
        let found = result(&task.pattern, &completion.text);
        right.push(found.as_deref() == Some(task.answer.as_str()));
        each(json!({
            "index": index, "text": completion.text, "found": found, "answer": task.answer, "right": right[index],
        }))?;
    }
    Ok(TaskAnswers { right, right_by_length: None, truncated: 0, seconds: begin.elapsed().as_secs_f64() })
}

/// Continues each prompt greedily.
///
/// # Errors
/// A prompt is longer than the context, or the engine fails.
pub(super) fn complete(
    model: &mut Answerer<'_>,
    prompts: impl Iterator<Item = String>,
    answers: &Answers,
) -> Result<Vec<Completion>> {
    let (mut requests, context) = (Vec::new(), model.engine.context());
    for (index, prompt) in prompts.enumerate() {
        let ids = model.tokenizer.encode(&prompt)?;
        if ids.len() >= context {
            let found = format!("found a prompt of {} tokens, expected fewer than {context}", ids.len());
            let error = Error::usage(found).tensor(format!("question {index}"));
            return Err(error.help("use a longer context (--ctx), or a model that has one"));
        }
        let max_new = answers.max_new.min(context - ids.len());
        requests.push(Request { ids, max_new, stop: answers.stop.clone(), ..Request::default() });
    }
    let bar = progress::items("tokens", (answers.max_new * requests.len()) as u64);
    let eos = model.engine.config().eos.clone();
    let generation = Options {
        tokenizer: Some(model.tokenizer),
        batch: answers.batch,
        eos: &eos,
        show_special: false,
        ..Options::default()
    };
    let outcome = generate(model.engine, None, model.speculator, requests, &generation, |_| {
        bar.inc(1);
        Ok(())
    })?;
    Ok(outcome.completions)
}

/// Compiles the regular expression of a result: `text`, or by default that of a number.
pub(super) fn result_pattern(text: Option<&str>) -> Result<Regex> {
    pattern(text.unwrap_or(NUMBER))
}

fn pattern(text: &str) -> Result<Regex> {
    Regex::new(text).map_err(|e| Error::usage(format!("`{text:.80}` is not a regular expression: {e}")))
}

/// Parses a line: `{"prompt", "answer", "regex"?}`, or `{"question", "answer"}` as in GSM8K.
pub(super) fn parse(value: &Value, usual: &Regex) -> Result<ExactMatchTask> {
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
    let (form, answer) = match answer.rsplit_once("####") {
        Some((_, result)) if text(value, &["prompt"]).is_none() => (TaskForm::Gsm8k, result),
        Some((_, result)) => (TaskForm::ExactMatch, result),
        None => (TaskForm::ExactMatch, answer.as_str()),
    };
    let answer = plain(answer);
    if answer.is_empty() {
        return Err(Error::corrupt("`answer`: found no result, expected a text, or one behind `####`"));
    }
    Ok(ExactMatchTask { form, prompt, answer, pattern })
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
        assert!(parse(&json!({"question": "q", "answer": "long #### "}), &usual).is_err());
        assert_eq!(parse(&json!({"prompt": "p", "answer": -3}), &usual).unwrap().answer, "-3");
    }
}
