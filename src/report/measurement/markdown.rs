//! Updates a table in a Markdown document, between two markers. A measurement replaces the row of the same work on
//! the same machine; nothing outside of the markers changes.

use super::Measurement;
use super::line::MeasurementLine;
use crate::files;

use super::rank::median;
use crate::error::{Context, Error, Result};
use crate::output::Target;
use serde_json::Value;

const BEGIN: &str = "<!-- iec bench: begin (rows are replaced by `iec bench --performance-md`) -->";
const END: &str = "<!-- iec bench: end -->";
/// Number of leading columns that identify what was measured; the other columns hold the results.
const KEY: usize = 8;

/// Merges the median of the runs into the document, which is created if it does not exist.
///
/// # Errors
/// The document cannot be read or written, or does not contain exactly one pair of markers.
pub fn merge(measurement: &Measurement, document: &Target) -> Result<()> {
    let path = document.work_path();
    // A device or a pipe has no old contents.
    let old = if document.is_file() && files::exists(&path)? { files::read_to_string(&path)? } else { String::new() };
    let new = merged(&old, &row(measurement)).at(path)?;
    if new == old {
        return Ok(());
    }
    document.write(new.as_bytes())
}

/// Returns the document with `row` (names of columns and cells) in its table.
fn merged(document: &str, row: &[(&str, String)]) -> Result<String> {
    let render = |rows: &[String]| {
        let head = format!("{}\n|{}\n", cells_line(row.iter().map(|(name, _)| *name)), "---|".repeat(row.len()));
        rows.iter().fold(head, |table, row| table + row + "\n")
    };
    let line = cells_line(row.iter().map(|(_, cell)| cell.as_str()));
    let Some((before, table, after)) = parts(document)? else {
        let gap = match document {
            "" => "",
            _ if document.ends_with("\n\n") => "",
            _ if document.ends_with('\n') => "\n",
            _ => "\n\n",
        };
        return Ok(format!("{document}{gap}{BEGIN}\n{}{END}\n", render(&[line])));
    };
    let mut rows: Vec<String> = table.lines().filter(|line| line.starts_with('|')).skip(2).map(String::from).collect();
    let key = |line: &str| -> Vec<String> { cells(line).into_iter().take(KEY).collect() };
    match rows.iter_mut().find(|other| key(other) == key(&line)) {
        Some(other) => *other = line,
        None => rows.push(line),
    }
    Ok(format!("{before}{BEGIN}\n{}{END}{after}", render(&rows)))
}

/// Splits the document into the text before, between and after the markers; `None` without markers.
fn parts(document: &str) -> Result<Option<(&str, &str, &str)>> {
    let damaged = || {
        Error::corrupt("found missing or repeated markers of the table, expected one pair")
            .help(format!("keep one line `{BEGIN}` and below it one line `{END}`, or remove all of them"))
    };
    match (document.matches(BEGIN).count(), document.matches(END).count()) {
        (0, 0) => Ok(None),
        (1, 1) => {
            let (before, rest) = document.split_once(BEGIN).ok_or_else(damaged)?;
            let (table, after) = rest.split_once(END).ok_or_else(damaged)?;
            Ok(Some((before, table, after)))
        }
        _ => Err(damaged()),
    }
}

fn cells_line<'a>(cells: impl Iterator<Item = &'a str>) -> String {
    format!("| {} |", cells.collect::<Vec<_>>().join(" | "))
}

fn cells(line: &str) -> Vec<String> {
    line.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_string()).collect()
}

/// Returns the row of a measurement: names of columns and cells.
fn row(measurement: &Measurement) -> [(&'static str, String); 15] {
    let (meta, lines) = (&measurement.meta, &measurement.lines);
    let setting = |name: &str| meta.settings.get(name).map_or_else(|| "–".to_string(), Value::to_string);
    let middle = |of: fn(&MeasurementLine) -> Option<f64>, digits: usize| {
        let mut values: Vec<f64> = lines.iter().filter_map(of).collect();
        if values.is_empty() { "–".to_string() } else { format!("{:.digits$}", median(&mut values)) }
    };
    let latencies = [
        middle(|l| l.metrics.latency_p50_ms, 2),
        middle(|l| l.metrics.latency_p95_ms, 2),
        middle(|l| l.metrics.latency_p99_ms, 2),
    ];
    let (least, most) = measurement.records.iter().fold((usize::MAX, 0), |(least, most), record| {
        let tokens = record.prompt_tokens - record.reused_tokens;
        (least.min(tokens), most.max(tokens))
    });
    let prompt = if least == most { most.to_string() } else { format!("{least}–{most}") };
    let cpu = meta.machine.get("cpu").and_then(Value::as_str).unwrap_or("–");
    let kv = meta.settings.get("kv").and_then(Value::as_str).unwrap_or("–");
    [
        ("model", word(&meta.model)),
        ("precision", format!("{}, kv {}", word(&meta.precision), word(kv))),
        ("threads", format!("{} {}", meta.threads, word(&meta.isa))),
        ("machine", word(cpu)),
        ("prompt", prompt),
        ("new", setting("max_new")),
        ("batch", setting("batch")),
        ("depth", setting("depth")),
        ("runs", lines.len().to_string()),
        ("prefill/s", middle(|line| Some(line.metrics.tps_prefill), 0)),
        ("decode/s", middle(|line| Some(line.metrics.tps_decode), 1)),
        ("GB/s", middle(|line| Some(line.metrics.effective_bandwidth_gbps), 1)),
        ("p50 / p95 / p99 ms", latencies.join(" / ")),
        ("peak MB", middle(|line| line.metrics.rss_peak_mb, 0)),
        ("date", meta.created.chars().take(10).collect()),
    ]
}

/// Replaces the characters that would break a table cell or form a marker.
fn word(text: &str) -> String {
    let safe = |c: char| if c.is_control() || "|<>`".contains(c) { '_' } else { c };
    text.trim().chars().map(safe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(model: &str, speed: &str) -> [(&'static str, String); 15] {
        let mut row = [(); 15].map(|()| ("column", "1".to_string()));
        (row[0].1, row[10].1) = (model.to_string(), speed.to_string());
        row
    }

    #[test]
    fn a_row_replaces_its_like_and_leaves_everything_else() {
        for document in ["", "# Title\n\ntext", "# Title\n\ntext\n", "# Title\n\n", "text\r\n| a | b |\r\n"] {
            let first = merged(document, &row("a", "10")).unwrap();
            assert!(first.starts_with(document), "{first:?}");
            let blank_line = document.is_empty() || first.contains(&format!("\n\n{BEGIN}"));
            assert!(blank_line, "{first:?}");
            assert_eq!(merged(&first, &row("a", "10")).unwrap(), first);
            let second = merged(&(first.clone() + "below\n"), &row("b", "20")).unwrap();
            let third = merged(&second, &row("a", "30")).unwrap();
            assert!(third.starts_with(document) && third.ends_with(&format!("{END}\nbelow\n")));
            let rows: Vec<Vec<String>> = third.lines().map(cells).filter(|cells| cells.len() == 15).collect();
            let of =
                |model: &str| rows.iter().filter(|row| row[0] == model).map(|row| row[10].clone()).collect::<Vec<_>>();
            assert_eq!((of("a"), of("b")), (vec!["30".to_string()], vec!["20".to_string()]));
        }
    }

    #[test]
    fn damaged_markers_are_refused() {
        for document in [BEGIN.to_string(), format!("{END}\n{BEGIN}\n"), format!("{BEGIN}{END}{BEGIN}{END}")] {
            let error = merged(&document, &row("a", "1")).unwrap_err();
            assert!(error.help_text().unwrap().contains("one line"), "{error}");
        }
    }

    #[test]
    fn no_model_name_breaks_the_table() {
        assert_eq!(word("a|b\n<!-- iec bench: end -->"), "a_b__!-- iec bench: end --_");
    }
}
