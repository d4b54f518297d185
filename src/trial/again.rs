//! Measures the quality of a pack again and compares the figures with the evidence that the pack records.

use super::task_gate::{TaskTrial, open_file};
use super::{Packs, Question, Trial};
use crate::error::{Context, Error, Result};
use crate::eval::tasks::TaskFile;
use crate::iebin::IebinReader;
use crate::provenance::{Evidence, Figures, Gate, Quality, TaskEvidence};
use crate::runtime::{Engine, EngineOptions, Precision};
use std::path::PathBuf;

/// Largest relative difference of figures that count as equal. Logits are the same on every machine; the logarithms of
/// sums of their exponentials may differ in the last bits.
const NOISE: f64 = 1e-6;

/// Figures of the evidence that a pack records, and the same figures measured again.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Again {
    /// Figures recorded in the pack, if it was measured on a text.
    pub recorded: Option<Figures>,
    /// Figures measured now.
    pub found: Option<Figures>,
    /// Accuracies on files of questions.
    pub tasks: Vec<TaskAgain>,
    /// True if the figures differ: the recorded ones are not those of this pack, this checkpoint and this text.
    pub differs: bool,
    /// Objections of the gate to the figures measured now.
    pub objections: Vec<String>,
}

/// Accuracy on a file of questions that a pack records, and the same measured again.
#[derive(Debug, Clone, serde::Serialize)]
pub struct TaskAgain {
    /// Evidence recorded in the pack.
    pub recorded: TaskEvidence,
    /// Evidence measured now.
    pub found: TaskEvidence,
}

/// Files on which the quality of a pack was measured.
#[derive(Debug, Clone)]
pub struct GateFiles {
    /// Text of the gate.
    pub text: Option<PathBuf>,
    /// Files of questions of the gate.
    pub tasks: Vec<PathBuf>,
    /// Number of threads of the engines.
    pub threads: usize,
}

impl Again {
    /// Compares the pack of `reader` with the float model under the conditions that the pack's evidence records.
    ///
    /// # Errors
    /// The pack contains no evidence, a file is missing or is not that of the evidence, or a model cannot be run.
    pub fn measure(reader: &IebinReader, packs: &Packs, files: &GateFiles) -> Result<Again> {
        let quality = recorded(reader)?;
        let text = quality.evidence.as_ref().map(|evidence| on_text(reader, evidence, packs, files)).transpose()?;
        let tasks = on_tasks(reader, quality, packs, files)?;
        let recorded = quality.evidence.as_ref().map(|evidence| evidence.figures);
        let text_differs = recorded.zip(text).is_some_and(|(recorded, found)| differ(&recorded, &found));
        let mut objections = text.map_or_else(Vec::new, |found| quality.gate.objections_to_answers(&found));
        objections.extend(tasks.iter().filter_map(|task| task.found.objection.clone()));
        let differs = text_differs || tasks.iter().any(|task| accuracies_differ(&task.recorded, &task.found));
        Ok(Again { recorded, found: text, tasks, differs, objections })
    }
}

/// Measures the figures of the text again.
fn on_text(reader: &IebinReader, evidence: &Evidence, packs: &Packs, files: &GateFiles) -> Result<Figures> {
    let threads = files.threads;
    let text = files.text.clone().ok_or_else(|| {
        Error::usage(format!("found no text, expected that of the gate, `{}`", evidence.text.name))
            .help(format!("name the file with the SHA-256 {} with --gate-text", evidence.text.sha256))
    })?;
    let question = Question { text: text.clone(), skip: 0, windows: None, threads };
    let mut trial = Trial::begin(packs, question)?;
    if trial.text.sha256 != evidence.text.sha256 {
        let found = format!("found another text than that of the gate, `{}`", evidence.text.name);
        let help = format!("name the file with the SHA-256 {} with --gate-text", evidence.text.sha256);
        return Err(Error::usage(found).at(&text).help(help));
    }
    trial.read_as(evidence).at(&reader.dir)?;
    let options = EngineOptions { precision: Some(evidence.precision.parse()?), threads, ..EngineOptions::default() };
    trial.compare(&mut Engine::open(reader, &options)?)
}

/// Measures the accuracies on the files of questions again.
fn on_tasks(reader: &IebinReader, quality: &Quality, packs: &Packs, files: &GateFiles) -> Result<Vec<TaskAgain>> {
    let Quality { gate: Gate { tasks: bounds, .. }, task_evidence: recorded, .. } = quality;
    if bounds.len() != recorded.len() {
        let (found, expected) = (recorded.len(), bounds.len());
        return Err(Error::corrupt(format!("found measurements of {found} tasks, but the gate has {expected}"))
            .at(&reader.dir)
            .help("measure with `iec ptq --gate task=FILE:-X%` and pack with that manifest, without --dtype"));
    }
    let Some(first) = recorded.first() else { return Ok(Vec::new()) };
    let given = files.tasks.iter().map(|path| open_file(path)).collect::<Result<Vec<TaskFile>>>()?;
    let named = recorded.iter().map(|task| {
        let same = given.iter().find(|file| file.source.sha256 == task.file.sha256);
        same.cloned().ok_or_else(|| {
            Error::usage(format!("found no file of questions of the gate, expected `{}`", task.file.name))
                .help(format!("name the file with the SHA-256 {} with --gate-task", task.file.sha256))
        })
    });
    let named = named.collect::<Result<Vec<TaskFile>>>()?;
    let trial = TaskTrial::begin(packs, &quality.gate, &named, files.threads)?;
    let precision: Option<Precision> = Some(first.precision.parse()?);
    let options = EngineOptions { precision, threads: files.threads, ..EngineOptions::default() };
    let found = trial.compare(&mut Engine::open(reader, &options)?)?;
    Ok(recorded.iter().cloned().zip(found).map(|(recorded, found)| TaskAgain { recorded, found }).collect())
}

/// Returns the quality record of a pack, which has evidence.
fn recorded(reader: &IebinReader) -> Result<&Quality> {
    let quality = reader.description.quality.as_ref();
    let has_evidence = |quality: &&Quality| quality.evidence.is_some() || !quality.task_evidence.is_empty();
    quality.filter(has_evidence).ok_or_else(|| {
        Error::usage("found no measurement of the outputs in the pack, because no gate on outputs was used")
            .at(&reader.dir)
            .help(
                "quantize with `iec ptq --gate kl=X --gate-text FILE`, and pack that manifest with --q4-map and \
                 without --dtype",
            )
    })
}

/// Returns true if the answers to questions are not those that are recorded.
fn accuracies_differ(a: &TaskEvidence, b: &TaskEvidence) -> bool {
    let pairs = [(a.accuracy, b.accuracy), (a.reference_accuracy, b.reference_accuracy), (a.difference, b.difference)];
    let counts = |task: &TaskEvidence| (task.questions, task.became_right, task.became_wrong);
    counts(a) != counts(b) || !pairs.into_iter().all(|(a, b)| (a - b).abs() <= NOISE)
}

fn differ(a: &Figures, b: &Figures) -> bool {
    let pairs = [
        (a.kl, b.kl),
        (a.kl_p99, b.kl_p99),
        (a.perplexity, b.perplexity),
        (a.perplexity_ratio, b.perplexity_ratio),
        (a.top1_agreement, b.top1_agreement),
    ];
    // NaN is equal to nothing.
    !pairs.into_iter().all(|(a, b)| (a - b).abs() <= NOISE * a.abs().max(b.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_differ_by_more_than_the_last_bits() {
        let figures = Figures {
            kl: 0.002,
            kl_stderr: 0.0001,
            kl_p99: 0.01,
            perplexity: 6.0,
            perplexity_ratio: 1.01,
            perplexity_ratio_stderr: 0.001,
            top1_agreement: 0.95,
        };
        assert!(!differ(&figures, &figures));
        assert!(!differ(&figures, &Figures { kl: 0.002 * (1.0 + 1e-9), ..figures }));
        assert!(differ(&figures, &Figures { kl: 0.0021, ..figures }));
        assert!(differ(&figures, &Figures { top1_agreement: 0.949, ..figures }));
        assert!(differ(&figures, &Figures { perplexity: f64::NAN, ..figures }));
    }
}
