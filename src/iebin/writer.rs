//! Plans the layout of a pack and commits its files atomically.
//!
//! A [`Layout`] fixes every offset before the first byte is written. Payloads are written to a temporary binary of the
//! full size, by any thread and in any order, so the bytes of the file do not depend on that order. [`commit`] makes
//! everything durable in the directory of partial work and replaces an old pack by [`crate::output::swap`], so that the
//! old or the new pack is complete at any moment. A deduplicated store of the old pack is removed with it.

use super::dependants;
use super::reader::parse_description;
use super::{
    ALIGNMENT, AdapterJson, BIN_NAME, COMPANIONS, DEDUP_FILE_NAMES, DEDUP_JSON_NAME, Description, Entry, EntryJson,
    FORMAT, JSON_NAME, PublishedJson, QuantJson, READER_VERSION, SIGNATURE_NAME, Store, VERSION, stored_bytes,
};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::interrupt;
use crate::model_config::ModelConfig;
use crate::output::{AtomicFile, DirLock, directory_of, swap};
use crate::provenance::{Quality, Source};
use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::iter::once;
use std::path::Path;

/// A pack as an output of several files.
pub const PACK: swap::OutputKind = swap::OutputKind { lead: JSON_NAME, members: &MEMBERS, obsolete };
/// Files of a pack other than its description.
const MEMBERS: [&str; 1 + COMPANIONS.len()] = {
    let mut names = [BIN_NAME; 1 + COMPANIONS.len()];
    let mut i = 0;
    while i < COMPANIONS.len() {
        names[1 + i] = COMPANIONS[i];
        i += 1;
    }
    names
};

/// Returns the names of files that cannot belong to the new pack with this description: companions that it does not
/// list, and a store and a signature, which are written after a pack and therefore belong to the old one.
fn obsolete(description: &[u8]) -> Vec<&'static str> {
    let listed = parse_description(description).ok().and_then(|description| description.files);
    let companions =
        COMPANIONS.into_iter().filter(|name| listed.as_ref().is_some_and(|files| !files.contains_key(*name)));
    companions.chain([DEDUP_JSON_NAME, SIGNATURE_NAME]).chain(DEDUP_FILE_NAMES).collect()
}

/// Completes the replacement of the pack in `dir` if a killed process has left it half done.
///
/// # Errors
/// The same as for [`swap::recover`].
pub fn recover(dir: &Path) -> Result<()> {
    swap::recover(dir, PACK)
}

/// A tensor that will be written.
#[derive(Debug, Clone)]
pub struct PlannedTensor {
    /// Canonical name.
    pub name: String,
    /// Logical shape.
    pub shape: Vec<usize>,
    /// Storage form of the payload.
    pub store: Store,
    /// `Some("in_out")` when the last two axes of the source are swapped.
    pub source_layout: Option<String>,
    /// Metrics of the quantizer, if it measured any.
    pub metrics: Option<serde_json::Value>,
}

/// Content of the description other than its tensors.
#[derive(Debug, Default)]
pub struct DescriptionParts {
    /// Configuration of the model.
    pub model: Option<ModelConfig>,
    /// File name of the tokenizer among the companions.
    pub tokenizer: Option<String>,
    /// Names of the companions from which the tokenizer was made, if the checkpoint had none.
    pub tokenizer_from: Vec<String>,
    /// Source of the weights.
    pub source: Option<Source>,
    /// Quantized checkpoint that the weights come from.
    pub published: Option<PublishedJson>,
    /// Quality thresholds of the quantization and its measured loss.
    pub quality: Option<Quality>,
    /// Changes of an adapter.
    pub adapter: Option<AdapterJson>,
    /// Files that belong to the pack (config, tokenizer), complete but not yet committed.
    pub companions: Vec<AtomicFile>,
    /// SHA-256 of each file that belongs to the pack, by name.
    pub files: BTreeMap<String, String>,
}

/// Offsets of all payloads in the binary.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The tensors with their offsets, in plan order.
    pub entries: Vec<Entry>,
    /// Length of the binary.
    pub total_bytes: u64,
}

/// Completes the pack whose binary is `bin`, which has all payloads at their offsets and zeros between them. `sha256`
/// holds the hex digest of every payload, in plan order. `work` is the directory of partial work, next to the files of
/// the pack; `allowed` is called immediately before the swap, while other commands are locked out.
///
/// # Errors
/// A write, sync or rename fails, the user interrupts, `allowed` fails, or other packs are rebuilt from the pack that
/// would be replaced. In these cases the old pack is unchanged or, if the error occurs after the swap, the new pack
/// is complete.
pub fn commit(
    layout: Layout,
    bin: AtomicFile,
    work: &Path,
    parts: DescriptionParts,
    sha256: Vec<String>,
    allowed: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let Layout { mut entries, total_bytes } = layout;
    assert_eq!(sha256.len(), entries.len(), "one digest per tensor");
    for (entry, digest) in entries.iter_mut().zip(sha256) {
        entry.sha256 = Some(digest);
    }
    let mut parts = parts;
    let companions = std::mem::take(&mut parts.companions);
    let json_path = bin.path().with_file_name(JSON_NAME);
    let dir = directory_of(&json_path);
    let mut json = AtomicFile::create_in(work, &json_path)?;
    json.write_all(describe(&entries, total_bytes, parts)?.to_text().as_bytes()).at(&json_path)?;
    interrupt::check()?;
    let _lock = DirLock::acquire(dir)?;
    swap::settle(dir, PACK)?;
    swap::replace(dir, work, PACK, once(bin).chain(companions).chain(once(json)).collect(), || {
        dependants::refuse_if_needed(dir)?;
        allowed()
    })
}

impl Layout {
    /// Assigns offsets in plan order.
    ///
    /// # Errors
    /// A name appears twice, a shape does not fit its store, or the binary would exceed the largest file size.
    pub fn new(plan: Vec<PlannedTensor>) -> Result<Layout> {
        let mut names = HashSet::new();
        let mut entries = Vec::with_capacity(plan.len());
        let mut end = 0usize;
        for tensor in plan {
            if !names.insert(tensor.name.clone()) {
                return Err(Error::corrupt("found this tensor twice in the plan").tensor(tensor.name));
            }
            let nbytes = stored_bytes(tensor.store, &tensor.shape).tensor(&tensor.name)?;
            let range = end
                .checked_next_multiple_of(tensor.store.alignment())
                .and_then(|offset| Some((offset, offset.checked_add(nbytes)?)))
                .filter(|(_, end)| i64::try_from(*end).is_ok());
            let Some((offset, after)) = range else {
                return Err(Error::corrupt("found a pack of more than 2^63 - 1 bytes, which no file can have")
                    .tensor(tensor.name));
            };
            end = after;
            let PlannedTensor { name, shape, store, source_layout, metrics } = tensor;
            entries.push(Entry { name, shape, store, offset, nbytes, sha256: None, source_layout, metrics });
        }
        Ok(Layout { entries, total_bytes: end as u64 })
    }
}

/// Refuses a directory that contains a pack.
pub fn refuse_existing(dir: &Path) -> Result<()> {
    match files::first([JSON_NAME, BIN_NAME].map(|name| dir.join(name)))? {
        Some(path) => Err(Error::usage("exists already").at(path).help("add --overwrite or choose another --out-dir")),
        None => Ok(()),
    }
}

fn describe(entries: &[Entry], total_bytes: u64, parts: DescriptionParts) -> Result<Description> {
    Ok(Description {
        version: VERSION,
        dtype: dominant_dtype(entries),
        weights_bin: BIN_NAME.to_string(),
        format: FORMAT.to_string(),
        total_bytes: Some(total_bytes),
        alignment: Some(ALIGNMENT as u64),
        endianness: Some("little".to_string()),
        created_by: Some(concat!("iec ", env!("CARGO_PKG_VERSION")).to_string()),
        architecture: parts.model.as_ref().map(|m| m.architecture.clone()),
        model: parts.model,
        tokenizer: parts.tokenizer,
        tokenizer_from: parts.tokenizer_from,
        source: parts.source,
        published: parts.published,
        quality: parts.quality,
        adapter: parts.adapter,
        files: Some(parts.files),
        reader_version: Some(READER_VERSION),
        tensors: entries.iter().map(entry_json).collect::<Result<_>>()?,
        sha256: None,
        read_from: None,
    })
}

fn entry_json(entry: &Entry) -> Result<EntryJson> {
    Ok(EntryJson {
        name: entry.name.clone(),
        dtype: entry.store.dtype_name().to_string(),
        shape: entry.shape.iter().map(|d| *d as u64).collect(),
        nbytes: entry.nbytes as u64,
        offset: entry.offset as u64,
        sha256: entry.sha256.clone(),
        source_layout: entry.source_layout.clone(),
        quant: entry.layout().transpose()?.map(|layout| QuantJson::new(&layout, entry.metrics.clone())),
        older: None,
    })
}

/// Returns the dtype with the most bytes, in lower case.
fn dominant_dtype(entries: &[Entry]) -> Option<String> {
    let mut bytes = BTreeMap::new();
    for entry in entries {
        *bytes.entry(entry.store.dtype_name()).or_insert(0) += entry.nbytes;
    }
    bytes.into_iter().max_by_key(|(_, n)| *n).map(|(name, _)| name.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::iebin::IebinReader;
    use crate::scheme::{Granularity, QuantSpec, ScaleType, Scheme};
    use proptest::prelude::*;

    fn plain(name: &str, shape: &[usize], dtype: DType) -> PlannedTensor {
        planned(name, shape, Store::Plain(dtype))
    }

    fn planned(name: &str, shape: &[usize], store: Store) -> PlannedTensor {
        PlannedTensor { name: name.into(), shape: shape.to_vec(), store, source_layout: None, metrics: None }
    }

    fn write(dir: &Path, plan: Vec<PlannedTensor>) -> Vec<Vec<u8>> {
        let layout = Layout::new(plan).unwrap();
        let bin = AtomicFile::create(&dir.join(BIN_NAME)).unwrap();
        bin.file().set_len(layout.total_bytes).unwrap();
        let payload = |i: usize, n: usize| (0..n).map(|j| (i * 37 + j) as u8).collect::<Vec<u8>>();
        let payloads: Vec<_> = layout.entries.iter().enumerate().map(|(i, e)| payload(i, e.nbytes)).collect();
        for (entry, bytes) in layout.entries.iter().zip(&payloads) {
            bin.write_at(bytes, entry.offset as u64).unwrap();
        }
        let hashes = vec![String::new(); payloads.len()];
        let work = dir.join(".iec-0123456789abcdef.partial");
        std::fs::create_dir_all(&work).unwrap();
        commit(layout, bin, &work, DescriptionParts::default(), hashes, || Ok(())).unwrap();
        payloads
    }

    fn store() -> impl Strategy<Value = Store> {
        let spec = |scheme, granularity, symmetric, scale_dtype| {
            Store::Tiled(QuantSpec { scheme, granularity, symmetric, scale_dtype })
        };
        prop_oneof![
            Just(Store::Plain(DType::BF16)),
            Just(Store::Plain(DType::F32)),
            Just(Store::Plain(DType::U8)),
            Just(Store::Tiled(QuantSpec::Q4_0)),
            Just(Store::Tiled(QuantSpec::MXFP4)),
            Just(spec(Scheme::Int4, Granularity::Group(64), false, ScaleType::F16)),
            Just(spec(Scheme::Int8, Granularity::Row, true, ScaleType::F32)),
        ]
    }

    proptest! {
        #[test]
        fn whatever_is_planned_reads_back(
            tensors in prop::collection::vec((prop::collection::vec(1usize..40, 2..4), store()), 0..6),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let plan: Vec<_> =
                tensors.iter().enumerate().map(|(i, (shape, store))| planned(&format!("t{i}"), shape, *store)).collect();
            let payloads = write(dir.path(), plan);
            let reader = IebinReader::open(dir.path()).unwrap();
            prop_assert_eq!(reader.entries().len(), tensors.len());
            for ((entry, (shape, store)), payload) in reader.entries().iter().zip(&tensors).zip(&payloads) {
                prop_assert_eq!(&entry.shape, shape);
                prop_assert_eq!(&entry.store, store);
                prop_assert_eq!(entry.offset % store.alignment(), 0);
                prop_assert_eq!(&reader.payload(entry).unwrap()[..], &payload[..]);
            }
        }
    }

    #[test]
    fn an_existing_pack_needs_overwrite_and_is_then_replaced() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), vec![plain("a", &[4], DType::F32)]);
        let refused = refuse_existing(dir.path()).unwrap_err();
        assert_eq!(refused.cause().exit_code(), 2);
        assert!(refused.help_text().unwrap().contains("--overwrite"));
        write(dir.path(), vec![plain("b", &[9], DType::U8)]);
        assert_eq!(IebinReader::open(dir.path()).unwrap().entries()[0].name, "b");
    }

    #[test]
    fn impossible_plans_are_refused_by_name() {
        for plan in [
            vec![plain("w", &[1], DType::U8), plain("w", &[1], DType::U8)],
            vec![plain("w", &[usize::MAX, 2], DType::U8)],
            vec![plain("v", &[1 << 62], DType::U8), plain("w", &[1 << 62], DType::U8)],
            vec![planned("w", &[32], Store::Tiled(QuantSpec::Q4_0))],
        ] {
            assert_eq!(Layout::new(plan).unwrap_err().tensor_name(), Some("w"));
        }
    }

    #[test]
    fn descriptions_of_older_writers_mean_the_same() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), vec![plain("a", &[16], DType::BF16), plain("b", &[3], DType::U8)]);
        let ours = IebinReader::open(dir.path()).unwrap().entries().to_vec();
        let path = dir.path().join(JSON_NAME);
        let read = |json: &str| {
            std::fs::write(&path, json).unwrap();
            IebinReader::open(dir.path()).map(|r| {
                r.entries().iter().map(|e| Entry { sha256: Some(String::new()), ..e.clone() }).collect::<Vec<_>>()
            })
        };
        for json in [
            r#"{"tensors":{"a":{"dtype":"torch.bfloat16","shape":[16],"size_bytes":32,"offset_bytes":0},
                           "b":{"dtype":8,"shape":[3],"size":3,"offset":64}}}"#,
            r#"{"version":1,"tensors":[{"name":"a","dtype":2,"shape":[16],"nbytes":32,"offset":0},
                                       {"name":"b","dtype":"uint8","shape":[3],"nbytes":3,"offset_bytes":64}]}"#,
        ] {
            assert_eq!(read(json).unwrap(), ours);
        }
        for (json, message) in [
            (r#"{"tensors":{"a":{"dtype":5,"shape":[2],"size":1,"offset":0}}}"#, "4-bit codes"),
            (r#"{"tensors":{"a":{"dtype":99,"shape":[2],"size":1,"offset":0}}}"#, "a: dtype code 99"),
            (r#"{"tensors":{"a":{"dtype":8,"shape":[2],"size":2,"nbytes":2,"offset":0}}}"#, "duplicate field"),
            (r#"{"tensors":[{"dtype":8,"shape":[2],"size":2,"offset":0}]}"#, "tensor number 0 has no name"),
            (
                r#"{"tensors":{"a":{"dtype":8,"shape":[2],"size":2,"offset":0},
                               "a":{"dtype":8,"shape":[3],"size":3,"offset":64}}}"#,
                "a: found this tensor twice",
            ),
        ] {
            let refused = read(json).unwrap_err().to_string();
            assert!(refused.contains(message), "{message}: {refused}");
        }
    }

    #[test]
    fn every_way_to_break_a_description_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), vec![plain("a", &[16], DType::F32), planned("q", &[17, 40], Store::Tiled(QuantSpec::Q4_0))]);
        let path = dir.path().join(JSON_NAME);
        let good = std::fs::read_to_string(&path).unwrap();
        assert!(good.starts_with("{\n  \"version\": 1,\n  \"dtype\": \"int4\",\n  \"weights_bin\": \"model.ie.bin\""));
        let total = std::fs::metadata(dir.path().join(BIN_NAME)).unwrap().len();
        let cases: &[(&str, &str, serde_json::Value, &str)] = &[
            ("overlap", "/tensors/1/offset", 0.into(), "overlaps tensor a"),
            ("past the end", "/tensors/0/offset", (total.next_multiple_of(64)).into(), "reach past the end"),
            ("offset overflow", "/tensors/0/offset", (u64::MAX - 63).into(), "reach past the end"),
            ("wrong nbytes", "/tensors/0/nbytes", 65.into(), "expected 64"),
            ("wrong shape", "/tensors/0/shape", vec![17].into(), "expected 68"),
            ("shape overflow", "/tensors/0/shape", vec![u64::MAX, 2].into(), "overflows"),
            ("tile overflow", "/tensors/1/shape", vec![1u64 << 40, 1 << 40].into(), "overflows"),
            ("negative", "/tensors/0/offset", (-1).into(), "invalid value"),
            ("misaligned", "/tensors/0/offset", 4.into(), "expected a multiple of 64"),
            ("duplicate name", "/tensors/1/name", "a".into(), "this tensor twice"),
            ("unknown dtype", "/tensors/0/dtype", "F8_E9".into(), "F8_E9"),
            ("bad layout", "/tensors/1/quant/layout", "rows".into(), "layout `rows`"),
            ("bad tile", "/tensors/1/quant/tile_bytes", 64.into(), "tile bytes"),
            ("bad bits", "/tensors/1/quant/bits", 5.into(), "expected (4"),
            ("bad scheme", "/tensors/1/quant/scheme", "q9".into(), "q9"),
            ("bad group", "/tensors/1/quant/group_size", 64.into(), "groups of 32"),
            ("absolute bin", "/weights_bin", "/etc/passwd".into(), "expected a plain file name"),
            ("climbing bin", "/weights_bin", "../model.ie.bin".into(), "expected a plain file name"),
            ("missing bin", "/weights_bin", "other.bin".into(), "No such file"),
            ("other size", "/total_bytes", (total + 1).into(), "from the description"),
            ("version", "/reader_version", 2.into(), "version 2"),
            ("endianness", "/endianness", "big".into(), "little-endian"),
            ("no tensors", "/tensors", serde_json::Value::Null, "not a model description"),
        ];
        let mut failures = Vec::new();
        for (what, pointer, value, message) in cases {
            let mut json: serde_json::Value = serde_json::from_str(&good).unwrap();
            *json.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value.clone();
            json.as_object_mut().unwrap().remove("sha256");
            std::fs::write(&path, json.to_string()).unwrap();
            match IebinReader::open(dir.path()) {
                Ok(_) => failures.push(format!("{what}: accepted")),
                Err(e) if e.to_string().contains(message) => {}
                Err(e) => failures.push(format!("{what}: {e}")),
            }
        }
        assert!(failures.is_empty(), "{failures:#?}");
    }
}
