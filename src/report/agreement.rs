//! Formats the comparison of a pack with its checkpoint or a trace as text and as JSON, and returns the verdict.

use crate::error::{Error, Result};
use crate::signature::Signature;
use crate::trial::agreement::{Agreement, CheckedHashes, PromptAgreement};
use crate::trial::{Again, TaskAgain};
use crate::units::{decimals, percentage};
use crate::verify::{Comparison, RefDtype};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;

/// Returns the reason to refuse the pack, if there is one.
fn objection(found: &Agreement) -> Option<String> {
    if let Some(hashes) = &found.hashes
        && let Some(first) = hashes.differing.first()
    {
        return Some(format!("{} of {} tensors differ: {first}", hashes.differing.len(), hashes.tensors));
    }
    if let Some(again) = &found.gate {
        let objections = &again.objections;
        if again.differs {
            let found = differences(again).join(", ");
            return Some(format!("the recorded evidence is not that of this pack and checkpoint: found {found}"));
        }
        return (!objections.is_empty()).then(|| format!("the gate refuses the pack: {}", objections.join(", ")));
    }
    if found.same_vocabulary == Some(false) {
        return Some("the tokenizers have different tokens".into());
    }
    let why = found.explanation.clone().unwrap_or_default();
    if found.other_prompts() > 0 {
        return Some(format!("{} prompts are encoded to other tokens than expected; {why}", found.other_prompts()));
    }
    let compared = found.compared.as_ref()?;
    if compared.exact && found.total.differing() > 0 {
        return Some(format!("{} of {} steps differ; {why}", found.total.differing(), found.total.steps));
    }
    (found.percent() < compared.percent).then(|| {
        let agree = percentage(found.percent(), 100.0);
        format!("{agree} of the tokens agree, expected {} %; {why}", compared.percent)
    })
}

/// Describes what was measured again, and what the pack records.
fn differences(again: &Again) -> Vec<String> {
    let text = again.recorded.zip(again.found).map(|(recorded, found)| {
        format!("a divergence of {}, expected {}", decimals(found.kl, 6), decimals(recorded.kl, 6))
    });
    let task = |TaskAgain { recorded, found }: &TaskAgain| {
        let [ours, theirs] = [found, recorded].map(|task| {
            let [accuracy, before] = [task.accuracy, task.reference_accuracy].map(|share| decimals(100.0 * share, 2));
            format!("{accuracy} % after {before} %")
        });
        format!("an accuracy on {} of {ours}, expected {theirs}", recorded.file.name)
    };
    text.into_iter().chain(again.tasks.iter().map(task)).collect()
}

/// Summarizes the agreement in one line.
pub fn summary(found: &Agreement) -> String {
    let Comparison { steps, same, max_logit_difference, .. } = found.total;
    format!("{same} of {steps} tokens are the same, logits differ by at most {max_logit_difference:.6}")
}

/// Fails if the pack differs from its checkpoint, from the trace, or from what it records.
///
/// # Errors
/// [`crate::error::Cause::Refused`] (exit code 4) with the difference.
pub fn verdict(found: &Agreement) -> Result<()> {
    let Some(objection) = objection(found) else { return Ok(()) };
    Err(Error::refused(objection).help(advice(found)))
}

/// Returns the advice for a pack that differs.
fn advice(found: &Agreement) -> &'static str {
    if found.hashes.as_ref().is_some_and(|hashes| !hashes.differing.is_empty()) {
        return "get the pack again from where it was copied, or make it again with `iec pack`";
    }
    match (&found.gate, &found.compared) {
        (Some(gate), _) if gate.differs => {
            "name the checkpoint that the gate was measured with, or measure again with `iec ptq` and pack again"
        }
        (Some(_), _) => "quantize with more bits, as with `iec ptq --keep-failing int8`, and pack again",
        (None, Some(compared)) if !compared.exact => {
            "compare with the checkpoint that the pack was made from, or a trace of it; if that was done, quantize \
             with more bits, or accept less agreement with --min-agreement"
        }
        _ => {
            "compare with the checkpoint that the pack was made from, or a trace of it, or pack again; if the \
             difference stays, report it with the output of --json"
        }
    }
}

/// Returns the comparison as JSON.
pub fn json(found: &Agreement) -> Value {
    let mut line = json!({"schema_version": 1, "ok": objection(found).is_none()});
    if let Some(compared) = &found.compared {
        let (dir, dtype) = match &compared.reference {
            Some((dir, RefDtype::F32)) => (Some(dir.display().to_string()), Some("fp32")),
            Some((dir, RefDtype::F64)) => (Some(dir.display().to_string()), Some("fp64")),
            Some((dir, RefDtype::Bf16)) => (Some(dir.display().to_string()), Some("bf16")),
            None => (None, None),
        };
        line["model"] = compared.model.clone().into();
        line["architecture"] = compared.architecture.clone().into();
        line["precision"] = compared.precision.name().into();
        line["kv"] = compared.kv.clone().into();
        line["hf_dir"] = dir.into();
        line["ref_dtype"] = dtype.into();
        if !compared.adapters.is_empty() {
            let adapter = |(dir, scale): &(PathBuf, f32)| json!({"dir": dir, "scale": f64::from(*scale)});
            line["ref_adapters"] = compared.adapters.iter().map(adapter).collect();
        }
        line["topk"] = compared.rules.topk.into();
        line["logits_tol"] = f64::from(compared.rules.logits_tol).into();
        line["min_agreement"] = compared.percent.into();
        line["strict"] = compared.exact.into();
        line["agreement"] = found.percent().into();
        line["max_logit_difference"] = f64::from(found.total.max_logit_difference).into();
        count(&mut line, &found.total);
    }
    if let Some(same) = found.same_vocabulary {
        line["same_vocabulary"] = same.into();
    }
    if let Some(CheckedHashes { tensors, differing, added_template }) = &found.hashes {
        line["hashes"] = json!({"tensors": tensors, "differing": differing, "added_template": added_template});
    }
    if let Some(signature) = &found.signature {
        line["signature"] = json!(signature);
    }
    if let Some(again) = &found.gate {
        line["gate"] = json!(again);
    }
    line["prompts"] = found.prompts.iter().map(prompt).collect();
    line["first_mismatch"] = found.total.first_mismatch.as_ref().map_or(Value::Null, |first| {
        let mut value = json!(first);
        value["explanation"] = found.explanation.clone().into();
        value
    });
    line
}

fn count(line: &mut Value, steps: &Comparison) {
    line["steps"] = steps.steps.into();
    line["same"] = steps.same.into();
    line["ties"] = steps.ties.into();
    line["other_tokens"] = steps.other_tokens.into();
    line["other_logits"] = steps.other_logits.into();
    line["differing"] = steps.differing().into();
}

fn prompt(prompt: &PromptAgreement) -> Value {
    let mut row = json!({
        "prompt_index": prompt.index,
        "prompt": prompt.text,
        "prompt_tokens": prompt.tokens,
        "same_prompt_ids": prompt.same_ids,
    });
    if let Some(steps) = &prompt.steps {
        count(&mut row, steps);
        row["max_logit_difference"] = f64::from(steps.max_logit_difference).into();
    }
    row
}

/// Returns the comparison as text with one line per measured value.
pub fn text(found: &Agreement) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: String| {
        let _ = writeln!(text, "{key:<12} {value}");
    };
    if let Some(CheckedHashes { tensors, differing, added_template }) = &found.hashes {
        line("hashes", format!("{} of {tensors} tensors as recorded", tensors.saturating_sub(differing.len())));
        differing.iter().for_each(|why| line("", why.clone()));
        added_template.iter().for_each(|name| line("", format!("{name} is used and not recorded in the pack")));
    }
    if let Some(signature) = &found.signature {
        let Signature { files, algorithm, key_sha256, .. } = signature;
        line("signature", format!("valid for {files} files, {algorithm} key {key_sha256}"));
    }
    if let Some(again) = &found.gate {
        let Again { tasks, objections, .. } = again;
        if let Some((recorded, found)) = again.recorded.zip(again.found) {
            line("divergence", format!("{:.6} nats per token, {:.6} recorded", found.kl, recorded.kl));
            line("perplexity", format!("{:.4}, {:.4} recorded", found.perplexity, recorded.perplexity));
            let [top1, before] = [found.top1_agreement, recorded.top1_agreement].map(|share| 100.0 * share);
            line("top-1", format!("{top1:.2} % agreement, {before:.2} % recorded"));
        }
        for TaskAgain { recorded, found } in tasks {
            let [accuracy, before] = [found, recorded].map(|task| decimals(100.0 * task.accuracy, 2));
            let [reference, of] = [decimals(100.0 * found.reference_accuracy, 2), recorded.file.name.clone()];
            line("accuracy", format!("{accuracy} % on {of} after {reference} %, {before} % recorded"));
        }
        objections.iter().for_each(|objection| line("gate", objection.clone()));
    }
    if let Some(same) = found.same_vocabulary {
        line("vocabulary", if same { "the same" } else { "DIFFERENT" }.into());
    }
    if !found.prompts.is_empty() {
        let (all, same) = (found.prompts.len(), found.prompts.len() - found.other_prompts());
        line("prompts", format!("{same} of {all} have the same tokens"));
    }
    if let Some(compared) = &found.compared {
        let Comparison { steps, same, ties, other_tokens, other_logits, max_logit_difference, .. } = &found.total;
        line(
            "steps",
            format!(
                "{steps} compared: {same} the same, {ties} ties, {other_logits} the same token with other \
                               logits, {other_tokens} another token"
            ),
        );
        let tolerance = compared.rules.logits_tol;
        line("logits", format!("differ by at most {max_logit_difference:.6}; up to {tolerance} counts as rounding"));
        let agree = percentage(found.percent(), 100.0);
        line("agreement", format!("{agree} of the tokens, expected {} %", compared.percent));
    }
    if let Some(explanation) = &found.explanation {
        line("first", explanation.clone());
    }
    text
}
