//! `iec eval --exact-match`: does the model's answer hold the right result? GSM8K and the like.

use super::lines::{self, Details, lacks, text};
use super::{Args, about};
use crate::global::Global;
use crate::model::Model;
use iec::error::{Error, Result};
use iec::eval::stats::Mean;
use iec::progress;
use iec::runtime::generate::{Options, Request, generate};
use regex::Regex;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

/// A number, with the commas and the dollar sign that people write.
const NUMBER: &str = r"-?[$0-9][0-9.,]*";

/// A task with the result that is expected.
struct Task {
    prompt: String,
    answer: String,
    pattern: Regex,
}

/// Lets the model answer all tasks and prints the share of right results.
pub fn run(args: &Args, file: &Path, model: &mut Model, global: &Global) -> Result<()> {
    let usual = pattern(args.regex.as_deref().unwrap_or(NUMBER))?;
    let mut tasks = lines::read(file, |value| parse(value, &usual))?;
    tasks.truncate(args.limit.unwrap_or(usize::MAX));
    let shots = args.shots()?;
    let mut requests = Vec::with_capacity(tasks.len());
    for task in &tasks {
        let ids = model.tokenizer()?.encode(&format!("{shots}{}", task.prompt))?;
        let max_new = args.max_new.min(model.engine.context().saturating_sub(ids.len()).max(1));
        requests.push(Request { ids, max_new, stop: args.stop.clone(), ..Request::default() });
    }
    let begin = Instant::now();
    let bar = progress::items("tokens", (args.max_new * tasks.len()) as u64);
    let Model { engine, speculator, tokenizer, .. } = model;
    let eos = engine.config().eos.clone();
    let options = Options {
        tokenizer: tokenizer.as_ref(),
        batch: args.batch,
        eos: &eos,
        show_special: false,
        keep_sessions: false,
    };
    let outcome = generate(engine, speculator, requests, &options, |_| {
        bar.inc(1);
        Ok(())
    })?;
    bar.finish_and_clear();
    let mut details = Details::create(args.details.as_deref())?;
    let mut right = Vec::with_capacity(tasks.len());
    for (index, (task, completion)) in tasks.iter().zip(&outcome.completions).enumerate() {
        let found = result(&task.pattern, &completion.text);
        right.push(found.as_deref() == Some(task.answer.as_str()));
        let line = json!({"index": index, "text": completion.text, "found": found, "answer": task.answer, "right": right[index]});
        details.line(&line)?;
    }
    details.commit()?;
    let share = Mean::share(right.iter().copied());
    let seconds = begin.elapsed().as_secs_f64();
    if args.json {
        let mut line = about(model);
        line["task"] = "exact-match".into();
        line["file"] = file.display().to_string().into();
        line["questions"] = tasks.len().into();
        line["exact_match"] = json!(share);
        line["wall_time_s"] = seconds.into();
        println!("{line}");
    } else {
        super::print_share("exact match", share);
    }
    global.note(format_args!("{} tasks in {seconds:.1} s", tasks.len()));
    Ok(())
}

fn pattern(text: &str) -> Result<Regex> {
    Regex::new(text).map_err(|e| Error::usage(format!("`{text:.80}` is not a regular expression: {e}")))
}

/// `{"prompt", "answer", "regex"?}`, or `{"question", "answer"}` as GSM8K has it.
fn parse(value: &Value, usual: &Regex) -> Result<Task> {
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
    // GSM8K works the answer out first and puts the result behind this mark.
    let answer = answer.rsplit_once("####").map_or(answer.as_str(), |(_, result)| result);
    Ok(Task { prompt, answer: plain(answer), pattern })
}

/// The last match in a text: its first group, or all of it.
fn result(pattern: &Regex, text: &str) -> Option<String> {
    let last = pattern.captures_iter(text).last()?;
    last.get(1).or_else(|| last.get(0)).map(|found| plain(found.as_str()))
}

/// Without what does not change a result: spaces around it, thousands' commas, a dollar sign, a full stop.
fn plain(text: &str) -> String {
    text.trim().trim_start_matches('$').trim_end_matches('.').replace([',', '$'], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_found_and_compared_without_their_dress() {
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
