//! Builds the HTML page of `ptq --report`: errors, sizes, the verdict of the gate, the weights of one tensor before
//! and after, and texts of both models.

use crate::catalogue::Role;
use crate::convert::quantize::entry::{stored_as, stored_bits};
use crate::convert::quantize::judge;
use crate::convert::quantize::weights::Tensor;
use crate::error::Result;
use crate::iebin::Store;
use crate::manifest::TensorEntry;
use crate::provenance::{Evidence, Quality};
use crate::quant::spread::Spread;
use crate::report::html::charts::{Bar, HeatRow, Lengths, Parts, bars, heat_map, overlay, stacked};
use crate::report::html::{self, Page, escape, section, table};
use crate::report::quality::quality_lines;
use crate::runtime::Precision;
use crate::trial::ptq::Quantized;
use crate::trial::sample;
use crate::units::{human_bytes, percentage};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Number of tensors in the table of the largest errors.
const WORST: usize = 20;
/// Number of texts that both models continue.
const TEXTS: usize = 4;
const NEW_TOKENS: usize = 48;
/// Upper bound of layer numbers. Those in names of tensors are untrusted; no real model has as many layers.
const MOST_LAYERS: usize = 4096;

/// Returns the whole page. Both models continue the first few of `prompts`.
///
/// # Errors
/// A tensor cannot be read, or a model cannot run.
pub fn page(quantized: &Quantized<'_>, prompts: &[String]) -> Result<String> {
    let document = &quantized.measured.document;
    let maker = document.created_by.clone().unwrap_or_default();
    let texts = document.calibration.iter().flat_map(|c| &c.texts).map(|t| t.name.as_str());
    let guided = texts.collect::<Vec<_>>().join(", ");
    let guided = if guided.is_empty() { "no calibration".to_string() } else { format!("calibrated with {guided}") };
    let count = document.tensors.values().filter(|entry| entry.quant.is_some()).count();
    let sections = Sections(quantized);
    let body = [
        sections.tiles()?,
        section("The gate", &sections.gate()),
        section("Error", &sections.errors()),
        section("Divergence of each tensor on its own", &sections.divergences()),
        section("Where the bytes are", &sections.sizes()?),
        section("The tensors with the largest errors", &sections.worst()?),
        sections.spread(quantized.ptq.options.shown_tensor.as_deref())?,
        section("Texts", &sections.texts(prompts)?),
    ];
    Ok(html::document(&Page {
        command: "ptq",
        title: &quantized.ptq.options.model.name(),
        facts: &[&format!("{count} tensors quantized"), &guided],
        body: &body.concat(),
        footer: &maker,
    }))
}

struct Sections<'a>(&'a Quantized<'a>);

impl Sections<'_> {
    fn entries(&self) -> impl Iterator<Item = (&Tensor, &TensorEntry)> {
        self.0.measured.tensors.iter().map(|tensor| (tensor, &self.0.measured.document.tensors[&tensor.name]))
    }

    fn tiles(&self) -> Result<String> {
        let tile = |class: &str, name: &str, value: &str, note: &str| {
            let (name, value, note) = (escape(name), escape(value), escape(note));
            format!("<div class=\"{class}\"><h3>{name}</h3><b>{value}</b><small>{note}</small></div>\n")
        };
        let document = &self.0.measured.document;
        let (class, verdict) = if document.refused || !document.objections().is_empty() {
            ("bad", "refused")
        } else {
            ("good", "accepted")
        };
        let [before, after] = self.bytes()?.map(|parts| parts.values().sum::<f64>());
        let size = tile("", "size", &human_bytes(after as u64), &format!("of {}", human_bytes(before as u64)));
        let mut tiles = vec![tile(class, "verdict", verdict, ""), size];
        if let Some(Evidence { figures: f, bits_per_weight, .. }) = &document.evidence {
            let rise = format!("{:+.2} %", 100.0 * (f.perplexity_ratio - 1.0));
            tiles.extend([
                tile("", "bits per weight", &format!("{bits_per_weight:.2}"), "of the whole pack"),
                tile("", "divergence", &format!("{:.5}", f.kl), &format!("± {:.5} nats per token", f.kl_stderr)),
                tile("", "perplexity", &rise, &format!("± {:.2} %", 100.0 * f.perplexity_ratio_stderr)),
                tile("", "same most likely token", &percentage(f.top1_agreement, 1.0), ""),
            ]);
        }
        Ok(format!("<div class=\"tiles\">{}</div>\n", tiles.concat()))
    }

    fn gate(&self) -> String {
        let document = &self.0.measured.document;
        let quality = Quality {
            gate: document.gate.clone().unwrap_or_default(),
            refused: document.refused,
            evidence: document.evidence.clone(),
            task_evidence: document.task_evidence.clone(),
        };
        let lines = quality_lines(&quality).into_iter().map(|(key, value)| [key.to_string(), value]);
        // Quantized tensors that are copied from the checkpoint have no metrics and were not judged.
        let judged = self.entries().filter(|(_, entry)| entry.metrics.is_some());
        let refused = judged.filter(|(_, entry)| !entry.reasons.is_empty());
        let reasons = refused.map(|(tensor, entry)| [tensor.name.clone(), entry.reasons.join("; ")]);
        table(&["", ""], lines.chain(reasons))
    }

    /// Returns the error measure of the charts: that of the outputs if it is known for all tensors, else that of the
    /// weights.
    fn error(&self) -> (&'static str, fn(&TensorEntry) -> Option<f64>) {
        let outputs = |entry: &TensorEntry| entry.metrics.and_then(|m| m.output_error);
        let measured = || self.entries().filter(|(_, entry)| entry.metrics.is_some() && entry.quant.is_some());
        if measured().next().is_some() && measured().all(|(_, entry)| outputs(entry).is_some()) {
            ("Root mean square error of the outputs on calibration text that was not used for fitting.", outputs)
        } else {
            ("Root mean square error of the weights.", |entry| entry.metrics.map(|m| m.relative_rms))
        }
    }

    fn errors(&self) -> String {
        let (what, error) = self.error();
        let values = self.entries().filter(|(_, entry)| entry.quant.is_some());
        let values = values.filter_map(|(tensor, entry)| Some((tensor.name.as_str(), error(entry)?)));
        chart(what, &values.collect::<Vec<_>>(), |v| format!("{:.2} %", 100.0 * v))
    }

    fn divergences(&self) -> String {
        let values: Vec<_> = self.0.blame.iter().map(|blame| (blame.tensor.as_str(), blame.kl)).collect();
        chart(
            "Divergence, in nats per token, of a model in which only this tensor is quantized from the float model.",
            &values,
            |v| format!("{v:.5}"),
        )
    }

    /// Returns the bytes of each role before and after quantization.
    fn bytes(&self) -> Result<[BTreeMap<Role, f64>; 2]> {
        let mut bytes = [BTreeMap::new(), BTreeMap::new()];
        for tensor in self.0.ptq.weights.tensors() {
            let entry = self.0.measured.document.tensors.get(&tensor.name);
            let stored = entry.map(|entry| stored_bits(&tensor, entry)).transpose()?;
            let after = stored.map_or(tensor.nbytes() as f64, |bits| bits * tensor.elements() as f64 / 8.0);
            // Quantized tensors that are copied include their scales, so their size does not change.
            let before = if let Store::Plain(_) = tensor.store { tensor.nbytes() as f64 } else { after };
            for (parts, size) in bytes.iter_mut().zip([before, after]) {
                *parts.entry(tensor.role).or_default() += size;
            }
        }
        Ok(bytes)
    }

    fn sizes(&self) -> Result<String> {
        let [before, after] = self.bytes()?;
        let row = |label: &str, parts: &BTreeMap<Role, f64>| -> Parts {
            (label.into(), parts.iter().map(|(role, bytes)| (role.name().into(), bytes / 1e6)).collect())
        };
        let entry = |(i, role): (usize, &Role)| format!("<li><i class=\"c{i}\"></i>{}</li>", role.name());
        let legend: String = before.keys().enumerate().map(entry).collect();
        let numbers = before.iter().map(|(role, before)| {
            let after = after[role];
            let [from, to] = [*before, after].map(|bytes| human_bytes(bytes as u64));
            [role.name().to_string(), from, to, format!("{:.0} %", 100.0 * after / before)]
        });
        Ok(format!(
            "{}<ul class=\"legend\">{legend}</ul>\n{}",
            stacked(&[row("before", &before), row("after", &after)], "MB", Lengths::Sums),
            table(&["part", "before", "after", "after / before"], numbers)
        ))
    }

    fn worst(&self) -> Result<String> {
        let mut entries: Vec<_> = self.entries().filter(|(_, entry)| entry.metrics.is_some()).collect();
        let error = self.error().1;
        entries.sort_by(|a, b| error(b.1).unwrap_or(0.0).total_cmp(&error(a.1).unwrap_or(0.0)));
        let percent = |x: f64| format!("{:.2} %", 100.0 * x);
        let row = |(tensor, entry): &(&Tensor, &TensorEntry)| -> Result<[String; 7]> {
            let m = entry.metrics.expect("filtered");
            Ok([
                tensor.name.clone(),
                stored_as(tensor, entry),
                entry.quant.map_or("–".into(), |quant| quant.method.name().into()),
                format!("{:.2}", stored_bits(tensor, entry)?),
                percent(m.relative_rms),
                m.output_error.map_or("–".into(), percent),
                format!("{:.5}", m.cosine_mean),
            ])
        };
        let rows = entries.iter().take(WORST).map(row).collect::<Result<Vec<_>>>()?;
        let head = ["tensor", "stored as", "method", "bits", "of weights", "of outputs", "cosine"];
        Ok(table(&head, rows.into_iter()))
    }

    /// Draws histograms of the weights of the tensor `name`; by default of the tensor with the largest error.
    fn spread(&self, name: Option<&str>) -> Result<String> {
        let error = self.error().1;
        let quantized = || self.entries().filter(|(_, entry)| entry.quant.is_some());
        let chosen = match name {
            Some(name) => quantized().find(|(tensor, _)| tensor.name == name),
            None => quantized().max_by(|a, b| error(a.1).unwrap_or(0.0).total_cmp(&error(b.1).unwrap_or(0.0))),
        };
        let Some((tensor, entry)) = chosen else { return Ok(String::new()) };
        let Some(Spread { weights, before, after, errors }) =
            judge::spread(&self.0.ptq.weights, self.0.ptq.calibration.as_ref(), tensor, entry)?
        else {
            return Ok(String::new());
        };
        let title = format!("The weights of {}", escape(&tensor.name));
        let content = format!(
            "<p>{weights} weights before (bars) and after (line) quantization; values beyond the axis are counted in \
             the first and last bar. Heights are logarithmic.</p>\n{}<p>Errors of these weights.</p>\n{}",
            overlay(before.limit, &before.counts, Some(&after.counts)),
            overlay(errors.limit, &errors.counts, None),
        );
        Ok(section(&title, &content))
    }

    /// Returns a table of the texts with which both models continue the first prompts.
    fn texts(&self, prompts: &[String]) -> Result<String> {
        let Some(packs) = self.0.packs else { return Ok(String::new()) };
        let prompts = &prompts[..prompts.len().min(TEXTS)];
        let threads = self.0.ptq.options.threads;
        let write = |dir: PathBuf, precision| sample::continuations(&dir, precision, threads, prompts, NEW_TOKENS);
        let Some(float) = write(packs.float(), Some(Precision::Fp32))? else {
            return Ok("<p>The checkpoint has no tokenizer.</p>".into());
        };
        let quantized = write(packs.quantized(), None)?.unwrap_or_default();
        let row = |((prompt, float), quantized): ((&String, &String), &String)| {
            let same =
                float.chars().zip(quantized.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
            let cell = |text: &str| {
                let (same, other) = text.split_at(same);
                format!("<td>{}<mark>{}</mark></td>", escape(same), escape(other))
            };
            format!("<tr><td>{}</td>{}{}</tr>\n", escape(prompt), cell(float), cell(quantized))
        };
        let rows: String = prompts.iter().zip(&float).zip(&quantized).map(row).collect();
        Ok(format!(
            "<p>{NEW_TOKENS} tokens, generated greedily. Colored from the first difference on.</p>\n\
             <table><tr><th>prompt</th><th>floats</th><th>quantized</th></tr>\n{rows}</table>\n"
        ))
    }
}

/// Draws values of tensors: those in layers as a heat map, the others as bars.
fn chart(what: &str, values: &[(&str, f64)], show: impl Fn(f64) -> String) -> String {
    let (mut kinds, mut others) = (Vec::<HeatRow>::new(), Vec::new());
    for (name, value) in values {
        let Some((layer, kind)) = place(name) else {
            let label = name.trim_start_matches("model.").trim_end_matches(".weight").to_string();
            others.push(Bar { label, value: *value, note: format!("{name}: {}", show(*value)) });
            continue;
        };
        let row = kinds.iter().position(|(label, _)| label == kind).unwrap_or_else(|| {
            kinds.push((kind.to_string(), Vec::new()));
            kinds.len() - 1
        });
        let cells = &mut kinds[row].1;
        cells.resize(cells.len().max(layer + 1), None);
        cells[layer] = Some(*value);
    }
    match values {
        [] => String::new(),
        _ => {
            let map = if kinds.is_empty() { String::new() } else { heat_map(&kinds, "layer", &show) };
            let rest = if others.is_empty() { String::new() } else { bars(&others, &show) };
            format!("<p>{what}</p>\n{map}{rest}")
        }
    }
}

/// Splits the name of a tensor into its layer and its name within the layer; `None` outside of layers or if the layer
/// number is out of range.
fn place(name: &str) -> Option<(usize, &str)> {
    let (layer, leaf) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let leaf = leaf.strip_suffix(".weight").unwrap_or(leaf);
    let layer = layer.parse().ok().filter(|layer| *layer < MOST_LAYERS)?;
    Some((layer, leaf.rsplit('.').next().unwrap_or(leaf)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_a_place_in_the_map_or_a_bar() {
        assert_eq!(place("model.layers.12.self_attn.q_proj.weight"), Some((12, "q_proj")));
        assert_eq!(place("model.layers.0.mlp.experts.gate_up_proj"), Some((0, "gate_up_proj")));
        assert_eq!(place("lm_head.weight"), None);
        assert_eq!(place("model.layers.18446744073709551615.mlp.up_proj.weight"), None);
        let page = chart("Errors.", &[("lm_head.weight", 0.02), ("model.layers.1.mlp.up_proj.weight", 0.08)], |v| {
            format!("{:.1} %", 100.0 * v)
        });
        assert!(page.contains("up_proj, layer 1: 8.0 %") && page.contains("lm_head.weight: 2.0 %"), "{page}");
        assert!(chart("Nothing.", &[], |v| v.to_string()).is_empty());
    }
}
