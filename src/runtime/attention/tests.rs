//! Attention over values that are the first numbers of the keys: the same bits as with values of their own, and close
//! to a computation in f64.

use super::{Attend, Task};
use crate::rng::Rng;
use crate::runtime::cpu::Cpu;
use crate::runtime::device::Run;
use crate::runtime::kv::{KvCache, KvHeads, KvLayout, KvType, PagePool};
use crate::runtime::layer::AttentionShape;

const N_HEADS: usize = 5;
/// Positions that are fed: three pages, of which the last is not full.
const TOKENS: usize = 300;

/// Keys of all positions, and queries of all positions and heads.
struct Inputs {
    keys: Vec<f32>,
    queries: Vec<f32>,
}

impl Inputs {
    fn new(heads: KvHeads) -> Inputs {
        let mut rng = Rng::new(heads.key as u64);
        let mut random =
            |n: usize, factor: f32| (0..n).map(|_| rng.next_normal() as f32 * factor).collect::<Vec<f32>>();
        let keys = random(TOKENS * heads.key, 1.0);
        Inputs { keys, queries: random(TOKENS * N_HEADS * heads.key, 1.0 / (heads.key as f32).sqrt()) }
    }
}

/// Returns the results of all positions, fed in chunks of `chunk` positions.
fn attend(kind: KvType, heads: KvHeads, cpu: &Cpu, inputs: &Inputs, chunk: usize) -> Vec<f32> {
    let layout = KvLayout::new(kind, [heads]);
    let mut cache = KvCache::new(&PagePool::new(layout.clone(), None).unwrap());
    let shape = AttentionShape {
        n_heads: N_HEADS,
        n_kv_heads: 1,
        head_dim: heads.key,
        value_dim: heads.value,
        kv_from: None,
        rotary: None,
        pairs: Default::default(),
        position_scale: None,
        window: None,
        scale: 1.0,
        softcap: None,
    };
    let (mut attend, mut results) = (Attend::default(), Vec::new());
    for first in (0..TOKENS).step_by(chunk) {
        let tokens = chunk.min(TOKENS - first);
        cache.grow(tokens).unwrap();
        let keys = &inputs.keys[first * heads.key..(first + tokens) * heads.key];
        let values = keys.chunks_exact(heads.key).flat_map(|key| &key[..heads.value]).copied();
        let values: Vec<f32> = if heads.shared { Vec::new() } else { values.collect() };
        cache.write(cpu, 0, first, keys, &values);
        let mut out = vec![f32::NAN; tokens * N_HEADS * heads.value];
        let task = Task {
            cpu,
            layer: &layout.layers()[0],
            shape: &shape,
            sinks: None,
            runs: &[Run { sequence: 0, first: 0, tokens, position: first }],
            caches: &[&mut cache],
            queries: &inputs.queries[first * N_HEADS * heads.key..(first + tokens) * N_HEADS * heads.key],
        };
        attend.run(&task, &mut out, N_HEADS * heads.value);
        results.extend(out);
    }
    results
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

const KINDS: [KvType; 6] = [KvType::F32, KvType::F16, KvType::Bf16, KvType::Int8, KvType::Fp8, KvType::Int4];

#[test]
fn values_within_keys_have_the_bits_of_values_of_their_own() {
    for (key, value) in [(40, 24), (96, 64), (192, 64), (18, 17)] {
        let shared = KvHeads { count: 1, key, value, shared: true };
        let own = KvHeads { shared: false, ..shared };
        let inputs = Inputs::new(shared);
        for kind in KINDS {
            let [one, other] = [shared, own].map(|heads| KvLayout::new(kind, [heads]));
            // Other rotations give other codes; numbers that share a scale with the end of the key, too.
            let same_codes = match kind {
                KvType::Int8 => value % 32 == 0,
                KvType::Int4 => shared.rotations() == own.rotations() && value % 64 == 0,
                KvType::Fp8 => false,
                _ => true,
            };
            if one.check().is_err() || !same_codes {
                continue;
            }
            assert!(one.bytes(TOKENS) < other.bytes(TOKENS), "{kind} {key} {value}");
            let expected = bits(&attend(kind, own, &Cpu::new(1).unwrap(), &inputs, TOKENS));
            for isa in Cpu::isas() {
                let cpu = Cpu::with_isa(1, Some(isa)).unwrap();
                let found = bits(&attend(kind, shared, &cpu, &inputs, TOKENS));
                assert!(found == expected, "{kind} {key} {value} {isa}");
            }
        }
    }
}

#[test]
fn values_within_keys_have_the_same_bits_for_any_chunk_and_any_number_of_threads() {
    let heads = KvHeads { count: 1, key: 96, value: 64, shared: true };
    let inputs = Inputs::new(heads);
    for kind in KINDS {
        let expected = bits(&attend(kind, heads, &Cpu::new(1).unwrap(), &inputs, TOKENS));
        for (threads, chunk) in [(1, 1), (2, 1), (3, 7), (2, 64), (5, TOKENS)] {
            let found = bits(&attend(kind, heads, &Cpu::new(threads).unwrap(), &inputs, chunk));
            assert!(found == expected, "{kind}: {threads} threads, chunks of {chunk}");
        }
    }
}

/// Returns the results of attention in f64.
fn reference(heads: KvHeads, inputs: &Inputs) -> Vec<f64> {
    let row = |values: &[f32], i: usize| -> Vec<f64> {
        values[i * heads.key..][..heads.key].iter().map(|value| f64::from(*value)).collect()
    };
    let keys: Vec<Vec<f64>> = (0..TOKENS).map(|i| row(&inputs.keys, i)).collect();
    let of_row = |i: usize| {
        let query = row(&inputs.queries, i);
        let score = |key: &Vec<f64>| query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>().exp2();
        let shares: Vec<f64> = keys[..=i / N_HEADS].iter().map(score).collect();
        let sum: f64 = shares.iter().sum();
        let value = |d: usize| shares.iter().zip(&keys).map(|(share, key)| share * key[d]).sum::<f64>() / sum;
        (0..heads.value).map(value).collect::<Vec<f64>>()
    };
    (0..TOKENS * N_HEADS).flat_map(of_row).collect()
}

#[test]
fn values_within_keys_are_summed_up_to_the_rounding_of_the_type() {
    // Relative to the largest result. Four bits have steps of an eighth of the largest value of a block.
    let limits = [1e-5, 2e-3, 1e-2, 2e-2, 5e-2, 0.3];
    for (key, value) in [(576, 512), (40, 24)] {
        let heads = KvHeads { count: 1, key, value, shared: true };
        let inputs = Inputs::new(heads);
        let expected = reference(heads, &inputs);
        let largest = expected.iter().fold(0f64, |most, value| most.max(value.abs()));
        for (kind, limit) in KINDS.into_iter().zip(limits) {
            if KvLayout::new(kind, [heads]).check().is_err() {
                continue;
            }
            let found = attend(kind, heads, &Cpu::new(1).unwrap(), &inputs, 128);
            let apart = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0f64, f64::max);
            assert!(apart <= limit * largest, "{kind} {key} {value}: {apart} of {largest}");
        }
    }
}
