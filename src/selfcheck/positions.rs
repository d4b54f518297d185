//! Checks the kernels that prepare queries, keys and values: norms of heads, rotation, scaling, and the types of the KV
//! cache.

use super::random::normals;
use super::rig::{Case, EPS, Expected, Rig, UNWRITTEN, rounding};
use crate::dtype::{DType, decode_floats, encode_floats};
use crate::error::Result;
use crate::model_config::{Latent, RotaryPairs};
use crate::runtime::cuda::args::{self, Row};
use crate::runtime::cuda::array::Array;
use crate::runtime::cuda::context::Buffer;
use crate::runtime::cuda::heads::{LatentRope, Rope};
use crate::runtime::cuda::kv::{KV_BLOCK, Pool};
use crate::runtime::cuda::states::StateLayout;
use crate::runtime::kv::{KvHeads, KvLayer, KvLayout, KvType, PAGE};
use half::{bf16, f16};
use std::sync::Arc;

/// Number of layers of the cache, of which the last is used.
const LAYERS: usize = 2;

/// Sequence and position of each row.
const ROWS: [(u32, u32); 7] = [(0, 0), (1, 126), (1, 127), (1, 128), (2, 300), (0, 1), (2, 255)];

#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    rotary_dim: usize,
    norms: bool,
    kind: KvType,
    pairs: RotaryPairs,
    values: Values,
}

/// Values that are written to the cache.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Values {
    /// Projected ones.
    Own,
    /// Projected ones after a norm.
    Normed,
    /// The projected keys, after a norm.
    Keys,
    /// Neither keys nor values are written.
    None,
}

/// Inputs of all rows.
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    angles: Vec<f32>,
    /// Factors of the norms of queries, keys and values.
    norms: [Vec<f32>; 3],
}

const Q_SCALE: f32 = 0.37;
const NORM_EPS: f32 = 1e-6;

/// Checks rotation and writing to the cache.
pub fn check(rig: &mut Rig<'_>) -> Result<()> {
    for (i, kind) in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Int8].into_iter().enumerate() {
        for (j, (dim, rotary_dim)) in
            [(6, 6), (16, 4), (64, 64), (80, 32), (128, 128), (256, 256), (320, 160)].into_iter().enumerate()
        {
            let (heads, kv_heads) = [(2, 2), (8, 2), (8, 1), (16, 1)][(i + j) % 4];
            let norms = (i + j) % 2 == 0;
            let plain = Shape {
                heads,
                kv_heads,
                dim,
                rotary_dim,
                norms,
                kind,
                pairs: RotaryPairs::Halves,
                values: Values::Own,
            };
            rope(rig, &plain)?;
            let values = match [Values::Normed, Values::Keys, Values::None][j % 3] {
                // Keys are changed in place for this type, so values have memory of their own.
                Values::Keys if kind == KvType::Int8 => Values::Normed,
                values => values,
            };
            rope(rig, &Shape { pairs: RotaryPairs::Adjacent, values, ..plain })?;
            rope(rig, &Shape { rotary_dim: 0, ..plain })?;
        }
    }
    Ok(())
}

fn rope(rig: &mut Rig<'_>, s: &Shape) -> Result<()> {
    let shape = format!(
        "{} + 2 x {} heads of {}, {} of them rotated ({:?}){}, values {:?}, cache of {}",
        s.heads,
        s.kv_heads,
        s.dim,
        s.rotary_dim,
        s.pairs,
        if s.norms { ", normed" } else { "" },
        s.values,
        s.kind
    );
    let case = rig.begin("rope and cache", shape)?;
    let n = ROWS.len();
    let data = Data {
        q: normals(&mut rig.rng, n * s.heads * s.dim, 1.0),
        k: normals(&mut rig.rng, n * s.kv_heads * s.dim, 1.0),
        v: normals(&mut rig.rng, n * s.kv_heads * s.dim, 1.0),
        angles: angles(rig, s.rotary_dim),
        norms: [(); 3].map(|()| normals(&mut rig.rng, s.dim, 1.0)),
    };
    let layout = KvLayout::new(s.kind, [KvHeads::new(s.kv_heads, s.dim); LAYERS]);
    let pages = Pages::new(rig, &layout, 3, 3)?;
    let (q, k, v) = (rig.array(&data.q)?, rig.array(&data.k)?, rig.array(&data.v)?);
    let (angles, rows) = (rig.array(&data.angles)?, rig.array(&rows())?);
    let [q_norm, k_norm, v_norm] = [0, 1, 2].map(|i| rig.array(&data.norms[i]));
    let (q_norm, k_norm, v_norm) = (q_norm?, k_norm?, v_norm?);
    rig.ops.rope(&Rope {
        q: q.view(),
        kv: match s.values {
            Values::None => None,
            Values::Keys => Some([k.view(), k.view()]),
            Values::Own | Values::Normed => Some([k.view(), v.view()]),
        },
        angles: angles.view(),
        pairs: s.pairs,
        head_norms: s.norms.then(|| [q_norm.view(), k_norm.view()]),
        value_norm: (s.values != Values::Own).then(|| v_norm.view()),
        rows: rows.view(),
        cache: pages.cache(LAYERS - 1),
        n,
        n_heads: s.heads,
        eps: NORM_EPS,
        q_scale: Q_SCALE,
    })?;
    let found = q.read()?;
    let turn = Turn { rotary_dim: s.rotary_dim, first: 0, pairs: s.pairs, angles: &data.angles };
    let expected = turned(&turn, s.dim, &data.q, s.norms.then_some(&data.norms[0]), Some(Q_SCALE));
    rig.compare(&case, s.heads * s.dim, &found, |i| expected[i]);
    let keys = turned(&turn, s.dim, &data.k, s.norms.then_some(&data.norms[1]), None);
    let still = Turn { rotary_dim: 0, ..turn };
    let values = match s.values {
        Values::Own => data.v.iter().map(|value| Expected::exact(round(s.kind, *value))).collect(),
        Values::Normed => turned(&still, s.dim, &data.v, Some(&data.norms[2]), None),
        Values::Keys => turned(&still, s.dim, &data.k, Some(&data.norms[2]), None),
        Values::None => return compare_pages(rig, &case, &layout, &pages, [&[], &[]]),
    };
    compare_pages(rig, &case, &layout, &pages, [&keys, &values])
}

/// Returns random cosines and sines of all rows.
fn angles(rig: &mut Rig<'_>, rotary_dim: usize) -> Vec<f32> {
    let angles = normals(&mut rig.rng, ROWS.len() * rotary_dim / 2, 3.0);
    let rows = angles.chunks((rotary_dim / 2).max(1));
    rows.flat_map(|row| row.iter().map(|x| x.cos()).chain(row.iter().map(|x| x.sin()))).collect()
}

/// Returns the rows, with different factors of their queries.
fn rows() -> [Row; ROWS.len()] {
    let mut rows = ROWS.map(|(sequence, position)| Row { sequence, position, q_factor: 1.0, unused: 0 });
    rows.iter_mut().enumerate().for_each(|(i, row)| row.q_factor += i as f32 / 8.0);
    rows
}

/// Checks the kernel that stores the keys and values of latent attention.
pub fn latent(rig: &mut Rig<'_>) -> Result<()> {
    for (i, kind) in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Int8].into_iter().enumerate() {
        for (j, (heads, nope, rope, value)) in [(4, 24, 16, 20), (3, 128, 64, 128)].into_iter().enumerate() {
            let sizes = Latent { q_rank: None, kv_rank: 24, nope, rope, value, norm_eps: 0.0 };
            let pairs = [RotaryPairs::Halves, RotaryPairs::Adjacent][(i + j) % 2];
            latent_heads(rig, heads, sizes, kind, pairs)?;
        }
    }
    Ok(())
}

fn latent_heads(rig: &mut Rig<'_>, heads: usize, sizes: Latent, kind: KvType, pairs: RotaryPairs) -> Result<()> {
    let case = rig.begin("latent_rope", format!("{heads} heads of {sizes:?}, {pairs:?}, cache of {kind}"))?;
    let Latent { kv_rank, nope, rope, value, .. } = sizes;
    let (n, dim) = (ROWS.len(), nope + rope);
    let layout = KvLayout::new(kind, [KvHeads { value, ..KvHeads::new(heads, dim) }; LAYERS]);
    let pages = Pages::new(rig, &layout, 3, 3)?;
    let q_values = normals(&mut rig.rng, n * heads * dim, 1.0);
    let latent_values = normals(&mut rig.rng, n * (kv_rank + rope), 1.0);
    let expanded_values = normals(&mut rig.rng, n * heads * (nope + value), 1.0);
    let angle_values = angles(rig, rope);
    let (q, k) = (rig.array(&q_values)?, rig.unwritten(n * heads * dim)?);
    let (latent, expanded) = (rig.array(&latent_values)?, rig.array(&expanded_values)?);
    let (angles, rows) = (rig.array(&angle_values)?, rig.array(&rows())?);
    rig.ops.latent_rope(&LatentRope {
        sizes,
        q: q.view(),
        k: k.view(),
        latent: latent.view(),
        expanded: expanded.view(),
        angles: angles.view(),
        pairs,
        rows: rows.view(),
        cache: pages.cache(LAYERS - 1),
        n,
        n_heads: heads,
        q_scale: Q_SCALE,
    })?;
    let turn = Turn { rotary_dim: rope, first: nope, pairs, angles: &angle_values };
    let expected = turned(&turn, dim, &q_values, None, Some(Q_SCALE));
    rig.compare(&case, heads * dim, &q.read()?, |i| expected[i]);
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for (i, head) in expanded_values.chunks_exact(nope + value).enumerate() {
        keys.extend_from_slice(&head[..nope]);
        keys.extend_from_slice(&latent_values[i / heads * (kv_rank + rope) + kv_rank..][..rope]);
        values.extend(head[nope..].iter().map(|value| Expected::exact(round(kind, *value))));
    }
    let keys = turned(&turn, dim, &keys, None, None);
    compare_pages(rig, &case, &layout, &pages, [&keys, &values])
}

/// Rotation of heads.
#[derive(Clone, Copy)]
struct Turn<'a> {
    rotary_dim: usize,
    /// First number of a head that is rotated.
    first: usize,
    pairs: RotaryPairs,
    /// Cosines and sines of all rows: `(n, rotary_dim)`.
    angles: &'a [f32],
}

/// Returns the expected heads of `dim` numbers after norm and rotation, and after scaling by `q_scale` and by the
/// factors of the rows.
fn turned(turn: &Turn<'_>, dim: usize, heads: &[f32], norm: Option<&Vec<f32>>, q_scale: Option<f32>) -> Vec<Expected> {
    let Turn { first, pairs, .. } = *turn;
    let half = turn.rotary_dim / 2;
    let per_row = heads.len() / ROWS.len() / dim;
    let mut out = Vec::new();
    for (i, head) in heads.chunks_exact(dim).enumerate() {
        let scale = q_scale.map_or(1.0, |scale| f64::from(scale * rows()[i / per_row].q_factor));
        let (cos, sin) = turn.angles[i / per_row * 2 * half..][..2 * half].split_at(half);
        let mut x: Vec<f64> = head.iter().map(|x| f64::from(*x)).collect();
        if let Some(norm) = norm {
            let root = (x.iter().map(|x| x * x).sum::<f64>() / dim as f64 + f64::from(NORM_EPS)).sqrt();
            x.iter_mut().zip(norm).for_each(|(x, weight)| *x *= f64::from(*weight) / root);
        }
        let (cos, sin) = (|i: usize| f64::from(cos[i]), |i: usize| f64::from(sin[i]));
        out.extend((0..dim).map(|i| {
            let rotated = i.checked_sub(first).filter(|at| *at < 2 * half);
            let terms = match (rotated, pairs) {
                (None, _) => [x[i], 0.0],
                (Some(at), RotaryPairs::Adjacent) if at % 2 == 0 => [x[i] * cos(at / 2), -x[i + 1] * sin(at / 2)],
                (Some(at), RotaryPairs::Adjacent) => [x[i] * cos(at / 2), x[i - 1] * sin(at / 2)],
                (Some(at), RotaryPairs::Halves) if at < half => [x[i] * cos(at), -x[i + half] * sin(at)],
                (Some(at), RotaryPairs::Halves) => [x[i] * cos(at - half), x[i - half] * sin(at - half)],
            };
            let magnitude = (terms[0].abs() + terms[1].abs()) * scale;
            let terms_of_norm = if norm.is_some() { dim } else { 1 };
            Expected { value: (terms[0] + terms[1]) * scale, tolerance: rounding(terms_of_norm) * magnitude }
        }));
    }
    out
}

/// Rounds a number to the type of a cache.
pub fn round(kind: KvType, value: f32) -> f32 {
    match kind {
        KvType::F16 => f16::from_f32(value).to_f32(),
        KvType::Bf16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Returns half the distance between two adjacent numbers of a type: relative to the number for normal numbers, and
/// absolute for subnormal ones.
pub fn half_step(kind: KvType) -> (f64, f64) {
    match kind {
        KvType::F16 => (2f64.powi(-11), 2f64.powi(-25)),
        KvType::Bf16 => (2f64.powi(-8), 0.0),
        _ => (0.5 * EPS, 0.0),
    }
}

/// Returns the largest error with which a cache stores number `column` of a head.
fn storing_error(kind: KvType, head: &[Expected], column: usize) -> f64 {
    let (step, smallest) = half_step(kind);
    if kind == KvType::Int8 {
        let block = &head[column / KV_BLOCK * KV_BLOCK..];
        let largest = block.iter().take(KV_BLOCK).fold(0f64, |m, of| m.max(of.value.abs()));
        return 0.501 / 127.0 * largest;
    }
    // Values are rounded, but not computed with, so they must be exact.
    if head[column].tolerance == 0.0 { 0.0 } else { step * head[column].value.abs() + smallest }
}

/// Compares the keys and values that were written to the pages, if any were, and checks that the rest of the pages is
/// still NaN.
fn compare_pages(
    rig: &mut Rig<'_>,
    case: &Case,
    layout: &KvLayout,
    pages: &Pages,
    written: [&[Expected]; 2],
) -> Result<()> {
    let KvHeads { count, key, value, .. } = layout.layers()[0].heads;
    for sequence in 0..pages.sequences {
        for page in 0..pages.per_sequence {
            let found = pages.read(sequence, page)?;
            rig.compare(case, key, &found, |i| {
                let (head, inside) = (i / (PAGE * (key + value)), i % (PAGE * (key + value)));
                let part = usize::from(inside >= PAGE * key);
                let (dim, inside) = if part == 0 { (key, inside) } else { (value, inside - PAGE * key) };
                let at = (sequence as u32, (page * PAGE + inside / dim) as u32);
                let head = head.checked_sub((LAYERS - 1) * count).filter(|_| !written[part].is_empty());
                let Some((head, row)) = head.zip(ROWS.iter().position(|row| *row == at)) else {
                    return Expected::exact(f64::NAN);
                };
                let numbers = &written[part][(row * count + head) * dim..][..dim];
                let Expected { value, tolerance } = numbers[inside % dim];
                Expected { value, tolerance: tolerance + storing_error(layout.kind, numbers, inside % dim) }
            });
        }
    }
    Ok(())
}

/// Returns the number format of a cache type.
fn stored(kind: KvType) -> DType {
    match kind {
        KvType::F16 => DType::F16,
        KvType::Bf16 => DType::BF16,
        _ => DType::F32,
    }
}

/// Pages of some sequences, in arbitrary order and filled with NaN.
pub struct Pages {
    pool: Arc<Pool>,
    buffers: Vec<Buffer>,
    tables: Array<u64>,
    pub sequences: usize,
    pub per_sequence: usize,
}

impl Pages {
    pub fn new(rig: &Rig<'_>, layout: &KvLayout, sequences: usize, per_sequence: usize) -> Result<Pages> {
        let mut buffers = Vec::new();
        for _ in 0..sequences * per_sequence {
            let buffer = rig.context.alloc(Pool::page_bytes(layout))?;
            buffer.fill(UNWRITTEN)?;
            buffers.push(buffer);
        }
        // Pages are used in the reverse order of their addresses, so that a kernel that ignores the tables fails.
        buffers.reverse();
        let stride = per_sequence.next_power_of_two();
        let mut tables = vec![0u64; sequences * stride];
        for (i, buffer) in buffers.iter().enumerate() {
            tables[i / per_sequence * stride + i % per_sequence] = buffer.address();
        }
        let pool = Pool::new(rig.context, layout.clone(), StateLayout::default(), usize::MAX);
        Ok(Pages { pool, buffers, tables: rig.array(&tables)?, sequences, per_sequence })
    }

    /// Returns the arguments of kernels for a layer of the cache.
    pub fn cache(&self, layer: usize) -> args::Cache {
        self.pool.cache(layer, self.tables.view().address(), self.per_sequence.next_power_of_two())
    }

    /// Writes all numbers of a page.
    pub fn write(&self, sequence: usize, page: usize, numbers: &[f32]) -> Result<()> {
        let KvLayer { kind, heads: KvHeads { key, value, .. }, .. } = self.pool.layout().layers()[0];
        let mut bytes = Vec::new();
        match kind {
            KvType::Int8 => numbers.chunks(PAGE * (key + value)).for_each(|head| {
                code(&head[..PAGE * key], key, &mut bytes);
                code(&head[PAGE * key..], value, &mut bytes);
            }),
            kind => encode_floats(stored(kind), numbers, &mut bytes)?,
        }
        self.buffers[sequence * self.per_sequence + page].write(&bytes)
    }

    /// Reads all numbers of a page: for each layer and head the keys position by position, then the values.
    fn read(&self, sequence: usize, page: usize) -> Result<Vec<f32>> {
        let KvLayer { kind, heads: KvHeads { key, value, .. }, .. } = self.pool.layout().layers()[0];
        let bytes = self.buffers[sequence * self.per_sequence + page].read()?;
        if kind == KvType::Int8 {
            let [keys, values] = [key, value].map(|dim| PAGE * (dim + 4 * dim.div_ceil(KV_BLOCK)));
            let numbers = |head: &[u8]| [decoded(&head[..keys], key), decoded(&head[keys..], value)].concat();
            return Ok(bytes.chunks(keys + values).flat_map(numbers).collect());
        }
        let dtype = stored(kind);
        let mut numbers = vec![0.0; bytes.len() / dtype.size()];
        decode_floats(dtype, &bytes, &mut numbers)?;
        Ok(numbers)
    }
}

/// Appends the keys or values `(PAGE, dim)` of a head as codes and scales of a cache of int8. The scale of numbers that
/// are NaN is NaN.
fn code(head: &[f32], dim: usize, bytes: &mut Vec<u8>) {
    let blocks = || head.chunks(dim).flat_map(|row| row.chunks(KV_BLOCK));
    let scale = |block: &[f32]| match block[0].is_nan() {
        true => f32::NAN,
        false => block.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0,
    };
    bytes.extend(blocks().flat_map(|block| block.iter().map(move |x| (x / scale(block)).round() as i8 as u8)));
    bytes.extend(blocks().flat_map(|block| scale(block).to_le_bytes()));
}

/// Returns the numbers of a head that [`code`] wrote.
fn decoded(head: &[u8], dim: usize) -> Vec<f32> {
    let (codes, scales) = head.split_at(PAGE * dim);
    let scales: Vec<f32> = scales.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let scale = |i: usize| scales[i / dim * dim.div_ceil(KV_BLOCK) + i % dim / KV_BLOCK];
    codes.iter().enumerate().map(|(i, code)| f32::from(*code as i8) * scale(i)).collect()
}

/// Rounds each block of numbers of a head to what a cache of int8 stores.
pub fn round_codes(head: &mut [f32]) {
    for block in head.chunks_mut(KV_BLOCK) {
        let scale = block.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0;
        block.iter_mut().for_each(|x| *x = (*x / scale).round() * scale);
    }
}
