//! Describes measurements that `iec bench` or `iec run` stored as JSON lines, and checks their figures.

use crate::error::{Error, Result};
use crate::files;
use crate::report::measurement::record::{self, Meta, Record, RecordEntry};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::path::Path;

/// Largest difference of two figures that count as equal, relative to the larger of the expected figure and 1.
const TOLERANCE: f64 = 1e-6;

/// Measurement that was read from a file.
pub struct Report {
    meta: Meta,
    records: Vec<Record>,
    summaries: Vec<Map<String, Value>>,
}

impl Report {
    /// Returns true when `path` names a file of JSON lines.
    ///
    /// # Errors
    /// The system cannot tell whether it exists.
    pub fn is_at(path: &Path) -> Result<bool> {
        Ok(path.extension().is_some_and(|extension| extension == "jsonl") && files::is_file(path)?)
    }

    /// Reads a measurement.
    ///
    /// # Errors
    /// The file cannot be read, or does not hold exactly one measurement.
    pub fn open(path: &Path) -> Result<Report> {
        let (mut metas, mut records, mut summaries) = (Vec::new(), Vec::new(), Vec::new());
        for entry in record::read(path)? {
            match entry {
                RecordEntry::Meta(meta) => metas.push(meta),
                RecordEntry::Record(record) => records.push(record),
                RecordEntry::Summary(summary) => summaries.push(summary),
            }
        }
        match <[Meta; 1]>::try_from(metas) {
            Ok([meta]) => Ok(Report { meta, records, summaries }),
            Err(metas) => {
                let found = format!("found {} lines with `\"kind\":\"meta\"`, expected one", metas.len());
                Err(Error::corrupt(found)
                    .at(path)
                    .help("name one .jsonl file as `iec bench --report-root DIR` writes it"))
            }
        }
    }

    /// Checks that the figures of the report agree with each other and that all expected tokens were generated.
    ///
    /// # Errors
    /// A figure or token is wrong (exit code 4); the error names the first one.
    pub fn check(&self, path: &Path) -> Result<()> {
        let mut wrong = Vec::new();
        if self.records.is_empty() || self.summaries.is_empty() {
            wrong.push("found no generated text or no run, expected at least one of each".to_string());
        }
        self.records.iter().for_each(|record| check_record(record, &mut wrong));
        for summary in &self.summaries {
            self.check_summary(summary, &mut wrong);
        }
        match wrong.first() {
            None => Ok(()),
            Some(first) => Err(Error::refused(format!("found {} wrong figures, the first is {first}", wrong.len()))
                .at(path)
                .help("measure again with --report-root DIR; if a token differs, check the --expected-tokens, too")),
        }
    }

    fn check_summary(&self, summary: &Map<String, Value>, wrong: &mut Vec<String>) {
        let number = |name: &str| summary.get(name).and_then(Value::as_f64);
        let run = number("run").unwrap_or(0.0);
        // With --aggregate, one summary stands for all runs.
        let own = |record: &&Record| self.summaries.len() == 1 || record.run as f64 == run;
        let tokens: usize = self.records.iter().filter(own).map(|record| record.tokens_generated).sum();
        let mut expect = |name: &str, expected: f64| match number(name) {
            Some(found) if (found - expected).abs() <= TOLERANCE * expected.abs().max(1.0) => {}
            Some(found) => wrong.push(format!("run {run}: found `{name}` {found}, expected {expected}")),
            None => wrong.push(format!("run {run}: found no `{name}`, expected {expected}")),
        };
        expect("tokens_generated", tokens as f64);
        if let Some(wall) = number("wall_time_s").filter(|wall| *wall > 0.0) {
            expect("tps_true", tokens as f64 / wall);
        }
        let percentiles = ["latency_p50_ms", "latency_p95_ms", "latency_p99_ms"].map(number);
        if !percentiles.is_sorted() {
            let found = percentiles.into_iter().flatten().map(|ms| ms.to_string()).collect::<Vec<_>>().join(", ");
            wrong.push(format!("run {run}: found the percentiles {found}, expected ascending ones"));
        }
    }

    /// Describes the measurement for people.
    pub fn text(&self, path: &Path) -> String {
        let Report { meta, records, summaries } = self;
        let mut text = format!("{}: measurement of iec {}\n", path.display(), meta.command);
        let mut line = |key: &str, value: String| {
            let _ = writeln!(text, "  {key:<14}{value}");
        };
        line("model", format!("{} ({})", meta.model, meta.architecture));
        line("precision", meta.precision.clone());
        line("device", format!("{}, {} threads, {}", meta.device, meta.threads, meta.isa));
        line("made by", format!("{}, {}", meta.program, meta.created));
        line("texts", format!("{} in {} runs", records.len(), summaries.len()));
        for (key, name) in [("decode", "tps_decode"), ("prefill", "tps_prefill")] {
            let rates: Vec<String> = summaries
                .iter()
                .filter_map(|summary| summary.get(name)?.as_f64())
                .map(|rate| format!("{rate:.1}"))
                .collect();
            line(key, format!("{} tokens/s", rates.join(", ")));
        }
        text
    }

    /// Describes the measurement as JSON.
    pub fn as_json(&self, path: &Path) -> Value {
        json!({"schema_version": 1, "path": path, "kind": "measurement", "meta": self.meta,
               "texts": self.records.len(), "runs": self.summaries})
    }
}

fn check_record(record: &Record, wrong: &mut Vec<String>) {
    let Record { run, round, prompt_index, tokens_generated, .. } = record;
    let mut add = |found: String| wrong.push(format!("run {run}, round {round}, prompt {prompt_index}: {found}"));
    if record.tokens.len() > *tokens_generated {
        add(format!("found {} token ids, expected at most {tokens_generated}", record.tokens.len()));
    }
    if record.latencies_ms.len() != tokens_generated.saturating_sub(1) {
        let (found, expected) = (record.latencies_ms.len(), tokens_generated.saturating_sub(1));
        add(format!("found {found} latencies of {tokens_generated} tokens, expected {expected}"));
    }
    let times = [record.prefill_time_s, record.decode_time_s].into_iter().chain(record.latencies_ms.iter().copied());
    if times.into_iter().any(|time| !time.is_finite() || time < 0.0) {
        add("found a negative or infinite time".into());
    }
    if record.expected_ok == Some(false) {
        add(format!("token {} is not the expected one", record.mismatch_index.unwrap_or(0)));
    }
}
