//! A deduplicated pack as somebody opens it: every number is checked once, then any bytes of any tensor can be rebuilt.

use super::description::{Base, Description, Encoding, FILE_NAMES, JSON_NAME, Origin, Payload, Unit};
use super::frame::{Coder, frame_bytes};
use super::pattern::Pattern;
use super::plane::{Cursors, Effort, Streams};
use crate::error::{Context, Error, Result};
use crate::iebin::reader::{check_entries, plain_file_name, read_description};
use crate::iebin::{self, Entry};
use crate::interrupt;
use crate::mapped::MappedFile;
use crate::sha256::{Digest, Sha256, hex};
use indicatif::ProgressBar;
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A description larger than this is refused before it is parsed.
const JSON_LIMIT: u64 = 256 << 20;
/// Bytes of a frame's entry in the index of its unit: three lengths and a checksum, 32 bits each.
const INDEX_ENTRY: usize = 16;
/// Packs that may follow each other as bases.
const MOST_BASES: usize = 4;
/// Bytes rebuilt at once.
const PIECE: usize = 64 << 20;

/// The tensors of a pack and its payloads, in `model.ie.bin` or deduplicated.
#[derive(Debug)]
pub struct Artifact {
    /// Where it lies.
    pub dir: PathBuf,
    entries: Vec<Entry>,
    bytes: Source,
}

#[derive(Debug)]
enum Source {
    Binary(Arc<MappedFile>),
    Store(Box<Store>),
}

impl Artifact {
    /// Opens the binary of a pack, or what it was deduplicated to where the binary is gone.
    ///
    /// # Errors
    /// Neither is there, or a number in a description is impossible.
    pub fn open(dir: &Path) -> Result<Artifact> {
        Artifact::open_below(dir, 0)
    }

    fn open_below(dir: &Path, depth: usize) -> Result<Artifact> {
        let binary = dir.join(iebin::BIN_NAME);
        if binary.exists() || !dir.join(JSON_NAME).exists() {
            let reader = iebin::IebinReader::open(dir)?;
            let entries = reader.entries().to_vec();
            return Ok(Artifact { dir: dir.to_path_buf(), entries, bytes: Source::Binary(reader.bin().clone()) });
        }
        let store = Store::open_below(dir, depth)?;
        Ok(Artifact { dir: dir.to_path_buf(), entries: store.entries.clone(), bytes: Source::Store(Box::new(store)) })
    }

    /// All tensors.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Lets go of what was read.
    pub(crate) fn release(&self) {
        match &self.bytes {
            Source::Binary(file) => file.release(),
            Source::Store(store) => store.files.iter().for_each(|file| file.release()),
        }
    }

    /// Bytes `range` of tensor `i`.
    pub(crate) fn read(&self, i: usize, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let entry = &self.entries[i];
        match &self.bytes {
            Source::Binary(file) => {
                out.copy_from_slice(&file.bytes()[entry.offset..][..entry.nbytes][range]);
                Ok(())
            }
            Source::Store(store) => store.read(store.payload_of(i), range, out),
        }
    }
}

/// An opened store.
#[derive(Debug)]
pub(crate) struct Store {
    pub dir: PathBuf,
    pub description: Description,
    /// The tensors of the pack.
    pub entries: Vec<Entry>,
    files: Vec<Arc<MappedFile>>,
    layouts: Vec<Layout>,
    /// Of each tensor its payload.
    place: Vec<usize>,
    bases: Vec<Artifact>,
    effort: Effort,
}

/// How a payload is cut.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// What its bytes mean.
    pub pattern: Pattern,
    /// Number of units.
    pub units: usize,
    pub unit_bytes: usize,
    pub frame_bytes: usize,
}

impl Layout {
    /// The layout of a tensor, or of other bytes.
    pub fn of(entry: Option<&Entry>, nbytes: usize, effort: Effort) -> Result<Layout> {
        let (pattern, units) = match entry {
            None => (Pattern::bytes(), 1),
            Some(entry) => (Pattern::of(entry)?, if entry.shape.len() > 2 { entry.matrices()?.0 } else { 1 }),
        };
        // Stacks of nothing, and of matrices that do not end between two numbers, are one unit.
        let whole = |bytes: usize| bytes > 0 && nbytes > 0 && nbytes.is_multiple_of(bytes);
        let units = if units.checked_mul(pattern.period).is_some_and(whole) { units } else { 1 };
        Ok(Layout { units, unit_bytes: nbytes / units, frame_bytes: frame_bytes(&pattern, effort), pattern })
    }

    /// True when a unit of the other can stand for one of these.
    pub fn alike(&self, other: &Layout) -> bool {
        (&self.pattern, self.unit_bytes) == (&other.pattern, other.unit_bytes)
    }

    /// The frames of a unit.
    pub fn frames(&self) -> usize {
        self.unit_bytes.div_ceil(self.frame_bytes)
    }

    /// Bytes of frame `i` within its unit.
    pub fn frame(&self, i: usize) -> Range<usize> {
        i * self.frame_bytes..((i + 1) * self.frame_bytes).min(self.unit_bytes)
    }
}

impl Store {
    /// Opens the store in `dir`, whose `model.ie.json` is still there.
    ///
    /// # Errors
    /// A file is missing, or a number is impossible.
    pub fn open(dir: &Path) -> Result<Store> {
        Store::open_below(dir, 0)
    }

    fn open_below(dir: &Path, depth: usize) -> Result<Store> {
        if depth > MOST_BASES {
            return Err(
                Error::corrupt(format!("more than {MOST_BASES} packs, each the base of the one before")).at(dir)
            );
        }
        let json = dir.join(JSON_NAME);
        let description = read(&json).at(&json)?;
        plain_file_name(&description.weights_bin).at(&json).tensor("weights_bin")?;
        let pack = dir.join(iebin::JSON_NAME);
        let mut packed = read_description(&pack)?;
        let older = packed.is_older();
        let length = usize::try_from(description.total_bytes)
            .map_err(|_| Error::corrupt("total_bytes does not fit this machine").at(&json))?;
        let entries = check_entries(std::mem::take(&mut packed.tensors), length, older).at(&pack)?;
        let open = |name: &&str| {
            MappedFile::open(&dir.join(name)).help("the files model.dedup.* belong together; restore the missing one")
        };
        let files = FILE_NAMES.iter().map(open).collect::<Result<Vec<_>>>()?;
        let effort = description.codec.effort(1);
        let open_base = |base: &Base| {
            let base = dir.join(&base.dir);
            if !base.join(iebin::JSON_NAME).exists() {
                return Err(Error::corrupt("the pack this one was deduplicated against is gone")
                    .at(base)
                    .help("bring it back: without it this pack cannot be rebuilt"));
            }
            Artifact::open_below(&base, depth + 1)
        };
        let bases = description.bases.iter().map(open_base).collect::<Result<Vec<_>>>()?;
        let mut store = Store {
            dir: dir.to_path_buf(),
            description,
            entries,
            files,
            layouts: Vec::new(),
            place: Vec::new(),
            bases,
            effort,
        };
        store.check().at(&json)?;
        Ok(store)
    }

    fn check(&mut self) -> Result<()> {
        for ((file, said), name) in self.files.iter().zip(self.description.files).zip(FILE_NAMES) {
            if file.bytes().len() as u64 != said {
                return Err(
                    Error::corrupt(format!("{} bytes, expected {said}", file.bytes().len())).at(self.dir.join(name))
                );
            }
        }
        let by_name: HashMap<&str, usize> =
            self.entries.iter().enumerate().map(|(i, e)| (e.name.as_str(), i)).collect();
        let (mut layouts, mut place) = (Vec::new(), vec![None; self.entries.len()]);
        let mut end = 0;
        for (i, payload) in self.description.payloads.iter().enumerate() {
            let label = payload.label();
            let entry = match &payload.name {
                None => None,
                Some(name) => {
                    let found = by_name.get(name.as_str()).copied().filter(|entry| place[*entry].is_none());
                    let entry =
                        found.ok_or_else(|| Error::corrupt("listed twice, or not in model.ie.json").tensor(label))?;
                    place[entry] = Some(i);
                    Some(&self.entries[entry])
                }
            };
            layouts.push(self.check_payload(payload, entry, end).tensor(label)?);
            end = payload.offset + payload.nbytes;
        }
        let missing = |(entry, place): (&Entry, Option<usize>)| {
            place.ok_or_else(|| Error::corrupt("is in model.ie.json, but not here").tensor(&entry.name))
        };
        self.place = self.entries.iter().zip(place).map(missing).collect::<Result<_>>()?;
        self.layouts = layouts;
        for (i, payload) in self.description.payloads.iter().enumerate() {
            payload.units.iter().try_for_each(|unit| self.check_unit(i, unit)).tensor(payload.label())?;
        }
        Ok(())
    }

    fn check_payload(&self, payload: &Payload, entry: Option<&Entry>, end: u64) -> Result<Layout> {
        let fits = payload.offset >= end
            && payload.offset.checked_add(payload.nbytes).is_some_and(|end| end <= self.description.total_bytes);
        let agrees = entry.is_none_or(|e| (e.offset as u64, e.nbytes as u64) == (payload.offset, payload.nbytes));
        if !fits || !agrees {
            return Err(Error::corrupt(format!("{} bytes at {} are not its place", payload.nbytes, payload.offset)));
        }
        let layout = Layout::of(entry, payload.nbytes as usize, self.effort)?;
        if payload.units.len() != layout.units {
            return Err(Error::corrupt(format!("{} units, expected {}", payload.units.len(), layout.units)));
        }
        Ok(layout)
    }

    fn check_unit(&self, payload: usize, unit: &Unit) -> Result<()> {
        let layout = &self.layouts[payload];
        if (unit.encoding == Encoding::Frames) != unit.of.is_none()
            || (unit.encoding == Encoding::Same) != unit.streams.is_none()
        {
            return Err(Error::corrupt(format!("{:?} without what it needs, or with more", unit.encoding)));
        }
        if let Some(of) = &unit.of {
            self.check_origin(layout, unit.encoding, of)?;
        }
        let Some(streams) = unit.streams else { return Ok(()) };
        for ((range, file), name) in streams.iter().zip(&self.files).zip(FILE_NAMES) {
            if range[0].checked_add(range[1]).is_none_or(|end| end > file.bytes().len() as u64) {
                return Err(Error::corrupt(format!("{} bytes at {} of {name}, past its end", range[1], range[0])));
            }
        }
        let index = self.index(layout, streams)?;
        let mut sums = [0u64; 3];
        for frame in index {
            for (sum, length) in sums.iter_mut().zip(lengths(frame)) {
                *sum += length as u64;
            }
        }
        let found = [streams[0][1], streams[1][1] - (index.len() * INDEX_ENTRY) as u64, streams[2][1]];
        if sums != found {
            return Err(Error::corrupt(format!("frames of {sums:?} bytes in streams of {found:?}")));
        }
        Ok(())
    }

    /// An origin is a unit that looks alike. Differences are taken from units that need no other, copies are made of all but
    /// copies: nothing goes in circles.
    fn check_origin(&self, layout: &Layout, encoding: Encoding, of: &Origin) -> Result<()> {
        let wrong = || Error::corrupt("refers to a unit that is none, or of another kind");
        let Some(base) = of.base else {
            let payload = self.description.payloads.get(of.payload).ok_or_else(wrong)?;
            let unit = payload.units.get(of.unit).ok_or_else(wrong)?;
            let ends =
                unit.encoding == Encoding::Frames || (unit.encoding, encoding) == (Encoding::Delta, Encoding::Same);
            let good = ends && layout.alike(&self.layouts[of.payload]);
            return if good { Ok(()) } else { Err(wrong()) };
        };
        let base = self.bases.get(base).ok_or_else(wrong)?;
        let entry = base.entries().get(of.payload).ok_or_else(wrong)?;
        let other = Layout::of(Some(entry), entry.nbytes, self.effort)?;
        if !layout.alike(&other) || of.unit >= other.units {
            return Err(wrong());
        }
        if entry.sha256.is_none() || entry.sha256 != of.sha256 {
            return Err(Error::corrupt(format!("its base has another {} than this was made from", entry.name))
                .help("bring back the pack it was deduplicated against"));
        }
        Ok(())
    }

    fn index(&self, layout: &Layout, streams: [[u64; 2]; 3]) -> Result<&[[u8; INDEX_ENTRY]]> {
        let masks = &self.files[1].bytes()[streams[1][0] as usize..][..streams[1][1] as usize];
        let length = layout.frames().checked_mul(INDEX_ENTRY).filter(|length| *length <= masks.len());
        let length = length.ok_or_else(|| Error::corrupt("its masks are too short for the index of its frames"))?;
        Ok(masks[masks.len() - length..].as_chunks().0)
    }

    /// Place of tensor `i` of the pack among the payloads.
    pub fn payload_of(&self, i: usize) -> usize {
        self.place[i]
    }

    /// Rebuilds payload `i` piece after piece, each frame by frame on all threads, and hands the pieces to `take`. What was
    /// read is let go again: memory stays the same for any size.
    pub fn pieces(&self, i: usize, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let layout = &self.layouts[i];
        let frames: Vec<(usize, usize)> =
            (0..layout.units).flat_map(|unit| (0..layout.frames()).map(move |frame| (unit, frame))).collect();
        let mut buffer = Vec::new();
        for piece in frames.chunks((PIECE / layout.frame_bytes).max(1)) {
            interrupt::check()?;
            buffer.resize(piece.iter().map(|(_, frame)| layout.frame(*frame).len()).sum(), 0);
            let mut rest = &mut buffer[..];
            let mut work = Vec::with_capacity(piece.len());
            for (unit, frame) in piece {
                let (out, more) = rest.split_at_mut(layout.frame(*frame).len());
                work.push((*unit, *frame, out));
                rest = more;
            }
            work.into_par_iter().try_for_each_init(
                || Coder::new(self.effort),
                |coder, (unit, frame, out)| self.frame(coder, i, unit, frame, out),
            )?;
            take(&buffer)?;
            self.files.iter().for_each(|file| file.release());
        }
        Ok(())
    }

    /// Compares payload `i` with its hash.
    pub fn verify(&self, i: usize, bar: &ProgressBar) -> Result<()> {
        let payload = &self.description.payloads[i];
        let mut hasher = Sha256::new();
        self.pieces(i, |bytes| {
            hasher.update(bytes);
            bar.inc(bytes.len() as u64);
            Ok(())
        })?;
        self.compare(payload, hasher)
    }

    /// Fails unless a payload's bytes have its hash.
    pub fn compare(&self, payload: &Payload, hasher: Sha256) -> Result<()> {
        let found = hex(hasher);
        if found == payload.sha256 {
            return Ok(());
        }
        Err(Error::refused(format!("sha256 is {found}, the record says {}", payload.sha256)).tensor(payload.label()))
    }

    /// Bytes `range` of payload `i`.
    pub fn read(&self, i: usize, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let layout = &self.layouts[i];
        let mut coder = Coder::new(self.effort);
        let mut buffer = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (unit, within) = (at / layout.unit_bytes, at % layout.unit_bytes);
            let frame = layout.frame(within / layout.frame_bytes);
            buffer.resize(frame.len(), 0);
            self.frame(&mut coder, i, unit, within / layout.frame_bytes, &mut buffer)?;
            let part = &buffer[within - frame.start..];
            let part = &part[..part.len().min(range.end - at)];
            out[at - range.start..][..part.len()].copy_from_slice(part);
            at += part.len();
        }
        Ok(())
    }

    /// Rebuilds one frame.
    fn frame(&self, coder: &mut Coder, i: usize, unit: usize, frame: usize, out: &mut [u8]) -> Result<()> {
        let (payload, layout) = (&self.description.payloads[i], &self.layouts[i]);
        let of = payload.units[unit].of.as_ref();
        let mut base = None;
        if let Some(of) = of {
            let mut bytes = vec![0; out.len()];
            let range = layout.frame(frame);
            match of.base {
                None => self.frame(coder, of.payload, of.unit, frame, &mut bytes)?,
                Some(base) => {
                    let start = of.unit * layout.unit_bytes;
                    self.bases[base].read(of.payload, start + range.start..start + range.end, &mut bytes)?;
                }
            }
            base = Some(bytes);
        }
        let Some(streams) = payload.units[unit].streams else {
            out.copy_from_slice(&base.expect("a copy has an origin"));
            return Ok(());
        };
        let cursors = self.cursors(layout, streams, frame).tensor(payload.label())?;
        coder.decode(&layout.pattern, cursors, base.as_deref(), out).tensor(payload.label())
    }

    /// The streams of a frame, if they are what was written.
    fn cursors(&self, layout: &Layout, streams: [[u64; 2]; 3], frame: usize) -> Result<Cursors<'_>> {
        let index = self.index(layout, streams)?;
        let before = index[..frame].iter().fold([0; 3], |sum, entry| {
            let lengths = lengths(entry);
            std::array::from_fn(|i| sum[i] + lengths[i])
        });
        let lengths = lengths(&index[frame]);
        let [defaults, masks, exceptions]: [&[u8]; 3] =
            std::array::from_fn(|i| &self.files[i].bytes()[streams[i][0] as usize + before[i]..][..lengths[i]]);
        let cursors = Cursors { defaults, masks, exceptions };
        let said = u32::from_le_bytes(*index[frame].last_chunk().expect("an entry is longer"));
        if checksum(&cursors) != said {
            return Err(Error::corrupt(format!("frame {frame} was changed: its checksum is another one"))
                .help("restore the files model.dedup.* from a backup"));
        }
        Ok(cursors)
    }
}

/// What the index says of a frame: lengths of its streams.
fn lengths(entry: &[u8; INDEX_ENTRY]) -> [usize; 3] {
    let numbers = entry.as_chunks::<4>().0;
    std::array::from_fn(|i| u32::from_le_bytes(numbers[i]) as usize)
}

/// The entry of a frame in the index.
pub(crate) fn index_entry(streams: &Streams) -> [u8; INDEX_ENTRY] {
    let cursors = Cursors { defaults: &streams.defaults, masks: &streams.masks, exceptions: &streams.exceptions };
    let lengths = [&streams.defaults, &streams.masks, &streams.exceptions].map(|stream| stream.len() as u32);
    let mut entry = [0; INDEX_ENTRY];
    for (field, number) in entry.as_chunks_mut::<4>().0.iter_mut().zip(lengths.into_iter().chain([checksum(&cursors)]))
    {
        *field = number.to_le_bytes();
    }
    entry
}

fn checksum(frame: &Cursors<'_>) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for stream in [frame.defaults, frame.masks, frame.exceptions] {
        // Lengths count, so that nothing can move from one stream to the next.
        hasher.update(&(stream.len() as u32).to_le_bytes());
        hasher.update(stream);
    }
    hasher.finalize()
}

/// Reads the description of a store.
fn read(json: &Path) -> Result<Description> {
    let size = std::fs::metadata(json)?.len();
    if size > JSON_LIMIT {
        return Err(Error::corrupt(format!("{size} bytes; a description has at most {JSON_LIMIT}")));
    }
    Description::parse(&std::fs::read(json)?)
}
