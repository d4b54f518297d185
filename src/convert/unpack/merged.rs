//! Adapters that are merged into the weights of the checkpoint.

use crate::adapter::{Adapter, Change};
use crate::convert::adapter::{self, Combination};
use crate::convert::rows::Merged;
use crate::error::{Context, Error, Result};
use crate::iebin::{IebinReader, Store};
use crate::model_config::ModelConfig;
use crate::scheme::Scheme;
use std::path::PathBuf;

/// Reads adapters for the model of a pack, combined into one if their changes are not just added, and checks that they
/// can be merged.
///
/// # Errors
/// One cannot be read, or changes something that no weight of the checkpoint can express.
pub(super) fn read(
    reader: &IebinReader,
    sources: &[(PathBuf, f32)],
    how: Combination,
    model: &ModelConfig,
) -> Result<Vec<(Adapter, f32)>> {
    let checked = |adapter: Adapter| -> Result<Adapter> {
        for (name, changes) in &adapter.changes {
            changes.iter().try_for_each(|change| check(reader, name, change, model)).tensor(name)?;
        }
        Ok(adapter)
    };
    if how != Combination::Cat {
        return Ok(vec![(checked(adapter::combine(sources, how, model)?)?, 1.0)]);
    }
    let one = |(dir, factor): &(PathBuf, f32)| {
        let adapter = adapter::read(dir, model)?;
        let has_magnitudes = adapter.changes.values().flatten().any(|change| change.magnitude.is_some());
        if has_magnitudes && (sources.len() > 1 || *factor != 1.0) {
            return Err(Error::usage(
                "found an adapter of DoRA with others or with a scale, expected it alone with scale 1",
            )
            .at(dir));
        }
        Ok((checked(adapter).at(dir)?, *factor))
    };
    sources.iter().map(one).collect()
}

/// Returns the name of the bias of a matrix.
fn bias_of(name: &str) -> Option<String> {
    name.strip_suffix(".weight").map(|module| format!("{module}.bias"))
}

fn check(reader: &IebinReader, name: &str, change: &Change, model: &ModelConfig) -> Result<()> {
    let refused =
        |reason: &str| Err(Error::unsupported(format!("{reason}, so it cannot be merged")).help("use it with --lora"));
    let entry = |name: &str| reader.entries().iter().find(|entry| entry.name == name);
    let Some(own) = entry(name) else {
        return refused("found a change of the output matrix of a model that has none of its own");
    };
    if matches!(own.store, Store::Tiled(spec) if spec.scheme == Scheme::Mxfp4) {
        return refused("found a change of a matrix of MXFP4, which the checkpoint keeps in that form");
    }
    if name == "model.embed_tokens.weight" && model.tied_embeddings {
        return refused("found a change of the embedding alone, which the model also uses as its output matrix");
    }
    if name == "model.embed_tokens.weight" && change.magnitude.is_some() {
        return refused("found magnitudes of the columns of the embedding");
    }
    let biased = change.added.is_some() || change.bias.is_some();
    match bias_of(name).filter(|bias| entry(bias).is_some()) {
        None if biased => refused("found a bias for a matrix that has none"),
        _ => Ok(()),
    }
}

/// Returns the changes of a tensor of the pack.
pub(super) fn of<'a>(adapters: &'a [(Adapter, f32)], name: &str) -> Vec<Merged<'a>> {
    let of_bias = |adapter: &'a Adapter| {
        let weight = name.strip_suffix(".bias").map(|module| format!("{module}.weight"))?;
        adapter.changes.get(&weight)?.first().filter(|change| change.added.is_some() || change.bias.is_some())
    };
    let one = |(adapter, factor): &'a (Adapter, f32)| match adapter.changes.get(name) {
        Some(changes) => Some(Merged::Matrix(changes, *factor)),
        None => of_bias(adapter).map(|change| Merged::Bias(change, *factor)),
    };
    adapters.iter().filter_map(one).collect()
}
