//! Forms of the files of questions, and how a file is recognized by its first line.

use super::csv;
use super::mmlu;
use serde::Serialize;
use serde_json::Value;

/// Form of a file of questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskForm {
    /// HellaSwag: `ctx`, `endings`, `label`.
    HellaSwag,
    /// ARC as published by AI2: `question.stem`, `question.choices`, `answerKey`.
    ArcAi2,
    /// ARC as exported from the Hugging Face Hub: `question`, `choices.text`, `choices.label`, `answerKey`.
    ArcHub,
    /// MMLU: comma-separated values without a header, with a question, four choices and a letter.
    Mmlu,
    /// Multiple choice in the form of `iec`: `query`, `choices`, `answer`.
    MultipleChoice,
    /// GSM8K: `question`, and `answer` that ends with `####` and a number.
    Gsm8k,
    /// Exact match in the form of `iec`: `prompt`, `answer`.
    ExactMatch,
    /// HumanEval: `task_id`, `prompt`, `entry_point`, `canonical_solution`, `test`.
    HumanEval,
}

impl TaskForm {
    /// Returns the name of the task.
    pub fn name(self) -> &'static str {
        match self {
            TaskForm::HellaSwag => "HellaSwag",
            TaskForm::ArcAi2 | TaskForm::ArcHub => "ARC",
            TaskForm::Mmlu => "MMLU",
            TaskForm::MultipleChoice => "multiple choice",
            TaskForm::Gsm8k => "GSM8K",
            TaskForm::ExactMatch => "exact match",
            TaskForm::HumanEval => "HumanEval",
        }
    }

    /// Describes how a file of this form is read.
    pub fn description(self) -> &'static str {
        match self {
            TaskForm::HellaSwag => "HellaSwag (`endings`)",
            TaskForm::ArcAi2 => "ARC (`question.stem`, the form of AI2)",
            TaskForm::ArcHub => "ARC (`choices.text`, the form of the Hugging Face Hub)",
            TaskForm::Mmlu => "MMLU (CSV with six columns)",
            TaskForm::MultipleChoice => "multiple choice (`choices`)",
            TaskForm::Gsm8k => "GSM8K (`answer` with `####`)",
            TaskForm::ExactMatch => "exact match (`prompt`, `answer`)",
            TaskForm::HumanEval => "HumanEval (`entry_point`)",
        }
    }

    /// Returns true if accuracy is also given by the likelihood per character of each choice.
    pub fn is_normalized(self) -> bool {
        matches!(self, TaskForm::HellaSwag | TaskForm::ArcAi2 | TaskForm::ArcHub | TaskForm::MultipleChoice)
    }

    /// Returns true if a choice is to be made among given ones.
    pub fn has_choices(self) -> bool {
        self.is_normalized() || self == TaskForm::Mmlu
    }

    /// Returns the form of a line of JSON by its fields; `None` if they are those of no form. Whether the fields are
    /// complete and have the right types is checked when the line is read.
    pub(super) fn of_fields(value: &Value) -> Option<TaskForm> {
        let has = |key: &str| !value[key].is_null();
        if has("entry_point") && has("prompt") {
            Some(TaskForm::HumanEval)
        } else if has("endings") {
            Some(TaskForm::HellaSwag)
        } else if !value["question"]["stem"].is_null() {
            Some(TaskForm::ArcAi2)
        } else if value["choices"].is_object() {
            Some(TaskForm::ArcHub)
        } else if has("choices") {
            Some(TaskForm::MultipleChoice)
        } else if has("answer") && has("question") && value["answer"].as_str().is_some_and(|a| a.contains("####")) {
            Some(TaskForm::Gsm8k)
        } else if has("answer") && (has("prompt") || has("question")) {
            Some(TaskForm::ExactMatch)
        } else {
            None
        }
    }
}

/// First bytes of a file that gzip has compressed.
const GZIP: &[u8] = &[0x1f, 0x8b];

/// Recognizes the form of a file by its content. The error is the reason why it is not a file of questions.
pub(super) fn recognize(bytes: &[u8]) -> Result<TaskForm, String> {
    if bytes.starts_with(GZIP) {
        return Err("it is compressed with gzip; run `gunzip --keep` on it".into());
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return Err("it is not UTF-8 text".into()) };
    let Some(line) = text.lines().find(|line| !line.trim().is_empty()) else { return Err("it is empty".into()) };
    if !line.trim_start().starts_with('{') {
        return match csv::first(text) {
            Ok(Some(record)) if mmlu::is_question(&record.fields) => Ok(TaskForm::Mmlu),
            _ => Err("its first line is neither a JSON object nor a question of MMLU as CSV".into()),
        };
    }
    let Ok(value) = serde_json::from_str::<Value>(line) else {
        return Err("its first line begins like a JSON object and is none; expected one object per line".into());
    };
    let Some(form) = TaskForm::of_fields(&value) else {
        return Err(format!("{} are those of no task", fields(&value)));
    };
    let answers: &[&str] = match form {
        TaskForm::HellaSwag => &["label", "answer", "gold"],
        TaskForm::ArcAi2 => &["answerKey"],
        TaskForm::ArcHub | TaskForm::MultipleChoice => &["answer", "label", "gold", "answerKey"],
        _ => return Ok(form),
    };
    // Questions of HellaSwag's test are published without answers, with or without an empty label.
    let is_answered = |key: &&str| !value[*key].is_null() && value[*key] != "";
    match answers.iter().any(is_answered) {
        true => Ok(form),
        false => Err(format!("its questions are those of {} without answers (`{}`)", form.name(), answers[0])),
    }
}

/// Lists the first fields of a line.
fn fields(value: &Value) -> String {
    let names = value.as_object().into_iter().flat_map(|object| object.keys());
    let names: Vec<String> = names.take(6).map(|name| format!("`{name:.40}`")).collect();
    match names.is_empty() {
        true => "its first line has no fields, which".into(),
        false => format!("its fields {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_recognized_by_their_fields() {
        let cases = [
            (r#"{"ind": 1, "ctx": "c", "endings": ["a"], "label": 0}"#, TaskForm::HellaSwag),
            (r#"{"question": {"stem": "q", "choices": []}, "answerKey": "A"}"#, TaskForm::ArcAi2),
            (r#"{"question": "q", "choices": {"text": [], "label": []}, "answerKey": "A"}"#, TaskForm::ArcHub),
            ("What is 1 + 1?,1,2,3,4,B", TaskForm::Mmlu),
            ("\"a, b\",1,2,3,4,D\n", TaskForm::Mmlu),
            (r#"{"query": "q", "choices": ["a"], "answer": 0}"#, TaskForm::MultipleChoice),
            ("\n{\"question\": \"q\", \"answer\": \"1 #### 1\"}", TaskForm::Gsm8k),
            (r#"{"prompt": "q", "answer": 3}"#, TaskForm::ExactMatch),
            (r#"{"task_id": "t", "prompt": "p", "entry_point": "f", "test": ""}"#, TaskForm::HumanEval),
        ];
        for (text, form) in cases {
            assert_eq!(recognize(text.as_bytes()), Ok(form), "{text}");
        }
    }

    #[test]
    fn other_files_have_a_reason() {
        let cases: [(&[u8], &str); 9] = [
            (b"", "it is empty"),
            (b"\x1f\x8b\x08", "gunzip"),
            (b"\xff\xfe", "not UTF-8"),
            (b"# Data\n", "neither a JSON object nor"),
            (b"a,b,c,d,e,F\n", "neither a JSON object nor"),
            (b"{\"a\": 1\n}", "one object per line"),
            (b"{\"a\": 1, \"b\": 2}", "its fields `a`, `b` are those of no task"),
            (b"{}", "no fields"),
            (
                b"{\"ctx\": \"c\", \"endings\": [\"a\"], \"label\": \"\"}",
                "those of HellaSwag without answers (`label`)",
            ),
        ];
        for (bytes, expected) in cases {
            let reason = recognize(bytes).unwrap_err();
            assert!(reason.contains(expected), "{reason}");
        }
    }
}
