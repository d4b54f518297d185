//! An adapter with random factors, for tests that compare two ways to compute it.

use iec::adapter::{Adapter, Change, LowRank};
use iec::convert::arch::expected_tensors;
use iec::dtype::DType;
use iec::model_config::ModelConfig;
use iec::rng::Rng;
use std::collections::BTreeMap;

/// Ends of the names of tensors that the engine changes by adapters.
const CHANGED: [&str; 21] = [
    "self_attn.q_proj.weight",
    "self_attn.q_a_proj.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.gate_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "mlp.router.weight",
    "mlp.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    "per_layer_input_gate.weight",
    "per_layer_projection.weight",
    "model.per_layer_model_projection.weight",
];

/// Makes an adapter of rank 2 that changes every matrix of a model that the engine can change.
pub fn random_adapter(model: &ModelConfig, rng: &mut Rng) -> Adapter {
    let hash = format!("{:016x}", rng.next_u64());
    let mut numbers =
        |count: usize, spread: f64| -> Vec<f32> { (0..count).map(|_| (spread * rng.next_normal()) as f32).collect() };
    let mut changes = BTreeMap::new();
    for tensor in expected_tensors(model) {
        if !CHANGED.iter().any(|end| tensor.name == *end || tensor.name.ends_with(&format!(".{end}"))) {
            continue;
        }
        let (stack, [rows, cols]) = tensor.shape.split_at(tensor.shape.len() - 2) else { panic!("{}", tensor.name) };
        let mut change = |_| {
            let (a, b) = (numbers(2 * cols, 0.1), numbers(rows * 2, 0.1));
            let low_rank = LowRank { rank: 2, scale: 0.5, a, b, dtype: DType::F32, int8: [None, None] };
            Change { low_rank: Some(low_rank), ..Change::default() }
        };
        changes.insert(tensor.name, (0..stack.first().copied().unwrap_or(1)).map(&mut change).collect());
    }
    Adapter { hash, changes }
}

/// Adds magnitudes of DoRA, and biases of B, to all changes of an adapter.
pub fn with_magnitudes(mut adapter: Adapter, rng: &mut Rng) -> Adapter {
    for change in adapter.changes.values_mut().flatten() {
        let rows = change.low_rank.as_ref().map_or(0, |factors| factors.b.len() / factors.rank);
        let mut numbers =
            |mean: f64, spread: f64| Some((0..rows).map(|_| (mean + spread * rng.next_normal()) as f32).collect());
        (change.magnitude, change.added) = (numbers(1.0, 0.2), numbers(0.0, 0.05));
    }
    adapter
}
