//! Compares two measurements for `iec bench --compare A B`: tests whether B is slower than A with statistical
//! significance.
//!
//! Tokens of one text share the state of the machine, and so do texts of one run, so they are not independent
//! samples. Therefore the comparison uses the largest unit of which there are enough for a test: runs, then prompts
//! (paired, because prompts differ from each other more than versions of a program do), then single tokens.

use super::rank::{Comparison, median, paired, unpaired};
use super::record::{self, Meta, Record, RecordEntry};
use crate::error::{Error, Result};
use crate::report::table::{Column, Table};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// Significance level: a difference counts if its p-value is smaller.
const SIGNIFICANT: f64 = 0.01;
/// Minimum number of runs of A and of B with which a rank test can be significant: its smallest p-value is 2/252.
const RUNS: usize = 5;
/// Minimum number of pairs of prompts with which a test can be significant: its smallest p-value is 2/256.
const PROMPTS: usize = 8;
/// Minimum number of alternations between A and B from which drift of the machine affects both about equally.
const TURNS: usize = 4;
/// Minimum number of single tokens of A and of B.
const TOKENS: usize = 30;

/// All measurements in one of the two files, A or B.
struct Side {
    metas: Vec<Meta>,
    records: Vec<Record>,
    runs: Vec<Map<String, Value>>,
}

/// Time in milliseconds that is compared, and how it is computed for each unit.
#[derive(Clone, Copy)]
struct Metric {
    name: &'static str,
    /// Time of a run.
    run: fn(&Map<String, Value>) -> Option<f64>,
    /// Time of a text.
    text: fn(&Record) -> Option<f64>,
    /// Times of single tokens.
    tokens: fn(&Record) -> &[f64],
}

const METRICS: [Metric; 3] = [
    Metric {
        name: "prefill_ms_per_token",
        run: |run| inverse(run, "tps_prefill"),
        text: |record| per(record.prefill_time_s, record.prompt_tokens.checked_sub(record.reused_tokens)),
        tokens: |_| &[],
    },
    Metric {
        name: "decode_ms_per_token",
        run: |run| inverse(run, "tps_decode"),
        text: |record| per(record.decode_time_s, record.tokens_generated.checked_sub(1)),
        tokens: |record| &record.latencies_ms,
    },
    Metric {
        name: "latency_p95_ms",
        run: |run| positive(run.get("latency_p95_ms")?.as_f64()?),
        text: |_| None,
        tokens: |_| &[],
    },
];

fn inverse(run: &Map<String, Value>, name: &str) -> Option<f64> {
    positive(1e3 / run.get(name)?.as_f64()?)
}

fn per(seconds: f64, tokens: Option<usize>) -> Option<f64> {
    positive(1e3 * seconds / tokens? as f64)
}

/// Returns the value if it is positive and finite.
fn positive(value: f64) -> Option<f64> {
    Some(value).filter(|value| *value > 0.0 && value.is_finite())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Slower,
    Faster,
    /// A difference that is likely larger than the tolerance (the whole 95 % interval of the ratio lies beyond it), but
    /// is not significant.
    Unclear,
    /// No difference that is both significant and larger than the tolerance.
    Same,
    /// There are too few samples for a test.
    Unknown,
}

/// Comparison of one metric.
#[derive(Debug, Serialize)]
struct MetricRow {
    metric: &'static str,
    unit: &'static str,
    samples_a: usize,
    samples_b: usize,
    median_a: Option<f64>,
    median_b: Option<f64>,
    /// B divided by A: above 1, B is slower.
    ratio: Option<f64>,
    ratio_low: Option<f64>,
    ratio_high: Option<f64>,
    p: Option<f64>,
    verdict: Verdict,
}

/// Result of a comparison. It serializes as the JSON line of `iec bench --compare`.
#[derive(Debug, Serialize)]
pub struct Report {
    schema_version: u32,
    a: String,
    b: String,
    tolerance: f64,
    /// Number of alternations between A and B in the order of time; if they alternate, drift of the machine affects
    /// both equally.
    alternations: usize,
    /// Settings that differ between A and B.
    differences: Vec<String>,
    /// Number of prompts whose generated tokens differ between A and B.
    texts_differ: usize,
    metrics: Vec<MetricRow>,
    verdict: Verdict,
}

/// Compares two files of measurements; `tolerance` is the fraction by which B may be slower.
///
/// # Errors
/// A file cannot be read or does not contain a measurement.
pub fn compare(a: &Path, b: &Path, tolerance: f64) -> Result<Report> {
    let (first, second) = (Side::read(a)?, Side::read(b)?);
    let metrics: Vec<MetricRow> = METRICS.iter().map(|metric| metric.compare(&first, &second, tolerance)).collect();
    let is = |verdict: Verdict| metrics.iter().any(|row| row.verdict == verdict);
    let order = [Verdict::Slower, Verdict::Faster, Verdict::Unclear, Verdict::Same, Verdict::Unknown];
    Ok(Report {
        schema_version: 1,
        a: a.display().to_string(),
        b: b.display().to_string(),
        tolerance,
        alternations: alternations(&first, &second),
        differences: differences(&first, &second),
        texts_differ: texts_differ(&first, &second),
        verdict: order.into_iter().find(|verdict| is(*verdict)).unwrap_or(Verdict::Unknown),
        metrics,
    })
}

impl Side {
    fn read(path: &Path) -> Result<Side> {
        let mut side = Side { metas: Vec::new(), records: Vec::new(), runs: Vec::new() };
        for entry in record::read(path)? {
            match entry {
                RecordEntry::Meta(meta) => side.metas.push(meta),
                RecordEntry::Record(record) => side.records.push(record),
                RecordEntry::Summary(run) => side.runs.push(run),
            }
        }
        if side.metas.is_empty() || side.records.is_empty() {
            return Err(Error::corrupt("found no measurement, expected `meta` and `record` lines")
                .at(path)
                .help("name the .jsonl file that `iec bench --report-root DIR` wrote"));
        }
        Ok(side)
    }

    /// Returns the median of each prompt over its texts by `prompt_id`; synthetic prompts have ids, too.
    fn prompts(&self, metric: &Metric) -> BTreeMap<&str, f64> {
        let mut texts: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for record in &self.records {
            texts.entry(&record.prompt_id).or_default().extend((metric.text)(record));
        }
        let middle = |(id, mut values): (_, Vec<f64>)| Some((id, positive(median(&mut values))?));
        texts.into_iter().filter_map(middle).collect()
    }
}

impl Metric {
    /// Compares the largest units of which there are enough samples.
    fn compare(&self, a: &Side, b: &Side, tolerance: f64) -> MetricRow {
        let runs = |side: &Side| -> Vec<f64> { side.runs.iter().filter_map(self.run).collect() };
        let (runs_a, runs_b) = (runs(a), runs(b));
        if runs_a.len().min(runs_b.len()) >= RUNS {
            return self.row("run", &runs_a, &runs_b, Some(unpaired(&runs_a, &runs_b)), tolerance);
        }
        let prompts_b = b.prompts(self);
        let pairs = a.prompts(self).into_iter().filter_map(|(id, a)| Some((a, *prompts_b.get(id)?)));
        let pairs: Vec<(f64, f64)> = pairs.collect();
        if pairs.len() >= PROMPTS {
            let (a, b): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
            return self.row("prompt", &a, &b, Some(paired(&pairs)), tolerance);
        }
        let tokens = |side: &Side| -> Vec<f64> {
            side.records.iter().flat_map(self.tokens).copied().filter_map(positive).collect()
        };
        let (tokens_a, tokens_b) = (tokens(a), tokens(b));
        if tokens_a.len().min(tokens_b.len()) >= TOKENS {
            return self.row("token", &tokens_a, &tokens_b, Some(unpaired(&tokens_a, &tokens_b)), tolerance);
        }
        self.row("run", &runs_a, &runs_b, None, tolerance)
    }

    fn row(&self, unit: &'static str, a: &[f64], b: &[f64], test: Option<Comparison>, tolerance: f64) -> MetricRow {
        let verdict = match test {
            None => Verdict::Unknown,
            Some(test) if test.p < SIGNIFICANT && test.ratio > 1.0 + tolerance => Verdict::Slower,
            Some(test) if test.p < SIGNIFICANT && test.ratio < 1.0 / (1.0 + tolerance) => Verdict::Faster,
            Some(test) if test.low > 1.0 + tolerance || test.high < 1.0 / (1.0 + tolerance) => Verdict::Unclear,
            Some(_) => Verdict::Same,
        };
        let middle = |values: &[f64]| positive(median(&mut values.to_vec()));
        MetricRow {
            metric: self.name,
            unit,
            samples_a: a.len(),
            samples_b: b.len(),
            median_a: middle(a),
            median_b: middle(b),
            ratio: test.map(|test| test.ratio),
            ratio_low: test.map(|test| test.low),
            ratio_high: test.map(|test| test.high),
            p: test.map(|test| test.p),
            verdict,
        }
    }
}

impl Report {
    /// Fails if B is significantly slower than A, by more than the tolerance.
    ///
    /// # Errors
    /// B is slower: exit code 4.
    pub fn verdict(&self) -> Result<()> {
        let slower: Vec<String> =
            self.metrics.iter().filter(|row| row.verdict == Verdict::Slower).map(MetricRow::describe).collect();
        if slower.is_empty() {
            Ok(())
        } else {
            Err(Error::refused(format!("slower: {}", slower.join(", "))).at(&self.b))
        }
    }

    /// Returns a table of all metrics.
    pub fn table(&self) -> Table {
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.3}"));
        let interval =
            |row: &MetricRow| row.ratio_low.zip(row.ratio_high).map(|(low, high)| format!("{low:.3} – {high:.3}"));
        let chance = |p: f64| if p < 1e-4 { "< 0.0001".into() } else { format!("{p:.4}") };
        let columns: [Column<'_, &MetricRow>; 8] = [
            ("metric", &|row| row.metric.replace('_', " ")),
            (">A", &|row| number(row.median_a)),
            (">B", &|row| number(row.median_b)),
            (">B/A", &|row| number(row.ratio)),
            ("95 %", &|row| interval(row).unwrap_or("-".into())),
            (">p", &|row| row.p.map_or("-".into(), chance)),
            ("samples", &|row| format!("{} and {} {}s", row.samples_a, row.samples_b, row.unit)),
            ("B is", &|row| format!("{:?}", row.verdict).to_lowercase()),
        ];
        Table::of(&self.metrics, &columns)
    }

    /// Returns the limitations of the verdict, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self.differences.iter().map(|one| format!("not the same: {one}")).collect();
        if self.texts_differ > 0 {
            notes.push(format!("{} prompts were continued with other tokens in B than in A", self.texts_differ));
        }
        if self.metrics.iter().any(|row| row.unit == "token") {
            let found = "latencies of single tokens do not show whether the machine changed between the runs";
            notes.push(format!("{found}; better measure 5 runs of each"));
        }
        if self.alternations < TURNS && matches!(self.verdict, Verdict::Slower | Verdict::Faster) {
            let found = "A and B were not measured in turns, so the difference may come from a change of the machine";
            notes.push(found.into());
        }
        if self.metrics.iter().any(|row| row.verdict == Verdict::Unclear) {
            notes.push("unclear: a difference is likely, but could be chance; measure more runs".into());
        }
        if self.verdict == Verdict::Unknown {
            notes.push(format!("too few samples for a test, expected {RUNS} runs or {PROMPTS} prompts in A and in B"));
        }
        notes
    }
}

impl MetricRow {
    fn describe(&self) -> String {
        let percent = 100.0 * (self.ratio.unwrap_or(f64::NAN) - 1.0);
        format!("{} by {percent:.1} % (p = {:.2e})", self.metric.replace('_', " "), self.p.unwrap_or(f64::NAN))
    }
}

/// Counts the changes between A and B when all measurements are sorted by time.
fn alternations(a: &Side, b: &Side) -> usize {
    let mut times: Vec<(&str, usize)> = Vec::new();
    for (side, Side { metas, .. }) in [a, b].into_iter().enumerate() {
        times.extend(metas.iter().map(|meta| (&*meta.created, side)));
    }
    times.sort_unstable();
    times.windows(2).filter(|pair| pair[0].1 != pair[1].1).count()
}

/// Lists the settings and properties of the machine that differ between A and B.
fn differences(a: &Side, b: &Side) -> Vec<String> {
    let mut facts: BTreeMap<String, [Vec<String>; 2]> = BTreeMap::new();
    for (side, Side { metas, .. }) in [a, b].into_iter().enumerate() {
        for meta in metas {
            let Ok(Value::Object(fields)) = serde_json::to_value(meta) else { continue };
            let inner = ["settings", "machine"].iter().filter_map(|name| fields.get(*name)?.as_object()).flatten();
            let outer = fields.iter().filter(|(name, value)| !value.is_object() && *name != "created");
            for (name, value) in outer.chain(inner) {
                let (values, value) = (&mut facts.entry(name.clone()).or_default()[side], value.to_string());
                if !values.contains(&value) {
                    values.push(value);
                }
            }
        }
    }
    let shown = |values: &[String]| if values.is_empty() { "nothing".into() } else { values.join(" and ") };
    let differing = facts.into_iter().filter(|(_, [a, b])| a != b);
    differing.map(|(name, [a, b])| format!("{name}: {} in A, {} in B", shown(&a), shown(&b))).collect()
}

/// Counts the prompts whose tokens differ within the length of the shorter text.
fn texts_differ(a: &Side, b: &Side) -> usize {
    let tokens = |side: &Side| -> BTreeMap<String, Vec<u32>> {
        side.records.iter().map(|record| (record.prompt_id.clone(), record.tokens.clone())).collect()
    };
    let (a, b) = (tokens(a), tokens(b));
    a.iter().filter(|(id, ids)| b.get(*id).is_some_and(|other| other.iter().zip(*ids).any(|(x, y)| x != y))).count()
}
