//! Model that answers questions, and what it answered.

use crate::generate::speculate::Speculator;
use crate::generate::text::Tokenizer;
use crate::runtime::Engine;

/// Opened model that answers questions.
#[derive(Debug)]
pub struct Answerer<'a> {
    /// Engine that runs the model.
    pub engine: &'a mut Engine,
    /// Source of draft tokens.
    pub speculator: &'a mut Speculator,
    /// Tokenizer of the model.
    pub tokenizer: &'a Tokenizer,
    /// True if the tokens that the tokenizer adds precede every context of a choice.
    pub bos: bool,
}

/// Options for the generation of answers.
#[derive(Debug, Clone)]
pub struct Answers {
    /// Largest number of tokens of an answer.
    pub max_new: usize,
    /// Stop texts that end an answer.
    pub stop: Vec<String>,
    /// Number of answers generated in one batch.
    pub batch: usize,
}

impl Default for Answers {
    /// Returns the options for tasks as published: those of lm-evaluation-harness for GSM8K.
    fn default() -> Answers {
        Answers { max_new: 256, stop: vec!["Question:".into()], batch: 8 }
    }
}

/// Answers of a model to the questions of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskAnswers {
    /// Whether each question was answered correctly.
    pub right: Vec<bool>,
    /// The same for choices by their log-likelihood per character.
    pub right_by_length: Option<Vec<bool>>,
    /// Number of questions whose context was too long and lost its beginning.
    pub truncated: usize,
    /// Wall time in seconds.
    pub seconds: f64,
}
