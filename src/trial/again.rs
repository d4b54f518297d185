//! Measures the quality of a pack again and compares the figures with the evidence that the pack records.

use super::{Packs, Question, Trial};
use crate::error::{Context, Error, Result};
use crate::iebin::IebinReader;
use crate::provenance::{Evidence, Figures, Quality};
use crate::runtime::{Engine, EngineOptions, Precision};

/// Largest relative difference of figures that count as equal. Logits are the same on every machine; the logarithms of
/// sums of their exponentials may differ in the last bits.
const NOISE: f64 = 1e-6;

/// Figures of the evidence that a pack records, and the same figures measured again.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Again {
    /// Figures recorded in the pack.
    pub recorded: Figures,
    /// Figures measured now.
    pub found: Figures,
    /// True if the figures differ: the recorded ones are not those of this pack, this checkpoint and this text.
    pub differs: bool,
    /// Objections of the gate to the figures measured now.
    pub objections: Vec<String>,
}

impl Again {
    /// Compares the pack of `reader` with the float model under the conditions that the pack's evidence records.
    ///
    /// # Errors
    /// The pack contains no evidence, the text is not that of the evidence, or a model cannot be run.
    pub fn measure(reader: &IebinReader, packs: &Packs, question: Question) -> Result<Again> {
        let (quality, evidence) = recorded(reader)?;
        let precision: Precision = evidence.precision.parse()?;
        let threads = question.threads;
        let path = question.text.clone();
        let mut trial = Trial::begin(packs, question)?;
        if trial.text.sha256 != evidence.text.sha256 {
            let found = format!("found another text than that of the gate, `{}`", evidence.text.name);
            let help = format!("name the file with the SHA-256 {} with --gate-text", evidence.text.sha256);
            return Err(Error::usage(found).at(path).help(help));
        }
        trial.read_as(evidence).at(&reader.dir)?;
        let options = EngineOptions { precision: Some(precision), threads, ..EngineOptions::default() };
        let found = trial.compare(&mut Engine::open(reader, &options)?)?;
        let recorded = evidence.figures;
        Ok(Again {
            recorded,
            found,
            differs: differ(&recorded, &found),
            objections: quality.gate.objections_to_answers(&found),
        })
    }
}

/// Returns the quality record of a pack and its evidence.
fn recorded(reader: &IebinReader) -> Result<(&Quality, &Evidence)> {
    let quality = reader.description.quality.as_ref();
    quality.and_then(|quality| Some((quality, quality.evidence.as_ref()?))).ok_or_else(|| {
        Error::usage("found no measurement of the outputs in the pack, because no gate on outputs was used")
            .at(&reader.dir)
            .help(
                "quantize with `iec ptq --gate kl=X --gate-text FILE`, and pack that manifest with --q4-map and \
                 without --dtype",
            )
    })
}

fn differ(a: &Figures, b: &Figures) -> bool {
    let pairs = [
        (a.kl, b.kl),
        (a.kl_p99, b.kl_p99),
        (a.perplexity, b.perplexity),
        (a.perplexity_ratio, b.perplexity_ratio),
        (a.top1_agreement, b.top1_agreement),
    ];
    // NaN is equal to nothing.
    !pairs.into_iter().all(|(a, b)| (a - b).abs() <= NOISE * a.abs().max(b.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_differ_by_more_than_the_last_bits() {
        let figures = Figures {
            kl: 0.002,
            kl_stderr: 0.0001,
            kl_p99: 0.01,
            perplexity: 6.0,
            perplexity_ratio: 1.01,
            perplexity_ratio_stderr: 0.001,
            top1_agreement: 0.95,
        };
        assert!(!differ(&figures, &figures));
        assert!(!differ(&figures, &Figures { kl: 0.002 * (1.0 + 1e-9), ..figures }));
        assert!(differ(&figures, &Figures { kl: 0.0021, ..figures }));
        assert!(differ(&figures, &Figures { top1_agreement: 0.949, ..figures }));
        assert!(differ(&figures, &Figures { perplexity: f64::NAN, ..figures }));
    }
}
