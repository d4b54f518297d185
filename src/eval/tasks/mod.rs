//! Evaluation tasks with known answers, read from files, and requests for log-probabilities.
//!
//! A [`TaskFile`] holds the questions of a file in one of the forms of [`TaskForm`]; a [`Suite`] finds the files of a
//! directory. [`TaskResult`] holds the answers of a model: the scores of the choices of each question, generated
//! results that are compared with the expected ones, or programs that a [`CodeRunner`] tests. [`loglikelihoods`]
//! answers requests of lm-evaluation-harness.

mod answerer;
mod choices;
mod code;
mod csv;
mod encoder;
mod exact_match;
mod form;
mod lines;
mod mmlu;
mod requests;
mod result;
mod run_code;
mod suite;
mod task_file;

pub use answerer::{Answerer, Answers, TaskAnswers};
pub use encoder::Encoder;
pub use form::TaskForm;
pub use lines::TASK_LIMIT;
pub use requests::{Answer, Answered, loglikelihoods};
pub use result::{Accuracy, TaskResult};
pub use run_code::{CodeResult, CodeRunner};
pub use suite::{SkippedFile, Suite, SuiteTask};
pub use task_file::TaskFile;
