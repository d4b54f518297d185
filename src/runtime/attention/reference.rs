//! Attention by its definition: the specification of the fast kernel, and the kernel of `--attention reference`.
//!
//! Keys and values are those of the cache, so they are rounded to its type. Everything that follows is computed in f64:
//! the fast kernel also rounds queries and probabilities for some types, and adds in f32.

use super::AttentionTask;
use crate::runtime::kv::{Element, PAGE, by_type, rotate};
use std::f64::consts::LOG2_E;

/// Computes attention for all tokens of a batch, like [`super::Attend::run`].
pub(super) fn run(task: &AttentionTask<'_>, out: &mut [f32], out_stride: usize) {
    let (layer, group) = (task.layer, task.group());
    let (key, value) = (layer.heads.key, layer.heads.value);
    task.cpu.for_rows(out, out_stride, |row, out| {
        let run = task.runs[task.runs.partition_point(|run| run.first + run.tokens <= row)];
        let visible = task.visible(run.position + row - run.first);
        for (kv_head, out) in out[..task.shape.n_heads * value].chunks_exact_mut(group * value).enumerate() {
            let mut heads: Vec<Head> = (kv_head * group..).take(group).map(|head| Head::new(task, row, head)).collect();
            for page in visible.start / PAGE..visible.end.div_ceil(PAGE) {
                let slots = visible.start.saturating_sub(page * PAGE)..(visible.end - page * PAGE).min(PAGE);
                let page = &task.caches[run.sequence].pages()[page];
                let [keys, values] = layer.numbers(page, kv_head, slots.end);
                for slot in slots {
                    heads.iter_mut().for_each(|head| head.see(&keys[slot * key..][..key], &values[slot * value..]));
                }
            }
            heads.iter().zip(out.chunks_exact_mut(value)).for_each(|(head, out)| head.finish(out));
        }
    });
}

/// Query of one head, and the softmax over the positions it has seen.
struct Head {
    /// The query, multiplied by log2(e) like all queries, so scores are exponents of 2.
    query: Vec<f32>,
    /// Softcap of the scores, if there is one.
    cap: Option<f64>,
    /// Largest score so far, the sink included.
    largest: f64,
    /// Sum of `2^(score - largest)`.
    sum: f64,
    /// Sum of the values, each times `2^(score - largest)`.
    values: Vec<f64>,
    /// Order of the matrix by which values are stored rotated, if they are.
    rotated: Option<usize>,
}

impl Head {
    fn new(task: &AttentionTask<'_>, row: usize, head: usize) -> Head {
        let heads = task.layer.heads;
        let mut query = task.queries[(row * task.shape.n_heads + head) * heads.key..][..heads.key].to_vec();
        let orders = by_type!(task.layer.kind, T, T::ROTATED).then(|| heads.rotations());
        if let Some([order, _]) = orders {
            rotate(&mut query, order);
        }
        let sink = task.sinks.map(|sinks| f64::from(sinks[head]) * LOG2_E);
        Head {
            query,
            cap: task.shape.softcap.map(|cap| f64::from(cap) * LOG2_E),
            largest: sink.unwrap_or(f64::NEG_INFINITY),
            sum: if sink.is_some() { 1.0 } else { 0.0 },
            values: vec![0.0; heads.value],
            rotated: orders.map(|[_, order]| order),
        }
    }

    /// Adds a position; `value` begins with its value.
    fn see(&mut self, key: &[f32], value: &[f32]) {
        let mut score: f64 = self.query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        if let Some(cap) = self.cap {
            score = cap * (score / cap).tanh();
        }
        if score > self.largest {
            let keep = (self.largest - score).exp2();
            self.sum *= keep;
            self.values.iter_mut().for_each(|sum| *sum *= keep);
            self.largest = score;
        }
        let share = (score - self.largest).exp2();
        self.sum += share;
        self.values.iter_mut().zip(value).for_each(|(sum, value)| *sum += share * f64::from(*value));
    }

    /// Writes the result.
    fn finish(&self, out: &mut [f32]) {
        out.iter_mut().zip(&self.values).for_each(|(out, value)| *out = (value / self.sum) as f32);
        if let Some(order) = self.rotated {
            rotate(out, order);
        }
    }
}
