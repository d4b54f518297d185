//! Multiple-choice tasks such as HellaSwag and ARC: selects the continuation with the highest likelihood.

use super::answerer::{Answerer, TaskAnswers};
use super::encoder::Encoder;
use super::form::TaskForm;
use super::lines::{lacks, string, text};
use crate::error::{Error, Result};
use crate::eval::{Likelihood, likelihoods};
use crate::progress;
use serde_json::{Value, json};
use std::time::Instant;

/// Question with its choices and the index of the right one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ChoiceQuestion {
    pub form: TaskForm,
    pub context: String,
    pub choices: Vec<String>,
    pub answer: usize,
}

/// Indices of three choices of a question: the right one, the one with the highest log-probability, and the one with
/// the highest log-probability per character.
struct Outcome {
    answer: usize,
    chosen: usize,
    chosen_normalized: usize,
}

/// Scores the choices of all questions, each behind `shots` and its context. Calls `each` with a description of each
/// answer.
///
/// # Errors
/// A question cannot be encoded or is longer than the context, the engine fails, or `each` fails.
pub(super) fn score(
    model: &mut Answerer<'_>,
    questions: &[ChoiceQuestion],
    shots: &str,
    each: &mut dyn FnMut(Value) -> Result<()>,
) -> Result<TaskAnswers> {
    let encoder = Encoder::new(model.engine.config(), Some(model.tokenizer), model.bos)?;
    let mut requests = Vec::new();
    for (index, question) in questions.iter().enumerate() {
        let context = format!("{shots}{}", question.context);
        for choice in &question.choices {
            let request = encoder.request(&context, &format!(" {choice}"));
            let request = request.map_err(|e| e.tensor(format!("question {index}")))?;
            if request.continuation.is_empty() {
                return Err(Error::corrupt("found a choice without text").tensor(format!("question {index}")));
            }
            requests.push(request);
        }
    }
    let begin = Instant::now();
    let bar = progress::items("questions", questions.len() as u64);
    let mut outcomes: Vec<Outcome> = Vec::with_capacity(questions.len());
    let mut found: Vec<Likelihood> = Vec::new();
    let mut truncated = 0;
    likelihoods(model.engine, &requests, |likelihood| {
        found.push(likelihood);
        let question = &questions[outcomes.len()];
        if found.len() < question.choices.len() {
            return Ok(());
        }
        let outcome = judge(question, &found);
        each(json!({
            "index": outcomes.len(), "answer": outcome.answer, "chosen": outcome.chosen,
            "chosen_normalized": outcome.chosen_normalized,
            "logprobs": found.iter().map(|f| f.logprob).collect::<Vec<_>>(),
        }))?;
        truncated += usize::from(found.iter().any(|likelihood| likelihood.truncated));
        found.clear();
        outcomes.push(outcome);
        let right = outcomes.iter().filter(|o| o.chosen_normalized == o.answer).count();
        bar.set_message(format!("{:.1} %", 100.0 * right as f64 / outcomes.len() as f64));
        bar.inc(1);
        Ok(())
    })?;
    Ok(TaskAnswers {
        right: outcomes.iter().map(|o| o.chosen == o.answer).collect(),
        right_by_length: Some(outcomes.iter().map(|o| o.chosen_normalized == o.answer).collect()),
        truncated,
        seconds: begin.elapsed().as_secs_f64(),
    })
}

/// Selects the choice with the highest log-probability, and the one with the highest log-probability per character;
/// on a tie the first.
fn judge(question: &ChoiceQuestion, found: &[Likelihood]) -> Outcome {
    let best = |score: &dyn Fn(usize) -> f64| (0..found.len()).fold(0, |a, b| if score(b) > score(a) { b } else { a });
    let characters = |i: usize| question.choices[i].chars().count().max(1) as f64;
    Outcome {
        answer: question.answer,
        chosen: best(&|i| found[i].logprob),
        chosen_normalized: best(&|i| found[i].logprob / characters(i)),
    }
}

/// Question as a line states it: its labels are empty if choices have none.
struct Stated<'a> {
    form: TaskForm,
    context: String,
    choices: Vec<String>,
    labels: Vec<String>,
    answer: &'a Value,
}

/// Parses a line: `{"query", "choices", "answer"}`, or a line of HellaSwag or ARC as published.
pub(super) fn parse(value: &Value) -> Result<ChoiceQuestion> {
    let stated = match TaskForm::of_fields(value) {
        Some(TaskForm::HellaSwag) => hellaswag(value)?,
        Some(TaskForm::ArcAi2) => arc_of_ai2(value)?,
        Some(TaskForm::ArcHub) => arc_of_hub(value)?,
        _ => own(value)?,
    };
    let Stated { form, context, choices, labels, answer } = stated;
    if answer.is_null() {
        return Err(lacks("`answer`"));
    }
    if !labels.is_empty() && labels.len() != choices.len() {
        let found = format!("found {} labels of {} choices, expected one of each", labels.len(), choices.len());
        return Err(Error::corrupt(found));
    }
    match number(answer, &labels) {
        Some(answer) if answer < choices.len() => Ok(ChoiceQuestion { form, context, choices, answer }),
        _ => Err(Error::corrupt(format!(
            "found no valid `answer`, expected one of the {} choices: {}",
            choices.len(),
            if labels.is_empty() { "an index from 0, or a letter" } else { "the label of one" },
        ))),
    }
}

/// Returns a list of texts.
fn texts(list: &Value) -> Option<Vec<String>> {
    list.as_array()?.iter().map(|choice| choice.as_str().map(str::to_string)).collect()
}

/// Returns the first of these fields that has a value.
fn first<'a>(value: &'a Value, keys: &[&str]) -> &'a Value {
    keys.iter().map(|key| &value[*key]).find(|v| !v.is_null()).unwrap_or(&Value::Null)
}

/// Reads a line of HellaSwag as lm-evaluation-harness does: both parts of the context, the second one capitalized.
fn hellaswag(value: &Value) -> Result<Stated<'_>> {
    let context = match (text(value, &["ctx_a"]), text(value, &["ctx_b"])) {
        (Some(a), Some(b)) => format!("{a} {}", capitalized(b)),
        _ => text(value, &["ctx", "query", "context"]).ok_or_else(|| lacks("`ctx`"))?.to_string(),
    };
    let context = match text(value, &["activity_label"]) {
        Some(label) => format!("{label}: {context}"),
        None => context,
    };
    let endings = texts(&value["endings"]).ok_or_else(|| lacks("`endings`, a list of texts"))?;
    let answer = first(value, &["label", "answer", "gold"]);
    let choices = endings.iter().map(|ending| without_marks(ending)).collect();
    Ok(Stated { form: TaskForm::HellaSwag, context: without_marks(&context), choices, labels: Vec::new(), answer })
}

/// Changes the first letter to upper case and all others to lower case, as `str.capitalize` of Python does.
fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    let first: String = letters.next().into_iter().flat_map(char::to_uppercase).collect();
    first + &letters.as_str().to_lowercase()
}

/// Reads a line of ARC as AI2 publishes it: a list of choices, each with its label.
fn arc_of_ai2(value: &Value) -> Result<Stated<'_>> {
    let question = string(&value["question"], "stem")?;
    let list = value["question"]["choices"].as_array().ok_or_else(|| lacks("`question.choices`, a list"))?;
    let field = |key: &str| list.iter().map(|choice| string(choice, key).map(str::to_string)).collect::<Result<_>>();
    let (choices, labels) = (field("text")?, field("label")?);
    Ok(arc(question, choices, labels, first(value, &["answerKey"])))
}

/// Reads a line of ARC as the Hugging Face Hub has it: a list of texts and a list of labels.
fn arc_of_hub(value: &Value) -> Result<Stated<'_>> {
    let choices = texts(&value["choices"]["text"]).ok_or_else(|| lacks("`choices.text`, a list of texts"))?;
    let labels = texts(&value["choices"]["label"]).ok_or_else(|| lacks("`choices.label`, a list of texts"))?;
    let answer = first(value, &["answerKey", "answer", "label", "gold"]);
    let stated = arc(string(value, "question")?, choices, labels, answer);
    Ok(Stated { form: TaskForm::ArcHub, ..stated })
}

fn arc<'a>(question: &str, choices: Vec<String>, labels: Vec<String>, answer: &'a Value) -> Stated<'a> {
    Stated { form: TaskForm::ArcAi2, context: format!("Question: {question}\nAnswer:"), choices, labels, answer }
}

/// Reads a line of the form of `iec`.
fn own(value: &Value) -> Result<Stated<'_>> {
    let context = text(value, &["query", "context", "question", "prompt"]).ok_or_else(|| lacks("`query`"))?.to_string();
    let choices = texts(&value["choices"]).ok_or_else(|| lacks("`choices`, a list of texts"))?;
    let answer = first(value, &["answer", "label", "gold", "answerKey"]);
    Ok(Stated { form: TaskForm::MultipleChoice, context, choices, labels: Vec::new(), answer })
}

/// Returns the index of an answer. Where choices have labels, it is one of them; otherwise it is a number from 0, such
/// a number in quotes, or a letter.
fn number(answer: &Value, labels: &[String]) -> Option<usize> {
    let word = answer.as_str();
    if !labels.is_empty() {
        let label = word.map_or_else(|| answer.to_string(), String::from);
        return labels.iter().position(|other| *other == label);
    }
    let Some(word) = word else { return answer.as_u64().and_then(|n| usize::try_from(n).ok()) };
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

    fn parsed(line: Value) -> ChoiceQuestion {
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
        let ai2 = json!({"id": "M1", "answerKey": "B", "question": {"stem": "Why?", "choices":
            [{"text": "a", "label": "A"}, {"text": "b", "label": "B"}]}});
        let ai2 = parsed(ai2);
        assert_eq!((ai2.context.as_str(), ai2.answer, ai2.form), ("Question: Why?\nAnswer:", 1, TaskForm::ArcAi2));
        assert_eq!(ai2.choices, ["a", "b"]);
    }

    #[test]
    fn both_parts_of_a_context_of_hellaswag_are_joined_as_by_the_harness() {
        let line = json!({"activity_label": "Roof", "ctx_a": "A man is there.", "ctx_b": "he Starts", "ctx": "x",
            "label": 0, "endings": ["a", "b"]});
        assert_eq!(parsed(line).context, "Roof: A man is there. He starts");
        let line = json!({"activity_label": "Roof", "ctx_a": "[header] How to", "ctx_b": "", "label": 0,
            "endings": ["a", "b"]});
        assert_eq!(parsed(line).context, "Roof: How to");
    }

    #[test]
    fn broken_lines_say_what_they_lack() {
        let cases = [
            (json!({"choices": ["a"], "answer": 0}), "`query`"),
            (json!({"query": "q", "answer": 0}), "`choices`"),
            (json!({"query": "q", "choices": ["a"]}), "`answer`"),
            (json!({"query": "q", "choices": ["a"], "answer": 1}), "one of the 1 choices"),
            (json!({"query": "q", "choices": ["a"], "answer": "why"}), "one of the 1 choices"),
            (json!({"question": {"stem": "q", "choices": 3}, "answerKey": "A"}), "`question.choices`"),
            (json!({"question": {"stem": "q", "choices": [{"text": "a", "label": 1}]}}), "`label`: found a number"),
            (
                json!({"question": "q", "choices": {"text": ["a", "b"], "label": ["A"]}, "answerKey": "A"}),
                "found 1 labels of 2 choices",
            ),
            (
                json!({"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "1"}),
                "the label of one",
            ),
            (json!({"endings": ["a", 1], "ctx": "c", "label": 0}), "`endings`"),
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
