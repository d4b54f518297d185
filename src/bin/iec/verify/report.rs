//! What was compared, and the verdict.

use crate::model::Model;
use iec::error::{Error, Result};
use iec::iebin::IebinReader;
use iec::runtime::text::Tokenizer;
use iec::trial::Again;
use iec::units::decimals;
use iec::verify::{Comparison, Mismatch, Rules};
use serde_json::{Map, Value, json};
use std::fmt;
use std::path::Path;

/// Everything that was compared.
#[derive(Debug, Default)]
pub struct Report {
    about: Map<String, Value>,
    rules: Option<Rules>,
    /// Percent of steps that must agree.
    percent: f64,
    /// Every logit must agree, too.
    exact: bool,
    prompts: Vec<PromptRow>,
    total: Comparison,
    vocabulary: Option<bool>,
    hashes: Option<Hashes>,
    gate: Option<Again>,
    explanation: Option<String>,
}

#[derive(Debug)]
struct PromptRow {
    index: usize,
    text: String,
    tokens: usize,
    same_ids: bool,
    steps: Option<Comparison>,
}

#[derive(Debug)]
struct Hashes {
    tensors: usize,
    differing: Vec<String>,
}

impl Report {
    /// Notes what is compared by which rules.
    pub fn about(&mut self, model: &Model, hf_dir: Option<&Path>, bf16: bool, rules: Rules, percent: f64, exact: bool) {
        self.about.insert("model".into(), model.name.clone().into());
        self.about.insert("architecture".into(), model.engine.config().architecture.clone().into());
        self.about.insert("precision".into(), model.engine.precision().name().into());
        self.about.insert("kv".into(), model.engine.kv_type().to_string().into());
        self.about.insert("hf_dir".into(), hf_dir.map(|dir| dir.display().to_string()).into());
        self.about.insert("ref_dtype".into(), hf_dir.map(|_| if bf16 { "bf16" } else { "fp32" }).into());
        (self.rules, self.percent, self.exact) = (Some(rules), percent, exact);
    }

    /// Takes in the hashes of a pack.
    pub fn hashes(&mut self, reader: &IebinReader, differing: &[Error]) {
        let differing: Vec<String> = differing.iter().map(ToString::to_string).collect();
        self.hashes = Some(Hashes { tensors: reader.entries().len(), differing });
    }

    /// Takes in what became of the evidence of the gate.
    pub fn gate(&mut self, again: Again) {
        self.gate = Some(again);
    }

    /// Takes in whether all tokens have the same ids.
    pub fn same_vocabulary(&mut self, same: bool) {
        self.vocabulary = Some(same);
    }

    /// Takes in the tokens of a prompt.
    pub fn prompt(&mut self, index: usize, text: &str, ours: Vec<u32>, theirs: Vec<u32>) {
        let same_ids = self.total.prompt(index, &ours, &theirs);
        match self.prompts.iter_mut().find(|row| row.index == index) {
            Some(row) => row.same_ids &= same_ids,
            None => {
                let text = text.to_string();
                self.prompts.push(PromptRow { index, text, tokens: ours.len(), same_ids, steps: None });
            }
        }
    }

    /// Takes in the steps of a text.
    pub fn text(&mut self, index: usize, found: Comparison) {
        if let Some(row) = self.prompts.iter_mut().find(|row| row.index == index) {
            row.steps = Some(found.clone());
        }
        self.total.merge(found);
    }

    /// Explains the first difference with the spelling of tokens.
    pub fn spell(&mut self, tokenizer: &Tokenizer) {
        let spell = |id: u32| tokenizer.token(id).map_or_else(String::new, |token| format!("`{token}`"));
        self.explanation = self.total.first_mismatch.as_ref().map(|mismatch| mismatch.explain(spell));
    }

    fn other_prompts(&self) -> usize {
        self.prompts.iter().filter(|row| !row.same_ids).count()
    }

    fn agreement(&self) -> f64 {
        100.0 * self.total.agreement()
    }

    /// What is wrong, if anything is.
    fn objection(&self) -> Option<String> {
        if let Some(hashes) = &self.hashes
            && let Some(first) = hashes.differing.first()
        {
            return Some(format!("{} of {} tensors differ: {first}", hashes.differing.len(), hashes.tensors));
        }
        if let Some(Again { recorded, found, differs, objections }) = &self.gate {
            if *differs {
                return Some(format!(
                    "the evidence is not of this pack and checkpoint: a divergence of {} is recorded, {} was found",
                    decimals(recorded.kl, 6),
                    decimals(found.kl, 6)
                ));
            }
            return (!objections.is_empty()).then(|| format!("the gate objects: {}", objections.join(", ")));
        }
        if self.vocabulary == Some(false) {
            return Some("the tokenizers have different tokens".into());
        }
        let why = self.explanation.clone().unwrap_or_default();
        if self.other_prompts() > 0 {
            return Some(format!("{} prompts have other tokens; {why}", self.other_prompts()));
        }
        if self.exact && self.total.differing > 0 {
            return Some(format!("{} of {} steps differ; {why}", self.total.differing, self.total.steps));
        }
        if self.agreement() < self.percent {
            let found = format!("{:.1} % of the tokens agree, expected {} %", self.agreement(), self.percent);
            return Some(format!("{found}; {why}"));
        }
        None
    }

    /// How far it agrees, in a few words.
    pub fn in_words(&self) -> String {
        let Comparison { steps, same, max_logit_difference, .. } = self.total;
        format!("{same} of {steps} tokens are the same, logits {max_logit_difference:.6} apart at most")
    }

    /// An error with exit code 4 when something differs.
    ///
    /// # Errors
    /// That one.
    pub fn verdict(&self) -> Result<()> {
        match self.objection() {
            None => Ok(()),
            Some(objection) => Err(Error::refused(objection).help(match self.hashes {
                Some(Hashes { ref differing, .. }) if !differing.is_empty() => "make the pack again with `iec pack`",
                _ => "pack the checkpoint again; if the difference stays, report it with the --json report",
            })),
        }
    }

    /// The report for machines.
    pub fn json(&self) -> Value {
        let mut line = json!({"schema_version": 1, "ok": self.objection().is_none()});
        for (key, value) in &self.about {
            line[key] = value.clone();
        }
        if let Some(rules) = &self.rules {
            line["topk"] = rules.topk.into();
            line["logits_tol"] = f64::from(rules.logits_tol).into();
            line["min_agreement"] = self.percent.into();
            line["strict"] = self.exact.into();
            line["agreement"] = self.agreement().into();
            line["max_logit_difference"] = f64::from(self.total.max_logit_difference).into();
            for (key, count) in [
                ("steps", self.total.steps),
                ("same", self.total.same),
                ("ties", self.total.ties),
                ("differing", self.total.differing),
            ] {
                line[key] = count.into();
            }
        }
        if let Some(same) = self.vocabulary {
            line["same_vocabulary"] = same.into();
        }
        if let Some(hashes) = &self.hashes {
            line["hashes"] = json!({"tensors": hashes.tensors, "differing": hashes.differing});
        }
        if let Some(again) = &self.gate {
            line["gate"] = json!(again);
        }
        line["prompts"] = self.prompts.iter().map(PromptRow::json).collect();
        line["first_mismatch"] = self.total.first_mismatch.as_ref().map_or(Value::Null, |first| self.mismatch(first));
        line
    }

    fn mismatch(&self, first: &Mismatch) -> Value {
        let mut value = json!(first);
        value["explanation"] = self.explanation.clone().into();
        value
    }
}

impl PromptRow {
    fn json(&self) -> Value {
        let mut row = json!({
            "prompt_index": self.index,
            "prompt": self.text,
            "prompt_tokens": self.tokens,
            "same_prompt_ids": self.same_ids,
        });
        if let Some(steps) = &self.steps {
            row["steps"] = steps.steps.into();
            row["same"] = steps.same.into();
            row["ties"] = steps.ties.into();
            row["differing"] = steps.differing.into();
            row["max_logit_difference"] = f64::from(steps.max_logit_difference).into();
        }
        row
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(hashes) = &self.hashes {
            writeln!(
                f,
                "hashes       {} of {} tensors as recorded",
                hashes.tensors - hashes.differing.len(),
                hashes.tensors
            )?;
            hashes.differing.iter().try_for_each(|line| writeln!(f, "             {line}"))?;
        }
        if let Some(Again { recorded, found, objections, .. }) = &self.gate {
            writeln!(f, "divergence   {:.6} nats per token, {:.6} recorded", found.kl, recorded.kl)?;
            writeln!(f, "perplexity   {:.4}, {:.4} recorded", found.perplexity, recorded.perplexity)?;
            writeln!(f, "first token  {:.2} % agree, {:.2} % recorded", 100.0 * found.top1, 100.0 * recorded.top1)?;
            objections.iter().try_for_each(|objection| writeln!(f, "gate         {objection}"))?;
        }
        if let Some(same) = self.vocabulary {
            writeln!(f, "vocabulary   {}", if same { "the same" } else { "DIFFERENT" })?;
        }
        if !self.prompts.is_empty() {
            let same = self.prompts.len() - self.other_prompts();
            writeln!(f, "prompts      {same} of {} have the same tokens", self.prompts.len())?;
        }
        if let Some(rules) = &self.rules {
            let total = &self.total;
            writeln!(
                f,
                "steps        {} compared: {} the same token, {} ties, {} other",
                total.steps, total.same, total.ties, total.other_ids
            )?;
            writeln!(
                f,
                "logits       {:.6} apart at most; up to {} is noise",
                total.max_logit_difference, rules.logits_tol
            )?;
            if !self.exact {
                writeln!(f, "agreement    {:.1} %, {} % needed", self.agreement(), self.percent)?;
            }
        }
        if let Some(explanation) = &self.explanation {
            writeln!(f, "first        {explanation}")?;
        }
        Ok(())
    }
}
