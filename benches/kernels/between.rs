//! Benchmarks the work between the matrix products: attention, exponentials, norms, rotary embedding, routing and
//! sampling, in the sizes of TinyLlama 1.1B (routing: 128 experts).

use super::count::{self, counting};
use super::{best, values};
use iec::generate::sampler::{Sampler, Sampling};
use iec::model_config::{Activation, Rope, RopeScaling, RotaryPairs, RouterSoftmax};
use iec::runtime::KvType;
use iec::runtime::attention::{Attend, AttentionKernel, AttentionTask};
use iec::runtime::cpu::Cpu;
use iec::runtime::device::Run;
use iec::runtime::kv::{KvCache, KvHeads, KvLayout, PagePool};
use iec::runtime::layer::AttentionShape;
use iec::runtime::moe::route;
use iec::runtime::ops::{Gated, RmsNorm, SoftCap};
use iec::runtime::rope::{Rotary, rotate};
use iec::simd::Kernel;
use std::hint::black_box;

const HEADS: usize = 32;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const WIDTH: usize = HEADS * HEAD_DIM;
const INTERMEDIATE: usize = 5632;
const VOCABULARY: usize = 32_000;
/// Repetitions of operations that take a few microseconds, to exceed the resolution of the clock.
const TIMES: usize = 100;

/// Name and function that measures the seconds of one call.
type Case = (&'static str, fn(&Cpu) -> f64);

/// Runs the measurements whose names match the filter, or all if it is empty.
pub fn measure(cpu: &Cpu, filter: &[String]) {
    if !counting() {
        println!("{:<34} {:>10}", "between products", "us");
    }
    let wanted = |name: &str| filter.is_empty() || filter.iter().any(|f| name.contains(f.as_str()));
    for kind in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Int8, KvType::Fp8, KvType::Int4] {
        let cases = if counting() { &[(1, 511), (16, 240)][..] } else { &[(1, 2047), (128, 0), (128, 1920)] };
        for &(tokens, position) in cases {
            let name = format!("attention {kind} n={tokens} at {position}");
            if wanted(&name) {
                print(&name, attention(cpu, kind, tokens, position));
            }
        }
    }
    let cases: [Case; 6] = [
        ("exp (silu of 5632)", silu),
        ("tanh (softcap of 32000)", softcap),
        ("norm (2048)", norm),
        ("rotary (36 heads of 64)", rotary),
        ("router (8 of 128 experts)", router),
        ("sampling (top-k 40, top-p 0.9)", sampling),
    ];
    for (name, seconds) in cases {
        if wanted(name) {
            print(name, seconds(cpu));
        }
    }
}

fn print(name: &str, seconds: f64) {
    match counting() {
        true => count::print(name, 1),
        false => println!("{name:<34} {:>10.2}", seconds * 1e6),
    }
}

/// Returns the seconds of one call, from the fastest of 10 rounds.
fn once(cpu: &Cpu, mut f: impl FnMut()) -> f64 {
    let times = if counting() { 1 } else { TIMES };
    best(cpu, 10, || (0..times).for_each(|_| f())) / times as f64
}

/// Measures attention of one layer: `tokens` queries, the first of which is at `position`, attend to all earlier
/// tokens.
fn attention(cpu: &Cpu, kind: KvType, tokens: usize, position: usize) -> f64 {
    let layout = KvLayout::new(kind, [KvHeads::new(KV_HEADS, HEAD_DIM)]);
    let mut cache = KvCache::new(&PagePool::new(layout.clone(), None).expect("a small page"));
    let len = position + tokens;
    cache.grow(len).expect("memory for a small cache");
    let stored = values(len * KV_HEADS * HEAD_DIM);
    cache.write(cpu, 0, 0, &stored, &stored);
    let (queries, mut out) = (values(tokens * WIDTH), vec![0.0; tokens * WIDTH]);
    let mut attend = Attend::default();
    let task = AttentionTask {
        kernel: AttentionKernel::Fast,
        cpu,
        layer: &layout.layers()[0],
        shape: &AttentionShape {
            n_heads: HEADS,
            n_kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            value_dim: HEAD_DIM,
            kv_from: None,
            rotary: Some(0),
            pairs: RotaryPairs::Halves,
            position_scale: None,
            window: None,
            scale: 1.0,
            softcap: None,
        },
        sinks: None,
        runs: &[Run { sequence: 0, first: 0, tokens, position }],
        caches: &[&mut cache],
        queries: &queries,
    };
    best(cpu, 10, || attend.run(&task, &mut out, WIDTH))
}

fn silu(cpu: &Cpu) -> f64 {
    let (gate, mut out) = (values(INTERMEDIATE), vec![0.0; INTERMEDIATE]);
    once(cpu, || {
        let up = &gate;
        cpu.level().run(Gated { activation: Activation::Silu, gate: &gate, up, out: &mut out });
    })
}

fn softcap(cpu: &Cpu) -> f64 {
    let mut x = values(VOCABULARY);
    once(cpu, || cpu.level().run(SoftCap { x: &mut x, cap: 30.0 }))
}

fn norm(cpu: &Cpu) -> f64 {
    let (x, mut out) = (values(WIDTH), vec![0.0; WIDTH]);
    once(cpu, || cpu.level().run(RmsNorm { x: &x, weight: &x, eps: 1e-5, out: &mut out }))
}

struct Rotate<'a> {
    heads: &'a mut [f32],
    angles: &'a [f32],
}

impl Kernel for Rotate<'_> {
    #[inline(always)]
    fn run(self) {
        rotate(self.heads, HEAD_DIM, RotaryPairs::Halves, self.angles, 1.0);
    }
}

fn rotary(cpu: &Cpu) -> f64 {
    let rotary = Rotary::new(
        &Rope {
            theta: 1e4,
            rotary_dim: None,
            pairs: RotaryPairs::Halves,
            turning_pairs: None,
            scaling: RopeScaling::None,
        },
        HEAD_DIM,
    );
    let (mut heads, mut angles) = (values((HEADS + KV_HEADS) * HEAD_DIM), vec![0.0; rotary.dim()]);
    once(cpu, || {
        rotary.angles(1000, false, &mut angles);
        cpu.level().run(Rotate { heads: &mut heads, angles: &angles });
    })
}

fn router(cpu: &Cpu) -> f64 {
    let (logits, mut choices) = (values(128), [(0, 0.0); 8]);
    once(cpu, || route(black_box(&logits), RouterSoftmax::Chosen, &mut choices))
}

fn sampling(cpu: &Cpu) -> f64 {
    let logits = values(VOCABULARY);
    let mut sampler = Sampler::new(Sampling { temperature: 0.8, top_k: 40, top_p: 0.9, ..Sampling::default() }, 0);
    once(cpu, || {
        black_box(sampler.sample(black_box(&logits)).expect("numbers"));
    })
}
