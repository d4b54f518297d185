//! Rotary position embedding (RoPE), following `modeling_rope_utils.py`.

use super::config::Fields;
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
}

impl Rope {
    /// Creates the embedding of every layer; layers with sliding-window attention may have their own base (Gemma 3).
    pub(super) fn by_layer(json: Fields<'_>, theta: f64, head_dim: usize, sliding: &[bool]) -> Result<Vec<Rope>> {
        let parameters = json.object("rope_parameters");
        let by_type = |kind: &str| parameters.and_then(|p| p.object(kind));
        let full = by_type("full_attention").or(parameters).or(json.object("rope_scaling"));
        let full = Rope::read(json, full, json.number("rope_theta")?.unwrap_or(theta), head_dim)?;
        let local = match (by_type("sliding_attention"), json.number("rope_local_base_freq")?) {
            (Some(own), _) => Rope::read(json, Some(own), 10_000.0, head_dim)?,
            (None, Some(theta)) => Rope::read(json, None, theta, head_dim)?,
            (None, None) if json.word("model_type") == Some("gemma3_text") && parameters.is_none() => {
                Rope::read(json, None, 10_000.0, head_dim)?
            }
            (None, None) => full.clone(),
        };
        Ok(sliding.iter().map(|sliding| if *sliding { local.clone() } else { full.clone() }).collect())
    }

    fn read(json: Fields<'_>, parameters: Option<Fields<'_>>, theta: f64, head_dim: usize) -> Result<Rope> {
        let empty = serde_json::Value::Null;
        let p = parameters.unwrap_or(Fields(&empty));
        let theta = p.number("rope_theta")?.unwrap_or(theta);
        let part = p.number("partial_rotary_factor")?.or(json.number("partial_rotary_factor")?).unwrap_or(1.0);
        let dim = (head_dim as f64 * part) as usize;
        if dim == 0 || dim > head_dim || !dim.is_multiple_of(2) || theta <= 0.0 {
            let found = format!("found {dim} of {head_dim} values and base {theta}, expected an even number, base > 0");
            return Err(Error::corrupt(found).tensor("rope_theta"));
        }
        let plain: Vec<f64> = (0..dim / 2).map(|i| theta.powf(-2.0 * i as f64 / dim as f64)).collect();
        let positions = json.number("max_position_embeddings")?.unwrap_or(2048.0);
        let original = p
            .number("original_max_position_embeddings")?
            .or(json.number("original_max_position_embeddings")?)
            .unwrap_or(positions);
        let need =
            |key: &str| p.number(key)?.ok_or_else(|| Error::corrupt("found no value, expected a number").tensor(key));
        let narrow = |freq: Vec<f64>| freq.into_iter().map(|f| f as f32).collect::<Vec<f32>>();
        let of = |inv_freq, factor| Rope { inv_freq: narrow(inv_freq), long: None, factor };
        match p.word("rope_type").or(p.word("type")).unwrap_or("default") {
            "default" => Ok(of(plain, 1.0)),
            "linear" => {
                let factor = need("factor")?;
                Ok(of(plain.iter().map(|f| f / factor).collect(), 1.0))
            }
            "llama3" => Ok(of(
                llama3(&plain, need("factor")?, need("low_freq_factor")?, need("high_freq_factor")?, original),
                1.0,
            )),
            "yarn" => {
                let factor = match p.number("factor")? {
                    Some(factor) => factor,
                    None => positions / original,
                };
                let bands = (p.number("beta_fast")?.unwrap_or(32.0), p.number("beta_slow")?.unwrap_or(1.0));
                let truncate = p.flag("truncate", true)?;
                let scale = yarn_scale(p, factor)?;
                Ok(of(yarn(&plain, theta, factor, bands, truncate, original), scale))
            }
            "longrope" | "su" => {
                let factors = |key: &str| {
                    let list = p.numbers(key).filter(|list| list.len() == dim / 2);
                    list.ok_or_else(|| Error::corrupt(format!("found no list of {} numbers", dim / 2)).tensor(key))
                };
                let divided = |by: Vec<f64>| narrow(plain.iter().zip(by).map(|(f, by)| f / by).collect());
                let growth = positions / original;
                let usual = if growth <= 1.0 { 1.0 } else { (1.0 + growth.ln() / original.ln()).sqrt() };
                Ok(Rope {
                    inv_freq: divided(factors("short_factor")?),
                    long: Some((divided(factors("long_factor")?), original as usize)),
                    factor: p.number("attention_factor")?.unwrap_or(usual),
                })
            }
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
        let (_, tokens, head_dim) = x.dims3()?;
        let inv_freq = self.long.as_ref().filter(|_| long).map_or(&self.inv_freq, |(long, _)| long);
        let half = inv_freq.len();
        let positions = Tensor::arange(0u32, tokens as u32, &Device::Cpu)?.to_dtype(candle_core::DType::F32)?;
        let angles = positions.unsqueeze(1)?.matmul(&Tensor::new(inv_freq.as_slice(), &Device::Cpu)?.unsqueeze(0)?)?;
        let (cos, sin) = ((angles.cos()? * self.factor)?, (angles.sin()? * self.factor)?);
        let (first, second) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
        let turned_first = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
        let turned_second = (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?;
        let rest = x.narrow(D::Minus1, 2 * half, head_dim - 2 * half)?;
        Tensor::cat(&[turned_first, turned_second, rest], D::Minus1)
    }
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
    let mscale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
    Ok(match (p.number("attention_factor")?, p.number("mscale")?, p.number("mscale_all_dim")?) {
        (Some(given), _, _) => given,
        (None, Some(one), Some(all)) if one != 0.0 && all != 0.0 => mscale(one) / mscale(all),
        _ => mscale(1.0),
    })
}
