//! Checks norms, including the addition of a branch to the residual stream before them, and activations.

use super::random::{below, normals};
use super::rig::{EPS, Expected, Rig, rounding, sum};
use crate::error::Result;
use crate::model_config::{Activation, NormKind};
use crate::runtime::cuda::array::Array;
use crate::runtime::cuda::heads::TokenInputs;
use crate::runtime::cuda::multiply::Middle;
use crate::runtime::cuda::ops::{self, Branch, Chosen, Norm};

/// Checks norms and activations.
pub fn check(rig: &mut Rig<'_>) -> Result<()> {
    norms(rig)?;
    activations(rig)
}

/// Options of a norm.
#[derive(Debug, Clone, Copy)]
struct Extras {
    branch: bool,
    /// True if a second branch is added to the first.
    beside: bool,
    post: bool,
    /// Number of experts per row; 0 = the branch is one vector per row.
    top_k: usize,
    /// True if the output rows are some of the rows, in another order.
    rows: bool,
    /// True if only the sum is computed, without a norm.
    sum_only: bool,
    /// True if branch and sum have factors.
    scaled: bool,
    /// Kind of the norm; `None` = the sum is copied.
    kind: Option<NormKind>,
    /// True if the output has factors.
    weight: bool,
    /// Numbers between the rows of x.
    gap: usize,
}

/// Epsilons of the norm and of that of the branch.
const NORM_EPS: [f32; 2] = [1e-5, 3e-2];

fn norms(rig: &mut Rig<'_>) -> Result<()> {
    let none = Extras {
        branch: false,
        beside: false,
        post: false,
        top_k: 0,
        rows: false,
        sum_only: false,
        scaled: false,
        kind: Some(NormKind::Rms),
        weight: true,
        gap: 0,
    };
    let branch = Extras { branch: true, ..none };
    let layer = Extras { kind: Some(NormKind::Layer), ..none };
    let copy = Extras { kind: None, weight: false, ..none };
    let all_extras = [
        none,
        Extras { rows: true, ..none },
        branch,
        Extras { sum_only: true, ..branch },
        Extras { post: true, ..branch },
        Extras { rows: true, ..branch },
        Extras { top_k: 1, ..branch },
        Extras { top_k: 4, rows: true, ..branch },
        Extras { top_k: 8, post: true, ..branch },
        Extras { scaled: true, ..branch },
        Extras { beside: true, top_k: 3, scaled: true, ..branch },
        Extras { beside: true, post: true, ..branch },
        Extras { weight: false, gap: 12, ..none },
        Extras { gap: 1, ..none },
        layer,
        Extras { branch: true, post: true, scaled: true, ..layer },
        Extras { branch: true, rows: true, ..layer },
        copy,
        Extras { branch: true, post: true, ..copy },
    ];
    // Beyond 8192 columns, threads read a row twice; 6 and 48 columns are less than a warp reads.
    let widths: &[usize] = if rig.quick { &[6, 2880] } else { &[6, 48, 80, 2880, 4099, 9000] };
    for &width in widths {
        for (i, extras) in all_extras.into_iter().enumerate() {
            let n = if width < 1000 { [130, 1, 9][i % 3] } else { [1, 3, 8][i % 3] };
            norm(rig, extras, n, width)?;
        }
        in_place(rig, 3, width)?;
    }
    Ok(())
}

/// Inputs of a norm.
struct NormData {
    x: Vec<f32>,
    y: Vec<f32>,
    beside: Vec<f32>,
    post: Vec<f32>,
    weight: Vec<f32>,
    slots: Vec<u32>,
    shares: Vec<f32>,
}

fn norm(rig: &mut Rig<'_>, extras: Extras, n: usize, width: usize) -> Result<()> {
    let case = rig.begin("norm", format!("{n} rows of {width}, {extras:?}"))?;
    let (held, top_k, x_stride) = (if extras.rows { n + 3 } else { n }, extras.top_k.max(1), width + extras.gap);
    let mut slots: Vec<u32> = (0..held * top_k).map(|i| i as u32).collect();
    (1..slots.len()).rev().for_each(|i| slots.swap(i, below(&mut rig.rng, i + 1)));
    let data = NormData {
        // The mean is not zero, so that a norm that has to subtract it differs from one that has not.
        x: normals(&mut rig.rng, held * x_stride, 2.0).into_iter().map(|x| x + 1.0).collect(),
        y: normals(&mut rig.rng, held * top_k * width, 1.0),
        beside: normals(&mut rig.rng, held * width, 1.0),
        post: normals(&mut rig.rng, width, 1.0),
        weight: normals(&mut rig.rng, width, 1.0),
        slots,
        shares: normals(&mut rig.rng, held * top_k, 0.5),
    };
    // Each row occurs at most once, because a branch is added in place.
    let rows: Vec<usize> = (0..n).map(|i| if extras.rows { held - 1 - i } else { i }).collect();
    let (x, y, post) = (rig.array(&data.x)?, rig.array(&data.y)?, rig.array(&data.post)?);
    let (weight, slots, shares) = (rig.array(&data.weight)?, rig.array(&data.slots)?, rig.array(&data.shares)?);
    let wanted = rig.array(&rows.iter().map(|row| *row as u32).collect::<Vec<_>>())?;
    let out = rig.room(n, width)?;
    let chosen = Chosen { slots: slots.view(), weights: shares.view(), top_k };
    let beside = rig.array(&data.beside)?;
    let (scale, x_scale) = factors(extras);
    let branch = Branch {
        y: y.view(),
        beside: extras.beside.then(|| beside.view()),
        post: extras.post.then_some(&post),
        chosen: (extras.top_k > 0).then_some(chosen),
        scale,
        x_scale,
    };
    rig.ops.norm(&Norm {
        x_stride,
        branch: extras.branch.then_some(branch),
        kind: extras.kind,
        weight: (!extras.sum_only && extras.weight).then(|| weight.view()),
        rows: extras.rows.then(|| wanted.view()),
        out: (!extras.sum_only).then_some(&out),
        post_eps: NORM_EPS[1],
        ..Norm::of(x.view(), n, width, NORM_EPS[0])
    })?;
    let sums = summed(&data, extras, &rows, width);
    let found = x.read()?;
    rig.compare(&case, x_stride, &found, |i| sums[i]);
    if extras.sum_only {
        return Ok(());
    }
    let found = rig.read_acts(&case, &out, n)?;
    let expected: Vec<Expected> = (rows.iter())
        .flat_map(|row| normed(&sums[row * x_stride..][..width], extras.kind, extras.weight.then_some(&data.weight)))
        .collect();
    rig.compare(&case, width, &found, |i| expected[i]);
    Ok(())
}

/// Returns the factors of the branch and of the sum.
fn factors(extras: Extras) -> (f32, f32) {
    if extras.scaled { (0.22, 1.7) } else { (1.0, 1.0) }
}

/// Returns the expected norm of a row.
fn normed(row: &[Expected], kind: Option<NormKind>, weight: Option<&Vec<f32>>) -> Vec<Expected> {
    let width = row.len();
    let (mean, magnitude) = match kind {
        Some(NormKind::Layer) => sum(row.iter().map(|x| x.value / width as f64)),
        _ => (0.0, 0.0),
    };
    let distances: Vec<Expected> = (row.iter())
        .map(|x| Expected { value: x.value - mean, tolerance: x.tolerance + rounding(width) * magnitude })
        .collect();
    let scale = kind.map_or(1.0, |_| inverse_root(&distances, NORM_EPS[0]));
    let norm = |(column, x): (usize, Expected)| {
        let factor = scale * weight.map_or(1.0, |weight| f64::from(weight[column]));
        let value = x.value * factor;
        let rounded = if kind.is_some() { rounding(width) * value.abs() } else { 0.0 };
        Expected { value, tolerance: rounded + 2.0 * x.tolerance * factor.abs() }
    };
    distances.into_iter().enumerate().map(norm).collect()
}

fn inverse_root(row: &[Expected], eps: f32) -> f64 {
    let squares: f64 = row.iter().map(|x| x.value * x.value).sum();
    1.0 / (squares / row.len() as f64 + f64::from(eps)).sqrt()
}

/// Checks the norm of rows in place, and their copy.
fn in_place(rig: &mut Rig<'_>, n: usize, width: usize) -> Result<()> {
    let case = rig.begin("norm", format!("{n} rows of {width}, copied, then in place"))?;
    let (values, factors) = (normals(&mut rig.rng, n * width, 2.0), normals(&mut rig.rng, width, 1.0));
    let (from, weight) = (rig.array(&values)?, rig.array(&factors)?);
    let x = rig.unwritten(n * width)?;
    rig.ops.copy_rows(from.view(), x.view(), n, width)?;
    rig.same(&case, "copied number", &x.read()?, &values);
    rig.ops.norm_in_place(&Norm { weight: Some(weight.view()), ..Norm::of(x.view(), n, width, NORM_EPS[0]) })?;
    let exact: Vec<Expected> = values.iter().map(|value| Expected::exact(*value)).collect();
    let expected: Vec<Expected> =
        exact.chunks(width).flat_map(|row| normed(row, Some(NormKind::Rms), Some(&factors))).collect();
    rig.compare(&case, width, &x.read()?, |i| expected[i]);
    Ok(())
}

/// Returns the expected residual stream after the branch was added to the wanted rows.
fn summed(data: &NormData, extras: Extras, rows: &[usize], width: usize) -> Vec<Expected> {
    let mut sums: Vec<Expected> = data.x.iter().map(|x| Expected::exact(*x)).collect();
    let (scale, x_scale) = factors(extras);
    for &row in rows.iter().filter(|_| extras.branch) {
        let mut added: Vec<Expected> = (0..width)
            .map(|column| {
                if extras.top_k == 0 {
                    return Expected::exact(data.y[row * width + column]);
                }
                let choices = row * extras.top_k..(row + 1) * extras.top_k;
                let terms = choices.map(|choice| {
                    f64::from(data.y[data.slots[choice] as usize * width + column]) * f64::from(data.shares[choice])
                });
                let (value, magnitude) = sum(terms);
                Expected { value, tolerance: rounding(extras.top_k) * magnitude }
            })
            .collect();
        for (added, beside) in added.iter_mut().zip(&data.beside[row * width..]).filter(|_| extras.beside) {
            added.value += f64::from(*beside);
            added.tolerance += EPS * added.value.abs();
        }
        if extras.post {
            let scale = inverse_root(&added, NORM_EPS[1]);
            for (added, post) in added.iter_mut().zip(&data.post) {
                let factor = scale * f64::from(*post);
                added.value *= factor;
                added.tolerance = 2.0 * added.tolerance * factor.abs() + rounding(width) * added.value.abs();
            }
        }
        for (sum, added) in sums[row * (width + extras.gap)..][..width].iter_mut().zip(&added) {
            let (scale, x_scale) = (f64::from(scale), f64::from(x_scale));
            let total = sum.value + scale * added.value;
            sum.value = total * x_scale;
            sum.tolerance = (scale * added.tolerance + EPS * total.abs()) * x_scale + EPS * sum.value.abs();
        }
    }
    sums
}

/// Checks the further inputs of layers.
pub fn token_inputs(rig: &mut Rig<'_>) -> Result<()> {
    let (scale, eps) = (0.37, NORM_EPS[0]);
    for (n, layers, width) in [(3, 5, 12), (1, 2, 256), (9, 1, 33)] {
        let case = rig.begin("token_inputs", format!("{n} rows, {layers} layers, {width} numbers each"))?;
        let [projected, embedded] = [(); 2].map(|()| normals(&mut rig.rng, n * layers * width, 1.0));
        let factors = normals(&mut rig.rng, width, 1.0);
        let (projections, embeddings, norm) = (rig.array(&projected)?, rig.array(&embedded)?, rig.array(&factors)?);
        let out = rig.unwritten(n * layers * width)?;
        rig.ops.token_inputs(&TokenInputs {
            projected: projections.view(),
            embedded: embeddings.view(),
            norm: norm.view(),
            out: out.view(),
            n,
            layers,
            scale,
            eps,
        })?;
        let expected = |i: usize| {
            let (layer, row, column) = (i / width / n, i / width % n, i % width);
            let at = (row * layers + layer) * width;
            let x: Vec<Expected> =
                projected[at..at + width].iter().map(|x| Expected::exact(f64::from(*x) * f64::from(scale))).collect();
            let x = normed(&x, Some(NormKind::Rms), Some(&factors))[column];
            let embedded = f64::from(embedded[at + column]);
            let value = (x.value + embedded) * std::f64::consts::FRAC_1_SQRT_2;
            Expected { value, tolerance: x.tolerance + 4.0 * EPS * (x.value.abs() + embedded.abs()) }
        };
        rig.compare(&case, width, &out.read()?, expected);
    }
    Ok(())
}

fn activations(rig: &mut Rig<'_>) -> Result<()> {
    let kinds = [
        ("silu", Activation::Silu),
        ("gelu", Activation::GeluTanh),
        ("swiglu_oai", Activation::SwigluOai { alpha: 1.702, limit: 7.0 }),
        ("relu2", Activation::Relu2),
    ];
    for (name, activation) in kinds {
        for (n, width) in [(130, 6), (3, 48), (1, 513), (9, 2880)] {
            for interleaved in [false, true].into_iter().filter(|interleaved| activation.is_gated() || !interleaved) {
                gated(rig, (name, activation), n, width, interleaved)?;
            }
        }
    }
    Ok(())
}

fn gated(
    rig: &mut Rig<'_>,
    (name, activation): (&str, Activation),
    n: usize,
    width: usize,
    interleaved: bool,
) -> Result<()> {
    let shape = format!("{n} rows of {width}{}", if interleaved { ", gate and up interleaved" } else { "" });
    let case = rig.begin(format!("gated, {name}"), shape)?;
    let mut gate = normals(&mut rig.rng, n * width, 4.0);
    let up = normals(&mut rig.rng, n * width, 4.0);
    // Arguments at which exponentials overflow or underflow, and NaN and infinity, which must not be lost.
    let edges = [0.0, -0.0, 88.5, -88.5, 110.0, -110.0, f32::NAN, f32::INFINITY];
    gate[2..10].copy_from_slice(&edges);
    // An activation without a gate has one factor.
    let up = if activation.is_gated() { up } else { gate.clone() };
    let out = rig.room(n, width)?;
    let (gates, ups) = match interleaved {
        true => (gate.iter().zip(&up).flat_map(|(gate, up)| [*gate, *up]).collect(), None),
        false => (gate.clone(), Some(rig.array(&up)?)),
    };
    let gates = rig.array::<f32>(&gates)?;
    let middle = Middle { activation, out: &out, intermediate: width };
    rig.ops.gated(&ops::gated(&middle, gates.view(), ups.as_ref().map(Array::view), n))?;
    let found = rig.read_acts(&case, &out, n)?;
    rig.compare(&case, width, &found, |i| activated(activation, f64::from(gate[i]), f64::from(up[i])));
    Ok(())
}

/// Returns the expected activation of gate and up.
pub fn activated(activation: Activation, gate: f64, up: f64) -> Expected {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let (value, exponent) = match activation {
        Activation::Silu => (gate * sigmoid(gate) * up, gate),
        Activation::GeluTanh => {
            let exponent = f64::from(1.595_769f32) * (gate + f64::from(0.044_715f32) * gate.powi(3));
            (gate * sigmoid(exponent) * up, exponent)
        }
        Activation::SwigluOai { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let gate = if gate > limit { limit } else { gate };
            let up = up.clamp(-limit, limit);
            ((up + 1.0) * gate * sigmoid(alpha * gate), alpha * gate)
        }
        Activation::Relu2 => (if up < 0.0 { 0.0 } else { up * up }, 0.0),
    };
    // The rounding error of an exponent is multiplied by the exponent; e^-87 is near the smallest f32.
    let relative = 8.0 + 4.0 * exponent.abs().min(100.0);
    // `up + 1` may cancel.
    let magnitude =
        if let Activation::SwigluOai { .. } = activation { value.abs() + gate.abs().min(7.0) } else { value.abs() };
    let floor = 1e-36 * (1.0 + gate.abs().min(1e3)) * (1.0 + up.abs());
    Expected { value, tolerance: relative * EPS * magnitude + floor }
}
