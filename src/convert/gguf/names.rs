//! Maps the tensors of a GGUF file to canonical tensors and their rows.
//!
//! The two formats differ in tensor names and in the order of rows, but not within a row: in some families the rows of
//! a rotary pair are adjacent in GGUF, the gate and up rows of experts alternate in one canonical tensor and are two
//! tensors in GGUF, and some families stack q, k and v. Codes and floats are therefore moved row by row. A vector is
//! treated as a column, each element as a row.

use super::family::Family;
use crate::catalogue::LayerTensor;
use crate::convert::arch::ExpectedTensor;
use crate::convert::rows::RowStack;
use crate::error::{Error, Result};
use crate::model_config::{Latent, ModelConfig};

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
    /// Two halves whose rows alternate in the canonical tensor: GGUF rows 0 to n - 1 are its even rows, rows n to
    /// 2n - 1 its odd ones. The field is n.
    Halves(usize),
    /// A part of each head: of every `head` canonical rows, the `rows` from `first` on. In GGUF each head is a matrix.
    OfHeads {
        /// Canonical rows of a head.
        head: usize,
        /// First row of the part.
        first: usize,
        /// Rows of the part.
        rows: usize,
    },
    /// The rows of one matrix, each of which is a matrix of its own in the canonical tensor.
    Squeezed,
    /// The first `rows` of every `head` canonical rows. In GGUF each head is a matrix with these rows as its columns.
    HeadColumns {
        /// Canonical rows of a head.
        head: usize,
        /// Rows of the part.
        rows: usize,
    },
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
            RowOrder::Same | RowOrder::Squeezed => (0, row),
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
            RowOrder::Halves(half) => (0, 2 * (row % half) + row / half),
            RowOrder::OfHeads { head, first, rows } => (0, row / rows * head + first + row % rows),
            RowOrder::HeadColumns { .. } => unreachable!("columns are not moved row by row"),
        }
    }

    /// Returns the GGUF row of row `row` of canonical tensor number `part`; `None` when another
    /// GGUF tensor holds that row.
    pub fn gguf_row(&self, part: usize, row: usize) -> Option<usize> {
        match self {
            RowOrder::Same | RowOrder::Squeezed => Some(row),
            RowOrder::Neighbours(head) => {
                let (start, within) = (row / head * head, row % head);
                Some(start + within % (head / 2) * 2 + within / (head / 2))
            }
            RowOrder::Alternate(first) => (row % 2 == *first).then_some(row / 2),
            RowOrder::Stacked(parts) => Some(parts[..part].iter().sum::<usize>() + row),
            RowOrder::Halves(half) => Some(row % 2 * half + row / 2),
            RowOrder::OfHeads { head, first, rows } => {
                let (number, within) = (row / head, row % head);
                (*first..first + rows).contains(&within).then(|| number * rows + within - first)
            }
            RowOrder::HeadColumns { .. } => unreachable!("columns are not moved row by row"),
        }
    }

    /// Returns true when the tensor holds canonical rows as columns.
    pub fn is_transposed(&self) -> bool {
        matches!(self, RowOrder::HeadColumns { .. })
    }

    /// Returns a GGUF tensor of this shape as a stack of matrices. `vector` is true for a vector or a stack of vectors.
    pub fn stack(&self, shape: &[usize], vector: bool) -> RowStack {
        let stack = RowStack::new(shape, vector);
        match self {
            // The canonical tensor is one matrix, so the matrices of the heads are one, too.
            RowOrder::OfHeads { .. } | RowOrder::HeadColumns { .. } => {
                RowStack { count: 1, rows: stack.count * stack.rows, cols: stack.cols }
            }
            RowOrder::Squeezed => RowStack { count: stack.rows, rows: 1, cols: stack.cols },
            _ => stack,
        }
    }
}

/// Canonical and GGUF names of the tensors outside of the layers.
const TOP: &[(&str, &str)] = &[
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
    ("model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
    ("model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
    ("model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
];

/// Beginning of the canonical names of the MLP beside the experts.
const SHARED: &str = "mlp.shared_experts.";

/// Tensors of a layer that are stacked along the rows where a file fuses them, and the GGUF name of the stack.
const STACKS: &[(&[&str], &str)] = &[
    (&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "attn_qkv"),
    (&["mlp.gate_proj", "mlp.up_proj"], "ffn_up"),
];

/// Returns the GGUF tensors of a model with the canonical tensors `expected`. `fused` is called with the GGUF name of a
/// tensor that holds several others (q, k, v or gate, up of a layer, keys and values of latent attention) and returns
/// true when it is stored.
///
/// # Errors
/// A tensor has no name in GGUF.
pub fn map(
    family: &Family,
    model: &ModelConfig,
    expected: &[ExpectedTensor],
    fused: impl Fn(&str) -> bool,
) -> Result<Vec<MappedTensor>> {
    let mapper = Mapper { family, model, expected, fused: &fused };
    let mut all = Vec::new();
    for position in 0..expected.len() {
        mapper.append(position, &mut all)?;
    }
    Ok(all)
}

struct Mapper<'a> {
    family: &'a Family,
    model: &'a ModelConfig,
    expected: &'a [ExpectedTensor],
    fused: &'a dyn Fn(&str) -> bool,
}

impl Mapper<'_> {
    /// Appends the GGUF tensors whose first canonical tensor is the one at `position`.
    fn append(&self, position: usize, all: &mut Vec<MappedTensor>) -> Result<()> {
        let tensor = &self.expected[position];
        if let Some((_, name)) = TOP.iter().find(|(canonical, _)| *canonical == tensor.name) {
            // llama.cpp has this name for the last norm of the family.
            let is_last_norm = self.family.has_convolutions() && *name == "output_norm.weight";
            let name = if is_last_norm { "token_embd_norm.weight" } else { name };
            all.push(self.mapped(position, name.to_string(), RowOrder::Same));
            return Ok(());
        }
        let unknown = || Error::unsupported("this tensor has no name in GGUF").tensor(&tensor.name);
        let in_layer = tensor.name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let (layer, part) = in_layer.ok_or_else(unknown)?;
        let tensor_name = part;
        let (part, suffix) = match part.strip_suffix("bias") {
            Some(part) => (part.trim_end_matches(['.', '_']), "bias"),
            None => (part.strip_suffix(".weight").unwrap_or(part), "weight"),
        };
        let name = |leaf: &str| format!("blk.{layer}.{leaf}.{suffix}");
        let stack = STACKS.iter().find(|(parts, leaf)| parts.contains(&part) && (self.fused)(&name(leaf)));
        if let Some((parts, leaf)) = stack {
            // The first tensor of a stack adds the whole stack to the list.
            if part == parts[0] {
                let member = |part| format!("model.layers.{layer}.{part}.{suffix}");
                let first = self.mapped(position, name(leaf), RowOrder::Same);
                all.push(stacked(first, parts.iter().map(member), self.expected)?);
            }
        } else if tensor_name == "conv.conv.weight" {
            let mut mapped = self.mapped(position, name("shortconv.conv"), RowOrder::Squeezed);
            mapped.shape.remove(1);
            all.push(mapped);
        } else if part == "mlp.experts.gate_up_proj" {
            self.append_gate_up(position, name, all);
        } else if let Some(latent) = self.model.attention.latent.filter(|_| self.splits(part, name)) {
            self.append_keys_values(position, latent, name, all);
        } else {
            let own = self.own_name(tensor_name).ok_or_else(unknown)?;
            let moved = self.family.neighbour_pairs && ["self_attn.q_proj", "self_attn.k_proj"].contains(&part);
            let order = if moved { RowOrder::Neighbours(self.model.head_dim) } else { RowOrder::Same };
            all.push(self.mapped(position, format!("blk.{layer}.{own}"), order));
        }
        Ok(())
    }

    fn mapped(&self, position: usize, name: String, order: RowOrder) -> MappedTensor {
        let tensor = &self.expected[position];
        let is_plain = self.model.plain_final_norm && tensor.name == "model.norm.weight";
        let plus_one = self.family.norm_plus_one && tensor.name.ends_with("norm.weight") && !is_plain;
        MappedTensor { name, shape: tensor.shape.clone(), canonical: vec![position], order, plus_one }
    }

    /// Returns the GGUF name of a tensor of a layer; `None` if it has none.
    fn own_name(&self, name: &str) -> Option<String> {
        if name == "post_attention_layernorm.weight" {
            return Some(format!("{}.weight", self.family.post_attention));
        }
        // Where every layer has a dense MLP beside experts, GGUF names it like an MLP without experts.
        let is_dense = self.family.dense.is_some() && !name.ends_with("norm.weight");
        let dense = name.strip_prefix(SHARED).filter(|_| is_dense).map(|part| format!("mlp.{part}"));
        let tensor = LayerTensor::of(dense.as_deref().unwrap_or(name))?;
        (!tensor.gguf.is_empty()).then(|| tensor.gguf.to_string())
    }

    /// Appends the gate and up rows of experts.
    fn append_gate_up(&self, position: usize, name: impl Fn(&str) -> String, all: &mut Vec<MappedTensor>) {
        let fused = name("ffn_gate_up_exps");
        if (self.fused)(&fused) {
            let rows = self.expected[position].shape[1];
            all.push(self.mapped(position, fused, RowOrder::Halves(rows / 2)));
            return;
        }
        for (half, leaf) in ["ffn_gate_exps", "ffn_up_exps"].into_iter().enumerate() {
            let mut mapped = self.mapped(position, name(leaf), RowOrder::Alternate(half));
            mapped.shape[1] /= 2;
            all.push(mapped);
        }
    }

    /// Returns true for the matrix of keys and values of latent attention if GGUF stores them apart.
    fn splits(&self, part: &str, name: impl Fn(&str) -> String) -> bool {
        part == "self_attn.kv_b_proj" && !(self.fused)(&name("attn_kv_b"))
    }

    /// Appends the matrices of keys and values of latent attention: llama.cpp multiplies queries with the keys' matrix,
    /// which it therefore stores transposed.
    fn append_keys_values(
        &self,
        position: usize,
        latent: Latent,
        name: impl Fn(&str) -> String,
        all: &mut Vec<MappedTensor>,
    ) {
        let Latent { kv_rank, nope, value, .. } = latent;
        let (heads, head) = (self.model.n_heads, nope + value);
        let mut keys = self.mapped(position, name("attn_k_b"), RowOrder::HeadColumns { head, rows: nope });
        keys.shape = vec![heads, kv_rank, nope];
        let order = RowOrder::OfHeads { head, first: nope, rows: value };
        let mut values = self.mapped(position, name("attn_v_b"), order);
        values.shape = vec![heads, value, kv_rank];
        all.extend([keys, values]);
    }
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
                Just(RowOrder::Squeezed),
                (1usize..9).prop_map(|half| RowOrder::Neighbours(2 * half)),
                Just(RowOrder::Alternate(0)),
                Just(RowOrder::Alternate(1)),
                prop::collection::vec(1usize..40, 1..4).prop_map(RowOrder::Stacked),
                Just(RowOrder::Halves(1000)),
                (1usize..9, 0usize..9).prop_map(|(rows, first)| {
                    RowOrder::OfHeads { head: first + rows + 3, first, rows }
                }),
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
