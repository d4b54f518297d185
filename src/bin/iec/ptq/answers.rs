//! A gate on the answers of the whole model: its options, and what is told about it.

use crate::global::Global;
use iec::calibration::Calibration;
use iec::convert::quantize::ptq::Measured;
use iec::error::{Context, Error, Result};
use iec::provenance::{Evidence, Gate};
use iec::report::table::Table;
use iec::sha256::{Digest, Sha256, hex};
use iec::trial::{self, Blame, Packs, Promote, Question, Trial};
use std::path::{Path, PathBuf};

/// Tensors that are named when the gate refuses.
const NAMED: usize = 10;

/// What a gate on answers needs.
#[derive(Debug, clap::Args)]
pub struct AnswerArgs {
    /// Text that the float model and the quantized one read for the gates kl, ppl and top1; calibration must not have seen it
    #[arg(long, value_name = "FILE")]
    gate_text: Option<PathBuf>,
    /// Read at most N windows of 512 tokens of it [default: all of it]
    #[arg(long, value_name = "N", requires = "gate_text", value_parser = clap::value_parser!(u32).range(1..))]
    gate_windows: Option<u32>,
    /// Most bits per weight that repairs (--keep-failing) may bring the model to [default: no limit]
    #[arg(long, value_name = "X", requires_all = ["gate_text", "keep_failing"])]
    max_bpw: Option<f64>,
}

impl AnswerArgs {
    /// True when the answers of the model are to be measured.
    ///
    /// # Errors
    /// They are, but a text or a checkpoint is missing, or calibration has read the same text.
    pub fn asked(&self, gate: &Gate, from_pack: bool, calibration: Option<&Calibration>) -> Result<bool> {
        let Some(path) = &self.gate_text else {
            return match gate.asks_the_model() {
                true => Err(Error::usage("a gate on answers without a text").help("add --gate-text FILE")),
                false => Ok(false),
            };
        };
        if from_pack {
            return Err(Error::usage("--gate-text with --model-dir; the model is packed anew to be measured")
                .help("use --hf-dir with the checkpoint the pack was made from"));
        }
        if let Some(calibration) = calibration {
            let sha256 = hex(Sha256::new_with_prefix(std::fs::read(path).at(path)?));
            if calibration.description().texts.iter().any(|text| text.sha256 == sha256) {
                return Err(Error::usage("calibration has read this text; what it says of itself proves nothing")
                    .at(path)
                    .help("give another text with --gate-text"));
            }
        }
        Ok(true)
    }

    /// The text the gate reads, and how many windows of it at most.
    pub fn text(&self) -> Option<(&Path, Option<usize>)> {
        Some((self.gate_text.as_deref()?, self.gate_windows.map(|n| n as usize)))
    }

    /// True when repairs have a limit.
    pub fn has_limit(&self) -> bool {
        self.max_bpw.is_some()
    }

    /// Measures the model and repairs it where `promote` can. Returns what each tensor does on its own, if that had to be
    /// found out.
    ///
    /// # Errors
    /// A model cannot be packed or run, or the text is none.
    pub fn judge(
        &self,
        packs: &Packs,
        threads: usize,
        measured: &mut Measured,
        gate: &Gate,
        promote: &Promote<'_>,
    ) -> Result<Vec<Blame>> {
        let text = self.gate_text.clone().unwrap_or_default();
        let question = Question { text, skip: 0, windows: self.gate_windows.map(|n| n as usize), threads };
        trial::repair(&mut Trial::begin(packs, question)?, measured, gate, promote, self.max_bpw)
    }
}

/// What was measured of the whole model, and what was done about it.
pub fn tell(evidence: &Evidence, global: &Global) {
    global.note(table(evidence).to_string().trim_end());
    for promotion in &evidence.promoted {
        global.note(format_args!("{}: {} instead of {}", promotion.tensor, promotion.to, promotion.from));
    }
}

fn table(evidence: &Evidence) -> Table {
    let mut table = Table::new(&["answers", ">value", ">± standard error"]);
    let f = &evidence.figures;
    table.row(["divergence, nats per token".into(), format!("{:.5}", f.kl), format!("{:.5}", f.kl_stderr)]);
    let (rise, error) = (100.0 * (f.perplexity_ratio - 1.0), 100.0 * f.perplexity_ratio_stderr);
    table.row([format!("perplexity {:.4}, rise", f.perplexity), format!("{rise:+.2} %"), format!("{error:.2} %")]);
    table.row(["bits per weight of the pack".into(), format!("{:.3}", evidence.bits_per_weight), String::new()]);
    table.row(["same first choice".into(), format!("{:.2} %", 100.0 * f.top1), String::new()]);
    table
}

/// Why the gate refuses, with the tensors that hurt most.
pub fn refusal(evidence: &Evidence, blame: &[Blame]) -> Error {
    let worst: Vec<String> = blame.iter().take(NAMED).map(|b| format!("{} {:.5}", b.tensor, b.kl)).collect();
    let worst =
        if worst.is_empty() { String::new() } else { format!("; alone these diverge by: {}", worst.join(", ")) };
    Error::refused(format!("the gate refuses the model's answers: {}{worst}", evidence.objections.join(", ")))
        .help("try --keep-failing int6 or int8 (with a higher --max-bpw), a smaller --group-size, or --force to write the manifest all the same")
}
