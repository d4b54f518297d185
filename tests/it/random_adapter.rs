//! An adapter with random factors, for tests that compare two ways to compute it.

use iec::adapter::{Adapter, Change, LowRank};
use iec::convert::arch::expected_tensors;
use iec::dtype::DType;
use iec::model_config::ModelConfig;
use iec::rng::Rng;
use std::collections::BTreeMap;

/// Ends of the names of tensors that the engine changes by adapters.
const CHANGED: [&str; 17] = [
    "self_attn.q_proj.weight",
    "self_attn.q_a_proj.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
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
];

/// Makes an adapter of rank 2 that changes every matrix of a model that the engine can change.
pub fn random_adapter(model: &ModelConfig, rng: &mut Rng) -> Adapter {
    let mut numbers =
        |count: usize, spread: f64| -> Vec<f32> { (0..count).map(|_| (spread * rng.next_normal()) as f32).collect() };
    let mut changes = BTreeMap::new();
    for tensor in expected_tensors(model) {
        if !CHANGED.iter().any(|end| tensor.name.ends_with(&format!(".{end}"))) {
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
    Adapter { hash: String::new(), changes }
}
