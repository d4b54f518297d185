//! Checks recurrent mixers: convolutions, linear attention with the states of texts, and the norm of its output.

use super::random::normals;
use super::rig::{EPS, Expected, Rig, rounding};
use crate::error::Result;
use crate::runtime::cuda::args::StateRun;
use crate::runtime::cuda::array::Array;
use crate::runtime::cuda::recurrent::{GatedNorm, Kernel, Linear, LinearHeads, StatePlace};

/// Rows of the two texts of a step; the first text begins, and the second one has a state.
const ROWS: [usize; 2] = [5, 3];
/// Rows of the step.
const N: usize = ROWS[0] + ROWS[1];
/// Numbers of a state before the place that a kernel uses.
const BEFORE: usize = 3;

/// Checks the kernels of recurrent layers.
pub fn check(rig: &mut Rig<'_>) -> Result<()> {
    for (columns, channels, first, width) in [(12, 12, 0, 4), (130, 300, 33, 3), (5, 9, 4, 8), (7, 7, 0, 1)] {
        convolve(rig, [columns, channels, first, width])?;
        short_conv(rig, columns, width)?;
    }
    let heads =
        |key_heads, per_key, key_dim, value_dim, tiled| LinearHeads { key_heads, per_key, key_dim, value_dim, tiled };
    for heads in [heads(2, 2, 40, 20, false), heads(2, 3, 128, 33, true), heads(1, 1, 256, 5, false)] {
        linear_attention(rig, heads, true)?;
        linear_attention(rig, heads, false)?;
    }
    gated_norm(rig, 2, 24, false)?;
    gated_norm(rig, 3, 130, true)?;
    gate_rows(rig)?;
    spread_heads(rig)
}

/// States of the two texts on the device, and the runs of a step.
struct Texts {
    /// State of the second text before the step.
    known: Vec<f32>,
    states: [Array<f32>; 2],
    runs: Array<StateRun>,
}

impl Texts {
    /// Makes states of `len` numbers behind those that no kernel touches. The second text is written in place.
    fn new(rig: &mut Rig<'_>, len: usize) -> Result<Texts> {
        let known = normals(&mut rig.rng, BEFORE + len, 1.0);
        let states = [rig.unwritten(BEFORE + len)?, rig.array(&known)?];
        let [first, second] = states.each_ref().map(|state| state.view().address());
        let runs = rig.array(&[
            StateRun { from: 0, to: first, first: 0, count: ROWS[0] as u32 },
            StateRun { from: second, to: second, first: ROWS[0] as u32, count: ROWS[1] as u32 },
        ])?;
        Ok(Texts { known, states, runs })
    }

    /// Returns the number of the text of a row, and the row in it.
    fn of(row: usize) -> (usize, usize) {
        if row < ROWS[0] { (0, row) } else { (1, row - ROWS[0]) }
    }
}

/// Returns the input of a convolution at a position of a text, from its first row in the step on; negative positions
/// are in its state.
fn input(
    texts: &Texts,
    x: impl Fn(usize) -> f64,
    text: usize,
    at: isize,
    reach: usize,
    channels: usize,
    c: usize,
) -> f64 {
    match usize::try_from(at) {
        Ok(row) => x(text * ROWS[0] + row),
        Err(_) if text == 0 => 0.0,
        Err(_) => f64::from(texts.known[BEFORE + (reach as isize + at) as usize * channels + c]),
    }
}

/// Compares the last inputs in the states of both texts.
fn compare_windows(
    rig: &mut Rig<'_>,
    case: &super::rig::Case,
    texts: &Texts,
    [reach, channels]: [usize; 2],
    expected: impl Fn(usize, isize, usize) -> Expected,
    is_written: impl Fn(usize) -> bool,
) -> Result<()> {
    for (text, state) in texts.states.iter().enumerate() {
        let found = state.read()?[BEFORE..].to_vec();
        let of = |i: usize| {
            let (place, c) = (i / channels, i % channels);
            if is_written(c) {
                return expected(text, ROWS[text] as isize - reach as isize + place as isize, c);
            }
            Expected::exact(if text == 0 { f32::NAN } else { texts.known[BEFORE + i] })
        };
        rig.compare(case, channels, &found, of);
    }
    Ok(())
}

fn convolve(rig: &mut Rig<'_>, [columns, channels, first, width]: [usize; 4]) -> Result<()> {
    let case = rig.begin("convolve", format!("{columns} of {channels} channels, {width} positions"))?;
    let (x, factors) = (normals(&mut rig.rng, N * columns, 1.0), normals(&mut rig.rng, width * channels, 1.0));
    let bias = normals(&mut rig.rng, channels, 1.0);
    let (reach, out) = (width - 1, rig.array(&x)?);
    let texts = Texts::new(rig, reach * channels)?;
    let (on_device, biases) = (rig.array(&factors)?, rig.array(&bias)?);
    let kernel = Kernel { factors: on_device.view(), bias: Some(biases.view()), channels, width };
    let place = StatePlace { window: BEFORE, matrix: 0 };
    rig.ops.convolve(out.view(), kernel, [first, columns], texts.runs.view(), place)?;
    let at = |text: usize, position: isize, c: usize| {
        input(&texts, |row| f64::from(x[row * columns + c - first]), text, position, reach, channels, c)
    };
    let expected = |i: usize| {
        let ((text, row), c) = (Texts::of(i / columns), first + i % columns);
        let term = |tap: usize| {
            f64::from(factors[tap * channels + c]) * at(text, row as isize + tap as isize - reach as isize, c)
        };
        let (sum, magnitude) = super::rig::sum((0..width).map(term).chain([f64::from(bias[c])]));
        Expected { value: sum / (1.0 + (-sum).exp()), tolerance: 2.0 * rounding(width + 1) * magnitude + 8.0 * EPS }
    };
    rig.compare(&case, columns, &out.read()?, expected);
    let is_written = |c: usize| (first..first + columns).contains(&c);
    let last = |text: usize, position: isize, c: usize| Expected::exact(at(text, position, c));
    compare_windows(rig, &case, &texts, [reach, channels], last, is_written)
}

fn short_conv(rig: &mut Rig<'_>, columns: usize, width: usize) -> Result<()> {
    let case = rig.begin("short_conv", format!("{columns} channels, {width} positions"))?;
    let (x, factors) = (normals(&mut rig.rng, N * 3 * columns, 1.0), normals(&mut rig.rng, width * columns, 1.0));
    let (reach, projected, out) = (width - 1, rig.array(&x)?, rig.room(N, columns)?);
    let texts = Texts::new(rig, reach * columns)?;
    let on_device = rig.array(&factors)?;
    let kernel = Kernel { factors: on_device.view(), bias: None, channels: columns, width };
    let place = StatePlace { window: BEFORE, matrix: 0 };
    rig.ops.short_conv(projected.view(), kernel, texts.runs.view(), place, &out)?;
    let part = |row: usize, part: usize, c: usize| f64::from(x[(3 * row + part) * columns + c]);
    let at = |text: usize, position: isize, c: usize| {
        input(&texts, |row| part(row, 0, c) * part(row, 2, c), text, position, reach, columns, c)
    };
    let expected = |i: usize| {
        let ((text, row), c) = (Texts::of(i / columns), i % columns);
        let term = |tap: usize| {
            f64::from(factors[tap * columns + c]) * at(text, row as isize + tap as isize - reach as isize, c)
        };
        let ((sum, magnitude), gate) = (super::rig::sum((0..width).map(term)), part(i / columns, 1, c));
        Expected { value: sum * gate, tolerance: 2.0 * rounding(width + 1) * magnitude * gate.abs() }
    };
    let found = rig.read_acts(&case, &out, N)?;
    rig.compare(&case, columns, &found, expected);
    let last = |text: usize, position: isize, c: usize| {
        let value = at(text, position, c);
        Expected { value, tolerance: EPS * value.abs() }
    };
    compare_windows(rig, &case, &texts, [reach, columns], last, |_| true)
}

/// Inputs of linear attention.
struct LinearData {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    decays: Vec<f32>,
    rates: Vec<f32>,
    decay: Vec<f32>,
    decay_bias: Vec<f32>,
    skip: Vec<f32>,
}

fn linear_attention(rig: &mut Rig<'_>, heads: LinearHeads, is_delta: bool) -> Result<()> {
    let LinearHeads { key_heads, per_key, key_dim, value_dim, tiled } = heads;
    let (keys, count) = (key_heads * key_dim, key_heads * per_key);
    let rule = if is_delta { "delta rule" } else { "Mamba-2" };
    let order = if tiled { ", tiled" } else { "" };
    let shape = format!("{count} heads of {value_dim}, keys of {key_dim}{order}");
    let case = rig.begin(format!("linear_attention, {rule}"), shape)?;
    let mut numbers = |len: usize| normals(&mut rig.rng, len, 1.0);
    let data = LinearData {
        q: numbers(N * keys),
        k: numbers(N * keys),
        v: numbers(N * count * value_dim),
        decays: numbers(N * count),
        rates: numbers(N * count),
        decay: numbers(count).into_iter().map(|x| -x.exp()).collect(),
        decay_bias: numbers(count),
        skip: numbers(count),
    };
    let texts = Texts::new(rig, count * value_dim * key_dim)?;
    let [q, k, v] = [rig.array(&data.q)?, rig.array(&data.k)?, rig.array(&data.v)?];
    let (decays, rates) = (rig.array(&data.decays)?, rig.array(&data.rates)?);
    let (decay, decay_bias, skip) = (rig.array(&data.decay)?, rig.array(&data.decay_bias)?, rig.array(&data.skip)?);
    let out = rig.unwritten(N * count * value_dim)?;
    let task = Linear {
        heads,
        qkv: [q.view(), k.view(), v.view()],
        decays: decays.view(),
        rates: is_delta.then(|| rates.view()),
        decay: [decay.view(), decay_bias.view()],
        skip: (!is_delta).then(|| skip.view()),
        out: out.view(),
    };
    rig.ops.linear_attention(&task, texts.runs.view(), StatePlace { window: 0, matrix: BEFORE })?;
    let (outputs, states) = by_rule(&data, &texts, heads, is_delta);
    let near = |values: &[f64], i: usize, width: usize| {
        let around = &values[i / width * width..][..width];
        let largest = around.iter().fold(1.0f64, |most, x| most.max(x.abs()));
        Expected { value: values[i], tolerance: 4.0 * rounding(key_dim) * largest }
    };
    rig.compare(&case, count * value_dim, &out.read()?, |i| near(&outputs, i, value_dim));
    for (state, expected) in texts.states.iter().zip(&states) {
        rig.compare(&case, key_dim, &state.read()?[BEFORE..], |i| near(expected, i, key_dim));
    }
    Ok(())
}

/// Computes outputs and states of the texts in f64.
fn by_rule(data: &LinearData, texts: &Texts, heads: LinearHeads, is_delta: bool) -> (Vec<f64>, [Vec<f64>; 2]) {
    let LinearHeads { key_heads, per_key, key_dim, value_dim, tiled } = heads;
    let count = key_heads * per_key;
    let known = texts.known[BEFORE..].iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let mut states = [vec![0.0; known.len()], known];
    let mut out = vec![0.0; N * count * value_dim];
    for row in 0..N {
        let state = &mut states[Texts::of(row).0];
        for head in 0..count {
            let key_head = if tiled { head % key_heads } else { head / per_key };
            let of = |x: &[f32]| -> Vec<f64> {
                x[(row * key_heads + key_head) * key_dim..][..key_dim].iter().map(|x| f64::from(*x)).collect()
            };
            let unit = |x: Vec<f64>, factor: f64| -> Vec<f64> {
                let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                x.into_iter().map(|x| if is_delta { x * factor / length } else { x }).collect()
            };
            let (k, q) = (unit(of(&data.k), 1.0), unit(of(&data.q), 1.0 / (key_dim as f64).sqrt()));
            let step = (f64::from(data.decays[row * count + head]) + f64::from(data.decay_bias[head])).exp().ln_1p();
            let decay = (f64::from(data.decay[head]) * step).exp();
            let rate = 1.0 / (1.0 + (-f64::from(data.rates[row * count + head])).exp());
            for c in 0..value_dim {
                let place = (row * count + head) * value_dim + c;
                let v = f64::from(data.v[place]);
                let held = &mut state[(head * value_dim + c) * key_dim..][..key_dim];
                held.iter_mut().for_each(|x| *x *= decay);
                let recalled: f64 = held.iter().zip(&k).map(|(x, k)| x * k).sum();
                let added = if is_delta { rate * (v - recalled) } else { step * v };
                held.iter_mut().zip(&k).for_each(|(x, k)| *x += k * added);
                let answer: f64 = held.iter().zip(&q).map(|(x, q)| x * q).sum();
                out[place] = if is_delta { answer } else { answer + f64::from(data.skip[head]) * v };
            }
        }
    }
    (out, states)
}

fn gated_norm(rig: &mut Rig<'_>, groups: usize, group: usize, gate_first: bool) -> Result<()> {
    let (width, eps) = (groups * group, 1e-5);
    let case = rig.begin("gated_norm", format!("{groups} groups of {group}, gate first: {gate_first}"))?;
    let [x, gate] = [(); 2].map(|()| normals(&mut rig.rng, N * width, 1.0));
    let weight = normals(&mut rig.rng, if gate_first { width } else { group }, 1.0);
    let (xs, gates, weights, out) = (rig.array(&x)?, rig.array(&gate)?, rig.array(&weight)?, rig.room(N, width)?);
    rig.ops.gated_norm(&GatedNorm {
        x: xs.view(),
        gate: gates.view(),
        weight: weights.view(),
        out: &out,
        n: N,
        group,
        gate_first,
        eps,
    })?;
    let silu = |x: f32| f64::from(x) / (1.0 + (-f64::from(x)).exp());
    let expected = |i: usize| {
        let (begin, c) = (i / group * group, i % width);
        let gated = |i: usize| f64::from(x[i]) * if gate_first { silu(gate[i]) } else { 1.0 };
        let mean = (begin..begin + group).map(|i| gated(i).powi(2)).sum::<f64>() / group as f64;
        let factor = f64::from(weight[if gate_first { c } else { c % group }]);
        let value = f64::from(x[i]) * silu(gate[i]) / (mean + f64::from(eps)).sqrt() * factor;
        Expected { value, tolerance: 2.0 * rounding(group) * value.abs() }
    };
    let found = rig.read_acts(&case, &out, N)?;
    rig.compare(&case, width, &found, expected);
    Ok(())
}

fn gate_rows(rig: &mut Rig<'_>) -> Result<()> {
    for width in [6, 129, 2880] {
        let case = rig.begin("gate_rows", format!("{N} rows of {width}"))?;
        let (x, gate) = (normals(&mut rig.rng, N * width, 1.0), normals(&mut rig.rng, N, 2.0));
        let (out, gates) = (rig.array(&x)?, rig.array(&gate)?);
        rig.ops.gate_rows(out.view(), gates.view(), N, width)?;
        let expected = |i: usize| {
            let value = f64::from(x[i]) / (1.0 + (-f64::from(gate[i / width])).exp());
            Expected { value, tolerance: 8.0 * EPS * value.abs() }
        };
        rig.compare(&case, width, &out.read()?, expected);
    }
    Ok(())
}

fn spread_heads(rig: &mut Rig<'_>) -> Result<()> {
    for (heads, width) in [(3, 6), (2, 129)] {
        let case = rig.begin("spread_heads", format!("{N} rows of {heads} heads of {width}"))?;
        let x = normals(&mut rig.rng, N * heads, 1.0);
        let (numbers, out) = (rig.array(&x)?, rig.unwritten(N * heads * width)?);
        rig.ops.spread_heads(numbers.view(), out.view(), N, [heads, width])?;
        rig.compare(&case, width, &out.read()?, |i| Expected::exact(x[i / width]));
    }
    Ok(())
}
