//! `--dry-run`: the plan of a conversion as a table or JSON.

use crate::console;
use iec::convert::outlook::{Disk, Outlook};
use iec::error::Result;
use iec::output::require_space;
use iec::report::table::Table;
use iec::units::{human_bytes, human_count};
use std::path::Path;

/// Prints the plan on stdout. `out_dir` is where the output would go.
///
/// # Errors
/// The output would not fit on its disk.
pub fn print(outlook: &Outlook, out_dir: &Path, json: bool) -> Result<()> {
    if json {
        console::print_json(outlook)?;
    } else {
        console::print_line(format_args!("{}\n{}", table(outlook), describe(outlook)))?;
    }
    match &outlook.disk {
        Some(disk) if !disk.fits => require_space(out_dir, disk.needed, disk.occupied),
        _ => Ok(()),
    }
}

fn table(outlook: &Outlook) -> Table {
    let mut table =
        Table::new(&["tensor", "shape", "source", ">bytes", "stored as", ">bytes", ">bits/weight", "because"]);
    for row in &outlook.tensors {
        let weights = row.shape.iter().product::<usize>();
        table.row([
            row.name.clone(),
            row.shape.iter().map(|n| n.to_string()).collect::<Vec<_>>().join(" x "),
            row.source.to_string(),
            human_bytes(row.bytes_in),
            row.stored.clone(),
            human_bytes(row.bytes_out),
            format!("{:.2}", row.bytes_out as f64 * 8.0 / weights.max(1) as f64),
            row.why.clone(),
        ]);
    }
    table
}

fn describe(outlook: &Outlook) -> String {
    let mut text = format!(
        "{} tensors, {} weights: {} -> {}, {:.2} bits per weight; nothing was written",
        outlook.tensors.len(),
        human_count(outlook.parameters),
        human_bytes(outlook.bytes_in),
        human_bytes(outlook.bytes_out),
        outlook.bits_per_weight
    );
    if let Some(Disk { needed, occupied, finished_tasks, free, .. }) = outlook.disk {
        text += &format!("\ndisk: {} needed, {} free", human_bytes(needed.saturating_sub(occupied)), human_bytes(free));
        if finished_tasks > 0 {
            text += &format!(
                "; continues an interrupted run: {finished_tasks} tasks are finished, {} are there",
                human_bytes(occupied)
            );
        }
    }
    text
}
