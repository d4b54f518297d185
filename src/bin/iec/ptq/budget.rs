//! `--target-bpw` and `--target-size`: the options of a budget, and what is told about its plan.

use super::answers::AnswerArgs;
use crate::global::Global;
use crate::source::SourceArgs;
use iec::calibration::Calibration;
use iec::error::{Context, Error, Result};
use iec::eval::windows::WINDOW;
use iec::manifest::plan::{Plan, Target, Yardstick};
use iec::report::table::Table;
use iec::sha256::{Digest, Sha256, hex};
use iec::trial::Question;
use iec::units::{decimals, human_bytes, parse_size};
use std::path::{Path, PathBuf};

/// Options that say themselves what a tensor is stored as.
const OTHERS: [&str; 10] = [
    "bits",
    "scheme",
    "group_size",
    "symmetric",
    "affine",
    "clamp",
    "percentile",
    "method",
    "rules",
    "include_lm_head",
];

/// What may be spent, and what the choice is made with.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Mixed precision under a budget")]
pub struct BudgetArgs {
    /// Choose the scheme of every matrix so that the whole pack has at most X bits per weight and is as near to the float model
    /// as possible. Everything counts: embeddings, the output matrix, and what stays float
    #[arg(long, value_name = "X", conflicts_with_all = OTHERS)]
    target_bpw: Option<f64>,
    /// The same for the bytes of the whole pack (its model.ie.bin)
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with_all = OTHERS, conflicts_with = "target_bpw")]
    target_size: Option<u64>,
    /// Text on which each tensor, quantized alone, is measured. What calibration or the gate has read of the same file is passed over.
    /// Without it, errors of outputs (with --calib) or of weights decide
    #[arg(long, value_name = "FILE")]
    plan_text: Option<PathBuf>,
    /// Read at most N windows of 512 tokens of it, once for each tensor
    #[arg(long, value_name = "N", requires = "plan_text", default_value_t = iec::trial::WINDOWS as u32, value_parser = clap::value_parser!(u32).range(1..))]
    plan_windows: u32,
}

impl BudgetArgs {
    /// The budget, if there is one.
    ///
    /// # Errors
    /// It is no amount of bits, or options need a budget that is not given.
    pub fn target(&self) -> Result<Option<Target>> {
        match (self.target_bpw, self.target_size) {
            (Some(bits), _) if !(bits > 0.0 && bits <= 64.0) => {
                Err(Error::usage(format!("--target-bpw {bits}; expected bits per weight, like 4.5")))
            }
            (Some(bits), _) => Ok(Some(Target::BitsPerWeight(bits))),
            (None, Some(bytes)) => Ok(Some(Target::Bytes(bytes))),
            (None, None) if self.plan_text.is_some() => {
                Err(Error::usage("--plan-text without a budget").help("add --target-bpw or --target-size"))
            }
            (None, None) => Ok(None),
        }
    }

    /// What each tensor is measured on; `None` when no text was given.
    ///
    /// # Errors
    /// The text cannot be read, there is no checkpoint, or a gate reads all of the same text.
    pub fn question(
        &self,
        source: &SourceArgs,
        calibration: Option<&Calibration>,
        answers: &AnswerArgs,
        global: &Global,
    ) -> Result<Option<Question>> {
        let Some(text) = &self.plan_text else { return Ok(None) };
        if source.path()?.is_none() {
            return Err(Error::usage("--plan-text with --model-dir; the model is packed anew to be measured")
                .help("use --hf-dir with the checkpoint the pack was made from"));
        }
        let hash = |path: &Path| Ok::<_, Error>(hex(Sha256::new_with_prefix(std::fs::read(path).at(path)?)));
        let sha256 = hash(text)?;
        // One more for the token that begins the text.
        let calibrated = calibration.iter().flat_map(|c| &c.description().texts).filter(|t| t.sha256 == sha256);
        let mut skip = calibrated.map(|text| text.tokens as usize + 1).max().unwrap_or(0);
        if let Some((gate, windows)) = answers.text()
            && hash(gate)? == sha256
        {
            let windows = windows.ok_or_else(|| {
                Error::usage("the gate reads all of this text; what chooses cannot judge, too")
                    .at(text)
                    .help("limit the gate with --gate-windows, or give another --plan-text")
            })?;
            skip = skip.max(windows.saturating_mul(WINDOW));
        }
        Ok(Some(Question {
            text: text.clone(),
            skip,
            windows: Some(self.plan_windows as usize),
            threads: global.threads()?,
        }))
    }
}

/// What the plan rests on, where that is not what the model does.
pub fn tell_yardstick(question: Option<&Question>, calibrated: bool, global: &Global) {
    if question.is_none() {
        let what = if calibrated { "the errors of outputs" } else { "the errors of weights" };
        global.note(format_args!(
            "note: without --plan-text {what} decide, as if the model minded them alike in all its tensors but the \
             output matrix, where they count {} times",
            iec::trial::budget::HEAD_COUNTS
        ));
    }
}

/// The plan tensor by tensor.
pub fn table(plan: &Plan) -> Table {
    let mut table = Table::new(&["tensor", "stored as", ">bits/weight", cost_of(plan)]);
    for (name, tensor) in &plan.tensors {
        table.row([name.clone(), tensor.stored.clone(), format!("{:.3}", tensor.bits), format!("{:.3e}", tensor.cost)]);
    }
    table
}

/// What was asked for, and what comes of it.
pub fn in_words(plan: &Plan) -> String {
    let (bits, bytes) = (decimals(plan.bits_per_weight, 3), human_bytes(plan.bytes));
    let asked = match plan.target {
        Target::BitsPerWeight(bits) if bits.abs() < 1e3 => format!("{bits} bits per weight"),
        Target::BitsPerWeight(bits) => format!("{} bits per weight", decimals(bits, 3)),
        Target::Bytes(bytes) => format!("{} ({bytes} bytes)", human_bytes(bytes)),
    };
    let mut text = format!("{bits} bits per weight, {bytes}, of {asked}; {} {:.3e}", what(plan), plan.predicted);
    if let Some(measured) = plan.measured {
        text += &format!(" expected, {measured:.3e} measured");
    }
    if let Some(uniform) = plan.uniform {
        let bits = decimals(uniform.bits_per_weight, 3);
        text += &format!(" ({:.3e} expected of q4_0 alone at {bits} bits)", uniform.predicted);
    }
    text
}

fn what(plan: &Plan) -> &'static str {
    match plan.yardstick {
        Yardstick::Divergence => "divergence in nats per token",
        Yardstick::Outputs => "weighted sum of the outputs' relative squared errors",
        Yardstick::Weights => "weighted sum of the weights' relative squared errors",
    }
}

fn cost_of(plan: &Plan) -> &'static str {
    match plan.yardstick {
        Yardstick::Divergence => ">divergence",
        Yardstick::Outputs => ">error² of outputs",
        Yardstick::Weights => ">error² of weights",
    }
}
