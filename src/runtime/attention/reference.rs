//! Attention by its definition: the specification of the fast kernel, and the kernel of `--attention reference`.
//!
//! Keys and values are those of the cache, so they are rounded to its type. Everything that follows is computed in f64:
//! the fast kernel also rounds queries and probabilities for some types, and adds in f32.

use super::Task;
use crate::runtime::kv::{Element, PAGE, by_type, rotate};
use std::f64::consts::LOG2_E;
use std::ops::Range;

/// Computes attention for all tokens of a batch, like [`super::Attend::run`].
pub(super) fn run(task: &Task<'_>, out: &mut [f32], out_stride: usize) {
    let (group, size) = (task.group(), task.layer.heads.value);
    task.cpu.for_rows(out, out_stride, |row, out| {
        let run = task.runs[task.runs.partition_point(|run| run.first + run.tokens <= row)];
        let visible = task.visible(run.position + row - run.first);
        for (kv_head, out) in out[..task.shape.n_heads * size].chunks_exact_mut(group * size).enumerate() {
            let [keys, values] = stored(task, run.sequence, kv_head, visible.clone());
            for (head, out) in (kv_head * group..).zip(out.chunks_exact_mut(size)) {
                attend(task, row, head, &keys, &values, out);
            }
        }
    });
}

/// Returns the keys and the values of a head at these positions of a sequence: `(positions, size)` each.
fn stored(task: &Task<'_>, sequence: usize, head: usize, positions: Range<usize>) -> [Vec<f32>; 2] {
    let (layer, mut all) = (task.layer, [Vec::new(), Vec::new()]);
    for page in positions.start / PAGE..positions.end.div_ceil(PAGE) {
        let first = positions.start.saturating_sub(page * PAGE);
        let slots = (positions.end - page * PAGE).min(PAGE);
        let numbers = layer.numbers(&task.caches[sequence].pages()[page], head, slots);
        for ((all, numbers), size) in all.iter_mut().zip(numbers).zip([layer.heads.key, layer.heads.value]) {
            all.extend(&numbers[first * size..]);
        }
    }
    all
}

/// Computes the result of one query over the keys and values that it attends to.
fn attend(task: &Task<'_>, row: usize, head: usize, keys: &[f32], values: &[f32], out: &mut [f32]) {
    let heads = task.layer.heads;
    let mut query = task.queries[(row * task.shape.n_heads + head) * heads.key..][..heads.key].to_vec();
    let rotated = by_type!(task.layer.kind, T, T::ROTATED).then(|| heads.rotations());
    if let Some([order, _]) = rotated {
        rotate(&mut query, order);
    }
    // Scores are exponents of 2: the queries have been multiplied by log2(e).
    let score = |key: &[f32]| {
        let score: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        let cap = task.shape.softcap.map(|cap| f64::from(cap) * LOG2_E);
        cap.map_or(score, |cap| cap * (score / cap).tanh())
    };
    let scores: Vec<f64> = keys.chunks_exact(heads.key).map(score).collect();
    let sink = task.sinks.map(|sinks| f64::from(sinks[head]) * LOG2_E);
    let largest = scores.iter().chain(&sink).fold(f64::NEG_INFINITY, |most, score| most.max(*score));
    let shares: Vec<f64> = scores.iter().map(|score| (score - largest).exp2()).collect();
    let sum = shares.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp2());
    for (i, out) in out.iter_mut().enumerate() {
        let values = values.chunks_exact(heads.value).map(|value| f64::from(value[i]));
        *out = (shares.iter().zip(values).map(|(share, value)| share * value).sum::<f64>() / sum) as f32;
    }
    if let Some([_, order]) = rotated {
        rotate(out, order);
    }
}
