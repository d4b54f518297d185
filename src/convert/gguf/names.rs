//! Which tensor of a GGUF file is which canonical one, and where its rows lie.
//!
//! The two forms differ in names and in the order of rows, never within a row: rotary pairs are neighbours in some families,
//! gate and up rows of experts alternate here and are two tensors there, and some families stack q, k, v. So codes and
//! floats alike are moved row by row. A vector counts as a column: every element is a row.

use super::family::Family;
use crate::convert::arch::ExpectedTensor;
use crate::error::{Error, Result};
use crate::model_config::ModelConfig;
use std::collections::HashMap;

/// A GGUF tensor and the canonical tensors its rows come from.
#[derive(Debug, Clone, PartialEq)]
pub struct MappedTensor {
    /// Name in GGUF.
    pub name: String,
    /// Shape, slowest axis first.
    pub shape: Vec<usize>,
    /// Positions of the canonical tensors in the list of expected ones.
    pub canonical: Vec<usize>,
    /// Where its rows come from.
    pub order: RowOrder,
    /// Stored with 1 added to every element.
    pub plus_one: bool,
}

/// Where the rows of a GGUF tensor come from; every matrix of a stack alike.
#[derive(Debug, Clone, PartialEq)]
pub enum RowOrder {
    /// The same rows of one canonical tensor.
    Same,
    /// Within each head of that many rows, rows i and i + n/2 become neighbours.
    Neighbours(usize),
    /// Rows 2i + first of one canonical tensor.
    Alternate(usize),
    /// Canonical tensors below each other, with these numbers of rows.
    Stacked(Vec<usize>),
}

/// A tensor as a stack of matrices whose rows can be moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowStack {
    /// Matrices.
    pub count: usize,
    /// Rows of each.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
}

impl RowStack {
    /// The view of a tensor, `vector` if it is one or a stack of them.
    pub fn new(shape: &[usize], vector: bool) -> RowStack {
        match (shape, vector) {
            ([lead @ .., rows], true) => RowStack { count: lead.iter().product(), rows: *rows, cols: 1 },
            ([lead @ .., rows, cols], false) => RowStack { count: lead.iter().product(), rows: *rows, cols: *cols },
            (_, _) => RowStack { count: 1, rows: shape.iter().product(), cols: 1 },
        }
    }
}

/// True for norms, biases, sinks, and for stacks of biases.
pub fn is_vector(canonical: &str, shape: &[usize]) -> bool {
    shape.len() < 2 || canonical.ends_with("bias")
}

impl RowOrder {
    /// The canonical tensor (by position among the tensor's own) and row that GGUF row `row` is.
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

    /// The GGUF row that is row `row` of canonical tensor number `part`; `None` when another GGUF tensor has it.
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

/// The GGUF tensors of a model whose canonical tensors are `expected`. With `fused`, q, k, v and gate, up of the layers for
/// which it says so are one matrix each.
pub fn map(
    family: &Family,
    model: &ModelConfig,
    expected: &[ExpectedTensor],
    fused: impl Fn(&str) -> bool,
) -> Result<Vec<MappedTensor>> {
    let positions: HashMap<&str, usize> = expected.iter().enumerate().map(|(i, e)| (e.name.as_str(), i)).collect();
    let mapper = Mapper { family, model, expected, positions, fused: &fused };
    let mut all = Vec::new();
    for (position, tensor) in expected.iter().enumerate() {
        mapper.push(position, tensor, &mut all)?;
    }
    Ok(all)
}

struct Mapper<'a> {
    family: &'a Family,
    model: &'a ModelConfig,
    expected: &'a [ExpectedTensor],
    positions: HashMap<&'a str, usize>,
    fused: &'a dyn Fn(&str) -> bool,
}

impl Mapper<'_> {
    fn push(&self, position: usize, tensor: &ExpectedTensor, all: &mut Vec<MappedTensor>) -> Result<()> {
        let top = match tensor.name.as_str() {
            "model.embed_tokens.weight" => Some("token_embd.weight"),
            "model.norm.weight" => Some("output_norm.weight"),
            "lm_head.weight" => Some("output.weight"),
            _ => None,
        };
        if let Some(name) = top {
            all.push(self.whole(position, name.to_string(), RowOrder::Same));
            return Ok(());
        }
        let unknown = || Error::unsupported("has no name in GGUF").tensor(&tensor.name);
        let (layer, part) =
            tensor.name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')).ok_or_else(unknown)?;
        let block = |leaf: &str| format!("blk.{layer}.{leaf}");
        if let Some(stack) = self.stack(layer, part) {
            // The first tensor of a stack stands for all of them.
            all.push(stack);
            return Ok(());
        }
        for half in 0..2 {
            let Some(leaf) = expert_half(part, half) else { continue };
            let mut mapped = self.whole(position, block(leaf), RowOrder::Alternate(half));
            let axis = usize::from(tensor.shape.len() > 1);
            mapped.shape[axis] /= 2;
            all.push(mapped);
        }
        if expert_half(part, 0).is_some() || self.in_stack(layer, part) {
            return Ok(());
        }
        let (module, suffix) = part.rsplit_once('.').unwrap_or((part, "weight"));
        let leaf = self.leaf(part, module).ok_or_else(unknown)?;
        let order = match module {
            "self_attn.q_proj" | "self_attn.k_proj" if self.family.neighbour_pairs => {
                RowOrder::Neighbours(self.model.head_dim)
            }
            _ => RowOrder::Same,
        };
        let suffix = match suffix {
            "bias" => "bias",
            other if other.ends_with("_bias") => "bias",
            _ => "weight",
        };
        all.push(self.whole(position, block(&format!("{leaf}.{suffix}")), order));
        Ok(())
    }

    fn whole(&self, position: usize, name: String, order: RowOrder) -> MappedTensor {
        let tensor = &self.expected[position];
        let plus_one = self.family.norm_plus_one && tensor.name.ends_with("norm.weight");
        MappedTensor { name, shape: tensor.shape.clone(), canonical: vec![position], order, plus_one }
    }

    fn leaf(&self, part: &str, module: &str) -> Option<&'static str> {
        Some(match module {
            "input_layernorm" => "attn_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" => "attn_output",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "post_attention_layernorm" => self.family.post_attention,
            "pre_feedforward_layernorm" => "ffn_norm",
            "post_feedforward_layernorm" => "post_ffw_norm",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" => "ffn_up",
            "mlp.down_proj" => "ffn_down",
            "mlp.router" => "ffn_gate_inp",
            _ => match part {
                "self_attn.sinks" => "attn_sinks",
                "mlp.experts.down_proj" | "mlp.experts.down_proj_bias" => "ffn_down_exps",
                _ => return None,
            },
        })
    }

    /// The canonical parts that GGUF keeps in one tensor, and its name.
    fn members(part: &str) -> Option<(Vec<String>, String)> {
        let (module, suffix) = part.rsplit_once('.')?;
        let (names, leaf): (&[&str], &str) = match module {
            "self_attn.q_proj" | "self_attn.k_proj" | "self_attn.v_proj" => {
                (&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "attn_qkv")
            }
            "mlp.gate_proj" | "mlp.up_proj" => (&["mlp.gate_proj", "mlp.up_proj"], "ffn_up"),
            _ => return None,
        };
        Some((names.iter().map(|name| format!("{name}.{suffix}")).collect(), format!("{leaf}.{suffix}")))
    }

    fn in_stack(&self, layer: &str, part: &str) -> bool {
        Self::members(part).is_some_and(|(_, leaf)| (self.fused)(&format!("blk.{layer}.{leaf}")))
    }

    /// The stack that begins with `part`.
    fn stack(&self, layer: &str, part: &str) -> Option<MappedTensor> {
        let (members, leaf) = Self::members(part)?;
        if members[0] != part || !self.in_stack(layer, part) {
            return None;
        }
        let positions: Vec<usize> = members
            .iter()
            .map(|part| self.positions.get(format!("model.layers.{layer}.{part}").as_str()).copied())
            .collect::<Option<_>>()?;
        let rows: Vec<usize> = positions.iter().map(|p| self.expected[*p].shape[0]).collect();
        let mut shape = self.expected[positions[0]].shape.clone();
        shape[0] = rows.iter().sum();
        let name = format!("blk.{layer}.{leaf}");
        Some(MappedTensor { name, shape, canonical: positions, order: RowOrder::Stacked(rows), plus_one: false })
    }
}

/// The GGUF tensor that holds the gate (0) or up (1) rows of the experts.
fn expert_half(part: &str, half: usize) -> Option<&'static str> {
    Some(match (part, half) {
        ("mlp.experts.gate_up_proj", 0) => "ffn_gate_exps.weight",
        ("mlp.experts.gate_up_proj", _) => "ffn_up_exps.weight",
        ("mlp.experts.gate_up_proj_bias", 0) => "ffn_gate_exps.bias",
        ("mlp.experts.gate_up_proj_bias", _) => "ffn_up_exps.bias",
        _ => return None,
    })
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
        // reshape(heads, 2, 3).swapaxes(1, 2) of two heads of six rows.
        let order = RowOrder::Neighbours(6);
        let rows: Vec<usize> = (0..12).map(|row| order.canonical_row(row).1).collect();
        assert_eq!(rows, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
    }
}
