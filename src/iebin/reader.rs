//! Opens packs as untrusted input: checks every number of the description against the files before it is used.

use super::rebuild::{Keep, Rebuild};
use super::seal::unsealed;
use super::{
    DEDUP_JSON_NAME, Description, Entry, EntryJson, JSON_NAME, LAYOUT, QuantJson, Store, VERSION, matrices,
    stored_bytes,
};
use crate::dtype::DType;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::mapped::{Bytes, MappedFile};
use crate::output::swap;
use crate::scheme::TileLayout;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A description larger than this is refused before it is parsed.
const JSON_LIMIT: u64 = 128 << 20;

/// An opened, validated pack. The binary is memory-mapped; opening it reads no payloads.
#[derive(Debug)]
pub struct IebinReader {
    /// Directory of the description.
    pub dir: PathBuf,
    json: PathBuf,
    /// The description as written, without its tensor list.
    pub description: Description,
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    payloads: Payloads,
}

/// Source of the bytes of tensors.
#[derive(Debug)]
enum Payloads {
    Binary(Arc<MappedFile>),
    Rebuilt(Arc<dyn Rebuild>, Keep),
}

impl IebinReader {
    /// Opens `model.ie.json` and its binary in `dir`.
    ///
    /// # Errors
    /// A file is missing, or any name, shape, range or size in the description is impossible.
    pub fn open(dir: &Path) -> Result<IebinReader> {
        Self::open_files(&dir.join(JSON_NAME), None)
    }

    /// Opens the description `json` with the binary `bin`; by default with the binary that the description names.
    pub fn open_files(json: &Path, bin: Option<&Path>) -> Result<IebinReader> {
        Self::open_described(read_description(json)?, json, bin)
    }

    /// Opens the binary for a description that was read from `json`.
    pub fn open_described(description: Description, json: &Path, bin: Option<&Path>) -> Result<IebinReader> {
        let dir = json.parent().unwrap_or(Path::new("")).to_path_buf();
        let bin_path = match bin {
            Some(path) => path.to_path_buf(),
            None => swap::member(json, plain_file_name(&description.weights_bin).at(json).tensor("weights_bin")?),
        };
        let bin = MappedFile::open(&bin_path).map_err(|e| match files::exists(&dir.join(DEDUP_JSON_NAME)) {
            Ok(true) => e.help(
                "the binary was removed when the pack was deduplicated; restore it with \
                 `iec dedup --restore --model-dir DIR`, or leave out `--dedup off` if it is given",
            ),
            _ => e,
        })?;
        if let Some(expected) = description.total_bytes
            && expected != bin.bytes().len() as u64
        {
            let found = format!("found {} bytes, expected {expected} from the description", bin.bytes().len());
            return Err(Error::corrupt(found)
                .at(&bin_path)
                .help("the file is truncated or belongs to another pack; copy it again, or make the pack again"));
        }
        let length = bin.bytes().len();
        Self::checked(description, json, length, Payloads::Binary(bin))
    }

    /// Opens the pack of a description that was read from `json`, with payloads that `source` rebuilds.
    ///
    /// # Errors
    /// Any name, shape, range or size in the description is impossible.
    pub fn open_rebuilt(
        description: Description,
        json: &Path,
        source: Arc<dyn Rebuild>,
        keep: Keep,
    ) -> Result<IebinReader> {
        let length = usize::try_from(source.total_bytes())
            .map_err(|_| Error::corrupt("found a file larger than this machine can address").at(json))?;
        Self::checked(description, json, length, Payloads::Rebuilt(source, keep))
    }

    fn checked(mut description: Description, json: &Path, length: usize, payloads: Payloads) -> Result<IebinReader> {
        let dir = json.parent().unwrap_or(Path::new("")).to_path_buf();
        if description.read_from.is_some_and(|read| identity(json).is_some_and(|now| now != read)) {
            return Err(Error::corrupt("the file was replaced while the pack was opened")
                .at(json)
                .help("run the command again"));
        }
        let older = description.is_older();
        let entries = check_entries(std::mem::take(&mut description.tensors), length, older).at(json).help(DAMAGED)?;
        let by_name = index_by_name(&entries).at(json).help(DAMAGED)?;
        if let Some(model) = &description.model {
            model.validate().at(json).help(DAMAGED)?;
        }
        Ok(IebinReader { dir, json: json.to_path_buf(), description, entries, by_name, payloads })
    }

    /// Returns the path of a file that belongs to the pack, such as `config.json`.
    pub fn path(&self, name: &str) -> PathBuf {
        swap::member(&self.json, name)
    }

    /// Returns all tensors in file order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns a tensor by name.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.position(name).map(|i| &self.entries[i])
    }

    /// Returns the index of a tensor in [`IebinReader::entries`] by name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Returns the index of `entry` in [`IebinReader::entries`]; fails when the pack has no tensor of its name.
    fn place(&self, entry: &Entry) -> Result<usize> {
        let place = self.position(&entry.name);
        place.ok_or_else(|| Error::corrupt("this tensor is not in the pack").tensor(&entry.name))
    }

    /// Returns the payload of a tensor of this pack, borrowed from the mapped binary or rebuilt.
    ///
    /// # Errors
    /// The data that the payload is rebuilt from were changed.
    pub fn payload(&self, entry: &Entry) -> Result<Bytes> {
        match &self.payloads {
            Payloads::Binary(bin) => Bytes::mapped(bin, entry.offset..entry.offset + entry.nbytes),
            Payloads::Rebuilt(source, _) => {
                Bytes::build(entry.nbytes, |out| source.read(self.place(entry)?, 0..entry.nbytes, out))
            }
        }
    }

    /// Fills `out` with the payload of a tensor from byte `at` on. It reads from the file by position instead of
    /// through the mapping, so that resident memory does not grow.
    ///
    /// # Errors
    /// The bytes lie outside the payload, cannot be read, or the data that they are rebuilt from were changed.
    pub fn read(&self, entry: &Entry, at: usize, out: &mut [u8]) -> Result<()> {
        if at.checked_add(out.len()).is_none_or(|end| end > entry.nbytes) {
            let found = format!("found a read of {} bytes from {at} on in a payload of {}", out.len(), entry.nbytes);
            return Err(Error::corrupt(found).tensor(&entry.name));
        }
        match &self.payloads {
            Payloads::Binary(bin) => bin.read_at((entry.offset + at) as u64, out),
            Payloads::Rebuilt(source, _) => source.read(self.place(entry)?, at..at + out.len(), out),
        }
    }

    /// Returns the source that rebuilds the payloads and the memory limits for them; `None` for a pack with a binary.
    pub fn rebuilt(&self) -> Option<(&Arc<dyn Rebuild>, &Keep)> {
        match &self.payloads {
            Payloads::Binary(_) => None,
            Payloads::Rebuilt(source, keep) => Some((source, keep)),
        }
    }

    /// Returns the files that weights are read from.
    pub fn files(&self) -> &[Arc<MappedFile>] {
        match &self.payloads {
            Payloads::Binary(bin) => std::slice::from_ref(bin),
            Payloads::Rebuilt(source, _) => source.files(),
        }
    }

    /// Returns the length of the binary, also for a deduplicated pack whose binary was removed.
    pub fn total_bytes(&self) -> u64 {
        match &self.payloads {
            Payloads::Binary(bin) => bin.bytes().len() as u64,
            Payloads::Rebuilt(source, _) => source.total_bytes(),
        }
    }

    /// Returns the mapped binary.
    ///
    /// # Errors
    /// The pack has no binary, because its payloads are rebuilt.
    pub fn bin(&self) -> Result<&Arc<MappedFile>> {
        match &self.payloads {
            Payloads::Binary(bin) => Ok(bin),
            Payloads::Rebuilt(..) => {
                let dir = self.dir.join(&self.description.weights_bin);
                Err(Error::unsupported("the binary was removed when the pack was deduplicated")
                    .at(dir)
                    .help("restore it: `iec dedup --restore --model-dir DIR`"))
            }
        }
    }
}

/// Help text of errors about impossible content of a description.
const DAMAGED: &str = "the pack is damaged, or another program made it; make it again with `iec pack` or \
                       `iec import-gguf`";
/// Help text of errors about a missing pack.
pub const NAME_A_PACK: &str = "name a pack with --model-dir, or make one: `iec pack --hf-dir HF --out-dir DIR`";

/// Reads a description and checks its version and endianness; its tensors are not checked yet.
///
/// # Errors
/// The file is missing, malformed, or of another version or endianness.
pub fn read_description(json: &Path) -> Result<Description> {
    let read_from = identity(json);
    let found = files::read_limited(json, JSON_LIMIT).and_then(|text| parse_description(&text)).at(json);
    let found = found.map(|description| Description { read_from, ..description });
    match json.parent() {
        Some(dir)
            if found.as_ref().is_err_and(Error::is_not_found)
                && matches!(files::is_file(&dir.join("config.json")), Ok(true)) =>
        {
            found.help(&format!(
                "{0} is a Hugging Face checkpoint; make a pack of it: `iec pack --hf-dir {0} --out-dir DIR`",
                dir.display()
            ))
        }
        _ => found.help(NAME_A_PACK),
    }
}

/// Returns the device and inode number of a file, which change when the file is replaced.
fn identity(path: &Path) -> Option<(u64, u64)> {
    path.metadata().ok().map(|found| (found.dev(), found.ino()))
}

/// Parses the text of a description with the checks of [`read_description`].
///
/// # Errors
/// The text is malformed, or of another version or endianness.
pub fn parse_description(text: &[u8]) -> Result<Description> {
    let description: Description = serde_json::from_slice(text)
        .map_err(|e| Error::corrupt(format!("not a model description: {e}")))
        .help("make the pack again with `iec pack`")?;
    let needed = description.reader_version.unwrap_or(description.version);
    if description.version == 0 || needed > VERSION {
        let found = if description.version == 0 { 0 } else { needed };
        let found = format!("found version {found}, expected 1 to {VERSION}");
        return Err(Error::unsupported(found).tensor("version").help("a higher version needs a newer version of iec"));
    }
    if description.sha256.is_some() && std::str::from_utf8(text).ok().and_then(unsealed).is_none() {
        return Err(Error::corrupt("the file was changed: its SHA-256 differs from the recorded one")
            .tensor("sha256")
            .help(
                "restore the file or make the pack again; to keep a deliberate change, delete the last field, `sha256`, \
                 and the comma before it",
            ));
    }
    if description.endianness.as_deref().is_some_and(|e| e != "little") {
        return Err(Error::unsupported("found big-endian payloads, expected little-endian ones").tensor("endianness"));
    }
    Ok(description)
}

/// Returns `name` if it is a plain file name, which cannot lead out of its directory; fails otherwise.
pub(crate) fn plain_file_name(name: &str) -> Result<&str> {
    let plain = !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0']);
    if plain {
        Ok(name)
    } else {
        Err(Error::corrupt(format!("found `{name}`, expected a plain file name without directories")))
    }
}

/// Checks every number of a tensor list against the length of the binary. Packs of `older` writers may have payloads at
/// any alignment, and equal tensors may share one payload; such packs can be read, but not run.
///
/// # Errors
/// A name, shape, range or size is impossible.
pub fn check_entries(entries: Vec<EntryJson>, file_len: usize, older: bool) -> Result<Vec<Entry>> {
    let check = |json: EntryJson| {
        let name = json.name.clone();
        entry_from_json(json, file_len, older).tensor(&name)
    };
    let entries = entries.into_iter().map(check).collect::<Result<Vec<_>>>()?;
    refuse_overlap(&entries, older)?;
    Ok(entries)
}

fn entry_from_json(json: EntryJson, file_len: usize, older: bool) -> Result<Entry> {
    if json.older.is_some() {
        return Err(Error::unsupported("found 4-bit codes in the layout of an older program")
            .help("convert the pack: `iec pack --hf-dir OLD_PACK --out-dir NEW_PACK`"));
    }
    let too_large =
        |what: &str, n: u64| Error::corrupt(format!("found {what} {n}, more than this machine can address"));
    let shape = json
        .shape
        .iter()
        .map(|d| usize::try_from(*d).map_err(|_| too_large("dimension", *d)))
        .collect::<Result<Vec<_>>>()?;
    let offset = usize::try_from(json.offset).map_err(|_| too_large("offset", json.offset))?;
    let nbytes = usize::try_from(json.nbytes).map_err(|_| too_large("nbytes", json.nbytes))?;
    let (store, metrics) = match json.quant {
        None => (Store::Plain(DType::parse(&json.dtype)?), None),
        Some(q) => {
            check_quant(&q, &shape)?;
            (Store::Tiled(q.spec), q.metrics)
        }
    };
    let expected = stored_bytes(store, &shape)?;
    if expected != nbytes {
        return Err(Error::corrupt(format!(
            "found nbytes {nbytes}, expected {expected} for shape {shape:?} of {}",
            store.dtype_name()
        )));
    }
    let end = offset.checked_add(nbytes).filter(|end| *end <= file_len);
    if end.is_none() {
        return Err(Error::corrupt(format!(
            "found {nbytes} bytes at offset {offset}, which reach past the end of the binary ({file_len} bytes)"
        )));
    }
    if !older && !offset.is_multiple_of(store.alignment()) {
        return Err(Error::corrupt(format!("found offset {offset}, expected a multiple of {}", store.alignment())));
    }
    Ok(Entry {
        name: json.name,
        shape,
        store,
        offset,
        nbytes,
        sha256: json.sha256,
        source_layout: json.source_layout,
        metrics,
    })
}

/// Refuses a `quant` object whose numbers differ from those of the one layout that this program reads.
fn check_quant(found: &QuantJson, shape: &[usize]) -> Result<()> {
    if found.layout != LAYOUT {
        return Err(Error::unsupported(format!("found layout `{}`, expected `{LAYOUT}`", found.layout)));
    }
    let (_, rows, cols) = matrices(shape)?;
    let expected = QuantJson::new(&TileLayout::new(found.spec, rows, cols)?, None);
    let numbers = |q: &QuantJson| (q.bits, q.zero_point, q.scales, q.tile_bytes);
    if numbers(found) != numbers(&expected) {
        return Err(Error::corrupt(format!(
            "found quant {:?}, expected {:?} (bits, zero point, scales, tile bytes)",
            numbers(found),
            numbers(&expected)
        )));
    }
    Ok(())
}

fn refuse_overlap(entries: &[Entry], may_share: bool) -> Result<()> {
    let mut order: Vec<&Entry> = entries.iter().filter(|e| e.nbytes > 0).collect();
    order.sort_by_key(|e| (e.offset, e.nbytes));
    for pair in order.windows(2) {
        let shared = (pair[0].offset, pair[0].nbytes) == (pair[1].offset, pair[1].nbytes);
        if may_share && shared {
            continue;
        }
        if pair[0].offset + pair[0].nbytes > pair[1].offset {
            return Err(
                Error::corrupt(format!("found data that overlaps tensor {}", pair[0].name)).tensor(&pair[1].name)
            );
        }
    }
    Ok(())
}

fn index_by_name(entries: &[Entry]) -> Result<HashMap<String, usize>> {
    let mut map = HashMap::with_capacity(entries.len());
    for (i, entry) in entries.iter().enumerate() {
        if map.insert(entry.name.clone(), i).is_some() {
            return Err(Error::corrupt("found this tensor twice").tensor(&entry.name));
        }
    }
    Ok(map)
}
