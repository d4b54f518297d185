//! Quality gate: compares the metrics of a tensor, or the measured loss of the whole model, with thresholds and
//! explains which ones are missed.

use crate::error::{Error, Result};
use crate::manifest::Metrics;
use crate::provenance::{Figures, Gate, TaskBound, TaskEvidence};
use crate::scheme::Scheme;
use std::path::PathBuf;

/// Syntax of the values of `--gate`.
const EXPECTED: &str = "cosine=X, cosine-min=Y, kl=NATS, ppl=+X%, top1=X% or task=FILE:-X%";

impl Gate {
    /// Only the bounds on cosines that are asked for, for a model whose schemes a budget chooses.
    pub const WITHOUT_COSINES: Gate = Gate {
        cosine: Some(0.0),
        cosine_min: Some(0.0),
        kl: None,
        perplexity_rise: None,
        top1: None,
        tasks: Vec::new(),
    };

    /// Returns the least mean cosine of the rows and the least cosine of a row of a tensor in this scheme.
    ///
    /// With the best scale, 1 - cosine^2 of a row is the share of its energy that became noise. Blocks of 32 at 4 bit
    /// lose 0.65 to 0.75 % on weights without outliers (cosine 0.9963 to 0.9967), so a mean below 0.995 (1 %) means
    /// that the scheme does not suit the tensor: one int4 scale per row loses 1.2 to 1.6 % on the trained models
    /// measured, and doubles the loss of perplexity compared with blocks. Single rows vary; a minimum of 0.98 (4 %)
    /// catches a row that an outlier has flattened. A trellis loses 2.6 % of the energy of usual weights with 3 bits
    /// and 9 % with 2 bits; its defaults leave the same room. The acceptable loss of the whole model depends on its
    /// use, so there is no default for it.
    pub fn cosines(&self, scheme: Scheme) -> (f64, f64) {
        let (mean, least) = match scheme.bits() {
            2 => (0.935, 0.75),
            3 => (0.98, 0.92),
            _ => (0.995, 0.98),
        };
        (self.cosine.unwrap_or(mean), self.cosine_min.unwrap_or(least))
    }

    /// Applies a `NAME=VALUE` option: `cosine` (mean over rows), `cosine-min` (the worst row), `kl` (nats per token),
    /// `ppl` (rise in percent), `top1` (share of tokens with the same most likely token), or `task` (a file of
    /// questions, and the largest drop of the accuracy on it in percentage points; repeatable).
    ///
    /// # Errors
    /// The name is unknown, or the value is not a number in its range.
    pub fn set(&mut self, option: &str) -> Result<()> {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let number = |text: &str, most: f64| {
            let number = text.parse().ok().filter(|v| (0.0..=most).contains(v));
            number.ok_or_else(|| {
                Error::usage(format!("gate: found `{option}`, expected a number from 0 to {most} in {EXPECTED}"))
            })
        };
        let percent = |text: &str, most: f64| {
            let Some(text) = text.strip_suffix('%') else {
                return Err(Error::usage(format!(
                    "gate: found `{option}`, expected a number followed by % in {EXPECTED}"
                )));
            };
            Ok(number(text, most)? / 100.0)
        };
        match name {
            "cosine" => self.cosine = Some(number(value, 1.0)?),
            "cosine-min" => self.cosine_min = Some(number(value, 1.0)?),
            "kl" => self.kl = Some(number(value, 100.0)?),
            "ppl" => self.perplexity_rise = Some(percent(value.strip_prefix('+').unwrap_or(value), 1e6)?),
            "top1" => self.top1 = Some(percent(value, 100.0)?),
            "task" => {
                let (file, drop) = value.rsplit_once(':').unwrap_or((value, ""));
                let drop = drop.strip_prefix('-').filter(|_| !file.is_empty());
                let Some(drop) = drop else {
                    let found = format!("gate: found `{option}`, expected task=FILE:-X%, as in task=arc.jsonl:-0.3%");
                    return Err(Error::usage(found));
                };
                let (path, largest_drop) = (PathBuf::from(file), percent(drop, 100.0)?);
                let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                self.tasks.push(TaskBound { path, file, largest_drop });
            }
            _ => return Err(Error::usage(format!("gate: found `{option}`, expected {EXPECTED}"))),
        }
        Ok(())
    }

    /// Returns true when the gate has thresholds on the outputs of the whole model.
    pub fn asks_the_model(&self) -> bool {
        self.asks_a_text() || !self.tasks.is_empty()
    }

    /// Returns true when the gate has thresholds on the outputs of the whole model for a text.
    pub fn asks_a_text(&self) -> bool {
        self.kl.is_some() || self.perplexity_rise.is_some() || self.top1.is_some()
    }

    /// Returns the reasons why the outputs of the model miss the thresholds; empty when they pass. The estimates are
    /// compared without a margin for their standard errors; a longer text makes these smaller.
    pub fn objections_to_answers(&self, figures: &Figures) -> Vec<String> {
        let mut objections = Vec::new();
        let rise = figures.perplexity_ratio - 1.0;
        // NaN misses every threshold.
        let above = |found: f64, most: &f64| found.is_nan() || found > *most;
        let below = |found: f64, least: &f64| found.is_nan() || found < *least;
        if let Some(most) = self.kl.filter(|most| above(figures.kl, most)) {
            objections.push(format!("KL divergence {:.5} ± {:.5} nats is above {most}", figures.kl, figures.kl_stderr));
        }
        if let Some(most) = self.perplexity_rise.filter(|most| above(rise, most)) {
            let error = 100.0 * figures.perplexity_ratio_stderr;
            objections.push(format!(
                "perplexity rises by {:.2} ± {error:.2} %, above {:.2} %",
                100.0 * rise,
                100.0 * most
            ));
        }
        if let Some(least) = self.top1.filter(|least| below(figures.top1_agreement, least)) {
            objections.push(format!(
                "top-1 agreement is {:.2} %, below {:.2} %",
                100.0 * figures.top1_agreement,
                100.0 * least
            ));
        }
        objections
    }

    /// Returns the reason why the accuracy on a file of questions misses a bound, without a margin for its standard
    /// error.
    pub fn objection_to_task(bound: &TaskBound, found: &TaskEvidence) -> Option<String> {
        // Differences of the same numbers of right answers may differ in their last bit.
        let is_met = found.difference >= -bound.largest_drop - 1e-12;
        (!is_met).then(|| {
            let [drop, error, most] =
                [-found.difference, found.difference_stderr, bound.largest_drop].map(|x| 100.0 * x);
            format!(
                "accuracy on {} drops by {drop:.2} ± {error:.2} percentage points to {:.2} %, more than {most:.2}",
                found.file.name,
                100.0 * found.accuracy
            )
        })
    }

    /// Returns the reasons why a tensor in this scheme misses the thresholds; empty when it passes.
    ///
    /// Rows that miss a threshold are accepted if the error of the outputs was measured and corresponds to a cosine
    /// that reaches the threshold for the mean: error compensation increases the error of the weights to reduce that of
    /// the outputs.
    pub fn objections(&self, scheme: Scheme, metrics: &Metrics) -> Vec<String> {
        let (mean, least) = self.cosines(scheme);
        let checks = [("mean", metrics.cosine_mean, mean), ("worst", metrics.cosine_min, least)];
        let failed = checks.iter().filter(|(_, found, wanted)| found < wanted);
        let mut reasons: Vec<String> =
            failed.map(|(which, found, wanted)| format!("{which} row cosine {found:.5} is below {wanted}")).collect();
        if let (Some(error), false) = (metrics.output_error, reasons.is_empty()) {
            // Under the best scale, the share of energy that became noise is 1 - cosine^2, as for weights.
            let cosine = (1.0 - error * error).max(0.0).sqrt();
            if cosine >= mean {
                return Vec::new();
            }
            reasons.push(format!("cosine {cosine:.5} of the outputs is below {mean}"));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provenance::SourceFile;

    #[test]
    fn a_gate_says_what_was_missed() {
        let mut gate = Gate::default();
        gate.set("cosine=0.9").unwrap();
        gate.set("cosine-min=0.5").unwrap();
        let metrics =
            Metrics { cosine_mean: 0.95, cosine_min: 0.4, relative_rms: 0.0, max_abs_error: 0.0, output_error: None };
        assert_eq!(gate.objections(Scheme::Int4, &metrics), ["worst row cosine 0.40000 is below 0.5"]);
        assert!(gate.objections(Scheme::Int4, &Metrics { cosine_min: 0.5, ..metrics }).is_empty());
        assert!(gate.objections(Scheme::Int4, &Metrics { output_error: Some(0.4), ..metrics }).is_empty());
        let reasons = gate.objections(Scheme::Int4, &Metrics { output_error: Some(0.6), ..metrics });
        assert_eq!(reasons, ["worst row cosine 0.40000 is below 0.5", "cosine 0.80000 of the outputs is below 0.9"]);
    }

    #[test]
    fn each_scheme_has_thresholds_of_its_bits_unless_they_are_set() {
        let metrics =
            Metrics { cosine_mean: 0.981, cosine_min: 0.93, relative_rms: 0.0, max_abs_error: 0.0, output_error: None };
        let mut gate = Gate::default();
        assert_eq!(gate.objections(Scheme::Nl4, &metrics).len(), 2);
        assert!(gate.objections(Scheme::T3, &metrics).is_empty());
        gate.set("cosine-min=0.94").unwrap();
        assert_eq!(gate.objections(Scheme::T2, &metrics), ["worst row cosine 0.93000 is below 0.94"]);
        assert!(Gate::WITHOUT_COSINES.objections(Scheme::Int8, &metrics).is_empty());
    }

    #[test]
    fn nonsense_gates_are_refused() {
        let bad = [
            "cosine",
            "cosine=",
            "cosine=2",
            "cosine=nan",
            "ppl=1",
            "ppl=+-1%",
            "kl=1%",
            "kl=-1",
            "top1=101%",
            "top1=0.9",
            "task=f",
            "task=f:0.3%",
            "task=f:-0.3",
            "task=:-1%",
            "task=f:-101%",
        ];
        for bad in bad.iter().chain(&["sharpness=1", "ppl=%", "ppl=nan%"]) {
            assert!(Gate::default().set(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_bound_on_a_task_has_a_file_and_a_drop() {
        let mut gate = Gate::default();
        gate.set("task=data/a:b.jsonl:-0.3%").unwrap();
        gate.set("task=c.csv:-0%").unwrap();
        assert!(gate.asks_the_model() && !gate.asks_a_text());
        let [first, second] = &gate.tasks[..] else { panic!("{gate:?}") };
        assert_eq!((first.path.to_str(), first.file.as_str()), (Some("data/a:b.jsonl"), "a:b.jsonl"));
        assert!((first.largest_drop - 0.003).abs() < 1e-15 && second.largest_drop == 0.0);
        let evidence = |right: usize| TaskEvidence {
            file: SourceFile { name: "a:b.jsonl".into(), bytes: 1, sha256: String::new() },
            task: "ARC".into(),
            questions: 1000,
            precision: "int4".into(),
            reference_precision: "fp32".into(),
            accuracy: right as f64 / 1000.0,
            reference_accuracy: 0.6,
            difference: right as f64 / 1000.0 - 0.6,
            difference_stderr: 0.001,
            became_right: 0,
            became_wrong: 600 - right,
            objection: None,
        };
        assert_eq!(Gate::objection_to_task(first, &evidence(597)), None);
        assert_eq!(Gate::objection_to_task(second, &evidence(600)), None);
        let refused = Gate::objection_to_task(first, &evidence(596)).unwrap();
        let expected = "accuracy on a:b.jsonl drops by 0.40 ± 0.10 percentage points to 59.60 %, more than 0.30";
        assert_eq!(refused, expected);
        let nan = TaskEvidence { difference: f64::NAN, ..evidence(597) };
        assert!(Gate::objection_to_task(first, &nan).is_some());
    }

    #[test]
    fn the_answers_of_a_model_are_judged_by_what_was_asked() {
        let figures = Figures {
            kl: 0.02,
            kl_stderr: 0.001,
            kl_p99: 0.2,
            perplexity: 6.5,
            perplexity_ratio: 1.02,
            perplexity_ratio_stderr: 0.002,
            top1_agreement: 0.93,
        };
        let mut gate = Gate::default();
        assert!(!gate.asks_the_model() && gate.objections_to_answers(&figures).is_empty());
        for option in ["kl=0.01", "ppl=+1%", "top1=95%"] {
            gate.set(option).unwrap();
        }
        assert!(gate.asks_the_model());
        assert_eq!(
            gate.objections_to_answers(&figures),
            [
                "KL divergence 0.02000 ± 0.00100 nats is above 0.01",
                "perplexity rises by 2.00 ± 0.20 %, above 1.00 %",
                "top-1 agreement is 93.00 %, below 95.00 %"
            ]
        );
        assert_eq!(gate.objections_to_answers(&Figures { kl: f64::NAN, ..figures }).len(), 3);
        for option in ["kl=0.02", "ppl=2.1%", "top1=93%"] {
            gate.set(option).unwrap();
        }
        assert!(gate.objections_to_answers(&figures).is_empty());
    }
}
