//! Checks attention over paged caches: row by row as in decoding, and by tiles as in prefilling.

use super::positions::{Pages, half_step, round, round_codes};
use super::random::normals;
use super::rig::{EPS, Expected, Rig, rounding, sum};
use crate::error::Result;
use crate::runtime::cuda::args::{Row, Tile};
use crate::runtime::cuda::array::{Acts, Array};
use crate::runtime::cuda::attend::{Attend, Kernels, tile_rows, tiles};
use crate::runtime::kv::{KvHeads, KvLayout, KvType, PAGE};
use rayon::prelude::*;
use std::f64::consts::LN_2;

/// Number of layers of the cache, of which the last is used.
const LAYERS: usize = 2;

/// Parameters of an attention case.
#[derive(Debug, Clone)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    /// Width of queries and keys, and of values.
    dim: usize,
    value_dim: usize,
    kind: KvType,
    window: Option<usize>,
    softcap: Option<f32>,
    sinks: bool,
    gate: bool,
    /// Magnitude of the scores, which are exponents of two.
    spread: f32,
    /// First position and number of rows of each sequence.
    runs: Vec<(usize, usize)>,
}

/// Inputs as the device holds them.
struct Data {
    /// Queries: `(rows, heads * dim)`.
    q: Vec<f32>,
    /// Cache of each sequence and head, position by position: `[keys, values]`.
    kv: Vec<[Vec<f32>; 2]>,
    sinks: Vec<f32>,
    /// Gates of the results: `(rows, heads * value_dim)`.
    gate: Vec<f32>,
    /// Sequence and position of each row.
    rows: Vec<(usize, usize)>,
}

/// Checks attention.
pub fn check(rig: &mut Rig<'_>) -> Result<()> {
    let decode = [vec![(0, 1)], vec![(63, 1), (127, 1), (128, 1)], vec![(400, 1), (130, 5), (16, 3)], vec![(700, 1)]];
    let prefill = [vec![(0, 20)], vec![(0, 65), (129, 9), (200, 1)], vec![(100, 40)], vec![(0, 130)]];
    let mut i = 0;
    for kind in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Int8] {
        for (dim, value_dim) in [(6, 6), (16, 16), (64, 64), (80, 80), (128, 128), (256, 256), (40, 20), (192, 128)] {
            for group in [1, 4, 8, 16] {
                i += 1;
                if rig.quick && i % 3 != 0 {
                    continue;
                }
                let kv_heads = if group <= 4 { 2 } else { 1 };
                let shape = Shape {
                    heads: group * kv_heads,
                    kv_heads,
                    dim,
                    value_dim,
                    kind,
                    window: [None, Some(37), None, Some(150), Some(1)][i % 5],
                    softcap: [None, None, Some(11.0)][i % 3],
                    sinks: i % 4 == 1,
                    gate: i % 6 == 4,
                    spread: [3.0, 0.5, 40.0][i % 7 % 3],
                    runs: Vec::new(),
                };
                attend(rig, &Shape { runs: decode[i % decode.len()].clone(), ..shape.clone() })?;
                attend(rig, &Shape { runs: prefill[i / 2 % prefill.len()].clone(), ..shape })?;
            }
        }
    }
    wide_heads(rig)
}

/// Checks heads of more than 256 numbers, as far as this device computes them.
fn wide_heads(rig: &mut Rig<'_>) -> Result<()> {
    let plain = Shape {
        heads: 8,
        kv_heads: 2,
        dim: 0,
        value_dim: 0,
        kind: KvType::F32,
        window: None,
        softcap: None,
        sinks: false,
        gate: false,
        spread: 3.0,
        runs: Vec::new(),
    };
    for (i, kind) in [KvType::F32, KvType::Bf16, KvType::Int8].into_iter().enumerate() {
        for dim in [320, 512] {
            let layout = KvLayout::new(kind, [KvHeads::new(plain.kv_heads, dim)]);
            if Kernels::new(&rig.context.info, &layout.layers()[0], plain.heads).is_err() {
                continue;
            }
            for runs in [vec![(63, 1), (300, 1)], vec![(0, 40), (129, 9)]] {
                let (window, sinks, gate) = ([None, Some(37)][i % 2], i == 1, i == 2);
                attend(rig, &Shape { dim, value_dim: dim, kind, window, sinks, gate, runs, ..plain.clone() })?;
            }
        }
    }
    Ok(())
}

/// Returns the number of positions of a sequence after the step, from the position of its first row in the step and its
/// number of rows.
fn length((position, tokens): &(usize, usize)) -> usize {
    position + tokens
}

fn data(rig: &mut Rig<'_>, s: &Shape) -> Data {
    let rows: Vec<(usize, usize)> = s
        .runs
        .iter()
        .enumerate()
        .flat_map(|(text, run)| (run.0..length(run)).map(move |position| (text, position)))
        .collect();
    let scale = s.spread / (s.dim as f32).sqrt();
    let q = normals(&mut rig.rng, rows.len() * s.heads * s.dim, scale);
    let mut cached = |len: usize, dim: usize| -> Vec<f32> {
        let mut numbers: Vec<f32> =
            normals(&mut rig.rng, len * dim, 1.0).into_iter().map(|x| round(s.kind, x)).collect();
        if s.kind == KvType::Int8 {
            numbers.chunks_mut(dim).for_each(round_codes);
        }
        numbers
    };
    let texts = s.runs.iter().flat_map(|run| (0..s.kv_heads).map(|_| length(run)));
    let kv = texts.map(|len| [cached(len, s.dim), cached(len, s.value_dim)]).collect();
    let gate = normals(&mut rig.rng, rows.len() * s.heads * s.value_dim, 2.0);
    Data { q, kv, sinks: normals(&mut rig.rng, s.heads, s.spread), gate, rows }
}

/// Writes the pages; positions that the sequences have not reached are NaN.
fn fill(pages: &Pages, s: &Shape, data: &Data) -> Result<()> {
    let sizes = [s.dim, s.value_dim].map(|dim| PAGE * dim);
    for text in 0..s.runs.len() {
        for page in 0..pages.per_sequence {
            let mut numbers = vec![f32::NAN; LAYERS * s.kv_heads * (sizes[0] + sizes[1])];
            for head in 0..s.kv_heads {
                let first = ((LAYERS - 1) * s.kv_heads + head) * (sizes[0] + sizes[1]);
                for (part, source) in data.kv[text * s.kv_heads + head].iter().enumerate() {
                    let Some(source) = source.get(page * sizes[part]..) else { continue };
                    let to = &mut numbers[first + part * sizes[0]..][..sizes[part]];
                    to.iter_mut().zip(source).for_each(|(to, from)| *to = *from);
                }
            }
            pages.write(text, page, &numbers)?;
        }
    }
    Ok(())
}

/// Attention over the pages of some sequences, ready to be launched.
pub struct Launches {
    pub pages: Pages,
    kernels: Kernels,
    q: Array<f32>,
    rows: Array<Row>,
    tiles: Array<Tile>,
    partial: Array<f32>,
    out: Acts,
}

impl Launches {
    /// Prepares attention for the queries of all rows of `runs`, the first position and the number of rows of each
    /// sequence.
    pub fn new(rig: &Rig<'_>, layout: &KvLayout, heads: usize, runs: &[(usize, usize)], q: &[f32]) -> Result<Launches> {
        let kernels = Kernels::new(&rig.context.info, &layout.layers()[0], heads)?;
        let longest = runs.iter().map(length).max().unwrap_or(1);
        let pages = Pages::new(rig, layout, runs.len(), longest.div_ceil(PAGE))?;
        let (mut rows, mut firsts) = (Vec::new(), Vec::new());
        for (text, (position, tokens)) in runs.iter().enumerate() {
            firsts.push((rows.len(), *tokens));
            let positions = *position..position + tokens;
            rows.extend(positions.map(|position| Row {
                sequence: text as u32,
                position: position as u32,
                ..Row::default()
            }));
        }
        let [tile_rows, _] = tile_rows(std::slice::from_ref(&kernels), runs.iter().map(|run| run.1));
        let tiles: Vec<Tile> = firsts.into_iter().flat_map(|(first, tokens)| tiles(first, tokens, tile_rows)).collect();
        Ok(Launches {
            pages,
            q: rig.array(q)?,
            partial: rig.unwritten(kernels.partial_len(rows.len()))?,
            out: rig.room(rows.len(), heads * layout.layers()[0].heads.value)?,
            rows: rig.array(&rows)?,
            tiles: rig.array(&tiles)?,
            kernels,
        })
    }

    /// Starts attention over a layer of the cache.
    pub fn attend(&self, rig: &Rig<'_>, layer: usize) -> Result<()> {
        rig.ops.attend(&self.kernels, &self.task(layer))
    }

    /// Returns attention over a layer of the cache, without sinks, gate, window and cap.
    fn task(&self, layer: usize) -> Attend<'_> {
        Attend {
            q: self.q.view(),
            rows: self.rows.view(),
            tiles: self.tiles.view(),
            sinks: None,
            gate: None,
            partial: self.partial.view(),
            out: &self.out,
            cache: self.pages.cache(layer),
            n: self.out.rows,
            window: None,
            softcap: None,
            longest: self.pages.per_sequence.next_power_of_two() * PAGE,
        }
    }
}

fn attend(rig: &mut Rig<'_>, s: &Shape) -> Result<()> {
    let heads = KvHeads { value: s.value_dim, ..KvHeads::new(s.kv_heads, s.dim) };
    let layout = KvLayout::new(s.kind, [heads; LAYERS]);
    let data = data(rig, s);
    let launches = Launches::new(rig, &layout, s.heads, &s.runs, &data.q)?;
    let tiles = launches.tiles.view().len() > 0;
    let widest = s.dim.max(s.value_dim);
    let eights = s.dim.is_multiple_of(8) && s.value_dim.is_multiple_of(8) && widest <= 256;
    let fast = matches!(s.kind, KvType::F16 | KvType::Bf16) && eights && rig.context.info.has_tensor_cores();
    let kernel = format!(
        "attention, {}, {}",
        if tiles { "prefill" } else { "decode" },
        if fast { format!("{} heads to {}", s.kind, widest.next_power_of_two().max(64)) } else { "any shape".into() }
    );
    let case = rig.begin(kernel, format!("{s:?}"))?;
    fill(&launches.pages, s, &data)?;
    let (sinks, gate) = (rig.array(&data.sinks)?, rig.array(&data.gate)?);
    let task = Attend {
        sinks: s.sinks.then(|| sinks.view()),
        gate: s.gate.then(|| gate.view()),
        window: s.window,
        softcap: s.softcap,
        ..launches.task(LAYERS - 1)
    };
    rig.ops.attend(&launches.kernels, &task)?;
    let n = data.rows.len();
    let found = rig.read_acts(&case, &launches.out, n)?;
    let way = Way { fast, tiles };
    let expected: Vec<Expected> =
        (0..n * s.heads).into_par_iter().flat_map_iter(|i| head(s, &data, way, i / s.heads, i % s.heads)).collect();
    rig.compare(&case, s.heads * s.value_dim, &found, |i| expected[i]);
    Ok(())
}

/// Variant of a kernel, which determines how it rounds.
#[derive(Debug, Clone, Copy)]
struct Way {
    /// True if it computes on tensor cores, in the type of the cache.
    fast: bool,
    /// True if it computes tiles of query rows, as in prefilling; false if it computes row by row, as in decoding.
    tiles: bool,
}

/// Returns an element of a query as the kernel multiplies it, and the relative and the absolute error with which the
/// kernel rounds an attention weight between 0 and 1.
fn rounded(s: &Shape, way: Way, q: f32) -> (f64, f64, f64) {
    let (step, smallest) = half_step(s.kind);
    match way {
        Way { fast: false, .. } => (f64::from(q), 0.0, 0.0),
        Way { tiles: true, .. } => (f64::from(round(s.kind, q)), step, smallest),
        // The kernel multiplies the rounded query and, separately, the rounded remainder, and adds the two products.
        Way { tiles: false, .. } => {
            let hi = round(s.kind, q);
            (f64::from(hi) + f64::from(round(s.kind, q - hi)), step * step, smallest)
        }
    }
}

/// Returns the expected output of one head of one row.
fn head(s: &Shape, data: &Data, way: Way, row: usize, head: usize) -> Vec<Expected> {
    let (text, position) = data.rows[row];
    let [keys, values] = &data.kv[text * s.kv_heads + head / (s.heads / s.kv_heads)];
    let first = s.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let q = &data.q[(row * s.heads + head) * s.dim..][..s.dim];
    let q: Vec<(f64, f64, f64)> = q.iter().map(|q| rounded(s, way, *q)).collect();
    let (_, relative, absolute) = q[0];
    // Computes the scores, and in `off` the maximum error of any of them.
    let mut off = 0f64;
    let scores: Vec<f64> = (first..=position)
        .map(|at| {
            let terms = q.iter().zip(&keys[at * s.dim..][..s.dim]).map(|((q, ..), k)| q * f64::from(*k));
            let (sum, magnitude) = sum(terms);
            let cap = s.softcap.map(f64::from);
            off = off.max(rounding(s.dim) * (magnitude + cap.unwrap_or(0.0)));
            cap.map_or(sum, |cap| cap * (sum / cap).tanh())
        })
        .collect();
    let sink = s.sinks.then(|| f64::from(data.sinks[head]));
    let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp2()).collect();
    let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp2());
    // Kernels compute weights relative to the largest score without the sink, so the absolute error applies to a
    // largest weight of 1.
    let own = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let absolute = absolute * (own - largest).exp2();
    // The differences of large scores are rounded, too.
    let largest_score = scores.iter().fold(0f64, |m, score| m.max(score.abs()));
    let error = relative + 2.0 * LN_2 * (off + rounding(1) * largest_score) + 2.0 * rounding(scores.len());
    (0..s.value_dim)
        .map(|column| {
            let gate = data.gate[(row * s.heads + head) * s.value_dim + column];
            let gate = if s.gate { 1.0 / (1.0 + (-f64::from(gate)).exp()) } else { 1.0 };
            let column_of = |i: usize| f64::from(values[(first + i) * s.value_dim + column]);
            let (mut sum, mut magnitude, mut all) = (0.0, 0.0, 0.0);
            for (i, weight) in weights.iter().enumerate() {
                sum += weight * column_of(i);
                magnitude += weight * column_of(i).abs();
                all += column_of(i).abs();
            }
            // A sigmoid is an exponential, a sum and a quotient.
            let tolerance = (error * magnitude + absolute * all + 16.0 * EPS * sum.abs()) / total * gate + 1e-36;
            Expected { value: sum / total * gate, tolerance }
        })
        .collect()
}
