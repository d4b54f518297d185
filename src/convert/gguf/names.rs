//! Maps the tensors of a GGUF file to canonical tensors and their rows.
//!
//! The two formats differ in tensor names and in the order of rows, but not within a row: in some families the rows of
//! a rotary pair are adjacent in GGUF, the gate and up rows of experts alternate in one canonical tensor and are two
//! tensors in GGUF, and some families stack q, k and v. Codes and floats are therefore moved row by row. A vector is
//! treated as a column, each element as a row.

use super::family::Family;
use crate::convert::arch::ExpectedTensor;
use crate::error::{Error, Result};
use crate::model_config::ModelConfig;

/// A GGUF tensor and the canonical tensors its rows come from.
#[derive(Debug, Clone, PartialEq)]
pub struct MappedTensor {
    /// Name in GGUF.
    pub name: String,
    /// Shape, slowest axis first.
    pub shape: Vec<usize>,
    /// Indices of the canonical tensors in the list of expected tensors.
    pub canonical: Vec<usize>,
    /// Mapping of the rows to those of the canonical tensors.
    pub order: RowOrder,
    /// True when GGUF stores every element with 1 added.
    pub plus_one: bool,
}

/// Mapping of the rows of a GGUF tensor to canonical rows. It is the same for every matrix of a stack.
#[derive(Debug, Clone, PartialEq)]
pub enum RowOrder {
    /// The rows of one canonical tensor in the same order.
    Same,
    /// Adjacent rotary pairs: in each head of n rows, canonical rows i and i + n/2 are GGUF rows 2i and
    /// 2i + 1. The field is n.
    Neighbours(usize),
    /// Every second row: GGUF row i is canonical row 2i + k. The field is k, 0 or 1.
    Alternate(usize),
    /// The rows of several canonical tensors in sequence. The field holds the number of rows of each.
    Stacked(Vec<usize>),
}

/// Returns true for tensors that are vectors or stacks of vectors: norms, biases and sinks.
pub fn is_vector(canonical: &str, shape: &[usize]) -> bool {
    shape.len() < 2 || canonical.ends_with("bias")
}

impl RowOrder {
    /// Returns the canonical tensor (as an index into [`MappedTensor::canonical`]) and its row that GGUF
    /// row `row` corresponds to.
    pub fn canonical_row(&self, row: usize) -> (usize, usize) {
        match self {
            RowOrder::Same => (0, row),
            RowOrder::Neighbours(head) => {
                let (start, within) = (row / head * head, row % head);
                (0, start + within % 2 * (head / 2) + within / 2)
            }
            RowOrder::Alternate(first) => (0, 2 * row + first),
            RowOrder::Stacked(parts) => {
                let (mut part, mut row) = (0, row);
                while row >= parts[part] {
                    row -= parts[part];
                    part += 1;
                }
                (part, row)
            }
        }
    }

    /// Returns the GGUF row of row `row` of canonical tensor number `part`; `None` when another
    /// GGUF tensor holds that row.
    pub fn gguf_row(&self, part: usize, row: usize) -> Option<usize> {
        match self {
            RowOrder::Same => Some(row),
            RowOrder::Neighbours(head) => {
                let (start, within) = (row / head * head, row % head);
                Some(start + within % (head / 2) * 2 + within / (head / 2))
            }
            RowOrder::Alternate(first) => (row % 2 == *first).then_some(row / 2),
            RowOrder::Stacked(parts) => Some(parts[..part].iter().sum::<usize>() + row),
        }
    }
}

/// Canonical and GGUF names of the tensors outside of the layers.
const TOP: &[(&str, &str)] = &[
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Canonical and GGUF names of the tensors of a layer, without `weight` or `bias`. Not listed are
/// `post_attention_layernorm`, whose name depends on the family, and the gate and up rows of experts, which
/// are two tensors in GGUF.
const PARTS: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.sinks", "attn_sinks"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
];

/// Tensors of a layer that are stacked along the rows where a file fuses them, and the GGUF name of the stack.
const STACKS: &[(&[&str], &str)] = &[
    (&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "attn_qkv"),
    (&["mlp.gate_proj", "mlp.up_proj"], "ffn_up"),
];

/// Returns the GGUF tensors of a model with the canonical tensors `expected`. `fused` is called with the GGUF name of
/// a stack (q, k, v or gate, up of a layer) and returns true when the stack is stored as one matrix.
///
/// # Errors
/// A tensor has no name in GGUF.
pub fn map(
    family: &Family,
    model: &ModelConfig,
    expected: &[ExpectedTensor],
    fused: impl Fn(&str) -> bool,
) -> Result<Vec<MappedTensor>> {
    let mut all = Vec::new();
    for (position, tensor) in expected.iter().enumerate() {
        let mapped = |name: String, order: RowOrder| {
            let plus_one = family.norm_plus_one && tensor.name.ends_with("norm.weight");
            MappedTensor { name, shape: tensor.shape.clone(), canonical: vec![position], order, plus_one }
        };
        if let Some((_, name)) = TOP.iter().find(|(canonical, _)| *canonical == tensor.name) {
            all.push(mapped(name.to_string(), RowOrder::Same));
            continue;
        }
        let unknown = || Error::unsupported("this tensor has no name in GGUF").tensor(&tensor.name);
        let in_layer = tensor.name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let (layer, part) = in_layer.ok_or_else(unknown)?;
        let (part, suffix) = match part.strip_suffix("bias") {
            Some(part) => (part.trim_end_matches(['.', '_']), "bias"),
            None => (part.strip_suffix(".weight").unwrap_or(part), "weight"),
        };
        let name = |leaf: &str| format!("blk.{layer}.{leaf}.{suffix}");
        let stack = STACKS.iter().find(|(parts, leaf)| parts.contains(&part) && fused(&name(leaf)));
        if let Some((parts, leaf)) = stack {
            // The first tensor of a stack adds the whole stack to the list.
            if part == parts[0] {
                let member = |part| format!("model.layers.{layer}.{part}.{suffix}");
                all.push(stacked(mapped(name(leaf), RowOrder::Same), parts.iter().map(member), expected)?);
            }
        } else if part == "mlp.experts.gate_up_proj" {
            for (half, leaf) in ["ffn_gate_exps", "ffn_up_exps"].into_iter().enumerate() {
                let mut mapped = mapped(name(leaf), RowOrder::Alternate(half));
                mapped.shape[1] /= 2;
                all.push(mapped);
            }
        } else {
            let leaf = PARTS.iter().find(|(canonical, _)| *canonical == part).map(|(_, leaf)| *leaf);
            let leaf = leaf.or((part == "post_attention_layernorm").then_some(family.post_attention));
            let moved = family.neighbour_pairs && ["self_attn.q_proj", "self_attn.k_proj"].contains(&part);
            let order = if moved { RowOrder::Neighbours(model.head_dim) } else { RowOrder::Same };
            all.push(mapped(name(leaf.ok_or_else(unknown)?), order));
        }
    }
    Ok(all)
}

/// Returns the tensor that stacks `first` and the other `members`, which follow it in `expected`.
fn stacked(
    mut first: MappedTensor,
    members: impl Iterator<Item = String>,
    expected: &[ExpectedTensor],
) -> Result<MappedTensor> {
    let start = first.canonical[0];
    let position = |name: String| {
        let found = expected[start..].iter().position(|tensor| tensor.name == name);
        found.map(|after| start + after).ok_or_else(|| {
            Error::unsupported("missing, but GGUF stores this tensor stacked with others of its layer").tensor(name)
        })
    };
    first.canonical = members.map(position).collect::<Result<_>>()?;
    let rows: Vec<usize> = first.canonical.iter().map(|position| expected[*position].shape[0]).collect();
    first.shape[0] = rows.iter().sum();
    first.order = RowOrder::Stacked(rows);
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_that_are_moved_there_and_back_are_the_same_rows(
            order in prop_oneof![
                Just(RowOrder::Same),
                (1usize..9).prop_map(|half| RowOrder::Neighbours(2 * half)),
                Just(RowOrder::Alternate(0)),
                Just(RowOrder::Alternate(1)),
                prop::collection::vec(1usize..40, 1..4).prop_map(RowOrder::Stacked),
            ],
            row in 0usize..1000,
        ) {
            let row = match &order { RowOrder::Stacked(parts) => row % parts.iter().sum::<usize>(), _ => row };
            let (part, canonical) = order.canonical_row(row);
            prop_assert_eq!(order.gguf_row(part, canonical), Some(row));
            if let RowOrder::Alternate(first) = order {
                prop_assert_eq!(RowOrder::Alternate(1 - first).gguf_row(0, canonical), None);
            }
        }
    }

    #[test]
    fn rotary_rows_are_moved_as_llama_cpp_converts_them() {
        // Equals reshape(heads, 2, 3).swapaxes(1, 2) for two heads of six rows.
        let order = RowOrder::Neighbours(6);
        let rows: Vec<usize> = (0..12).map(|row| order.canonical_row(row).1).collect();
        assert_eq!(rows, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
    }
}
