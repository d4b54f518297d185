//! Makes a store of a pack, proves that it gives the pack back, and gives it back.

use super::artifact::Artifact;
use super::description::{Base, Codec, Description, Encoding, FILE_NAMES, FORMAT, JSON_NAME, Origin, Payload, Unit};
use super::find::{Candidate, origins};
use super::frame::Coder;
use super::index::entry_of;
use super::layout::Layout;
use super::plane::{Effort, Streams};
use super::store::Store;
use crate::atomic_file::{AtomicFile, write_atomically};
use crate::error::{Context, Error, Result};
use crate::iebin::{self, Entry, IebinReader};
use crate::out_dir::{OutDir, require_space};
use crate::sha256::{Digest, Sha256, hex};
use crate::{interrupt, progress};
use indicatif::ProgressBar;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Frames encoded at once, for each thread.
const FRAMES_PER_THREAD: usize = 8;

/// What is wanted.
#[derive(Debug, Clone)]
pub struct Options {
    /// The pack.
    pub model_dir: PathBuf,
    /// Packs that it may be near to.
    pub bases: Vec<PathBuf>,
    /// How much is done for size.
    pub codec: Codec,
    /// Level of zstd, 1 to 22.
    pub level: i32,
}

/// What became of the bytes.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Bytes of the binary.
    pub original_bytes: u64,
    /// Bytes of the four files.
    pub stored_bytes: u64,
    /// Stored bytes / original bytes.
    pub ratio: f64,
    /// By encoding and by kind of tensor.
    pub parts: Vec<Part>,
}

/// Bytes of one encoding of one kind of tensor.
#[derive(Debug, Clone, Serialize)]
pub struct Part {
    /// `frames`, `same` or `delta`.
    pub encoding: String,
    /// The dtype, or scheme.
    pub kind: String,
    /// Units.
    pub units: usize,
    /// Bytes before.
    pub original_bytes: u64,
    /// Bytes after.
    pub stored_bytes: u64,
}

/// Writes the four files beside the binary, which stays.
///
/// # Errors
/// There is no binary, or no room.
pub fn dedup(options: &Options) -> Result<Summary> {
    let dir = &options.model_dir;
    if is_reduced(dir) {
        return Err(Error::usage("was deduplicated already, and its binary is gone")
            .at(dir)
            .help("bring the binary back first: `iec dedup --restore --model-dir DIR`"));
    }
    let reader = IebinReader::open(dir).map_err(Error::while_opening_model)?;
    let bases = options.bases.iter().map(|base| Artifact::open(base).map_err(Error::while_opening_model));
    let bases = bases.collect::<Result<Vec<_>>>()?;
    let effort = options.codec.effort(options.level);
    let plan = Plan::of(&reader, effort)?;
    let found = origins(&plan.candidates(&reader), || reader.bin().release(), &bases, effort)?;
    let writer = Writer::create(dir, reader.bin().bytes().len() as u64)?;
    let payloads = writer.write(&plan, &reader, &bases, found, effort)?;
    let base_dirs = options.bases.iter().map(|base| relative(base, dir).map(|dir| Base { dir }));
    let description = Description {
        format: FORMAT.to_string(),
        codec: options.codec,
        weights_bin: reader.description.weights_bin.clone(),
        total_bytes: reader.bin().bytes().len() as u64,
        files: payloads.files,
        bases: base_dirs.collect::<Result<_>>()?,
        payloads: payloads.payloads,
    };
    let text = description.to_text();
    payloads.commit.into_iter().try_for_each(AtomicFile::commit)?;
    write_atomically(&dir.join(JSON_NAME), text.as_bytes())?;
    Ok(summary(&description, &plan, text.len() as u64))
}

/// True for a pack whose binary is gone, and can be rebuilt.
pub fn is_reduced(dir: &Path) -> bool {
    !dir.join(iebin::BIN_NAME).exists() && dir.join(JSON_NAME).exists()
}

/// What the binary consists of.
struct Plan<'a> {
    parts: Vec<Planned<'a>>,
}

struct Planned<'a> {
    entry: Option<&'a Entry>,
    offset: usize,
    nbytes: usize,
    layout: Layout,
}

impl<'a> Plan<'a> {
    /// All tensors in file order, and what lies between them, unless it is zeros.
    fn of(reader: &'a IebinReader, effort: Effort) -> Result<Plan<'a>> {
        let bytes = reader.bin().bytes();
        let mut entries: Vec<&Entry> = reader.entries().iter().collect();
        entries.sort_by_key(|entry| (entry.offset, entry.nbytes));
        let mut parts = Vec::with_capacity(entries.len());
        let gap = |parts: &mut Vec<Planned<'a>>, offset: usize, end: usize| -> Result<()> {
            if bytes[offset..end].iter().any(|byte| *byte != 0) {
                let layout = Layout::of(None, end - offset, effort)?;
                parts.push(Planned { entry: None, offset, nbytes: end - offset, layout });
            }
            Ok(())
        };
        let mut end = 0;
        for entry in entries {
            if entry.offset < end {
                return Err(Error::unsupported("shares its bytes with another tensor, as packs of older programs do")
                    .tensor(&entry.name)
                    .help("convert the pack first: `iec pack --hf-dir OLD_PACK --out-dir NEW_PACK`"));
            }
            gap(&mut parts, end, entry.offset)?;
            let layout = Layout::of(Some(entry), entry.nbytes, effort).tensor(&entry.name)?;
            parts.push(Planned { entry: Some(entry), offset: entry.offset, nbytes: entry.nbytes, layout });
            end = entry.offset + entry.nbytes;
        }
        gap(&mut parts, end, bytes.len())?;
        Ok(Plan { parts })
    }

    fn candidates<'b>(&'b self, reader: &'b IebinReader) -> Vec<Candidate<'b>> {
        let units = self.parts.iter().enumerate().flat_map(|(payload, part)| {
            (0..part.layout.units).map(move |unit| Candidate {
                payload,
                unit,
                layout: &part.layout,
                bytes: part.unit(unit, reader),
                name: part.entry.map(|entry| entry.name.as_str()),
            })
        });
        units.collect()
    }
}

impl Planned<'_> {
    fn unit<'b>(&self, unit: usize, reader: &'b IebinReader) -> &'b [u8] {
        &reader.bin().bytes()[self.offset + unit * self.layout.unit_bytes..][..self.layout.unit_bytes]
    }
}

/// The files of streams while they grow.
struct Writer {
    files: Vec<BufWriter<AtomicFile>>,
    lengths: [u64; 3],
    bar: ProgressBar,
}

/// What the writer has made.
struct Written {
    commit: Vec<AtomicFile>,
    files: [u64; 3],
    payloads: Vec<Payload>,
}

impl Writer {
    fn create(dir: &Path, total: u64) -> Result<Writer> {
        let create = |name: &&str| Ok(BufWriter::with_capacity(1 << 20, AtomicFile::create(&dir.join(name))?));
        let files = FILE_NAMES.iter().map(create).collect::<Result<Vec<_>>>()?;
        Ok(Writer { files, lengths: [0; 3], bar: progress::bytes("dedup", total) })
    }

    fn write(
        mut self,
        plan: &Plan<'_>,
        reader: &IebinReader,
        bases: &[Artifact],
        found: Vec<Option<(Encoding, Origin)>>,
        effort: Effort,
    ) -> Result<Written> {
        let mut found = found.into_iter();
        let mut payloads = Vec::with_capacity(plan.parts.len());
        for part in &plan.parts {
            let mut units = Vec::with_capacity(part.layout.units);
            for unit in 0..part.layout.units {
                let (encoding, of) = found.next().flatten().map_or((Encoding::Frames, None), |(e, of)| (e, Some(of)));
                let streams = match encoding {
                    Encoding::Same => None,
                    _ => Some(self.write_unit(plan, part, unit, of.as_ref(), reader, bases, effort)?),
                };
                self.bar.inc(part.layout.unit_bytes as u64);
                units.push(Unit { encoding, of, streams });
            }
            let sha256 = match part.entry.and_then(|entry| entry.sha256.clone()) {
                Some(recorded) => recorded.to_ascii_lowercase(),
                None => hex(Sha256::new_with_prefix(&reader.bin().bytes()[part.offset..][..part.nbytes])),
            };
            let name = part.entry.map(|entry| entry.name.clone());
            payloads.push(Payload { name, offset: part.offset as u64, nbytes: part.nbytes as u64, sha256, units });
            reader.bin().release();
        }
        self.bar.finish_and_clear();
        let unbuffered = |file: BufWriter<AtomicFile>| file.into_inner().map_err(|e| Error::from(e.into_error()));
        let commit = self.files.into_iter().map(unbuffered).collect::<Result<Vec<_>>>()?;
        Ok(Written { commit, files: self.lengths, payloads })
    }

    /// Appends the frames of a unit and their index; where they lie.
    #[allow(clippy::too_many_arguments)]
    fn write_unit(
        &mut self,
        plan: &Plan<'_>,
        part: &Planned<'_>,
        unit: usize,
        of: Option<&Origin>,
        reader: &IebinReader,
        bases: &[Artifact],
        effort: Effort,
    ) -> Result<[[u64; 2]; 3]> {
        let (layout, bytes, starts) = (&part.layout, part.unit(unit, reader), self.lengths);
        let mut index = Vec::with_capacity(layout.frames());
        let frames: Vec<usize> = (0..layout.frames()).collect();
        for batch in frames.chunks(FRAMES_PER_THREAD * rayon::current_num_threads()) {
            interrupt::check()?;
            let encode = |coder: &mut Coder, frame: &usize| {
                let range = layout.frame(*frame);
                let mut buffer = Vec::new();
                let base = match of {
                    None => None,
                    Some(Origin { base: None, payload, unit, .. }) => {
                        Some(&plan.parts[*payload].unit(*unit, reader)[range.clone()])
                    }
                    Some(Origin { base: Some(base), payload, unit, .. }) => {
                        buffer.resize(range.len(), 0);
                        let start = unit * layout.unit_bytes;
                        bases[*base].read(*payload, start + range.start..start + range.end, &mut buffer)?;
                        Some(&buffer[..])
                    }
                };
                Ok(coder.encode(&layout.pattern, &bytes[range], base))
            };
            let encoded: Vec<Streams> =
                batch.par_iter().map_init(|| Coder::new(effort), encode).collect::<Result<_>>()?;
            for streams in &encoded {
                self.append([&streams.defaults, &streams.masks, &streams.exceptions])?;
                index.extend(entry_of(streams));
            }
            bases.iter().for_each(Artifact::release);
        }
        self.append([&[], &index, &[]])?;
        Ok(std::array::from_fn(|i| [starts[i], self.lengths[i] - starts[i]]))
    }

    fn append(&mut self, streams: [&[u8]; 3]) -> Result<()> {
        for ((file, length), bytes) in self.files.iter_mut().zip(&mut self.lengths).zip(streams) {
            file.write_all(bytes).at(file.get_ref().path())?;
            *length += bytes.len() as u64;
        }
        Ok(())
    }
}

/// The way from `dir` to a base.
fn relative(base: &Path, dir: &Path) -> Result<String> {
    let (base, dir) = (base.canonicalize().at(base)?, dir.canonicalize().at(dir)?);
    let common = base.components().zip(dir.components()).take_while(|(a, b)| a == b).count();
    let up = dir.components().skip(common).map(|_| "..".as_ref());
    let path: PathBuf = up.chain(base.components().skip(common).map(|c| c.as_os_str())).collect();
    let text = path.to_str().ok_or_else(|| Error::unsupported("a base whose path is not UTF-8").at(&base))?;
    Ok(text.to_string())
}

fn summary(description: &Description, plan: &Plan<'_>, json_bytes: u64) -> Summary {
    let mut parts: BTreeMap<(Encoding, &str), Part> = BTreeMap::new();
    for (payload, part) in description.payloads.iter().zip(&plan.parts) {
        let kind = part.entry.map_or("between tensors", |entry| match entry.store {
            iebin::Store::Plain(dtype) => dtype.name(),
            iebin::Store::Tiled(spec) => spec.scheme.name(),
        });
        for unit in &payload.units {
            let sum = parts.entry((unit.encoding, kind)).or_insert_with(|| Part {
                encoding: format!("{:?}", unit.encoding).to_lowercase(),
                kind: kind.to_string(),
                units: 0,
                original_bytes: 0,
                stored_bytes: 0,
            });
            sum.units += 1;
            sum.original_bytes += part.layout.unit_bytes as u64;
            sum.stored_bytes += unit.streams.map_or(0, |streams| streams.iter().map(|range| range[1]).sum());
        }
    }
    let stored_bytes = description.files.iter().sum::<u64>() + json_bytes;
    let original_bytes = description.total_bytes;
    let ratio = stored_bytes as f64 / original_bytes.max(1) as f64;
    Summary { original_bytes, stored_bytes, ratio, parts: parts.into_values().collect() }
}

/// Rebuilds every payload in memory and compares its hash; the bytes that were compared.
///
/// # Errors
/// A file is missing or was changed.
pub fn verify(dir: &Path) -> Result<u64> {
    let store = Store::open(dir).map_err(Error::while_opening_model)?;
    let total = store.description.payloads.iter().map(|payload| payload.nbytes).sum();
    let bar = progress::bytes("verify", total);
    (0..store.description.payloads.len()).try_for_each(|i| store.verify(i, &bar)).at(dir)?;
    bar.finish_and_clear();
    Ok(total)
}

/// Removes the binary of a pack whose store was proved just now.
///
/// # Errors
/// The proof fails; then nothing is removed.
pub fn remove_original(dir: &Path) -> Result<()> {
    verify(dir)?;
    let binary = dir.join(iebin::BIN_NAME);
    std::fs::remove_file(&binary).at(&binary)
}

/// Writes the binary again into `out_dir`, with the files that belong to a pack; every payload is compared with its hash.
///
/// # Errors
/// A file is missing or was changed, or there is no room; then there is no binary.
pub fn restore(dir: &Path, out_dir: &Path) -> Result<u64> {
    let store = Store::open(dir).map_err(Error::while_opening_model)?;
    let total = store.description.total_bytes;
    let out = OutDir::make(out_dir)?;
    require_space(out.path(), total, 0)?;
    let bar = progress::bytes("restore", total);
    let path = out.path().join(iebin::BIN_NAME);
    let file = AtomicFile::create(&path)?;
    file.file().set_len(total).at(&path)?;
    for (i, payload) in store.description.payloads.iter().enumerate() {
        write_payload(&store, i, payload, &file, &bar).at(&path)?;
    }
    bar.finish_and_clear();
    file.commit()?;
    copy_companions(dir, out.path())?;
    Ok(total)
}

/// Brings tokenizer, configuration and description along; the description last, because with it a pack is complete.
fn copy_companions(dir: &Path, out_dir: &Path) -> Result<()> {
    if dir.canonicalize().at(dir)? == out_dir.canonicalize().at(out_dir)? {
        return Ok(());
    }
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).at(dir)? {
        let entry = entry.at(dir)?;
        let name = entry.file_name();
        let ours = [iebin::BIN_NAME, iebin::JSON_NAME, JSON_NAME].iter().chain(&FILE_NAMES).any(|own| name == **own);
        if !ours && entry.path().is_file() && !name.as_encoded_bytes().starts_with(b".") {
            names.push(name);
        }
    }
    names.push(iebin::JSON_NAME.into());
    names.iter().try_for_each(|name| {
        let (from, to) = (dir.join(name), out_dir.join(name));
        write_atomically(&to, &std::fs::read(&from).at(&from)?)
    })
}

fn write_payload(store: &Store, i: usize, payload: &Payload, file: &AtomicFile, bar: &ProgressBar) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let (mut hasher, mut at) = (Sha256::new(), payload.offset);
    store.pieces(i, |bytes| {
        hasher.update(bytes);
        file.file().write_all_at(bytes, at)?;
        at += bytes.len() as u64;
        bar.inc(bytes.len() as u64);
        Ok(())
    })?;
    store.compare(payload, hasher)
}
