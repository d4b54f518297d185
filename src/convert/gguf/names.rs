//! Maps the tensors of a GGUF file to canonical tensors and their rows.
//!
//! The two formats differ in tensor names and in the order of rows, but not within a row: in some families the rows of
//! a rotary pair are adjacent in GGUF, the gate and up rows of experts alternate in one canonical tensor and are two
//! tensors in GGUF, and some families stack q, k and v. Codes and floats are therefore moved row by row. A vector is
//! treated as a column, each element as a row.

use super::family::Family;
use crate::catalogue::LayerTensor;
use crate::convert::arch::ExpectedTensor;
use crate::convert::rows::{ColumnOrder, RowStack};
use crate::error::{Error, Result};
use crate::model_config::{GatedDeltaNet, Latent, ModelConfig, Recurrent};

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
    /// The rows of two canonical tensors, head by head: in each head, as many rows of the one, then of the other. The
    /// field is the number of rows of a head in each.
    Paired(usize),
    /// The rows of one or several canonical tensors in sequence, of which those from a certain row on belong to heads
    /// in another order.
    Tiled {
        /// Number of rows of each canonical tensor.
        parts: Vec<usize>,
        /// First row of the heads.
        first: usize,
        /// Order of the heads.
        heads: TiledHeads,
    },
    /// The same rows, whose columns belong to heads in another order.
    TiledColumns(TiledHeads),
    /// One row as a vector.
    Row,
    /// A vector as a matrix, row after row.
    Column,
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

/// Value heads of gated delta nets in the order of GGUF files of Qwen3.5: those that read one key head are `groups`
/// apart, while canonically they are next to each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TiledHeads {
    /// Number of key heads.
    pub groups: usize,
    /// Number of value heads that read one key head.
    pub per_group: usize,
    /// Rows or columns of a head.
    pub width: usize,
}

impl TiledHeads {
    /// Returns the canonical position of a row or column of GGUF.
    pub fn canonical(&self, at: usize) -> usize {
        let (head, within) = (at / self.width, at % self.width);
        (head % self.groups * self.per_group + head / self.groups) * self.width + within
    }

    /// Returns the order of columns in GGUF.
    pub(super) fn columns(&self) -> ColumnOrder {
        let heads = TiledHeads { width: 1, ..*self };
        ColumnOrder {
            width: self.width,
            order: (0..self.groups * self.per_group).map(|head| heads.canonical(head)).collect(),
        }
    }

    /// Returns the position in GGUF of a canonical row or column.
    fn tiled(&self, at: usize) -> usize {
        let (head, within) = (at / self.width, at % self.width);
        (head % self.per_group * self.groups + head / self.per_group) * self.width + within
    }
}

/// Returns the part of a stack of parts that has a row, and the row of this part.
fn in_parts(parts: &[usize], mut row: usize) -> (usize, usize) {
    let mut part = 0;
    while row >= parts[part] {
        row -= parts[part];
        part += 1;
    }
    (part, row)
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
            RowOrder::Same | RowOrder::Squeezed | RowOrder::TiledColumns(_) | RowOrder::Row | RowOrder::Column => {
                (0, row)
            }
            RowOrder::Neighbours(head) => {
                let (start, within) = (row / head * head, row % head);
                (0, start + within % 2 * (head / 2) + within / 2)
            }
            RowOrder::Alternate(first) => (0, 2 * row + first),
            RowOrder::Stacked(parts) => in_parts(parts, row),
            RowOrder::Paired(head) => (row / head % 2, row / head / 2 * head + row % head),
            RowOrder::Tiled { parts, first, heads } => match row.checked_sub(*first) {
                Some(row) => in_parts(parts, first + heads.canonical(row)),
                None => in_parts(parts, row),
            },
            RowOrder::Halves(half) => (0, 2 * (row % half) + row / half),
            RowOrder::OfHeads { head, first, rows } => (0, row / rows * head + first + row % rows),
            RowOrder::HeadColumns { .. } => unreachable!("columns are not moved row by row"),
        }
    }

    /// Returns the GGUF row of row `row` of canonical tensor number `part`; `None` when another
    /// GGUF tensor holds that row.
    pub fn gguf_row(&self, part: usize, row: usize) -> Option<usize> {
        match self {
            RowOrder::Same | RowOrder::Squeezed | RowOrder::TiledColumns(_) | RowOrder::Row | RowOrder::Column => {
                Some(row)
            }
            RowOrder::Paired(head) => Some((2 * (row / head) + part) * head + row % head),
            RowOrder::Tiled { parts, first, heads } => {
                let row = parts[..part].iter().sum::<usize>() + row;
                Some(row.checked_sub(*first).map_or(row, |row| first + heads.tiled(row)))
            }
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
            RowOrder::Column => RowStack { count: 1, rows: stack.count * stack.rows, cols: 1 },
            RowOrder::Row => RowStack { count: 1, rows: 1, cols: stack.rows * stack.cols },
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
    let net = model.layers().find_map(|layer| match layer.recurrent()? {
        Recurrent::GatedDeltaNet(net) => Some(*net),
        Recurrent::ShortConv(_) | Recurrent::Mamba2(_) => None,
    });
    let groups = model.layers().find_map(|layer| match layer.recurrent()? {
        Recurrent::Mamba2(mamba) => Some(mamba.groups),
        Recurrent::ShortConv(_) | Recurrent::GatedDeltaNet(_) => None,
    });
    let mapper = Mapper { family, model, expected, fused: &fused, net, groups };
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
    /// Sizes of gated delta nets, if the model has them.
    net: Option<GatedDeltaNet>,
    /// Groups of heads of Mamba-2, if the model has it.
    groups: Option<usize>,
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
            all.push(self.squeezed(position, name("shortconv.conv"), RowOrder::Squeezed));
        } else if part.starts_with("mamba.") {
            self.append_of_mamba(position, (layer, tensor_name), name, all)?;
        } else if let Some(net) = self.net.filter(|_| part.starts_with("linear_attn.")) {
            self.append_of_net(position, net, (tensor_name, name), all)?;
        } else if self.net.is_some() && ["self_attn.q_proj", "self_attn.gate_proj"].contains(&part) {
            if part == "self_attn.q_proj" {
                let first = self.mapped(position, name("attn_q"), RowOrder::Same);
                let members =
                    ["q", "gate"].map(|matrix| format!("model.layers.{layer}.self_attn.{matrix}_proj.weight"));
                let stack = stacked(first, members.into_iter(), self.expected)?;
                all.push(MappedTensor { order: RowOrder::Paired(self.model.head_dim), ..stack });
            }
        } else if part == "mlp.router.shared_expert_gate" {
            let mut mapped = self.mapped(position, name("ffn_gate_inp_shexp"), RowOrder::Row);
            mapped.shape.remove(0);
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
        let is_plain = self.model.plain_final_norm && tensor.name == "model.norm.weight"
            || tensor.name.ends_with("linear_attn.norm.weight");
        let plus_one = self.family.norm_plus_one && tensor.name.ends_with("norm.weight") && !is_plain;
        MappedTensor { name, shape: tensor.shape.clone(), canonical: vec![position], order, plus_one }
    }

    /// Returns a tensor whose middle axis, of one entry, GGUF leaves out.
    fn squeezed(&self, position: usize, name: String, order: RowOrder) -> MappedTensor {
        let mut mapped = self.mapped(position, name, order);
        mapped.shape.remove(1);
        mapped
    }

    /// Appends a tensor of Mamba-2.
    fn append_of_mamba(
        &self,
        position: usize,
        (layer, part): (&str, &str),
        name: impl Fn(&str) -> String,
        all: &mut Vec<MappedTensor>,
    ) -> Result<()> {
        let own = || {
            let unknown =
                || Error::unsupported("this tensor has no name in GGUF").tensor(&self.expected[position].name);
            Ok::<_, Error>(format!("blk.{layer}.{}", self.own_name(part).ok_or_else(unknown)?))
        };
        let mapped = match part {
            "mamba.z_proj.weight" => {
                let member = |matrix: &str| format!("model.layers.{layer}.mamba.{matrix}_proj.weight");
                let first = self.mapped(position, name("ssm_in"), RowOrder::Same);
                stacked(first, ["z", "x", "b", "c", "dt"].map(member).into_iter(), self.expected)?
            }
            // These are in the stack.
            _ if part.ends_with("_proj.weight") && part != "mamba.out_proj.weight" => return Ok(()),
            "mamba.conv1d.weight" => self.squeezed(position, own()?, RowOrder::Squeezed),
            "mamba.A_log" | "mamba.A" | "mamba.D" => {
                let mut mapped = self.mapped(position, own()?, RowOrder::Column);
                mapped.shape.push(1);
                mapped
            }
            "mamba.norm.weight" => {
                let groups = self.groups.unwrap_or(1);
                let mut mapped = self.mapped(position, own()?, RowOrder::Column);
                mapped.shape = vec![groups, mapped.shape[0] / groups];
                mapped
            }
            _ => self.mapped(position, own()?, RowOrder::Same),
        };
        all.push(mapped);
        Ok(())
    }

    /// Appends a tensor of a gated delta net.
    fn append_of_net(
        &self,
        position: usize,
        net: GatedDeltaNet,
        (part, name): (&str, impl Fn(&str) -> String),
        all: &mut Vec<MappedTensor>,
    ) -> Result<()> {
        let (groups, per_group) = (net.key_heads, net.per_key());
        let moves = self.family.has_tiled_heads() && !net.tiled && per_group > 1;
        let heads = |width: usize| TiledHeads { groups, per_group, width };
        let rows = self.expected[position].shape[0];
        let tiled = |first: usize, width: usize| match moves {
            true => RowOrder::Tiled { parts: vec![rows], first, heads: heads(width) },
            false => RowOrder::Same,
        };
        let tensor = &self.expected[position].name;
        let member = |matrix: &str| tensor.replace(part, &format!("linear_attn.{matrix}_proj.weight"));
        let mapped = match part {
            "linear_attn.q_proj.weight" => {
                let first = self.mapped(position, name("attn_qkv"), RowOrder::Same);
                let mut stack = stacked(first, ["q", "k", "v"].map(member).into_iter(), self.expected)?;
                if moves {
                    let parts = vec![net.keys(), net.keys(), net.values()];
                    stack.order = RowOrder::Tiled { parts, first: 2 * net.keys(), heads: heads(net.value_dim) };
                }
                stack
            }
            // These are in the stack.
            "linear_attn.k_proj.weight" | "linear_attn.v_proj.weight" => return Ok(()),
            // Qwen3-Next has rates and decays in one matrix, by key heads.
            "linear_attn.b_proj.weight" if !self.family.has_tiled_heads() => {
                let first = self.mapped(position, name("ssm_ba"), RowOrder::Same);
                let stack = stacked(first, ["b", "a"].map(member).into_iter(), self.expected)?;
                MappedTensor { order: RowOrder::Paired(per_group), ..stack }
            }
            "linear_attn.a_proj.weight" if !self.family.has_tiled_heads() => return Ok(()),
            "linear_attn.conv1d.weight" => {
                let order = if moves { tiled(2 * net.keys(), net.value_dim) } else { RowOrder::Squeezed };
                self.squeezed(position, name("ssm_conv1d"), order)
            }
            "linear_attn.out_proj.weight" => {
                let order = if moves { RowOrder::TiledColumns(heads(net.value_dim)) } else { RowOrder::Same };
                self.mapped(position, name("ssm_out"), order)
            }
            _ => {
                let unknown = || Error::unsupported("this tensor has no name in GGUF").tensor(tensor);
                let own = self.own_name(part).ok_or_else(unknown)?;
                let width = if part == "linear_attn.z_proj.weight" { net.value_dim } else { 1 };
                let order = if part == "linear_attn.norm.weight" { RowOrder::Same } else { tiled(0, width) };
                let layer = tensor.strip_suffix(part).and_then(|start| start.strip_prefix("model.layers."));
                self.mapped(position, format!("blk.{}{own}", layer.unwrap_or_default()), order)
            }
        };
        all.push(mapped);
        Ok(())
    }

    /// Returns the GGUF name of a tensor of a layer; `None` if it has none.
    fn own_name(&self, name: &str) -> Option<String> {
        if name == "post_attention_layernorm.weight" {
            return Some(format!("{}.weight", self.family.post_attention));
        }
        // Where every layer has a dense MLP beside experts, GGUF names it like an MLP without experts.
        let is_dense = self.family.dense.is_some() && !self.family.has_mamba() && !name.ends_with("norm.weight");
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
                (1usize..9).prop_map(RowOrder::Paired),
                (1usize..5, 1usize..5, 1usize..9, 0usize..3).prop_map(|(groups, per_group, width, before)| {
                    let (heads, first) = (TiledHeads { groups, per_group, width }, 7 * before);
                    let parts = [vec![7; before], vec![groups * per_group * width]].concat();
                    RowOrder::Tiled { parts, first, heads }
                }),
                (1usize..9, 0usize..9).prop_map(|(rows, first)| {
                    RowOrder::OfHeads { head: first + rows + 3, first, rows }
                }),
            ],
            row in 0usize..1000,
        ) {
            let row = match &order {
                RowOrder::Stacked(parts) | RowOrder::Tiled { parts, .. } => row % parts.iter().sum::<usize>(),
                _ => row,
            };
            let (part, canonical) = order.canonical_row(row);
            prop_assert_eq!(order.gguf_row(part, canonical), Some(row));
            if let RowOrder::Alternate(first) = order {
                prop_assert_eq!(RowOrder::Alternate(1 - first).gguf_row(0, canonical), None);
            }
        }
    }

    #[test]
    fn heads_that_read_one_key_head_are_moved_apart_as_llama_cpp_converts_them() {
        // Equals reshape(2, 3, 2).permute(1, 0, 2) for two key heads, three value heads for each, and two rows.
        let heads = TiledHeads { groups: 2, per_group: 3, width: 2 };
        let rows: Vec<usize> = (0..12).map(|row| heads.canonical(row)).collect();
        assert_eq!(rows, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
        assert_eq!(heads.columns().order, [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn rotary_rows_are_moved_as_llama_cpp_converts_them() {
        // Equals reshape(heads, 2, 3).swapaxes(1, 2) for two heads of six rows.
        let order = RowOrder::Neighbours(6);
        let rows: Vec<usize> = (0..12).map(|row| order.canonical_row(row).1).collect();
        assert_eq!(rows, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
    }
}
