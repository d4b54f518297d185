//! Measures the speed of copies, products and attention in the shapes of a model of 8 billion parameters.
//!
//! Launches are recorded as a graph and replayed, as in decoding, over so many matrices or layers that none is
//! still in the device's cache when it is read again.

use super::attention::Launches;
use super::random::{Store, normals, weight};
use super::report::Measured;
use super::rig::Rig;
use crate::dtype::DType;
use crate::error::Result;
use crate::interrupt;
use crate::rng::Rng;
use crate::runtime::cpu::Arithmetic;
use crate::runtime::cuda::kv::Pool;
use crate::runtime::cuda::weights::{DeviceLinear, DeviceMatrix, How};
use crate::runtime::kv::{KvHeads, KvLayout, KvType, PAGE};
use crate::scheme::{Granularity, QuantSpec, Scheme};

/// Number of measurements of which the median is reported.
pub const SAMPLES: usize = 20;
/// Number of measurements that precede these [`SAMPLES`] and are discarded.
const WARM_UP: usize = 3;
/// Number of bytes that are read before the same ones are read again: several times the largest cache of a GPU.
const BEYOND_CACHE: usize = 400 << 20;

/// Rows and columns of the matrices of a model of 8 billion parameters.
const SHAPES: [(usize, usize); 4] = [(4096, 4096), (14_336, 4096), (4096, 14_336), (128_256, 4096)];

/// Measures all computations and appends the results to `out`.
pub fn measure(rig: &mut Rig<'_>, out: &mut Vec<Measured>) -> Result<()> {
    copies(rig, out)?;
    let int8 = QuantSpec { granularity: Granularity::Group(32), ..QuantSpec::usual(Scheme::Int8) };
    let stores = [
        ("int4", Store::Tiles(QuantSpec::Q4_0), Arithmetic::Int8),
        ("int4, bf16 + bf16", Store::Tiles(QuantSpec::Q4_0), Arithmetic::Int16),
        ("int8", Store::Tiles(int8), Arithmetic::Int8),
        ("bf16", Store::Plain(DType::BF16), Arithmetic::Bf16),
        ("mxfp4", Store::Tiles(QuantSpec::MXFP4), Arithmetic::Int8),
        ("q4_k", Store::Tiles(QuantSpec::usual(Scheme::Q4K)), Arithmetic::Int8),
        ("q6_k", Store::Tiles(QuantSpec::usual(Scheme::Q6K)), Arithmetic::Int8),
        ("fp8", Store::Tiles(QuantSpec::usual(Scheme::Fp8)), Arithmetic::Int8),
    ];
    for (name, store, arithmetic) in stores {
        for (rows, cols) in SHAPES {
            products(rig, (name, store, arithmetic), rows, cols, out)?;
        }
    }
    for (texts, length) in [(1, 1024), (1, 16_384), (16, 4096)] {
        decode(rig, texts, length, out)?;
    }
    for before in [0, 3072] {
        prefill(rig, before, out)?;
    }
    Ok(())
}

/// Returns the median time in seconds of the launches that `work` starts.
fn median(rig: &Rig<'_>, work: impl Fn() -> Result<()>) -> Result<f64> {
    let context = rig.context;
    // The first run loads the kernels, because loading cannot be recorded.
    work()?;
    context.synchronize()?;
    let mut graph = context.capture(&work)?;
    let mut times = Vec::new();
    for i in 0..WARM_UP + SAMPLES {
        interrupt::check()?;
        let begin = context.mark()?;
        rig.ops.replay(&mut graph)?;
        let end = context.mark()?;
        let seconds = end.seconds_since(&begin)?;
        if i >= WARM_UP {
            times.push(seconds);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok((times[SAMPLES / 2 - 1] + times[SAMPLES / 2]) / 2.0)
}

fn copies(rig: &Rig<'_>, out: &mut Vec<Measured>) -> Result<()> {
    let bytes = (rig.context.memory()?.0 / 4).min(1 << 30) as usize;
    let (from, to) = (rig.context.alloc(bytes)?, rig.context.alloc(bytes)?);
    from.fill(0)?;
    let seconds = median(rig, || to.copy_from_device(&from))?;
    let gb_per_s = Some(2.0 * bytes as f64 / seconds / 1e9);
    out.push(Measured { what: format!("copy of {} MiB on the device", bytes >> 20), seconds, gb_per_s, tflops: None });
    Ok(())
}

fn products(
    rig: &mut Rig<'_>,
    (name, store, arithmetic): (&str, Store, Arithmetic),
    rows: usize,
    cols: usize,
    out: &mut Vec<Measured>,
) -> Result<()> {
    let mut rng = Rng::new(8);
    let weight = weight(&mut rng, store, rows, cols)?;
    let copies = (BEYOND_CACHE / weight.nbytes()).clamp(1, 64);
    let how = How::new(weight.store(), arithmetic, rig.context.info.has_tensor_cores());
    let linears = (0..copies)
        .map(|_| {
            Ok(DeviceLinear {
                matrix: DeviceMatrix::upload(&mut rig.uploader, &[&weight])?,
                bias: None,
                how,
                target: None,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    for n in [1, 4, 16, 512] {
        let x = normals(&mut rng, n * cols, 1.0);
        let acts = rig.acts(how.forms(), &x, cols)?;
        let y = rig.unwritten(n * rows)?;
        // Products of many rows take so long that caches matter little.
        let used = if n < 64 { copies } else { copies.min(4) };
        let seconds = median(rig, || {
            linears[..used].iter().try_for_each(|linear| rig.ops.matmul(linear, &acts, 0, y.view(), n))
        })? / used as f64;
        let what = format!("matmul, {name}, {rows} x {cols}, {n} rows");
        let (gb_per_s, tflops) = match n {
            512 => (None, Some(2.0 * (n * rows) as f64 * cols as f64 / seconds / 1e12)),
            _ => (Some(weight.nbytes() as f64 / seconds / 1e9), None),
        };
        out.push(Measured { what, seconds, gb_per_s, tflops });
    }
    Ok(())
}

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;

/// Returns the time in seconds of attention in a layer of a model of 8 billion parameters. It is averaged over so
/// many layers that the cache of the device does not hold them all. Each run is given as its first position and its
/// number of tokens.
fn attention(rig: &Rig<'_>, runs: &[(usize, usize)]) -> Result<f64> {
    let pages: usize = runs.iter().map(|(position, tokens)| (position + tokens).div_ceil(PAGE)).sum();
    let of_layers = |count| KvLayout::new(KvType::Bf16, vec![KvHeads::new(KV_HEADS, DIM); count]);
    let layers = (BEYOND_CACHE / (Pool::page_bytes(&of_layers(1)) * pages)).clamp(1, 64);
    let layout = of_layers(layers);
    let rows: usize = runs.iter().map(|(_, tokens)| tokens).sum();
    let q = normals(&mut Rng::new(9), rows * HEADS * DIM, 0.1);
    let launches = Launches::new(rig, &layout, HEADS, runs, &q)?;
    let numbers = normals(&mut Rng::new(7), Pool::page_bytes(&layout) / 2, 1.0);
    let per_text = launches.pages.per_sequence;
    (0..pages).try_for_each(|i| launches.pages.write(i / per_text, i % per_text, &numbers))?;
    let layer = |layer| launches.attend(rig, layer);
    Ok(median(rig, || (0..layers).try_for_each(layer))? / layers as f64)
}

fn decode(rig: &Rig<'_>, count: usize, length: usize, out: &mut Vec<Measured>) -> Result<()> {
    let seconds = attention(rig, &vec![(length - 1, 1); count])?;
    let bytes = count * length * KV_HEADS * DIM * 2 * 2;
    let what = format!("attention, decode, {count} x {length} positions, bf16");
    out.push(Measured { what, seconds, gb_per_s: Some(bytes as f64 / seconds / 1e9), tflops: None });
    Ok(())
}

fn prefill(rig: &Rig<'_>, before: usize, out: &mut Vec<Measured>) -> Result<()> {
    let tokens = 1024;
    let seconds = attention(rig, &[(before, tokens)])?;
    let seen: usize = (before..before + tokens).map(|position| position + 1).sum();
    let work = 4.0 * (HEADS * DIM) as f64 * seen as f64;
    let what = format!("attention, prefill, {tokens} tokens after {before}, bf16");
    out.push(Measured { what, seconds, gb_per_s: None, tflops: Some(work / seconds / 1e12) });
    Ok(())
}
