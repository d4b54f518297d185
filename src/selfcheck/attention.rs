//! Checks attention over paged caches: row by row as in decoding, and by tiles as in prefilling.

use super::positions::{Pages, half_step, round, round_codes};
use super::random::normals;
use super::rig::{Expected, Rig, rounding, sum};
use crate::error::Result;
use crate::runtime::cuda::args::{Row, Tile};
use crate::runtime::cuda::array::{Acts, Array, View};
use crate::runtime::cuda::attend::{Attend, Kernels, tiles};
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
    dim: usize,
    kind: KvType,
    window: Option<usize>,
    softcap: Option<f32>,
    sinks: bool,
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
    /// Sequence and position of each row.
    rows: Vec<(usize, usize)>,
}

/// Checks attention.
pub fn check(rig: &mut Rig<'_>) -> Result<()> {
    let decode = [vec![(0, 1)], vec![(63, 1), (127, 1), (128, 1)], vec![(400, 1), (130, 5), (16, 3)], vec![(700, 1)]];
    let prefill = [vec![(0, 20)], vec![(0, 65), (129, 9), (200, 1)], vec![(100, 40)], vec![(0, 130)]];
    let mut i = 0;
    for kind in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Int8] {
        for dim in [6, 16, 64, 80, 128, 256] {
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
                    kind,
                    window: [None, Some(37), None, Some(150), Some(1)][i % 5],
                    softcap: [None, None, Some(11.0)][i % 3],
                    sinks: i % 4 == 1,
                    spread: [3.0, 0.5, 40.0][i % 7 % 3],
                    runs: Vec::new(),
                };
                attend(rig, &Shape { runs: decode[i % decode.len()].clone(), ..shape.clone() })?;
                attend(rig, &Shape { runs: prefill[i / 2 % prefill.len()].clone(), ..shape })?;
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
    let mut cached = |len: usize| -> Vec<f32> {
        let mut numbers: Vec<f32> =
            normals(&mut rig.rng, len * s.dim, 1.0).into_iter().map(|x| round(s.kind, x)).collect();
        if s.kind == KvType::Int8 {
            numbers.chunks_mut(s.dim).for_each(round_codes);
        }
        numbers
    };
    let texts = s.runs.iter().flat_map(|run| (0..s.kv_heads).map(|_| length(run)));
    let kv = texts.map(|len| [cached(len), cached(len)]).collect();
    Data { q, kv, sinks: normals(&mut rig.rng, s.heads, s.spread), rows }
}

/// Writes the pages; positions that the sequences have not reached are NaN.
fn fill(pages: &Pages, s: &Shape, data: &Data) -> Result<()> {
    let run = PAGE * s.dim;
    for text in 0..s.runs.len() {
        for page in 0..pages.per_sequence {
            let mut numbers = vec![f32::NAN; LAYERS * s.kv_heads * 2 * run];
            for head in 0..s.kv_heads {
                for (part, source) in data.kv[text * s.kv_heads + head].iter().enumerate() {
                    let Some(source) = source.get(page * run..) else { continue };
                    let to = &mut numbers[((LAYERS - 1) * s.kv_heads * 2 + head * 2 + part) * run..][..run];
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
            rows.extend(positions.map(|position| Row { sequence: text as u32, position: position as u32 }));
        }
        let tile_rows = kernels.tile_rows(runs.iter().map(|run| run.1)).unwrap_or(0);
        let tiles: Vec<Tile> = firsts.into_iter().flat_map(|(first, tokens)| tiles(first, tokens, tile_rows)).collect();
        Ok(Launches {
            pages,
            q: rig.array(q)?,
            partial: rig.unwritten(kernels.partial_len(rows.len()))?,
            out: rig.room(rows.len(), q.len() / rows.len())?,
            rows: rig.array(&rows)?,
            tiles: rig.array(&tiles)?,
            kernels,
        })
    }

    /// Starts attention over a layer of the cache.
    pub fn attend(
        &self,
        rig: &Rig<'_>,
        layer: usize,
        sinks: Option<View<f32>>,
        window: Option<usize>,
        softcap: Option<f32>,
    ) -> Result<()> {
        let attend = Attend {
            q: self.q.view(),
            rows: self.rows.view(),
            tiles: self.tiles.view(),
            sinks,
            partial: self.partial.view(),
            out: &self.out,
            cache: self.pages.cache(layer),
            n: self.out.rows,
            window,
            softcap,
            longest: self.pages.per_sequence.next_power_of_two() * PAGE,
        };
        rig.ops.attend(&self.kernels, &attend)
    }
}

fn attend(rig: &mut Rig<'_>, s: &Shape) -> Result<()> {
    let layout = KvLayout::new(s.kind, [KvHeads::new(s.kv_heads, s.dim); LAYERS]);
    let data = data(rig, s);
    let launches = Launches::new(rig, &layout, s.heads, &s.runs, &data.q)?;
    let tiles = launches.tiles.view().len() > 0;
    let fast =
        matches!(s.kind, KvType::F16 | KvType::Bf16) && s.dim.is_multiple_of(8) && rig.context.info.has_tensor_cores();
    let kernel = format!(
        "attention, {}, {}",
        if tiles { "prefill" } else { "decode" },
        if fast { format!("{} heads to {}", s.kind, s.dim.next_power_of_two().max(64)) } else { "any shape".into() }
    );
    let case = rig.begin(kernel, format!("{s:?}"))?;
    fill(&launches.pages, s, &data)?;
    let sinks = rig.array(&data.sinks)?;
    launches.attend(rig, LAYERS - 1, s.sinks.then(|| sinks.view()), s.window, s.softcap)?;
    let n = data.rows.len();
    let found = rig.read_acts(&case, &launches.out, n)?;
    let way = Way { fast, tiles };
    let expected: Vec<Expected> =
        (0..n * s.heads).into_par_iter().flat_map_iter(|i| head(s, &data, way, i / s.heads, i % s.heads)).collect();
    rig.compare(&case, s.heads * s.dim, &found, |i| expected[i]);
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
    (0..s.dim)
        .map(|column| {
            let column_of = |i: usize| f64::from(values[(first + i) * s.dim + column]);
            let (mut sum, mut magnitude, mut all) = (0.0, 0.0, 0.0);
            for (i, weight) in weights.iter().enumerate() {
                sum += weight * column_of(i);
                magnitude += weight * column_of(i).abs();
                all += column_of(i).abs();
            }
            Expected { value: sum / total, tolerance: (error * magnitude + absolute * all) / total + 1e-36 }
        })
        .collect()
}
