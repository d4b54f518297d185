//! Rotary position embedding (RoPE), following `modeling_rope_utils.py`.

use super::config::pairs;
use super::family::Family;
use super::fields::Fields;
use super::rules::Share;
use crate::error::{Error, Result};
use candle_core::{D, Device, Tensor};
use std::f64::consts::TAU;

/// Inverse frequencies of a layer, and the factor applied to cosines and sines.
#[derive(Debug, Clone)]
pub struct Rope {
    inv_freq: Vec<f32>,
    /// Inverse frequencies for texts longer than the limit, and the limit in tokens.
    long: Option<(Vec<f32>, usize)>,
    factor: f64,
    pairs: Pairs,
}

/// Values of a head that are rotated together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pairs {
    /// Value `i` and value `i + n / 2` of `n` rotated values.
    Halves,
    /// Values `2 i` and `2 i + 1`.
    Adjacent,
}

/// Embeddings of the two types of layers.
pub(super) struct Ropes {
    /// Embedding of layers that attend to all positions.
    pub full: Rope,
    /// Embedding of layers with sliding-window attention.
    pub sliding: Rope,
}

impl Ropes {
    /// Reads the embeddings of layers with heads of `full_dim` and `sliding_dim` values. Layers with sliding-window
    /// attention may have their own base (Gemma) or no scaling (OLMo 3).
    pub fn read(family: Family, json: Fields<'_>, full_dim: usize, sliding_dim: usize) -> Result<Ropes> {
        let parameters = json.object("rope_parameters");
        let by_type = |kind: &str| parameters.and_then(|p| p.object(kind));
        let full = by_type("full_attention").or(parameters).or(json.object("rope_scaling"));
        if full.is_none() && family == Family::Gemma4 {
            return Err(
                Error::corrupt("found no value, expected an object for each type of layer").tensor("rope_parameters")
            );
        }
        let theta = json.number("rope_theta")?.unwrap_or(family.row().theta);
        let part = match family.row().rotation.0 {
            Share::Whole => RotatedShare::Whole,
            Share::Given(share) => RotatedShare::Given(share),
            Share::Width(field) => RotatedShare::Given(json.size(field)?.unwrap_or(full_dim) as f64 / full_dim as f64),
        };
        let shape = Shape { head_dim: full_dim, part, pairs: pairs(family, json)? };
        let full = Rope::read(json, full, theta, shape)?;
        let shape = Shape { head_dim: sliding_dim, ..shape };
        let usual = if family == Family::Olmo3 { theta } else { 10_000.0 };
        let sliding = match (by_type("sliding_attention"), json.number("rope_local_base_freq")?) {
            (Some(own), _) => Rope::read(json, Some(own), usual, shape)?,
            (None, Some(theta)) => Rope::read(json, None, theta, shape)?,
            (None, None) if family == Family::Olmo3 => Rope::read(json, None, theta, shape)?,
            (None, None) if family == Family::Gemma3 && parameters.is_none() => {
                Rope::read(json, None, 10_000.0, shape)?
            }
            (None, None) => full.clone(),
        };
        Ok(Ropes { full, sliding })
    }
}

/// Values of a head that an embedding rotates.
#[derive(Clone, Copy)]
struct Shape {
    head_dim: usize,
    part: RotatedShare,
    pairs: Pairs,
}

/// Share of a head that is rotated.
#[derive(Clone, Copy)]
enum RotatedShare {
    /// The whole head, whatever `partial_rotary_factor` says.
    Whole,
    /// That of `partial_rotary_factor`, or this one.
    Given(f64),
}

impl Rope {
    fn read(json: Fields<'_>, parameters: Option<Fields<'_>>, theta: f64, shape: Shape) -> Result<Rope> {
        let empty = serde_json::Value::Null;
        let p = parameters.unwrap_or(Fields(&empty));
        let theta = p.number("rope_theta")?.unwrap_or(theta);
        let kind = p.word("rope_type").or(p.word("type")).unwrap_or("default");
        let part = match shape.part {
            RotatedShare::Whole => 1.0,
            RotatedShare::Given(usual) => {
                p.number("partial_rotary_factor")?.or(json.number("partial_rotary_factor")?).unwrap_or(usual)
            }
        };
        let (head_dim, part_dim) = (shape.head_dim, (shape.head_dim as f64 * part) as usize);
        let dim = if kind == "proportional" { head_dim } else { part_dim };
        if dim == 0 || part_dim > head_dim || !dim.is_multiple_of(2) || theta <= 0.0 {
            let found = format!("found {dim} of {head_dim} values and base {theta}, expected an even number, base > 0");
            return Err(Error::corrupt(found).tensor("rope_theta"));
        }
        let plain: Vec<f64> = (0..dim / 2).map(|i| theta.powf(-2.0 * i as f64 / dim as f64)).collect();
        let of = |freq: Vec<f64>| Rope { inv_freq: narrow(freq), long: None, factor: 1.0, pairs: shape.pairs };
        let need =
            |key: &str| p.number(key)?.ok_or_else(|| Error::corrupt("found no value, expected a number").tensor(key));
        match kind {
            // The three axes of mrope have the same positions in a text.
            "default" | "mrope" => Ok(of(plain)),
            "linear" => {
                let factor = need("factor")?;
                Ok(of(plain.iter().map(|f| f / factor).collect()))
            }
            "proportional" => {
                let (factor, turning) = (p.number("factor")?.unwrap_or(1.0), part_dim / 2);
                let freq = |(i, f): (usize, &f64)| if i < turning { f / factor } else { 0.0 };
                Ok(of(plain.iter().enumerate().map(freq).collect()))
            }
            "llama3" => {
                let original = original_length(json, p)?;
                let (low, high) = (need("low_freq_factor")?, need("high_freq_factor")?);
                Ok(of(llama3(&plain, need("factor")?, low, high, original)))
            }
            "yarn" => {
                let original = original_length(json, p)?;
                let factor = match p.number("factor")? {
                    Some(factor) => factor,
                    None => longest(json)? / original,
                };
                let bands = (p.number("beta_fast")?.unwrap_or(32.0), p.number("beta_slow")?.unwrap_or(1.0));
                let truncate = p.flag("truncate", true)?;
                let scaled = of(yarn(&plain, theta, factor, bands, truncate, original));
                Ok(Rope { factor: yarn_scale(p, factor)?, ..scaled })
            }
            "longrope" | "su" => longrope(json, p, of(plain.clone()), &plain),
            other => {
                Err(Error::unsupported(format!("found rope type `{other:.40}`, which the reference does not support"))
                    .tensor("rope_scaling"))
            }
        }
    }

    /// Returns the length in tokens of the longest text that uses LongRoPE's short factors; `None` for other kinds of
    /// scaling.
    pub fn border(&self) -> Option<usize> {
        self.long.as_ref().map(|(_, border)| *border)
    }

    /// Rotates `(heads, tokens, head_dim)`; the tokens are at positions 0, 1, …
    pub fn rotate(&self, x: &Tensor, long: bool) -> candle_core::Result<Tensor> {
        let (heads, tokens, head_dim) = x.dims3()?;
        let inv_freq = self.long.as_ref().filter(|_| long).map_or(&self.inv_freq, |(long, _)| long);
        let half = inv_freq.len();
        let positions = Tensor::arange(0u32, tokens as u32, &Device::Cpu)?.to_dtype(candle_core::DType::F32)?;
        let angles = positions.unsqueeze(1)?.matmul(&Tensor::new(inv_freq.as_slice(), &Device::Cpu)?.unsqueeze(0)?)?;
        // Angles are those of f32 in models of any type.
        let angles = angles.to_dtype(x.dtype())?;
        let (cos, sin) = ((angles.cos()? * self.factor)?, (angles.sin()? * self.factor)?);
        let turn = |first: &Tensor, second: &Tensor| -> candle_core::Result<(Tensor, Tensor)> {
            let turned_first = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
            let turned_second = (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?;
            Ok((turned_first, turned_second))
        };
        let rest = x.narrow(D::Minus1, 2 * half, head_dim - 2 * half)?;
        let turned = match self.pairs {
            Pairs::Halves => {
                let (first, second) = turn(&x.narrow(D::Minus1, 0, half)?, &x.narrow(D::Minus1, half, half)?)?;
                Tensor::cat(&[first, second], D::Minus1)?
            }
            Pairs::Adjacent => {
                let pairs = x.narrow(D::Minus1, 0, 2 * half)?.contiguous()?.reshape((heads, tokens, half, 2))?;
                let of = |index: usize| pairs.narrow(3, index, 1)?.squeeze(3);
                let (first, second) = turn(&of(0)?, &of(1)?)?;
                Tensor::stack(&[first, second], 3)?.reshape((heads, tokens, 2 * half))?
            }
        };
        if 2 * half == head_dim { Ok(turned) } else { Tensor::cat(&[turned, rest], D::Minus1) }
    }
}

fn narrow(freq: Vec<f64>) -> Vec<f32> {
    freq.into_iter().map(|f| f as f32).collect()
}

/// Returns the longest context of the model in tokens.
fn longest(json: Fields<'_>) -> Result<f64> {
    Ok(json.number("max_position_embeddings")?.unwrap_or(2048.0))
}

/// Returns the context length in tokens before it was extended.
fn original_length(json: Fields<'_>, p: Fields<'_>) -> Result<f64> {
    const KEY: &str = "original_max_position_embeddings";
    p.number(KEY)?.or(json.number(KEY)?).map_or_else(|| longest(json), Ok)
}

fn longrope(json: Fields<'_>, p: Fields<'_>, rope: Rope, plain: &[f64]) -> Result<Rope> {
    let original = original_length(json, p)?;
    let factors = |key: &str| {
        let list = p.numbers(key).filter(|list| list.len() == plain.len());
        list.ok_or_else(|| Error::corrupt(format!("found no list of {} numbers", plain.len())).tensor(key))
    };
    let divided = |by: Vec<f64>| narrow(plain.iter().zip(by).map(|(f, by)| f / by).collect());
    let growth = longest(json)? / original;
    let usual = if growth <= 1.0 { 1.0 } else { (1.0 + growth.ln() / original.ln()).sqrt() };
    Ok(Rope {
        inv_freq: divided(factors("short_factor")?),
        long: Some((divided(factors("long_factor")?), original as usize)),
        factor: p.number("attention_factor")?.unwrap_or(usual),
        ..rope
    })
}

fn llama3(plain: &[f64], factor: f64, low: f64, high: f64, original: f64) -> Vec<f64> {
    let scaled = |f: &f64| {
        let wavelength = TAU / f;
        if wavelength > original / low {
            f / factor
        } else if wavelength < original / high {
            *f
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            (1.0 - smooth) * f / factor + smooth * f
        }
    };
    plain.iter().map(scaled).collect()
}

fn yarn(plain: &[f64], theta: f64, factor: f64, bands: (f64, f64), truncate: bool, original: f64) -> Vec<f64> {
    let dim = 2.0 * plain.len() as f64;
    let correction = |rotations: f64| dim * (original / (rotations * TAU)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (correction(bands.0), correction(bands.1));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    let mixed = |(i, f): (usize, &f64)| {
        let keep = 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        f / factor * (1.0 - keep) + f * keep
    };
    plain.iter().enumerate().map(mixed).collect()
}

fn yarn_scale(p: Fields<'_>, factor: f64) -> Result<f64> {
    Ok(match (p.number("attention_factor")?, p.number("mscale")?, p.number("mscale_all_dim")?) {
        (Some(given), _, _) => given,
        (None, Some(one), Some(all)) if one != 0.0 && all != 0.0 => {
            yarn_magnitude(factor, one) / yarn_magnitude(factor, all)
        }
        _ => yarn_magnitude(factor, 1.0),
    })
}

/// Returns YaRN's factor for texts that are longer by `factor`, whose logarithm is multiplied by `by`.
pub(super) fn yarn_magnitude(factor: f64, by: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 }
}
