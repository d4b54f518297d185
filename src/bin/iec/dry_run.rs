//! `--dry-run`: the plan of a conversion as a table or JSON.

use crate::console;
use iec::convert::LeftOutPart;
use iec::convert::dry_run::{Disk, DryRun, TensorRow};
use iec::convert::published::PublishedSummary;
use iec::error::Result;
use iec::output::require_space;
use iec::report::table::{Column, Table};
use iec::units::{human_bytes, human_count};
use std::path::Path;

/// Prints the plan on stdout. `out_dir` is the directory that the output would be written to.
///
/// # Errors
/// The output would not fit on its disk.
pub fn print(dry_run: &DryRun, out_dir: &Path, json: bool) -> Result<()> {
    if json {
        console::print_json(dry_run)?;
    } else {
        // On a terminal, a table that is too wide loses columns; data for programs keep all of them.
        let most = console::columns_of(std::io::stdout()).unwrap_or(usize::MAX);
        let table = table(dry_run).within(most, &["source", "shape", "bits/weight", "because"]);
        console::print_line(format_args!("{table}\n{}", describe(dry_run)))?;
    }
    match &dry_run.disk {
        Some(disk) if !disk.fits => require_space(out_dir, disk.needed, disk.occupied),
        _ => Ok(()),
    }
}

/// Describes, in a line of its own, the tensors that are left out, if there are some.
pub fn left_out(parts: &[LeftOutPart]) -> String {
    if parts.is_empty() {
        return String::new();
    }
    let part = |LeftOutPart { part, tensors, bytes, .. }: &LeftOutPart| {
        format!("{part} ({tensors} tensors, {})", human_bytes(*bytes))
    };
    let list: Vec<String> = parts.iter().map(part).collect();
    format!("\nleft out, because the language model does not use them: {}", list.join(", "))
}

/// Says, in a line of its own, what the pack holds of a checkpoint that is quantized.
pub fn published(summary: Option<&PublishedSummary>) -> String {
    let Some(PublishedSummary { format, kept, converted, activation_scales }) = summary else { return String::new() };
    let mut text = format!("\n{format}: {kept} tensors keep their codes");
    if *converted > 0 {
        text +=
            &format!(", {converted} are converted (`iec pack --dry-run` and -vv say why; --dtype bf16 halves floats)");
    }
    if *activation_scales {
        text += "\nnote: the checkpoint has scales of activations, which are not used";
    }
    text
}

/// Says, in a line of its own, from which files the tokenizer.json is made, if it is not copied.
pub fn made_tokenizer(from: &[String]) -> String {
    if from.is_empty() { String::new() } else { format!("\ntokenizer.json: made from {}", from.join(", ")) }
}

fn table(dry_run: &DryRun) -> Table {
    let bits = |bytes: u64, shape: &[usize]| bytes as f64 * 8.0 / shape.iter().product::<usize>().max(1) as f64;
    let columns: [Column<'_, &TensorRow>; 8] = [
        ("tensor", &|row| row.name.clone()),
        ("shape", &|row| row.shape.iter().map(|n| n.to_string()).collect::<Vec<_>>().join(" x ")),
        ("source", &|row| row.source.to_string()),
        (">bytes", &|row| human_bytes(row.bytes_in)),
        ("stored as", &|row| row.stored.clone()),
        (">bytes", &|row| human_bytes(row.bytes)),
        (">bits/weight", &|row| format!("{:.2}", bits(row.bytes, &row.shape))),
        ("because", &|row| row.why.clone()),
    ];
    Table::of(&dry_run.tensors, &columns)
}

fn describe(dry_run: &DryRun) -> String {
    let (tensors, weights, bits) = (dry_run.tensors.len(), human_count(dry_run.weights), dry_run.bits_per_weight);
    let [before, after] = [dry_run.bytes_in, dry_run.bytes].map(human_bytes);
    let mut text = format!(
        "{tensors} tensors, {weights} weights: {before} -> {after}, {bits:.2} bits per weight; nothing was written"
    );
    text += &published(dry_run.published.as_ref());
    text += &left_out(&dry_run.left_out);
    text += &made_tokenizer(&dry_run.tokenizer_from);
    if let Some(Disk { needed, occupied, finished_tasks, free, .. }) = dry_run.disk {
        text += &format!("\ndisk: {} needed, {} free", human_bytes(needed.saturating_sub(occupied)), human_bytes(free));
        if finished_tasks > 0 {
            let there = human_bytes(occupied);
            text += &format!("; continues an interrupted run: {finished_tasks} tasks and {there} are finished");
        }
    }
    text
}
