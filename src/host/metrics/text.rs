//! Encoder of the Prometheus text exposition format, version 0.0.4.
//!
//! A metric family is two comment lines, `# HELP name text` and `# TYPE name kind`, and one line
//! `name{label="value",...} number` for each series. All series of a family must stand together. A histogram `name` has
//! the series `name_bucket{le="bound"}` with cumulative counts, `name_sum` and `name_count`.

use super::histogram::Histogram;
use std::fmt::{Display, Write};

/// Kind of a metric family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MetricKind {
    /// Number that only rises while the process runs.
    Counter,
    /// Number that rises and falls.
    Gauge,
    /// Counts of observed values per range of values.
    Histogram,
}

impl MetricKind {
    fn name(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        }
    }
}

/// Name and value of a label.
pub(super) type Label<'a> = (&'a str, &'a str);

/// Text under construction.
#[derive(Debug, Default)]
pub(super) struct MetricsText {
    out: String,
    /// Header of the current family until its first series is written: a family without series is left out.
    header: String,
    /// Name of the current family.
    name: &'static str,
}

impl MetricsText {
    /// Begins a family; the following series belong to it.
    pub(super) fn family(&mut self, name: &'static str, kind: MetricKind, help: &str) {
        self.name = name;
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        self.header = format!("# HELP {name} {help}\n# TYPE {name} {}\n", kind.name());
    }

    /// Writes a series of the current family.
    pub(super) fn value(&mut self, labels: &[Label<'_>], value: impl Display) {
        self.line("", labels, None, value);
    }

    /// Writes the series of a histogram.
    pub(super) fn histogram(&mut self, labels: &[Label<'_>], histogram: &Histogram) {
        let mut count = 0;
        for (bound, observed) in histogram.buckets() {
            count += observed;
            let bound = bound.map_or("+Inf".to_string(), |bound| format!("{bound:?}"));
            self.line("_bucket", labels, Some(("le", &bound)), count);
        }
        self.line("_sum", labels, None, histogram.sum());
        self.line("_count", labels, None, count);
    }

    /// Returns the complete text.
    pub(super) fn finish(self) -> String {
        self.out
    }

    fn line(&mut self, suffix: &str, labels: &[Label<'_>], last: Option<Label<'_>>, value: impl Display) {
        self.out.push_str(&std::mem::take(&mut self.header));
        self.out.push_str(self.name);
        self.out.push_str(suffix);
        let mut before = '{';
        for (name, text) in labels.iter().copied().chain(last) {
            self.out.push(before);
            self.out.push_str(name);
            self.out.push_str("=\"");
            self.escaped(text);
            self.out.push('"');
            before = ',';
        }
        self.out.push_str(if before == ',' { "} " } else { " " });
        // Writing to a string cannot fail.
        let _ = writeln!(self.out, "{value}");
    }

    fn escaped(&mut self, text: &str) {
        for c in text.chars() {
            match c {
                '\\' => self.out.push_str("\\\\"),
                '"' => self.out.push_str("\\\""),
                '\n' => self.out.push_str("\\n"),
                _ => self.out.push(c),
            }
        }
    }
}
