//! Was it good enough? A gate compares the metrics of a tensor with thresholds and says why when they are missed.

use crate::error::{Error, Result};
use crate::manifest::{Gate, Metrics};

impl Default for Gate {
    /// With the best scale, 1 - cosine^2 of a row is the share of its energy that became noise. Blocks of 32 at 4 bit lose
    /// 0.65 to 0.75 % on weights without outliers (cosine 0.9963 to 0.9967), so a mean below 0.995 (1 %) means that the
    /// scheme does not suit the tensor: one int4 scale per row loses 1.2 to 1.6 % on the trained models measured, and
    /// doubles the loss of perplexity against blocks. Single rows scatter; 0.98 (4 %) for the worst catches a row that
    /// an outlier has flattened.
    fn default() -> Gate {
        Gate { cosine: 0.995, cosine_min: 0.98 }
    }
}

impl Gate {
    /// Applies a `NAME=VALUE` option: `cosine` (mean over rows) or `cosine-min` (the worst row).
    ///
    /// # Errors
    /// The name is unknown or the value is no number from 0 to 1.
    pub fn set(&mut self, option: &str) -> Result<()> {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let field = match name {
            "cosine" => &mut self.cosine,
            "cosine-min" => &mut self.cosine_min,
            "ppl" | "kl" => {
                return Err(Error::unsupported(format!("gate `{name}`; this version measures weights only"))
                    .help("use --gate cosine=X and --gate cosine-min=Y"));
            }
            _ => return Err(Error::usage(format!("gate `{option}`; expected cosine=X or cosine-min=Y"))),
        };
        *field =
            value.parse().ok().filter(|v| (0.0..=1.0).contains(v)).ok_or_else(|| {
                Error::usage(format!("gate `{option}`; expected a number from 0 to 1 after `{name}=`"))
            })?;
        Ok(())
    }

    /// Why the tensor is not good enough; empty when it is.
    ///
    /// Where the error of the outputs is known, rows that miss are forgiven if the outputs pass: compensation makes weights worse
    /// to make outputs better.
    pub fn objections(&self, metrics: &Metrics) -> Vec<String> {
        let checks = [("mean", metrics.cosine_mean, self.cosine), ("worst", metrics.cosine_min, self.cosine_min)];
        let failed = checks.iter().filter(|(_, found, wanted)| found < wanted);
        let mut reasons: Vec<String> =
            failed.map(|(which, found, wanted)| format!("{which} row cosine {found:.5} is below {wanted}")).collect();
        if let (Some(error), false) = (metrics.output_error, reasons.is_empty()) {
            // As for weights under the best scale: the share of energy that became noise is 1 - cosine^2.
            let cosine = (1.0 - error * error).max(0.0).sqrt();
            if cosine >= self.cosine {
                return Vec::new();
            }
            reasons.push(format!("cosine {cosine:.5} of the outputs, too"));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_says_what_was_missed() {
        let mut gate = Gate::default();
        gate.set("cosine=0.9").unwrap();
        gate.set("cosine-min=0.5").unwrap();
        let metrics =
            Metrics { cosine_mean: 0.95, cosine_min: 0.4, relative_rms: 0.0, max_abs_error: 0.0, output_error: None };
        assert_eq!(gate.objections(&metrics), ["worst row cosine 0.40000 is below 0.5"]);
        assert!(gate.objections(&Metrics { cosine_min: 0.5, ..metrics }).is_empty());
        assert!(gate.objections(&Metrics { output_error: Some(0.4), ..metrics }).is_empty());
        let reasons = gate.objections(&Metrics { output_error: Some(0.6), ..metrics });
        assert_eq!(reasons, ["worst row cosine 0.40000 is below 0.5", "cosine 0.80000 of the outputs, too"]);
    }

    #[test]
    fn nonsense_gates_are_refused() {
        for bad in ["cosine", "cosine=", "cosine=2", "cosine=nan", "ppl=+1%", "kl=0.01", "sharpness=1"] {
            assert!(Gate::default().set(bad).is_err(), "{bad}");
        }
    }
}
