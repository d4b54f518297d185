//! Selects the tensors to quantize, and the quantization of each, from the options of a command and an optional
//! manifest.
//!
//! Without patterns and manifest, tensors are selected by role: the matrices of attention, recurrent mixers, MLP and
//! experts get the requested quantization, the embedding and the output matrix int8 in groups of 32. The output
//! projections of linear attention get int6 in place of 4 bits, because they lose most (docs/QUALITY.md).

use super::weights::Tensor;
use crate::catalogue::{Role, layer_part};
use crate::error::{Error, Result};
use crate::manifest::{Manifest, Rule, TensorEntry, compile_pattern, is_weight_matrix};
use crate::progress;
use crate::quant_spec::{Method, QuantFields, TensorQuant};
use crate::scheme::QuantSpec;
use regex_automata::meta::Regex;
use std::collections::BTreeMap;
use std::path::Path;

/// Quantization of the embedding and the output matrix if tensors are selected by role.
const OUTER: TensorQuant = TensorQuant { spec: QuantSpec::Q8_0, method: Method::Rtn, clamp: None, percentile: None };

/// Bits of the output projections of linear attention if tensors are selected by role and get 4 bits.
const MIXER_OUTPUT_BITS: u32 = 6;

/// Storage of the embedding or of the output matrix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OuterStorage {
    /// Patterns or a manifest decide; if tensors are selected by role, int8 in groups of 32.
    #[default]
    Chosen,
    /// Quantized like the matrices of the layers, unless a manifest says otherwise.
    LikeLayers,
    /// Not quantized, whatever a manifest says.
    Kept,
}

/// Options of the user that select tensors and their quantization.
#[derive(Debug, Clone, Default)]
pub struct SelectionOptions {
    /// Scheme and parameters of the quantization.
    pub fields: QuantFields,
    /// Patterns of the tensors to quantize, whatever their role; empty to select by role.
    pub include: Vec<String>,
    /// Patterns of tensors that are never quantized.
    pub exclude: Vec<String>,
    /// Storage of the embedding of tokens, and of those of the further inputs of layers.
    pub embedding: OuterStorage,
    /// Storage of the output matrix (LM head). If it is the embedding, it is kept if either of the two is to be kept.
    pub lm_head: OuterStorage,
}

/// [`SelectionOptions`], checked and compiled.
#[derive(Debug)]
pub struct Selection {
    exclude: Vec<Regex>,
    include: Vec<Regex>,
    quant: TensorQuant,
    /// Quantization of the output projections of linear attention if tensors are selected by role.
    mixer_output: TensorQuant,
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
        let quant = QuantFields::default().resolve(&options.fields)?;
        let more =
            QuantFields { bits: Some(MIXER_OUTPUT_BITS), method: options.fields.method, ..QuantFields::default() };
        // Codes that are in the weights already have no more bits.
        let mixer_output = match quant.spec.scheme.bits() <= 4 && quant.method != Method::Exact {
            true => QuantFields::default().resolve(&more)?,
            false => quant,
        };
        Ok(Selection {
            exclude: compile(&options.exclude)?,
            include: compile(&options.include)?,
            quant,
            mixer_output,
            manifest: rules.map(|rules| Manifest::load_with(rules, &options.fields)).transpose()?,
            planned: None,
            options,
        })
    }

    /// Notes options that select none of the tensors of a model.
    pub fn note_options_without_effect(&self, tensors: &[Tensor]) {
        self.note_lm_head(tensors);
        for (option, texts, patterns) in
            [("--include", &self.options.include, &self.include), ("--exclude", &self.options.exclude, &self.exclude)]
        {
            for (text, pattern) in texts.iter().zip(patterns) {
                if !tensors.iter().any(|tensor| pattern.is_match(&tensor.name)) {
                    progress::detail(0, || format!("note: {option} {text} has no effect: no tensor has such a name"));
                }
            }
        }
    }

    /// Notes that the output matrix is to be quantized where there is none.
    pub fn note_lm_head(&self, tensors: &[Tensor]) {
        let excluded = |name: &str| self.exclude.iter().any(|pattern| pattern.is_match(name));
        let heads = || tensors.iter().filter(|tensor| tensor.role == Role::LmHead);
        let why = match heads().next() {
            None => "the output matrix is tied to the embedding",
            Some(_) if heads().all(|head| excluded(&head.name)) => "--exclude names the output matrix",
            Some(_) => return,
        };
        if self.options.lm_head == OuterStorage::LikeLayers {
            progress::detail(0, || format!("note: --include-lm-head has no effect: {why}"));
        }
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
            && !self.keeps(tensor)
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
        let is_excluded = || self.exclude.iter().any(|p| p.is_match(name));
        if !is_weight_matrix(name, &tensor.shape) || self.keeps(tensor) || is_excluded() {
            return Ok(None);
        }
        let outer = self.outer(tensor.role);
        let like_layers = (outer == Some(OuterStorage::LikeLayers)).then_some(self.quant);
        if let Some(manifest) = &self.manifest {
            return Ok(manifest.decide(name, &tensor.shape)?.map(|d| d.quant).or(like_layers));
        }
        if !self.include.is_empty() {
            return Ok(self.include.iter().any(|p| p.is_match(name)).then_some(self.quant).or(like_layers));
        }
        Ok(match outer {
            Some(_) => like_layers.or(Some(OUTER)),
            None if is_linear_attention_output(name) => Some(self.mixer_output),
            None => tensor.role.quantizes_by_default().then_some(self.quant),
        })
    }

    /// Returns the option for tensors of this role, if there is one.
    fn outer(&self, role: Role) -> Option<OuterStorage> {
        match role {
            Role::Embedding => Some(self.options.embedding),
            Role::LmHead => Some(self.options.lm_head),
            _ => None,
        }
    }

    /// Returns true for an embedding or output matrix that is not to be quantized.
    pub(super) fn keeps(&self, tensor: &Tensor) -> bool {
        self.outer(tensor.role) == Some(OuterStorage::Kept)
            || tensor.is_tied && self.options.lm_head == OuterStorage::Kept
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

/// Returns true for the output projection of a gated delta net or of Mamba-2.
fn is_linear_attention_output(name: &str) -> bool {
    let part = layer_part(name).map_or("", |(_, part)| part);
    matches!(part, "linear_attn.out_proj.weight" | "mamba.out_proj.weight")
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

    /// Returns what `options` decide about a tensor of 64 x 64, by the name of the tensor.
    fn decided(options: SelectionOptions, tied: bool) -> impl Fn(&str) -> String {
        let selection = Selection::new(options, None).unwrap();
        move |name| {
            let tensor = Tensor::float(name, &[64, 64], tied && name == "model.embed_tokens.weight");
            let quant = selection.decide(&tensor).unwrap();
            quant.map_or("kept".into(), |q| format!("{} {}", in_words(&q.spec), q.method.name()))
        }
    }

    #[test]
    fn the_embedding_and_the_output_matrix_get_eight_bits_unless_an_option_says_otherwise() {
        use OuterStorage::{Chosen, Kept, LikeLayers};
        struct Case {
            bits: u32,
            embedding: OuterStorage,
            lm_head: OuterStorage,
            include: &'static [&'static str],
            tied: bool,
            /// Layer, embedding, embedding of further inputs, output matrix.
            expected: [&'static str; 4],
        }
        let (q8, usual) = (
            "int8/32 rtn",
            Case {
                bits: 4,
                embedding: Chosen,
                lm_head: Chosen,
                include: &[],
                tied: false,
                expected: ["q4_0 search", "int8/32 rtn", "int8/32 rtn", "int8/32 rtn"],
            },
        );
        let q4 = "q4_0 search";
        let cases = [
            Case { bits: 5, expected: ["int5/32 search", q8, q8, q8], ..usual },
            Case { bits: 6, expected: ["int6/32 search", q8, q8, q8], ..usual },
            Case { bits: 8, expected: ["int8/row rtn", q8, q8, q8], ..usual },
            Case { embedding: Kept, expected: [q4, "kept", "kept", q8], ..usual },
            Case { embedding: Kept, tied: true, expected: [q4, "kept", "kept", q8], ..usual },
            Case { lm_head: Kept, expected: [q4, q8, q8, "kept"], ..usual },
            Case { lm_head: Kept, tied: true, expected: [q4, "kept", q8, "kept"], ..usual },
            Case { lm_head: LikeLayers, expected: [q4, q8, q8, q4], ..usual },
            Case { include: &["q_proj"], expected: [q4, "kept", "kept", "kept"], ..usual },
            Case { include: &["embed"], expected: ["kept", q4, q4, "kept"], ..usual },
            Case { include: &["q_proj"], lm_head: LikeLayers, expected: [q4, "kept", "kept", q4], ..usual },
            usual,
        ];
        let mut wrong = Vec::new();
        for Case { bits, embedding, lm_head, include, tied, expected } in cases {
            let fields = QuantFields { bits: Some(bits), ..QuantFields::default() };
            let include: Vec<String> = include.iter().map(|p| (*p).to_string()).collect();
            let options = SelectionOptions { fields, include: include.clone(), exclude: vec![], embedding, lm_head };
            let decide = decided(options, tied);
            let found = [
                "model.layers.0.self_attn.q_proj.weight",
                "model.embed_tokens.weight",
                "model.embed_tokens_per_layer.weight",
                "lm_head.weight",
            ]
            .map(&decide);
            if found != expected {
                wrong.push(format!("{bits} bits, {embedding:?}, {lm_head:?}, tied {tied}: {found:?}, {expected:?}"));
            }
            for name in ["model.norm.weight", "model.layers.0.mlp.router.weight"] {
                assert_eq!(decide(name), "kept", "{name}");
            }
            if include.is_empty() {
                let output = decide("model.layers.0.linear_attn.out_proj.weight");
                assert_eq!(output, if bits == 4 { "int6/32 search" } else { expected[0] });
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
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
