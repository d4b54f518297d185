//! Compares ways to compute the factors A of adapters beside a product of the model: in one parallel region, in a region
//! of their own, and on a thread that is kept for adapters. Sizes are those of TinyLlama's up projection (q4_0) and of
//! factors of rank 32 in int8. `cargo bench --bench kernels adapters` prints this table only.

use super::{best, bytes_of};
use iec::mapped::Bytes;
use iec::rng::Rng;
use iec::runtime::cpu::{Acts, Arithmetic, Cpu, Form, Job, Matrix, MatrixStore};
use iec::scheme::{QuantSpec, TileLayout};
use std::sync::atomic::{AtomicUsize, Ordering};

const ROWS: usize = 5632;
const COLS: usize = 2048;
const RANK: usize = 32;
/// Number of products, whose weights are far more than the caches hold.
const LAYERS: usize = 60;
const ROUNDS: usize = 15;

/// A product of the model and those with the factors of adapters.
struct Layer {
    base: Matrix,
    factors: Vec<Matrix>,
}

/// Outputs of a layer.
struct Outputs {
    base: Vec<f32>,
    factors: Vec<Vec<f32>>,
}

/// Prints the table, if the filter is empty or names it.
pub fn measure(cpu: &Cpu, filter: &[String]) {
    if !(filter.is_empty() || filter.iter().any(|f| "adapters".contains(f.as_str()))) {
        return;
    }
    println!(
        "{:<34} {:>10} {:>10} {:>10} {:>10}",
        "adapters (us per product)", "none", "one region", "two", "own thread"
    );
    for (tokens, adapters) in [(1, 1), (1, 4), (8, 4), (32, 32), (512, 1)] {
        let layers: Vec<Layer> = (0..LAYERS).map(|_| layer(adapters)).collect();
        let mut x = Acts::default();
        let mut rng = Rng::new(1);
        x.set(tokens, COLS, &(0..tokens * COLS).map(|_| rng.next_normal() as f32).collect::<Vec<_>>());
        cpu.prepare(&mut x, Form::Int8);
        // Each adapter has the same number of tokens; several adapters of one token all have that token.
        let shares = (0..adapters)
            .map(|i| if tokens < adapters { 0..tokens } else { i * tokens / adapters..(i + 1) * tokens / adapters });
        let shares: Vec<_> = shares.collect();
        let factors = shares.iter().map(|share| vec![0.0; share.len() * RANK]).collect();
        let mut out = Outputs { base: vec![0.0; tokens * ROWS], factors };
        let us = |seconds: f64| seconds * 1e6 / LAYERS as f64;
        let none = best(cpu, ROUNDS, || {
            for layer in &layers {
                cpu.matmul(&mut [Job::new(&layer.base, None, &x, &mut out.base)], Arithmetic::Int8);
            }
        });
        let one = best(cpu, ROUNDS, || {
            for layer in &layers {
                let mut jobs = jobs(layer, &x, &shares, &mut out.factors);
                jobs.push(Job::new(&layer.base, None, &x, &mut out.base));
                cpu.matmul(&mut jobs, Arithmetic::Int8);
            }
        });
        let two = best(cpu, ROUNDS, || {
            for layer in &layers {
                cpu.matmul(&mut jobs(layer, &x, &shares, &mut out.factors), Arithmetic::Int8);
                cpu.matmul(&mut [Job::new(&layer.base, None, &x, &mut out.base)], Arithmetic::Int8);
            }
        });
        let own = (cpu.threads() > 1).then(|| partitioned(cpu, &layers, &x, &shares, &mut out));
        let own = own.map_or("-".to_string(), |own| format!("{:.1}", us(own)));
        let name = format!("{tokens} tokens, {adapters} adapters of r{RANK}");
        println!("{name:<34} {:>10.1} {:>10.1} {:>10.1} {own:>10}", us(none), us(one), us(two));
    }
}

fn layer(adapters: usize) -> Layer {
    let matrix = |spec: QuantSpec, rows: usize| {
        let store = MatrixStore::Tiled(TileLayout::new(spec, rows, COLS).expect("a layout"));
        Matrix::new(rows, COLS, store, Bytes::copied(&bytes_of(store, rows, COLS))).expect("a matrix")
    };
    let factors = (0..adapters).map(|_| matrix(QuantSpec::INT8_ROWS, RANK)).collect();
    Layer { base: matrix(QuantSpec::Q4_0, ROWS), factors }
}

/// Returns the products with the factors.
fn jobs<'a>(
    layer: &'a Layer,
    x: &'a Acts,
    shares: &[std::ops::Range<usize>],
    outputs: &'a mut [Vec<f32>],
) -> Vec<Job<'a>> {
    let all = layer.factors.iter().zip(shares).zip(outputs);
    all.map(|((factor, share), y)| Job { tokens: share.clone(), ..Job::new(factor, None, x, y) }).collect()
}

/// Measures a partition: one thread computes the factors, the others the product of the model, and both wait for each
/// other after each layer.
fn partitioned(cpu: &Cpu, layers: &[Layer], x: &Acts, shares: &[std::ops::Range<usize>], out: &mut Outputs) -> f64 {
    let Outputs { base, factors } = out;
    let of_base = Cpu::with_isa(cpu.threads() - 1, Some(cpu.isa())).expect("threads");
    best(cpu, ROUNDS, || {
        let done = AtomicUsize::new(0);
        let wait = |layer: usize| {
            done.fetch_add(1, Ordering::AcqRel);
            while done.load(Ordering::Acquire) < 2 * (layer + 1) {
                std::hint::spin_loop();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let own = Cpu::with_isa(1, Some(cpu.isa())).expect("a thread");
                for (i, layer) in layers.iter().enumerate() {
                    own.matmul(&mut jobs(layer, x, shares, factors), Arithmetic::Int8);
                    wait(i);
                }
            });
            for (i, layer) in layers.iter().enumerate() {
                of_base.matmul(&mut [Job::new(&layer.base, None, x, base)], Arithmetic::Int8);
                wait(i);
            }
        });
    })
}
