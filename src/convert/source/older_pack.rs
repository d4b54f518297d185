//! Reads a pack of the predecessor as a checkpoint.
//!
//! Its description gives the Hugging Face name of each tensor and its offset in one binary, but does not describe the
//! model, so the pack cannot be run; with `config.json` it is complete as a checkpoint. Floats, MXFP4 codes and MXFP4
//! scales become source tensors; matrices of finished 4-bit codes are copied unchanged. The binary is read at offsets
//! and not mapped, like every source.

use super::read_at::InputFile;
use super::shards::Shards;
use super::source_tensor::SourceTensor;
use crate::convert::json::Pairs;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::int4::TERMS;
use crate::iebin::reader::{check_entries, plain_file_name, read_description};
use crate::iebin::{EntryJson, JSON_NAME, Store};
use crate::manifest::{FinishedTensor, older_entry};
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};

/// File names of descriptions; the second belongs to packs with 4-bit copies of their attention matrices.
const NAMES: [&str; 2] = [JSON_NAME, "model.ie.compat.json"];

/// Returns the path of the description if `dir` has a pack of an older program.
///
/// # Errors
/// The description cannot be read.
pub(super) fn description_in(dir: &Path) -> Result<Option<PathBuf>> {
    let Some(path) = files::first(NAMES.iter().map(|name| dir.join(name)))? else { return Ok(None) };
    Ok(is_description(&path)?.then_some(path))
}

/// Returns true if a file is the description of a pack of an older program.
///
/// # Errors
/// The file cannot be read.
pub(super) fn is_description(path: &Path) -> Result<bool> {
    // Values are skipped, not built. An invalid file is reported when the model is opened.
    let Ok(Pairs::<IgnoredAny>(keys)) = serde_json::from_slice(&crate::convert::json::read_limited(path)?) else {
        return Ok(false);
    };
    let has = |wanted: &str| keys.iter().any(|(key, _)| key == wanted);
    Ok(has("tensors") && !has("model") && !has("created_by"))
}

/// Opens the pack that `json` describes.
///
/// # Errors
/// A file is missing, or a name, shape, range or size in the description is invalid.
pub(super) fn open(json: &Path) -> Result<Shards> {
    let description = read_description(json)?;
    if !description.is_older() {
        return Err(Error::usage("found a pack of this program, expected a checkpoint").at(json).help(
            "name it with --model-dir, as in `iec run --model-dir DIR`, or turn it back into a checkpoint: \
                 `iec unpack --model-dir DIR --out-dir NEW`",
        ));
    }
    let dir = json.parent().unwrap_or(Path::new(""));
    let name = plain_file_name(&description.weights_bin).tensor("weights_bin").at(json)?;
    let bin = InputFile::open(&dir.join(name))?;
    if let Some(expected) = description.total_bytes.filter(|n| *n != bin.nbytes()) {
        let found = format!("found {} bytes, expected {expected} from the description", bin.nbytes());
        return Err(Error::corrupt(found)
            .at(bin.path())
            .help("the file is truncated or belongs to another pack; copy it again"));
    }
    let entries = without_copies(description.tensors);
    let mut names = HashSet::new();
    if let Some(double) = entries.iter().find(|e| !names.insert(e.name.clone())) {
        return Err(Error::corrupt("found this tensor twice").tensor(&double.name).at(json));
    }
    let (codes, plain): (Vec<EntryJson>, Vec<EntryJson>) = entries.into_iter().partition(|e| e.older.is_some());
    let (mut packed, mut unexplained) = (BTreeMap::new(), BTreeSet::new());
    for entry in codes {
        match entry.older.as_ref().filter(|quant| !quant.is_empty()) {
            Some(quant) => {
                let tensor = packed_tensor(&entry, quant, name, dir).tensor(&entry.name).at(json)?;
                packed.insert(entry.name, tensor);
            }
            None => drop(unexplained.insert(entry.name)),
        }
    }
    let len = usize::try_from(bin.nbytes()).unwrap_or(usize::MAX);
    let tensors = check_entries(plain, len, true).at(json)?.into_iter().map(|entry| match entry.store {
        Store::Plain(dtype) => Ok((
            entry.name.clone(),
            SourceTensor {
                name: entry.name,
                dtype,
                shape: entry.shape,
                shard: 0,
                start: entry.offset as u64,
                nbytes: entry.nbytes,
                strides: None,
            },
        )),
        Store::Tiled(_) => Err(Error::unsupported("found tiled weights in a pack without a description of its model")
            .tensor(entry.name)
            .at(json)
            .help("make the pack again from its checkpoint")),
    });
    Ok(Shards { tensors: tensors.collect::<Result<_>>()?, files: vec![bin], packed, unexplained })
}

/// Removes copies: some packs have a float matrix and a 4-bit copy of it as `NAME_blocks` and `NAME_scales`; the
/// original is used.
fn without_copies(entries: Vec<EntryJson>) -> Vec<EntryJson> {
    let names: HashSet<String> = entries.iter().filter(|e| e.older.is_none()).map(|e| e.name.clone()).collect();
    let is_copy = |name: &str| {
        let original = name.strip_suffix("_blocks").or_else(|| name.strip_suffix("_scales"));
        original.is_some_and(|original| original.ends_with(".weight") && names.contains(original))
    };
    entries.into_iter().filter(|e| !is_copy(&e.name)).collect()
}

/// Reads the description of a matrix of 4-bit codes: the codes are in the binary, the scales in a separate file.
fn packed_tensor(entry: &EntryJson, quant: &Map<String, Value>, bin: &str, dir: &Path) -> Result<FinishedTensor> {
    let known =
        |field: &&String| TERMS.contains(&field.as_str()) || ["scale_bin", "scale_offset"].contains(&field.as_str());
    if let Some(field) = quant.keys().find(|field| !known(field)) {
        return Err(Error::unsupported(format!("found the unknown field `{field}` in quant"))
            .help("remove it if it does not affect the encoding; docs/FORMAT.md lists the supported fields"));
    }
    // A manifest of these programs lists the fields of the entry and of its `quant` in one object.
    let own = json!({"shape": entry.shape, "packed_bin": bin, "q4_offset": entry.offset, "q4_nbytes": entry.nbytes});
    let mut whole = quant.clone();
    whole.extend(own.as_object().into_iter().flatten().map(|(field, value)| (field.clone(), value.clone())));
    whole.entry("scale_offset").or_insert(0.into());
    let read = older_entry(&whole, &mut BTreeMap::new())?;
    read.check(dir)?;
    Ok(read.finished(dir).expect("entries of older programs have finished bytes"))
}
