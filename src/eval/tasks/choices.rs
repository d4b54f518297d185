//! Multiple-choice tasks such as HellaSwag and ARC: selects the continuation with the highest likelihood.

use super::lines::{self, lacks, text};
use super::{Encoder, TaskOptions};
use crate::error::{Error, Result};
use crate::eval::stats::Mean;
use crate::eval::{Likelihood, likelihoods};
use crate::output::JsonLines;
use crate::progress;
use crate::runtime::Engine;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

/// Question with its choices and the index of the right one.
struct Question {
    context: String,
    choices: Vec<String>,
    answer: usize,
}

/// Indices of three choices of a question: the right one, the one with the highest log-probability, and the one with
/// the highest log-probability per character.
struct Outcome {
    answer: usize,
    chosen: usize,
    chosen_normalized: usize,
}

/// Accuracy on the questions of a file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Accuracy {
    /// Number of questions.
    pub questions: usize,
    /// Share of questions whose most likely choice is the right one.
    pub raw: Mean,
    /// Share of right answers when each log-probability is divided by the number of characters of its choice.
    pub normalized: Mean,
    /// Wall time of the scoring in seconds.
    pub seconds: f64,
}

/// Evaluates the questions of a file: `{"query", "choices", "answer"}`, or lines of HellaSwag or ARC as published.
///
/// # Errors
/// A file cannot be read or written, a line is not a question, or the engine fails.
pub fn multiple_choice(
    engine: &mut Engine,
    encoder: &Encoder<'_>,
    file: &Path,
    options: &TaskOptions,
) -> Result<Accuracy> {
    let mut questions = lines::read(file, parse)?;
    questions.truncate(options.limit.unwrap_or(usize::MAX));
    let shots = options.shots()?;
    let mut requests = Vec::new();
    for question in &questions {
        let context = format!("{shots}{}", question.context);
        for choice in &question.choices {
            requests.push(encoder.request(&context, &format!(" {choice}"))?);
        }
    }
    let begin = Instant::now();
    let bar = progress::items("questions", questions.len() as u64);
    let mut details = options.details.as_ref().map(JsonLines::create).transpose()?;
    let mut outcomes: Vec<Outcome> = Vec::with_capacity(questions.len());
    let mut found: Vec<Likelihood> = Vec::new();
    likelihoods(engine, &requests, |likelihood| {
        found.push(likelihood);
        let question = &questions[outcomes.len()];
        if found.len() < question.choices.len() {
            return Ok(());
        }
        let outcome = judge(question, &found);
        if let Some(details) = &mut details {
            details.line(&json!({
                "index": outcomes.len(), "answer": outcome.answer, "chosen": outcome.chosen,
                "chosen_normalized": outcome.chosen_normalized,
                "logprobs": found.iter().map(|f| f.logprob).collect::<Vec<_>>(),
            }))?;
        }
        found.clear();
        outcomes.push(outcome);
        let right = outcomes.iter().filter(|o| o.chosen_normalized == o.answer).count();
        bar.set_message(format!("{:.1} %", 100.0 * right as f64 / outcomes.len() as f64));
        bar.inc(1);
        Ok(())
    })?;
    details.map_or(Ok(()), JsonLines::commit)?;
    Ok(Accuracy {
        questions: questions.len(),
        raw: Mean::share(outcomes.iter().map(|o| o.chosen == o.answer)),
        normalized: Mean::share(outcomes.iter().map(|o| o.chosen_normalized == o.answer)),
        seconds: begin.elapsed().as_secs_f64(),
    })
}

/// Selects the choice with the highest log-probability, and the one with the highest log-probability per character;
/// on a tie the first.
fn judge(question: &Question, found: &[Likelihood]) -> Outcome {
    let best = |score: &dyn Fn(usize) -> f64| (0..found.len()).fold(0, |a, b| if score(b) > score(a) { b } else { a });
    let characters = |i: usize| question.choices[i].chars().count().max(1) as f64;
    Outcome {
        answer: question.answer,
        chosen: best(&|i| found[i].logprob),
        chosen_normalized: best(&|i| found[i].logprob / characters(i)),
    }
}

/// Parses a line: `{"query", "choices", "answer"}`, or a line of HellaSwag or ARC as published.
fn parse(value: &Value) -> Result<Question> {
    let texts = |list: &Value| -> Option<Vec<String>> {
        list.as_array()?.iter().map(|choice| choice.as_str().map(str::to_string)).collect()
    };
    let (context, choices, labels) = if let Some(endings) = texts(&value["endings"]) {
        let context = text(value, &["ctx", "query", "context"]).ok_or_else(|| lacks("`ctx`"))?;
        let context = match text(value, &["activity_label"]) {
            Some(label) => format!("{label}: {context}"),
            None => context.to_string(),
        };
        (without_marks(&context), endings.iter().map(|ending| without_marks(ending)).collect(), Vec::new())
    } else if let Some(choices) = texts(&value["choices"]["text"]) {
        let question = text(value, &["question"]).ok_or_else(|| lacks("`question`"))?;
        let labels = texts(&value["choices"]["label"]).ok_or_else(|| lacks("`choices.label`"))?;
        (format!("Question: {question}\nAnswer:"), choices, labels)
    } else {
        let context = text(value, &["query", "context", "question", "prompt"]).ok_or_else(|| lacks("`query`"))?;
        let choices = texts(&value["choices"]).ok_or_else(|| lacks("`choices`, a list of texts"))?;
        (context.to_string(), choices, Vec::new())
    };
    let answer = ["answer", "label", "gold", "answerKey"].iter().map(|key| &value[*key]).find(|v| !v.is_null());
    let answer = number(answer.ok_or_else(|| lacks("`answer`"))?, &labels);
    match answer {
        Some(answer) if answer < choices.len() => Ok(Question { context, choices, answer }),
        _ => Err(Error::corrupt(format!(
            "found no valid `answer`, expected one of the {} choices: an index from 0, a label or a letter",
            choices.len()
        ))),
    }
}

/// Returns the index of an answer, which is given as a number from 0, as such a number in quotes, as a label, or as a
/// letter.
fn number(answer: &Value, labels: &[String]) -> Option<usize> {
    let Some(word) = answer.as_str() else { return answer.as_u64().and_then(|n| usize::try_from(n).ok()) };
    if let Some(place) = labels.iter().position(|label| label == word) {
        return Some(place);
    }
    match (word.parse(), word.as_bytes()) {
        (Ok(number), _) => Some(number),
        (_, [letter @ b'A'..=b'Z']) => Some(usize::from(letter - b'A')),
        _ => None,
    }
}

/// Removes markers like `[title]` and `[step]`, which HellaSwag's texts from WikiHow contain.
fn without_marks(text: &str) -> String {
    let text = text.trim().replace(" [title]", ". ");
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some((before, after)) = rest.split_once('[') {
        let Some((_, behind)) = after.split_once(']') else { break };
        out.push_str(before);
        rest = behind;
    }
    out.push_str(rest);
    out.replace("  ", " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: Value) -> Question {
        parse(&line).unwrap()
    }

    #[test]
    fn lines_of_known_tasks_are_understood() {
        let own = parsed(json!({"query": "2 + 2 =", "choices": ["3", "4"], "answer": 1}));
        assert_eq!((own.context.as_str(), own.choices.len(), own.answer), ("2 + 2 =", 2, 1));
        let hellaswag = json!({"activity_label": "Running", "ctx": "A man [step] runs", "label": "2",
            "endings": ["away.", "a [substeps] shop.", "home."]});
        let hellaswag = parsed(hellaswag);
        assert_eq!((hellaswag.context.as_str(), hellaswag.answer), ("Running: A man runs", 2));
        assert_eq!(hellaswag.choices[1], "a shop.");
        let arc = json!({"question": "Why?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"});
        assert_eq!((parsed(arc.clone()).context.as_str(), parsed(arc).answer), ("Question: Why?\nAnswer:", 1));
        let letter = parsed(json!({"query": "q", "choices": ["x", "y", "z"], "answer": "C"}));
        assert_eq!(letter.answer, 2);
    }

    #[test]
    fn broken_lines_say_what_they_lack() {
        let cases = [
            (json!({"choices": ["a"], "answer": 0}), "`query`"),
            (json!({"query": "q", "answer": 0}), "`choices`"),
            (json!({"query": "q", "choices": ["a"]}), "`answer`"),
            (json!({"query": "q", "choices": ["a"], "answer": 1}), "one of the 1 choices"),
            (json!({"query": "q", "choices": ["a"], "answer": "why"}), "one of the 1 choices"),
        ];
        for (line, expected) in cases {
            let error = parse(&line).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn length_counts_in_one_of_the_two_accuracies() {
        let question = parsed(json!({"query": "q", "choices": ["ab", "abcdefgh"], "answer": 1}));
        let of = |logprob: f64| Likelihood { logprob, ..Likelihood::default() };
        let outcome = judge(&question, &[of(-4.0), of(-8.0)]);
        assert_eq!((outcome.chosen, outcome.chosen_normalized), (0, 1));
    }
}
