//! Gate on tasks: the float model and a quantized one answer the same questions, and the accuracy may drop by no more
//! than the gate allows.
//!
//! One engine is in memory at a time. The answers of the float model are computed once and compared with those of
//! every quantized model of a repair.

use super::open;
use super::packs::{Packs, REFERENCE};
use crate::error::{Context, Error, Result};
use crate::eval::tasks::{Accuracy, Answerer, Answers, SuiteTask, TaskFile, TaskForm, TaskResult};
use crate::files;
use crate::generate::speculate::Speculator;
use crate::generate::text::{Tokenizer, tokenizer};
use crate::provenance::{Gate, TaskBound, TaskEvidence};
use crate::runtime::{Engine, Precision};
use std::path::Path;

/// Reads the files of questions of a gate.
///
/// # Errors
/// A file cannot be read or has no known form, or its answers are programs that would have to be run.
pub fn read(gate: &Gate) -> Result<Vec<TaskFile>> {
    gate.tasks.iter().map(|bound| open_file(&bound.path)).collect()
}

/// Reads a file of questions whose answers need not be run.
pub(super) fn open_file(path: &Path) -> Result<TaskFile> {
    let file = TaskFile::open(path)?;
    match file.form == TaskForm::HumanEval {
        true => {
            Err(Error::usage("found HumanEval, whose answers are programs; a gate runs no code that a model writes")
                .at(path)
                .help("name a file of multiple choice or exact match"))
        }
        false => Ok(file),
    }
}

/// Answers of the float model to files of questions, with which quantized models are compared.
#[derive(Debug)]
pub struct TaskTrial<'a> {
    packs: &'a Packs,
    bounds: &'a [TaskBound],
    files: &'a [TaskFile],
    threads: usize,
    reference: Vec<Accuracy>,
}

impl<'a> TaskTrial<'a> {
    /// Lets the float model answer the questions of `files`, those of the tasks of `gate`.
    ///
    /// # Errors
    /// The model cannot be run or has no tokenizer, or a question does not fit its context.
    pub fn begin(packs: &'a Packs, gate: &'a Gate, files: &'a [TaskFile], threads: usize) -> Result<TaskTrial<'a>> {
        let reference = answer(&mut open(&packs.float(), Some(REFERENCE), threads)?, packs, files)?;
        Ok(TaskTrial { packs, bounds: &gate.tasks, files, threads, reference })
    }

    /// Lets the pack that was quantized last answer the questions, and compares the answers. Returns the evidence of
    /// each task, with its objection.
    ///
    /// # Errors
    /// The same as for [`TaskTrial::begin`].
    pub fn measure(&self) -> Result<Vec<TaskEvidence>> {
        self.compare(&mut open(&self.packs.quantized(), None, self.threads)?)
    }

    /// Lets a model answer the questions, and compares the answers with those of the float model.
    pub(super) fn compare(&self, engine: &mut Engine) -> Result<Vec<TaskEvidence>> {
        let precision = engine.precision();
        let found = answer(engine, self.packs, self.files)?;
        let pairs = found.iter().zip(&self.reference).zip(self.files.iter().zip(self.bounds));
        Ok(pairs.map(|((ours, theirs), (file, bound))| evidence(file, bound, (ours, theirs), precision)).collect())
    }
}

/// Lets a model answer all files. The tokenizer is that of the float pack.
fn answer(engine: &mut Engine, packs: &Packs, files: &[TaskFile]) -> Result<Vec<Accuracy>> {
    let path = packs.float().join(tokenizer::FILE_NAME);
    if !files::exists(&path)? {
        let error = Error::usage("found no tokenizer.json, expected one to encode the questions");
        return Err(error.at(packs.checkpoint()).help("copy the tokenizer.json of the model into this directory"));
    }
    let tokenizer = Tokenizer::open(&path)?;
    let mut speculator = Speculator::off();
    let mut answerer = Answerer { engine, speculator: &mut speculator, tokenizer: &tokenizer, bos: true };
    let answers = Answers::default();
    let results = files.iter().map(|file| {
        let task = SuiteTask::of_file(file.clone());
        let found = TaskResult::measure(&mut answerer, &task, &answers, None, |_, _| Ok(())).at(&file.path)?;
        // The first accuracy is that of the likelihoods themselves.
        found.accuracies().into_iter().next().ok_or_else(|| Error::usage("found no answers").at(&file.path))
    });
    results.collect()
}

fn evidence(
    file: &TaskFile,
    bound: &TaskBound,
    (ours, theirs): (&Accuracy, &Accuracy),
    precision: Precision,
) -> TaskEvidence {
    let paired = ours.minus(theirs);
    let mut found = TaskEvidence {
        file: file.source.clone(),
        task: file.form.name().into(),
        questions: ours.right.len(),
        precision: precision.to_string(),
        reference_precision: REFERENCE.to_string(),
        accuracy: ours.share().value,
        reference_accuracy: theirs.share().value,
        difference: paired.difference.value,
        difference_stderr: paired.difference.stderr,
        became_right: paired.became_right,
        became_wrong: paired.became_wrong,
        objection: None,
    };
    found.objection = Gate::objection_to_task(bound, &found);
    found
}
