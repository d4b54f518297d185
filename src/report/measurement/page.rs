//! Builds the HTML page of a measurement: one file without scripts and without external resources.

use super::Measurement;
use super::line::MeasurementLine;
use super::rank::median;
use super::record::Record;
use super::stages::StageTimes;
use crate::report::html::charts::{Bar, Lengths, bars, histogram, stacked};
use crate::report::html::{self, Page, escape, number, section, shorten, table};
use crate::session::Latencies;
use serde_json::{Map, Value};

/// Maximum number of prompts that get a bar or a row of their own.
const MOST_PROMPTS: usize = 50;
/// Returns the whole page.
pub fn page(measurement: &Measurement) -> String {
    let (meta, name) = (&measurement.meta, shorten(measurement.meta.model.rsplit('/').next().unwrap_or_default(), 60));
    let cpu = meta.machine.get("cpu").and_then(Value::as_str).unwrap_or("unknown processor");
    let facts = [
        meta.architecture.as_str(),
        &meta.precision,
        &meta.isa,
        &format!("{} thread{}", meta.threads, if meta.threads == 1 { "" } else { "s" }),
        cpu,
        &meta.created,
    ];
    let body = [
        tiles(measurement),
        section("Runs", &runs(&measurement.lines)),
        section(
            "Decoded tokens per second of each prompt",
            &per_prompt(&measurement.records, |record| record.tps_decode),
        ),
        section(
            "Prefilled tokens per second of each prompt",
            &per_prompt(&measurement.records, |record| record.tps_prefill),
        ),
        section("Time between tokens", &latencies(&measurement.records)),
        section("Where the time goes", &stages(&measurement.lines)),
        section("Texts", &texts(&measurement.records)),
        section("Settings", &facts_table(&meta.settings)),
        section("Machine", &facts_table(&meta.machine)),
    ];
    html::document(&Page {
        command: &meta.command,
        title: &name,
        facts: &facts,
        body: &body.concat(),
        footer: &format!("{} · the same numbers are in the JSON Lines and CSV files next to this page", meta.program),
    })
}

/// Renders the medians of the runs, with their range.
fn tiles(measurement: &Measurement) -> String {
    let tile = |name: &str, unit: &str, of: fn(&MeasurementLine) -> Option<f64>| {
        let mut values: Vec<f64> = measurement.lines.iter().filter_map(of).collect();
        if values.is_empty() {
            return String::new();
        }
        values.sort_by(f64::total_cmp);
        let range = match values[..] {
            [_] => String::new(),
            _ => format!("{} – {}", number(values[0]), number(values[values.len() - 1])),
        };
        let middle = number(median(&mut values));
        format!("<div><h3>{name}</h3><b>{middle}</b> {unit}<small>{range}</small></div>\n")
    };
    let expected: Vec<bool> = measurement.records.iter().filter_map(|record| record.expected_ok).collect();
    let right = expected.iter().filter(|ok| **ok).count();
    let class = if right == expected.len() { "good" } else { "bad" };
    let verdict =
        format!("<div class=\"{class}\"><h3>expected tokens</h3><b>{right}</b> of {} texts</div>\n", expected.len());
    let tiles = [
        tile("decode", "tokens/s", |line| Some(line.metrics.tps_decode)),
        tile("prefill", "tokens/s", |line| Some(line.metrics.tps_prefill)),
        tile("first token", "ms", |line| Some(line.metrics.ttft_s * 1e3)),
        tile("median latency", "ms", |line| line.metrics.latency_p50_ms),
        tile("99th percentile", "ms", |line| line.metrics.latency_p99_ms),
        tile("weights read", "GB/s", |line| Some(line.metrics.effective_bandwidth_gbps)),
        tile("peak memory", "MB", |line| line.metrics.rss_peak_mb),
        if expected.is_empty() { String::new() } else { verdict },
    ];
    format!("<div class=\"tiles\">{}</div>\n", tiles.concat())
}

fn runs(lines: &[MeasurementLine]) -> String {
    if lines.len() < 2 {
        return String::new();
    }
    let row = |(i, line): (usize, &MeasurementLine)| {
        let optional = |value: Option<f64>| value.map_or("–".to_string(), number);
        [
            (i + 1).to_string(),
            line.metrics.tokens_generated.to_string(),
            number(line.metrics.wall_time_s),
            number(line.metrics.ttft_s * 1e3),
            number(line.metrics.tps_prefill),
            number(line.metrics.tps_decode),
            optional(line.metrics.latency_p50_ms),
            optional(line.metrics.latency_p95_ms),
            optional(line.metrics.latency_p99_ms),
        ]
    };
    let head = ["run", "tokens", "wall s", "first ms", "prefill/s", "decode/s", "p50 ms", "p95 ms", "p99 ms"];
    table(&head, lines.iter().enumerate().map(row))
}

/// Draws a bar for each prompt: the median of `speed` over runs and rounds.
fn per_prompt(records: &[Record], speed: fn(&Record) -> f64) -> String {
    let bar = |(index, of): (usize, Vec<&Record>)| {
        let mut speeds: Vec<f64> = of.iter().map(|record| speed(record)).collect();
        let note = format!(
            "{}: {} texts of {} + {} tokens",
            of[0].prompt,
            of.len(),
            of[0].prompt_tokens,
            of[0].tokens_generated
        );
        Bar { label: format!("{index}  {}", of[0].prompt), value: median(&mut speeds), note: shorten(&note, 200) }
    };
    let all: Vec<Bar> = by_prompt(records).into_iter().map(bar).collect();
    if all.iter().all(|bar| bar.value == 0.0) { String::new() } else { bars(&all, number) }
}

/// Returns the records grouped by prompt, in the order of the prompts, for at most [`MOST_PROMPTS`] prompts.
fn by_prompt(records: &[Record]) -> Vec<(usize, Vec<&Record>)> {
    let prompts = records.iter().map(|record| record.prompt_index + 1).max().unwrap_or(0).min(MOST_PROMPTS);
    (0..prompts)
        .map(|index| (index, records.iter().filter(|record| record.prompt_index == index).collect::<Vec<_>>()))
        .filter(|(_, of)| !of.is_empty())
        .collect()
}

fn latencies(records: &[Record]) -> String {
    let all: Vec<f64> = records.iter().flat_map(|record| record.latencies_ms.iter().copied()).collect();
    if all.is_empty() {
        return String::new();
    }
    let sorted = Latencies::new(all.clone());
    let marks = [("p50", 50), ("p95", 95), ("p99", 99)];
    let marks: Vec<_> =
        marks.iter().filter_map(|(name, percent)| Some((*name, sorted.percentile(*percent)?))).collect();
    histogram(&all, &marks, "ms")
}

/// Draws the time per stage, summed over the runs that were profiled.
fn stages(lines: &[MeasurementLine]) -> String {
    let profiles: Vec<&StageTimes> = lines.iter().filter_map(|line| line.stages.as_ref()).collect();
    let Some(first) = profiles.first() else { return String::new() };
    let sum = |part: fn(&StageTimes) -> &Map<String, Value>| -> Vec<(String, f64)> {
        let of = |name: &String| profiles.iter().filter_map(|p| part(p).get(name)?.as_f64()).sum::<f64>() * 1e3;
        part(first).keys().map(|name| (name.replace('_', " "), of(name))).collect()
    };
    let rows = [("prefill".to_string(), sum(|p| &p.prefill)), ("decode".to_string(), sum(|p| &p.decode))];
    let shown = |i: usize| rows.iter().any(|(_, parts)| parts[i].1 > 0.0);
    let entry = |(i, (name, _)): (usize, &(String, f64))| format!("<li><i class=\"c{i}\"></i>{}</li>", escape(name));
    let legend: String = rows[0].1.iter().enumerate().filter(|(i, _)| shown(*i)).map(entry).collect();
    let milliseconds = (0..rows[0].1.len()).filter(|i| shown(*i)).map(|i| {
        let cell = |row: usize| number(rows[row].1[i].1);
        [rows[0].1[i].0.clone(), cell(0), cell(1)]
    });
    let numbers = table(&["stage", "prefill ms", "decode ms"], milliseconds);
    format!(
        "{}<ul class=\"legend\">{legend}</ul>\n<details><summary>In milliseconds</summary>{numbers}</details>",
        stacked(&rows, "ms", Lengths::Full)
    )
}

/// Returns a table of the prompts, with generated texts if the command recorded them.
fn texts(records: &[Record]) -> String {
    let row = |(index, of): (usize, Vec<&Record>)| {
        let last = of[of.len() - 1];
        let ok = |of: &[&Record]| of.iter().all(|record| record.expected_ok != Some(false));
        let expected = match (last.expected_present, ok(&of)) {
            (false, _) => "–",
            (true, true) => "as expected",
            (true, false) => "differs",
        };
        [
            index.to_string(),
            shorten(&last.prompt, 90)
                + &last.text.as_ref().map_or(String::new(), |text| format!(" → {}", shorten(text, 400))),
            last.prompt_tokens.to_string(),
            last.tokens_generated.to_string(),
            last.finish.clone(),
            expected.to_string(),
        ]
    };
    let head = ["prompt", "text", "prompt tokens", "new tokens", "end", "expected"];
    table(&head, by_prompt(records).into_iter().map(row))
}

fn facts_table(facts: &Map<String, Value>) -> String {
    let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
    let known: Vec<(&String, &Value)> = facts.iter().filter(|(_, value)| !value.is_null()).collect();
    if known.is_empty() {
        return String::new();
    }
    let row = |(name, value): (&String, &Value)| {
        format!("<dt>{}</dt><dd>{}</dd>", escape(&name.replace('_', " ")), escape(&word(value)))
    };
    format!("<dl>{}</dl>", known.into_iter().map(row).collect::<String>())
}
