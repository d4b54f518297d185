//! Reports of a quantization: a table per role, the measurements of the whole model, JSON, and an HTML page.

mod page;
mod roles;

pub use page::page;
pub use roles::{json, table};

use super::table::Table;
use crate::provenance::{Evidence, TaskEvidence};

/// Returns a table that compares the quantized model with the float model.
pub fn answers(evidence: &Evidence) -> Table {
    let mut table = Table::new(&["whole model", ">value", ">± standard error"]);
    let f = &evidence.figures;
    table.row(["divergence, nats per token".into(), format!("{:.5}", f.kl), format!("{:.5}", f.kl_stderr)]);
    let (rise, error) = (100.0 * (f.perplexity_ratio - 1.0), 100.0 * f.perplexity_ratio_stderr);
    table.row([format!("perplexity {:.4}, rise", f.perplexity), format!("{rise:+.2} %"), format!("{error:.2} %")]);
    table.row(["bits per weight of the pack".into(), format!("{:.3}", evidence.bits_per_weight), String::new()]);
    table.row(["same most likely token".into(), format!("{:.2} %", 100.0 * f.top1_agreement), String::new()]);
    table
}

/// Returns a table of the accuracies of the quantized model and the float model on files of questions.
pub fn tasks(evidence: &[TaskEvidence]) -> Table {
    let mut table = Table::new(&["task", ">questions", ">accuracy", ">before", ">difference", ">± standard error"]);
    for task in evidence {
        table.row([
            format!("{} {}", task.task, task.file.name),
            task.questions.to_string(),
            format!("{:.2} %", 100.0 * task.accuracy),
            format!("{:.2} %", 100.0 * task.reference_accuracy),
            format!("{:+.2} points", 100.0 * task.difference),
            format!("{:.2}", 100.0 * task.difference_stderr),
        ]);
    }
    table
}
