//! Combines several adapters into one, as `add_weighted_adapter` of PEFT 0.21 does: A and B of a module are combined
//! separately, so the change of the combined adapter is the product of the two results.
//!
//! An adapter with the factor `w` and the scale `s` weighs `sqrt(|w s|)` in A and in B; the sign of `w s` goes to A.
//! `linear` adds the weighted factors. `ties` (TIES-Merging) does three steps per number: each adapter keeps the share
//! `density` of its largest numbers, the sign of their sum is elected, and the weighted numbers of that sign are
//! averaged over the adapters that have one. Signs are elected before numbers are weighted. A module that only some
//! adapters change is combined from these. PEFT multiplies the result by `sqrt(rank)` if its first adapter uses rsLoRA,
//! whose scale the weights contain already; this is left out.

use super::config::AdapterConfig;
use super::map::Mapper;
use super::modules::{ModulePart, Modules, Values};
use super::{FILE, arch_of, digest, modules, settings};
use crate::adapter::Adapter;
use crate::error::{Context, Error, Result};
use crate::model_config::ModelConfig;
use crate::sha256::{Digest, Sha256, hex};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Share of the numbers of a factor that `ties` keeps if no density is named: that of the paper on TIES-Merging.
const DENSITY: f64 = 0.2;

/// Way in which several adapters become one change of a matrix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub enum Combination {
    /// Sum of the changes; the same as concatenated factors.
    #[default]
    Cat,
    /// Product of the sums of the factors.
    Linear,
    /// Product of factors that are trimmed, that agree in sign, and that are averaged.
    Ties {
        /// Share of the numbers of each factor that is kept.
        density: f64,
    },
}

impl FromStr for Combination {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Combination, String> {
        let density = match text.split_once(':') {
            Some(("ties", density)) => density.parse().ok(),
            None if text == "ties" => Some(DENSITY),
            None if text == "cat" => return Ok(Combination::Cat),
            None if text == "linear" => return Ok(Combination::Linear),
            _ => return Err("expected cat, linear, ties or ties:DENSITY".into()),
        };
        match density.filter(|density| (0.0..=1.0).contains(density)) {
            Some(density) => Ok(Combination::Ties { density }),
            None => Err("expected a density from 0 to 1 after the colon".into()),
        }
    }
}

impl fmt::Display for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Combination::Cat => f.write_str("cat"),
            Combination::Linear => f.write_str("linear"),
            Combination::Ties { density } => write!(f, "ties:{density}"),
        }
    }
}

/// An adapter that is combined with others.
struct Weighted {
    settings: AdapterConfig,
    modules: Modules,
    factor: f32,
}

/// Reads the adapters in directories, each with its factor, and combines them into one for a model, with [`Linear`] or
/// [`Ties`].
///
/// # Errors
/// There are fewer than two, one cannot be read or has more than low-rank factors of modules, or the ranks of a module
/// differ.
///
/// [`Linear`]: Combination::Linear
/// [`Ties`]: Combination::Ties
pub fn combine(sources: &[(PathBuf, f32)], how: Combination, model: &ModelConfig) -> Result<Adapter> {
    let [(first, _), _, ..] = sources else {
        let found = format!("--merge {how}: found {} adapters, expected at least two", sources.len());
        return Err(Error::usage(found).help("name each with --lora, or leave --merge out"));
    };
    let mut hash = Sha256::new_with_prefix(how.to_string());
    let mut all = Vec::with_capacity(sources.len());
    for (dir, factor) in sources {
        let (text, settings) = settings(dir)?;
        let modules = modules::read(&dir.join(FILE))?;
        check(&settings, &modules).at(dir)?;
        hash.update(digest(&text, dir)?);
        hash.update(factor.to_le_bytes());
        all.push(Weighted { settings, modules, factor: *factor });
    }
    let names: BTreeSet<&String> = all.iter().flat_map(|adapter| adapter.modules.keys()).collect();
    let one = |name: &String| Ok((name.clone(), module(&all, name, how).tensor(name)?));
    let modules = names.into_iter().map(one).collect::<Result<Modules>>()?;
    let settings = AdapterConfig::with_scale(1.0);
    let arch = arch_of(model).at(first)?;
    let changes = Mapper { settings: &settings, arch, model, modules: &modules, used: Default::default() }.map()?;
    Ok(Adapter { hash: hex(hash), changes })
}

/// Refuses an adapter with anything that has no combination.
fn check(settings: &AdapterConfig, modules: &Modules) -> Result<()> {
    let refused = |what: &str| Error::unsupported(format!("found {what}, which cannot be combined")).help(ADVICE);
    if !settings.parameters.is_empty() {
        return Err(refused("factors of parameters (`target_parameters`)"));
    }
    let factors = [ModulePart::A, ModulePart::B, ModulePart::EmbeddingA, ModulePart::EmbeddingB];
    for (name, parts) in modules {
        if let Some(part) = parts.keys().find(|part| !factors.contains(part)) {
            let what = match part {
                ModulePart::Magnitude => "magnitudes of DoRA",
                ModulePart::Weight => "a whole weight",
                _ => "a bias",
            };
            return Err(refused(what).tensor(name));
        }
    }
    Ok(())
}

/// Advice for an adapter that cannot be combined.
const ADVICE: &str = "merge without --merge, which adds changes exactly, or save the adapter with low-rank factors \
                      alone (for embeddings with `save_embedding_layers=False`)";

/// Combines the factors of a module.
fn module(all: &[Weighted], name: &str, how: Combination) -> Result<BTreeMap<ModulePart, Values>> {
    let changing: Vec<(&Weighted, &BTreeMap<ModulePart, Values>)> =
        all.iter().filter_map(|adapter| Some((adapter, adapter.modules.get(name)?))).collect();
    let (_, parts) = changing[0];
    let mut combined = BTreeMap::new();
    for (part, like) in parts {
        let mut factors = Vec::with_capacity(changing.len());
        for (adapter, parts) in &changing {
            let values =
                parts.get(part).ok_or_else(|| Error::corrupt(format!("found {part:?} in some adapters only")))?;
            if values.shape != like.shape {
                let found = format!("found shapes {:?} and {:?} of {part:?}", like.shape, values.shape);
                return Err(Error::unsupported(format!("{found}, expected adapters of the same rank")).help(ADVICE));
            }
            factors.push((&values.values[..], adapter.weight(name, *part, parts)));
        }
        let values = Values { shape: like.shape.clone(), values: combined_numbers(&factors, how), dtype: like.dtype };
        combined.insert(*part, values);
    }
    Ok(combined)
}

impl Weighted {
    /// Returns the weight of a factor of a module.
    fn weight(&self, name: &str, part: ModulePart, parts: &BTreeMap<ModulePart, Values>) -> f32 {
        let a = parts.get(&ModulePart::A).or(parts.get(&ModulePart::EmbeddingA));
        let rank = a.map_or(1, |a| a.shape[0]);
        let weight = f64::from(self.factor) * f64::from(self.settings.scale(name, rank));
        let is_a = matches!(part, ModulePart::A | ModulePart::EmbeddingA);
        (weight.abs().sqrt() * if is_a && weight < 0.0 { -1.0 } else { 1.0 }) as f32
    }
}

/// Combines the same factor of several adapters, each with its weight.
fn combined_numbers(factors: &[(&[f32], f32)], how: Combination) -> Vec<f32> {
    let count = factors[0].0.len();
    let Combination::Ties { density } = how else {
        return (0..count).map(|i| factors.iter().map(|(values, weight)| weight * values[i]).sum()).collect();
    };
    let trimmed: Vec<Vec<f32>> = factors.iter().map(|(values, _)| trimmed(values, density)).collect();
    let one = |i: usize| {
        let total: f32 = trimmed.iter().map(|values| values[i]).sum();
        let elected = |value: f32| if total >= 0.0 { value > 0.0 } else { value < 0.0 };
        let (mut sum, mut agreeing) = (0.0, 0);
        for (values, (_, weight)) in trimmed.iter().zip(factors).filter(|(values, _)| elected(values[i])) {
            sum += weight * values[i];
            agreeing += 1;
        }
        sum / agreeing.max(1) as f32
    };
    (0..count).map(one).collect()
}

/// Returns the numbers with zeros in place of all but the share `density` of the largest. Of equally large ones the
/// first stay, where PEFT takes any.
fn trimmed(values: &[f32], density: f64) -> Vec<f32> {
    let kept = (density * values.len() as f64) as usize;
    let mut order: Vec<usize> = (0..values.len()).collect();
    if kept < values.len() {
        order.select_nth_unstable_by(kept, |a, b| values[*b].abs().total_cmp(&values[*a].abs()).then(a.cmp(b)));
    }
    let mut trimmed = vec![0.0; values.len()];
    order[..kept].iter().for_each(|i| trimmed[*i] = values[*i]);
    trimmed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_trims_then_elects_signs_and_averages_those_that_agree() {
        let (a, b) = ([4.0, -3.0, 0.5, 2.0, 1.0, -6.0], [1.0, 5.0, -4.0, 2.0, 0.0, -3.0]);
        let ties = |density| combined_numbers(&[(&a, 2.0), (&b, 0.5)], Combination::Ties { density });
        // Without trimming; the sign of the third number is that of -3.5, of the unweighted sum.
        assert_eq!(ties(1.0), [(8.0 + 0.5) / 2.0, 2.5, -2.0, 2.5, 2.0, (-12.0 - 1.5) / 2.0]);
        // The three largest of each: 4, -3, -6 and 5, -4, -3.
        assert_eq!(ties(0.5), [8.0, 2.5, -2.0, 0.0, 0.0, (-12.0 - 1.5) / 2.0]);
        assert_eq!(ties(0.0), [0.0; 6]);
        // 0.99 * 6 keeps five numbers; equal ones stay in their order.
        assert_eq!(trimmed(&[1.0, -1.0, 1.0, 1.0, 1.0, 1.0], 0.99), [1.0, -1.0, 1.0, 1.0, 1.0, 0.0]);
        assert_eq!(combined_numbers(&[(&a, 2.0), (&b, 0.5)], Combination::Linear)[..3], [8.5, -3.5, -1.0]);
    }

    #[test]
    fn combinations_have_names() {
        for (text, how) in [
            ("cat", Combination::Cat),
            ("linear", Combination::Linear),
            ("ties:0.2", Combination::Ties { density: 0.2 }),
            ("ties:1", Combination::Ties { density: 1.0 }),
        ] {
            assert_eq!((text.parse(), how.to_string()), (Ok(how), text.to_string()));
        }
        assert_eq!("ties".parse(), Ok(Combination::Ties { density: 0.2 }));
        for wrong in ["", "svd", "ties:", "ties:1.5", "ties:-0.1", "ties:nan", "linear:0.5"] {
            assert!(wrong.parse::<Combination>().is_err(), "{wrong}");
        }
    }
}
