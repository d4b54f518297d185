//! Changes of experts and routers that PEFT trains as parameters (`target_parameters`), not as modules.
//!
//! PEFT 0.21 writes the factors of all experts `E` of rank `r` as A `(E * r, in)`, experts outermost, and B
//! `(out, r * E)`, experts innermost. Each targeted parameter wraps the module once more, in the order gate_up_proj,
//! down_proj, and its own name is in no tensor: with both, `experts.base_layer` is gate_up_proj and `experts` is
//! down_proj. Files of PEFT before 0.19 have the two factors with `in` and `out` exchanged, as do those of gpt-oss from
//! transformers 4.

use super::map::{Mapper, incomplete};
use super::modules::{ModulePart, Values};
use crate::adapter::{Change, LowRank, transposed};
use crate::convert::arch::{ExpectedTensor, View};
use crate::error::{Error, Result};

/// Returns the changes of the experts' matrices if they are changed as one parameter.
pub(super) fn of_parameter(mapper: &Mapper<'_>, tensor: &ExpectedTensor) -> Result<Option<Vec<Change>>> {
    let Some((module, parameter)) = tensor.name.rsplit_once('.') else { return Ok(None) };
    if !module.ends_with(".mlp.experts") {
        return Ok(None);
    }
    let targeted = |name: &str| mapper.settings.parameters.iter().any(|target| target.ends_with(name));
    let both = mapper.modules.contains_key(&format!("{module}.base_layer"));
    let name = match parameter {
        "gate_up_proj" if both => format!("{module}.base_layer"),
        "down_proj" if both => module.to_string(),
        other if targeted(other) => module.to_string(),
        _ => return Ok(None),
    };
    let Some(parts) = mapper.modules.get(&name) else { return Ok(None) };
    let (Some(a), Some(b)) = (parts.get(&ModulePart::A), parts.get(&ModulePart::B)) else {
        return Err(incomplete(&name));
    };
    if parts.len() > 2 {
        return Err(Error::unsupported("found more than lora_A and lora_B of experts").tensor(name));
    }
    // gpt-oss, the family with MXFP4, computes with experts as `(in, out)` with alternating rows of gate and up, other
    // families with `(out, in)` and all rows of gate first.
    let turned = mapper.arch.views(mapper.model, tensor).iter().any(|view| matches!(view, View::Coded { .. }));
    let (experts, rows, cols) = (tensor.shape[0], tensor.shape[1], tensor.shape[2]);
    let rank = a.shape[0] / experts;
    let exchanged = is_exchanged(mapper, a, rows, cols, turned);
    let (width, height) = if exchanged { (rows, cols) } else { (cols, rows) };
    if a.shape != [rank * experts, width] || b.shape != [height, rank * experts] || rank == 0 {
        let expected = format!("expected ({experts} x r, {width}) and ({height}, {experts} x r)");
        let found = format!("found lora_A {:?} and lora_B {:?}, {expected}", a.shape, b.shape);
        return Err(Error::corrupt(found).tensor(name).help("the adapter was trained for another model"));
    }
    mapper.used.borrow_mut().insert(name);
    mapper.settings.check_rank(&tensor.name, rank)?;
    let scale = mapper.settings.scale(&tensor.name, rank);
    let halves = parameter == "gate_up_proj" && !turned;
    let change = |expert: usize| {
        let own_a = &a.values[expert * rank * width..][..rank * width];
        let own_b: Vec<f32> = b.values.iter().skip(expert).step_by(experts).copied().collect();
        let (own_a, own_b) = match exchanged {
            true => (transposed(&own_b, cols, rank), transposed(own_a, rank, rows)),
            false => (own_a.to_vec(), own_b),
        };
        let own_b = if halves { alternating(&own_b, rank) } else { own_b };
        Change {
            low_rank: Some(LowRank { rank, scale, a: own_a, b: own_b, dtype: a.dtype, int8: [None, None] }),
            ..Change::default()
        }
    };
    Ok(Some((0..experts).map(change).collect()))
}

/// Returns true if A has the width of the experts' output. Where input and output are equally wide, the version of PEFT
/// decides, and for gpt-oss the other parameter of the same experts.
fn is_exchanged(mapper: &Mapper<'_>, a: &Values, rows: usize, cols: usize, turned: bool) -> bool {
    let width = a.shape.last().copied().unwrap_or(0);
    if rows != cols {
        return width == rows;
    }
    if !turned {
        return mapper.settings.before_0_19;
    }
    // gate_up_proj is twice as high as down_proj is wide.
    let other = mapper.modules.iter().find(|(name, _)| name.ends_with(".mlp.experts.base_layer"));
    other.and_then(|(_, parts)| parts.get(&ModulePart::A)?.shape.last().copied()).is_some_and(|width| width == 2 * cols)
}

/// Returns the rows of the first and of the second half in turn.
fn alternating(b: &[f32], rank: usize) -> Vec<f32> {
    let (gate, up) = b.split_at(b.len() / 2);
    gate.chunks(rank).zip(up.chunks(rank)).flat_map(|(gate, up)| [gate, up].concat()).collect()
}
