//! Attention over values that are the first numbers of the keys: the same bits as with values of their own, and close
//! to a computation in f64. The fast kernel is close to the reference.

use super::{Attend, AttentionKernel, AttentionTask};
use crate::rng::Rng;
use crate::runtime::cpu::Cpu;
use crate::runtime::device::Run;
use crate::runtime::kv::{KvCache, KvHeads, KvLayout, KvType, PagePool};
use crate::runtime::layer::AttentionShape;

/// Positions that are fed: three pages, of which the last is not full.
const TOKENS: usize = 300;

/// A layer and what its queries see.
#[derive(Clone)]
struct Case {
    heads: KvHeads,
    n_heads: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    sinks: Option<Vec<f32>>,
}

impl Case {
    /// Returns a layer with five query heads per key/value head.
    fn new(heads: KvHeads) -> Case {
        Case { heads, n_heads: 5 * heads.count, window: None, softcap: None, sinks: None }
    }

    fn shape(&self) -> AttentionShape {
        AttentionShape {
            n_heads: self.n_heads,
            n_kv_heads: self.heads.count,
            head_dim: self.heads.key,
            value_dim: self.heads.value,
            kv_from: None,
            rotary: None,
            pairs: Default::default(),
            position_scale: None,
            window: self.window,
            scale: 1.0,
            softcap: self.softcap,
        }
    }
}

/// Keys, values and queries of all positions and heads.
struct Inputs {
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
}

impl Inputs {
    /// Returns random inputs; values are the first numbers of the keys, and then these once more.
    fn new(case: &Case) -> Inputs {
        let heads = case.heads;
        let mut rng = Rng::new(heads.key as u64);
        let mut random =
            |n: usize, factor: f32| (0..n).map(|_| rng.next_normal() as f32 * factor).collect::<Vec<f32>>();
        let keys = random(TOKENS * heads.count * heads.key, 1.0);
        let values =
            keys.chunks_exact(heads.key).flat_map(|key| key.iter().cycle().take(heads.value)).copied().collect();
        let queries = random(TOKENS * case.n_heads * heads.key, 1.0 / (heads.key as f32).sqrt());
        Inputs { keys, values, queries }
    }
}

/// Returns the results of all positions, fed in chunks of `chunk` positions.
fn attend(kernel: AttentionKernel, kind: KvType, case: &Case, cpu: &Cpu, inputs: &Inputs, chunk: usize) -> Vec<f32> {
    let heads = case.heads;
    let layout = KvLayout::new(kind, [heads]);
    let mut cache = KvCache::new(&PagePool::new(layout.clone(), None).unwrap());
    let shape = case.shape();
    let (mut attend, mut results) = (Attend::default(), Vec::new());
    for first in (0..TOKENS).step_by(chunk) {
        let tokens = chunk.min(TOKENS - first);
        let part = |all: &'_ [f32], width: usize| all[first * width..(first + tokens) * width].to_vec();
        let values = if heads.shared { Vec::new() } else { part(&inputs.values, heads.count * heads.value) };
        cache.grow(tokens).unwrap();
        cache.write(cpu, 0, first, &part(&inputs.keys, heads.count * heads.key), &values);
        let mut out = vec![f32::NAN; tokens * case.n_heads * heads.value];
        let task = AttentionTask {
            kernel,
            cpu,
            layer: &layout.layers()[0],
            shape: &shape,
            sinks: case.sinks.as_deref(),
            runs: &[Run { sequence: 0, first: 0, tokens, position: first }],
            caches: &[&mut cache],
            queries: &part(&inputs.queries, case.n_heads * heads.key),
        };
        attend.run(&task, &mut out, case.n_heads * heads.value);
        results.extend(out);
    }
    results
}

/// Returns the results of the fast kernel.
fn fast(kind: KvType, case: &Case, cpu: &Cpu, inputs: &Inputs, chunk: usize) -> Vec<f32> {
    attend(AttentionKernel::Fast, kind, case, cpu, inputs, chunk)
}

/// Returns the largest difference, relative to the largest expected result.
fn apart(found: &[f32], expected: &[f64]) -> f64 {
    let largest = expected.iter().fold(0f64, |most, value| most.max(value.abs()));
    found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0f64, f64::max) / largest
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
        let inputs = Inputs::new(&Case::new(shared));
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
            let expected = bits(&fast(kind, &Case::new(own), &Cpu::new(1).unwrap(), &inputs, TOKENS));
            for isa in Cpu::isas() {
                let cpu = Cpu::with_isa(1, Some(isa)).unwrap();
                let found = bits(&fast(kind, &Case::new(shared), &cpu, &inputs, TOKENS));
                assert!(found == expected, "{kind} {key} {value} {isa}");
            }
        }
    }
}

#[test]
fn values_within_keys_have_the_same_bits_for_any_chunk_and_any_number_of_threads() {
    let case = Case::new(KvHeads { count: 1, key: 96, value: 64, shared: true });
    let inputs = Inputs::new(&case);
    for kind in KINDS {
        let expected = bits(&fast(kind, &case, &Cpu::new(1).unwrap(), &inputs, TOKENS));
        for (threads, chunk) in [(1, 1), (2, 1), (3, 7), (2, 64), (5, TOKENS)] {
            let found = bits(&fast(kind, &case, &Cpu::new(threads).unwrap(), &inputs, chunk));
            assert!(found == expected, "{kind}: {threads} threads, chunks of {chunk}");
        }
    }
}

/// Returns the results of attention without a window over keys and values of one head, before they are rounded.
fn unrounded(case: &Case, inputs: &Inputs) -> Vec<f64> {
    let row = |values: &[f32], i: usize, size: usize| -> Vec<f64> {
        values[i * size..][..size].iter().map(|value| f64::from(*value)).collect()
    };
    let keys: Vec<Vec<f64>> = (0..TOKENS).map(|i| row(&inputs.keys, i, case.heads.key)).collect();
    let of_row = |i: usize| {
        let query = row(&inputs.queries, i, case.heads.key);
        let score = |key: &Vec<f64>| query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>().exp2();
        let shares: Vec<f64> = keys[..=i / case.n_heads].iter().map(score).collect();
        let sum: f64 = shares.iter().sum();
        let value = |d: usize| shares.iter().zip(&keys).map(|(share, key)| share * key[d]).sum::<f64>() / sum;
        (0..case.heads.value).map(value).collect::<Vec<f64>>()
    };
    (0..TOKENS * case.n_heads).flat_map(of_row).collect()
}

#[test]
fn results_of_both_kernels_differ_from_exact_ones_by_the_rounding_of_the_type() {
    // Relative to the largest result. Four bits have steps of an eighth of the largest value of a block.
    let limits = [1e-5, 2e-3, 1e-2, 2e-2, 5e-2, 0.3];
    for (key, value) in [(576, 512), (40, 24)] {
        let case = Case::new(KvHeads { count: 1, key, value, shared: true });
        let inputs = Inputs::new(&case);
        let expected = unrounded(&case, &inputs);
        for (kind, limit) in KINDS.into_iter().zip(limits) {
            if KvLayout::new(kind, [case.heads]).check().is_err() {
                continue;
            }
            for kernel in [AttentionKernel::Fast, AttentionKernel::Reference] {
                let found = attend(kernel, kind, &case, &Cpu::new(2).unwrap(), &inputs, 128);
                let apart = apart(&found, &expected);
                assert!(apart <= limit, "{kernel:?} {kind} {key} {value}: {apart}");
            }
        }
    }
}

#[test]
fn the_fast_kernel_is_close_to_the_reference() {
    let heads = |count: usize, key: usize, value: usize| KvHeads { count, key, value, shared: false };
    let sinks = |n: usize| Some((0..n).map(|i| i as f32 * 0.7 - 1.0).collect());
    let cases = [
        Case { softcap: Some(3.0), ..Case::new(heads(1, 80, 80)) },
        Case { window: Some(70), sinks: sinks(4), n_heads: 4, ..Case::new(heads(2, 64, 64)) },
        Case { window: Some(1), ..Case::new(heads(3, 18, 34)) },
        Case { sinks: sinks(3), n_heads: 3, ..Case::new(heads(3, 192, 128)) },
        Case { window: Some(200), softcap: Some(20.0), n_heads: 70, ..Case::new(heads(1, 32, 16)) },
    ];
    for case in cases {
        let inputs = Inputs::new(&case);
        // Types of 8 and 4 bits are multiplied like bf16: queries, and probabilities times scales, are rounded to it.
        for (kind, limit) in KINDS.into_iter().zip([2e-6, 2e-6, 1e-2, 1e-2, 1e-2, 1e-2]) {
            if KvLayout::new(kind, [case.heads]).check().is_err() {
                continue;
            }
            let cpu = Cpu::new(2).unwrap();
            let expected: Vec<f64> = attend(AttentionKernel::Reference, kind, &case, &cpu, &inputs, TOKENS)
                .into_iter()
                .map(f64::from)
                .collect();
            let apart = apart(&fast(kind, &case, &cpu, &inputs, 96), &expected);
            assert!(apart <= limit, "{kind} {:?}, window {:?}: {apart}", case.heads, case.window);
        }
    }
}
