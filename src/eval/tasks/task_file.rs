//! File of questions in one of the known forms, and the answers of a model to them.

use super::answerer::{Answerer, Answers, TaskAnswers};
use super::choices::{self, ChoiceQuestion};
use super::code::{self, CodeProblem};
use super::exact_match::{self, ExactMatchTask};
use super::form::{TaskForm, recognize};
use super::lines::{self, FORMS, TASK_LIMIT};
use super::mmlu;
use super::run_code::CodeRunner;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::provenance::SourceFile;
use crate::sha256::{Digest, Sha256, hex};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// File of questions.
#[derive(Debug, Clone)]
pub struct TaskFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Name, size and hash of the file.
    pub source: SourceFile,
    /// Form of the questions; that of `iec` if the file has several.
    pub form: TaskForm,
    /// Text before every question, such as worked examples.
    pub shots: String,
    questions: Questions,
}

/// Questions of one kind.
#[derive(Debug, Clone)]
enum Questions {
    Choices(Vec<ChoiceQuestion>),
    ExactMatch(Vec<ExactMatchTask>),
    Code(Vec<CodeProblem>),
}

impl TaskFile {
    /// Reads a file whose form is recognized by its content.
    ///
    /// # Errors
    /// The file cannot be read, has no known form, or a line is not as its form requires.
    pub fn open(path: &Path) -> Result<TaskFile> {
        let text = files::read_text(path, TASK_LIMIT)?;
        let form = recognize(text.as_bytes());
        let form = form.map_err(|reason| {
            Error::corrupt(format!("found no questions of a known form: {reason}")).at(path).help(FORMS)
        })?;
        TaskFile::parse(path, &text, form)
    }

    /// Reads a file of questions with choices.
    ///
    /// # Errors
    /// The file cannot be read, or a line is not such a question.
    pub fn of_choices(path: &Path) -> Result<TaskFile> {
        let text = files::read_text(path, TASK_LIMIT)?;
        match recognize(text.as_bytes()) {
            Ok(TaskForm::Mmlu) => TaskFile::parse(path, &text, TaskForm::Mmlu),
            _ => TaskFile::parse(path, &text, TaskForm::MultipleChoice),
        }
    }

    /// Reads a file of questions with one right result, which `regex` finds in an answer: by default a number.
    ///
    /// # Errors
    /// The file cannot be read, a line is not such a question, or `regex` is not a regular expression.
    pub fn of_exact_match(path: &Path, regex: Option<&str>) -> Result<TaskFile> {
        let pattern = exact_match::result_pattern(regex)?;
        let text = files::read_text(path, TASK_LIMIT)?;
        let tasks = lines::parse_text(&text, path, |value| exact_match::parse(value, &pattern))?;
        Ok(TaskFile::new(path, &text, Questions::ExactMatch(tasks)))
    }

    /// Parses the text of a file of this form.
    pub(super) fn parse(path: &Path, text: &str, form: TaskForm) -> Result<TaskFile> {
        let questions = match form {
            TaskForm::HumanEval => Questions::Code(lines::parse_text(text, path, code::parse)?),
            TaskForm::Gsm8k | TaskForm::ExactMatch => {
                let pattern = exact_match::result_pattern(None)?;
                let parse = |value: &Value| exact_match::parse(value, &pattern);
                Questions::ExactMatch(lines::parse_text(text, path, parse)?)
            }
            TaskForm::Mmlu => Questions::Choices(mmlu::questions(text, path)?),
            _ => Questions::Choices(lines::parse_text(text, path, choices::parse)?),
        };
        let mut file = TaskFile::new(path, text, questions);
        if file.form == TaskForm::Mmlu {
            file.shots = mmlu::shots(&mmlu::subject_and_part(path).0, &[]);
        }
        Ok(file)
    }

    fn new(path: &Path, text: &str, questions: Questions) -> TaskFile {
        let source = SourceFile {
            name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes: text.len() as u64,
            sha256: hex(Sha256::new_with_prefix(text)),
        };
        let form = match &questions {
            Questions::Choices(all) => same(all.iter().map(|q| q.form)).unwrap_or(TaskForm::MultipleChoice),
            Questions::ExactMatch(all) => same(all.iter().map(|q| q.form)).unwrap_or(TaskForm::ExactMatch),
            Questions::Code(_) => TaskForm::HumanEval,
        };
        TaskFile { path: path.to_path_buf(), source, form, shots: String::new(), questions }
    }

    /// Puts solved examples from another file of MMLU before every question.
    pub(super) fn set_examples(&mut self, examples: &TaskFile) {
        if let Questions::Choices(examples) = &examples.questions {
            self.shots = mmlu::shots(&mmlu::subject_and_part(&self.path).0, examples);
        }
    }

    /// Keeps the first `limit` questions only.
    pub fn truncate(&mut self, limit: usize) {
        match &mut self.questions {
            Questions::Choices(all) => all.truncate(limit),
            Questions::ExactMatch(all) => all.truncate(limit),
            Questions::Code(all) => all.truncate(limit),
        }
    }

    /// Returns the number of questions.
    pub fn count(&self) -> usize {
        match &self.questions {
            Questions::Choices(all) => all.len(),
            Questions::ExactMatch(all) => all.len(),
            Questions::Code(all) => all.len(),
        }
    }

    /// Checks that a command can run the programs of this file, if it has some.
    ///
    /// # Errors
    /// The canonical solution of the first problem does not pass.
    pub fn check_runner(&self, runner: &CodeRunner) -> Result<()> {
        match &self.questions {
            Questions::Code(all) => code::check(all, runner).at(&self.path),
            _ => Ok(()),
        }
    }

    /// Lets a model answer all questions. Calls `each` with a description of each answer.
    ///
    /// # Errors
    /// A question is too long for the model, the engine fails, code would have to be run and there is no `runner`, or
    /// `each` fails.
    pub fn answer(
        &self,
        model: &mut Answerer<'_>,
        answers: &Answers,
        runner: Option<&CodeRunner>,
        each: &mut dyn FnMut(Value) -> Result<()>,
    ) -> Result<TaskAnswers> {
        let answered = match (&self.questions, runner) {
            (Questions::Choices(all), _) => choices::score(model, all, &self.shots, each),
            (Questions::ExactMatch(all), _) => exact_match::score(model, all, &self.shots, answers, each),
            (Questions::Code(all), Some(runner)) => code::score(model, all, runner, answers.batch, each),
            (Questions::Code(_), None) => {
                Err(Error::usage("found problems whose answers are programs, which must be run to test them")
                    .help("measure them with `iec eval --suite DIR --run-code CMD`"))
            }
        };
        answered.at(&self.path)
    }
}

/// Returns the form that all questions have.
fn same(mut forms: impl Iterator<Item = TaskForm>) -> Option<TaskForm> {
    let first = forms.next()?;
    forms.all(|form| form == first).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<TaskFile> {
        let form = recognize(text.as_bytes()).map_err(Error::corrupt)?;
        TaskFile::parse(Path::new("d/some_test.csv"), text, form)
    }

    #[test]
    fn a_file_has_the_form_that_all_its_lines_have() {
        let own = r#"{"query": "q", "choices": ["a"], "answer": 0}"#;
        let arc = r#"{"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"}"#;
        assert_eq!(parsed(arc).unwrap().form, TaskForm::ArcHub);
        assert_eq!(parsed(&format!("{arc}\n{own}")).unwrap().form, TaskForm::MultipleChoice);
        let gsm = "{\"question\": \"q\", \"answer\": \"#### 1\"}";
        let mut file = parsed(&format!("{gsm}\n{gsm}\n")).unwrap();
        assert_eq!((file.form, file.count()), (TaskForm::Gsm8k, 2));
        file.truncate(1);
        assert_eq!((file.count(), file.source.name.as_str(), file.source.bytes), (1, "some_test.csv", 76));
        let mmlu = parsed("q,1,2,3,4,A\n").unwrap();
        assert!(mmlu.form == TaskForm::Mmlu && mmlu.shots.contains("about some."), "{}", mmlu.shots);
    }

    #[test]
    fn a_line_of_another_task_is_named() {
        let gsm = "{\"question\": \"q\", \"answer\": \"#### 1\"}";
        let own = r#"{"query": "q", "choices": ["a"], "answer": 0}"#;
        let found = parsed(&format!("{gsm}\n{own}")).unwrap_err().to_string();
        assert!(found.contains("some_test.csv: line 2: found no `prompt` or `question`"), "{found}");
    }
}
