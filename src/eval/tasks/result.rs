//! Results of tasks: the accuracies of a model, and their differences from those of another one.

use super::answerer::{Answerer, Answers, TaskAnswers};
use super::form::TaskForm;
use super::run_code::CodeRunner;
use super::suite::SuiteTask;
use crate::error::Result;
use crate::eval::stats::{Mean, PairedDifference, wilson};
use crate::provenance::SourceFile;
use serde_json::Value;

/// Answers of a model to the questions of a task.
#[derive(Debug, Clone)]
pub struct TaskResult {
    /// Name of the task in its suite.
    pub name: String,
    /// Form of its files.
    pub form: TaskForm,
    /// Files, with the answers to each.
    pub files: Vec<(SourceFile, TaskAnswers)>,
}

/// Share of right answers.
#[derive(Debug, Clone, PartialEq)]
pub struct Accuracy {
    /// Name of the figure in JSON.
    pub key: &'static str,
    /// Name of the figure for people.
    pub name: &'static str,
    /// Whether each question was answered correctly.
    pub right: Vec<bool>,
}

impl Accuracy {
    /// Returns the number of right answers.
    pub fn count(&self) -> usize {
        self.right.iter().filter(|right| **right).count()
    }

    /// Returns the share of right answers with its standard error.
    pub fn share(&self) -> Mean {
        Mean::share(self.right.iter().copied())
    }

    /// Returns the 95 % interval of the share.
    pub fn ci95(&self) -> [f64; 2] {
        wilson(self.count(), self.right.len())
    }

    /// Returns the difference from the accuracy of another model on the same questions.
    pub fn minus(&self, reference: &Accuracy) -> PairedDifference {
        PairedDifference::of(&self.right, &reference.right)
    }
}

impl TaskResult {
    /// Lets a model answer the questions of a task. Calls `each` with the name of the file and a description of each
    /// answer.
    ///
    /// # Errors
    /// A question is too long for the model, the engine fails, or `each` fails.
    pub fn measure(
        model: &mut Answerer<'_>,
        task: &SuiteTask,
        answers: &Answers,
        runner: Option<&CodeRunner>,
        mut each: impl FnMut(&SourceFile, Value) -> Result<()>,
    ) -> Result<TaskResult> {
        let answered = task.files.iter().map(|file| {
            let found = file.answer(model, answers, runner, &mut |answer| each(&file.source, answer))?;
            Ok((file.source.clone(), found))
        });
        let files = answered.collect::<Result<_>>()?;
        Ok(TaskResult { name: task.name.clone(), form: task.form, files })
    }

    /// Returns the share of right answers, and the share by likelihood per character if the task has one.
    pub fn accuracies(&self) -> Vec<Accuracy> {
        let answers = || self.files.iter().map(|(_, answers)| answers);
        let right = answers().flat_map(|answers| answers.right.iter().copied()).collect();
        let (key, name) = match self.form {
            TaskForm::Gsm8k | TaskForm::ExactMatch => ("exact_match", "exact match"),
            TaskForm::HumanEval => ("pass_at_1", "pass@1"),
            _ => ("accuracy", "accuracy"),
        };
        let mut found = vec![Accuracy { key, name, right }];
        if self.form.is_normalized() {
            let right = answers().flat_map(|answers| answers.right_by_length.iter().flatten().copied()).collect();
            found.push(Accuracy { key: "accuracy_normalized", name: "accuracy, by length", right });
        }
        found
    }

    /// Returns the number of questions.
    pub fn questions(&self) -> usize {
        self.files.iter().map(|(_, answers)| answers.right.len()).sum()
    }

    /// Returns the number of questions whose context was longer than that of the model, and lost its beginning.
    pub fn truncated(&self) -> usize {
        self.files.iter().map(|(_, answers)| answers.truncated).sum()
    }

    /// Returns the wall time of all answers in seconds.
    pub fn seconds(&self) -> f64 {
        self.files.iter().map(|(_, answers)| answers.seconds).sum()
    }
}
