//! Selects the tensors to quantize, and the quantization of each, from the options of a command and an optional
//! manifest.

use super::weights::Tensor;
use crate::error::{Error, Result};
use crate::manifest::{Manifest, Rule, TensorEntry, compile_pattern, is_weight_matrix};
use crate::quant_spec::{QuantFields, TensorQuant};
use crate::role::Role;
use regex_automata::meta::Regex;
use std::collections::BTreeMap;
use std::path::Path;

/// Options of the user that select tensors and their quantization.
#[derive(Debug, Clone, Default)]
pub struct SelectionOptions {
    /// Scheme and parameters of the quantization.
    pub fields: QuantFields,
    /// Patterns of the tensors to quantize, whatever their role; empty to select by role.
    pub include: Vec<String>,
    /// Patterns of tensors that are never quantized.
    pub exclude: Vec<String>,
    /// True to quantize the output matrix (LM head), too.
    pub include_lm_head: bool,
}

/// [`SelectionOptions`], checked and compiled.
#[derive(Debug)]
pub struct Selection {
    exclude: Vec<Regex>,
    include: Vec<Regex>,
    quant: TensorQuant,
    manifest: Option<Manifest>,
    /// Decisions of a plan for a size budget by tensor name, which replace all other options.
    planned: Option<BTreeMap<String, TensorQuant>>,
    options: SelectionOptions,
}

impl Selection {
    /// Compiles patterns and parameters. `rules` is a manifest that selects the tensors in place of roles and
    /// `include`; `fields` supplies the parameters that it does not set.
    ///
    /// # Errors
    /// A pattern is not a regular expression, parameters contradict each other or those of the manifest, the manifest
    /// is invalid, or `include` is given together with a manifest.
    pub fn new(options: SelectionOptions, rules: Option<&Path>) -> Result<Selection> {
        if rules.is_some() && !options.include.is_empty() {
            return Err(Error::usage(
                "found --rules together with --include, but the rules already select the tensors",
            )
            .help("write the pattern into the rules file; --exclude can be combined with it"));
        }
        let compile = |patterns: &[String]| patterns.iter().map(|p| compile_pattern(p)).collect::<Result<Vec<_>>>();
        Ok(Selection {
            exclude: compile(&options.exclude)?,
            include: compile(&options.include)?,
            quant: QuantFields::default().resolve(&options.fields)?,
            manifest: rules.map(|rules| Manifest::load_with(rules, &options.fields)).transpose()?,
            planned: None,
            options,
        })
    }

    /// Replaces all decisions by those of a plan, which was made for the tensors that
    /// [`leaves_to_plan`](Selection::leaves_to_plan) accepts.
    #[must_use]
    pub fn planned(self, decisions: BTreeMap<String, TensorQuant>) -> Selection {
        Selection { planned: Some(decisions), ..self }
    }

    /// Returns true for tensors that a plan may choose a scheme for: all matrices that the patterns admit, except
    /// routers. Routers are small, and the outputs of all experts depend on them.
    pub fn leaves_to_plan(&self, tensor: &Tensor) -> bool {
        let name = &tensor.name;
        is_weight_matrix(name, &tensor.shape)
            && tensor.role != Role::Router
            && !self.exclude.iter().any(|p| p.is_match(name))
            && (self.include.is_empty() || self.include.iter().any(|p| p.is_match(name)))
    }

    /// Returns the quantization of a tensor, or `None` if it is not quantized.
    ///
    /// # Errors
    /// The manifest was made for a tensor of another shape.
    pub fn decide(&self, tensor: &Tensor) -> Result<Option<TensorQuant>> {
        let name = &tensor.name;
        if let Some(planned) = &self.planned {
            return Ok(planned.get(name).copied());
        }
        if !is_weight_matrix(name, &tensor.shape) || self.exclude.iter().any(|p| p.is_match(name)) {
            return Ok(None);
        }
        let wanted_head = self.options.include_lm_head && tensor.role == Role::LmHead;
        if let Some(manifest) = &self.manifest {
            let decided = manifest.decide(name, &tensor.shape)?.map(|d| d.quant);
            return Ok(decided.or(wanted_head.then_some(self.quant)));
        }
        let selected = match self.include.is_empty() {
            true => tensor.role.quantizes_by_default(),
            false => self.include.iter().any(|p| p.is_match(name)),
        };
        Ok((selected || wanted_head).then_some(self.quant))
    }

    /// Returns true when neither options, nor manifest, nor plan determine the quantization method of a tensor.
    pub fn leaves_method_open(&self, tensor: &Tensor) -> bool {
        let is_ruled = self.manifest.as_ref().is_some_and(|manifest| manifest.names_method(&tensor.name));
        self.options.fields.method.is_none() && self.planned.is_none() && !is_ruled
    }

    /// Returns the manifest that decides, if there is one.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// Returns the entries of tensors that the manifest keeps unquantized. They are copied to every manifest that is
    /// made from it.
    pub fn kept_entries(&self) -> impl Iterator<Item = (String, TensorEntry)> + '_ {
        let entries = self.manifest.iter().flat_map(|m| &m.document().tensors);
        entries.filter(|(_, entry)| entry.keep.is_some()).map(|(name, entry)| (name.clone(), entry.clone()))
    }

    /// Returns the defaults and rules for the new manifest, which document how its decisions were made.
    pub fn document_rules(&self) -> (QuantFields, Vec<Rule>) {
        let exclude = |p: &String| Rule { exclude: Some(p.clone()), ..Rule::default() };
        let include = |p: &String| Rule { include: Some(p.clone()), ..Rule::default() };
        let mut rules: Vec<Rule> = self.options.exclude.iter().map(exclude).collect();
        match &self.manifest {
            Some(manifest) => {
                rules.extend(manifest.document().rules.iter().cloned());
                (manifest.document().defaults, rules)
            }
            None if self.planned.is_some() => (QuantFields::default(), Vec::new()),
            None => {
                rules.extend(self.options.include.iter().map(include));
                let q = &self.quant;
                let fields = QuantFields {
                    scheme: Some(q.spec.scheme),
                    bits: None,
                    group_size: Some(q.spec.granularity),
                    symmetric: Some(q.spec.symmetric),
                    scale_dtype: Some(q.spec.scale_dtype),
                    method: Some(q.method),
                    clamp: q.clamp,
                    percentile: q.percentile,
                };
                (fields, rules)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::dry_run::in_words;
    use crate::manifest::Rules;

    /// Resolves the same fields as command-line options, in a rule, and as the defaults of a rule without fields.
    fn doors(fields: QuantFields) -> [Result<TensorQuant>; 3] {
        let rule = |fields, defaults| {
            let rule = Rule { include: Some("a".into()), fields, ..Rule::default() };
            Rules::compile(&[rule], &defaults).map(|rules| rules.decide("a").expect("the rule includes it"))
        };
        let command = Selection::new(SelectionOptions { fields, ..SelectionOptions::default() }, None);
        let nothing = QuantFields::default();
        [command.map(|selection| selection.quant), rule(fields, nothing), rule(nothing, fields)]
    }

    #[test]
    fn words_mean_the_same_on_the_command_line_and_in_manifests() {
        let cases = [
            (r#"{}"#, "q4_0 search"),
            (r#"{"bits": 4}"#, "q4_0 search"),
            (r#"{"bits": 5}"#, "int5/32 search"),
            (r#"{"bits": 6}"#, "int6/32 search"),
            (r#"{"bits": 8}"#, "int8/row rtn"),
            (r#"{"bits": 7}"#, "7 bits per weight"),
            (r#"{"group_size": 32}"#, "q4_0 search"),
            (r#"{"bits": 4, "group_size": 32}"#, "q4_0 search"),
            (r#"{"group_size": 64}"#, "int4/64 search"),
            (r#"{"bits": 4, "group_size": 64}"#, "int4/64 search"),
            (r#"{"bits": 4, "group_size": "row"}"#, "int4/row search"),
            (r#"{"bits": 4, "group_size": "tensor", "method": "rtn"}"#, "int4/tensor rtn"),
            (r#"{"bits": 5, "group_size": 128}"#, "int5/128 search"),
            (r#"{"bits": 8, "group_size": 64}"#, "int8/64 rtn"),
            (r#"{"symmetric": true}"#, "q4_0 search"),
            (r#"{"symmetric": false}"#, "int4/32 affine search"),
            (r#"{"bits": 4, "symmetric": false, "group_size": 128}"#, "int4/128 affine search"),
            (r#"{"bits": 8, "symmetric": false}"#, "scheme int8 does not support zero points"),
            (r#"{"bits": 4, "scale_dtype": "f32"}"#, "int4/32 search"),
            (r#"{"bits": 4, "scale_dtype": "e8m0"}"#, "scheme q4_0 supports only groups of 32"),
            (r#"{"bits": 4, "percentile": 99}"#, "q4_0 rtn"),
            (r#"{"bits": 4, "group_size": 64, "percentile": 99}"#, "int4/64 rtn"),
            (r#"{"bits": 4, "percentile": 99, "method": "search"}"#, "a percentile cannot be used with method search"),
            (r#"{"bits": 4, "method": "gptq"}"#, "q4_0 gptq"),
            (r#"{"bits": 4, "method": "exact", "group_size": 64}"#, "int4/64 exact"),
            (r#"{"bits": 4, "method": "exact", "symmetric": false}"#, "method exact does not support scheme int4"),
            (r#"{"scheme": "int4"}"#, "int4/32 search"),
            (r#"{"scheme": "q4_0", "group_size": 64}"#, "scheme q4_0 supports only groups of 32"),
            (r#"{"scheme": "nl4", "bits": 4}"#, "nl4 search"),
            (r#"{"scheme": "nl4", "symmetric": false}"#, "scheme nl4 supports only groups of 32"),
            (r#"{"scheme": "mxfp4"}"#, "mxfp4 rtn"),
            (r#"{"scheme": "mxfp4", "method": "search"}"#, "method search does not support scheme mxfp4"),
            (r#"{"scheme": "int8", "bits": 4}"#, "4 bits, but scheme int8 has 8"),
            (r#"{"scheme": "int8", "group_size": 32, "method": "search"}"#, "int8/32 search"),
        ];
        let mut wrong = Vec::new();
        for (words, expected) in cases {
            for (door, found) in doors(serde_json::from_str(words).unwrap()).into_iter().enumerate() {
                let found = match found {
                    Ok(quant) => format!("{} {}", in_words(&quant.spec), quant.method.name()),
                    Err(e) => e.to_string(),
                };
                if !found.contains(expected) {
                    let place = ["the options", "a rule", "the defaults"][door];
                    wrong.push(format!("{words} in {place}: found `{found}`, expected `{expected}`"));
                }
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}
