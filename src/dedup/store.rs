//! Opens a deduplicated pack: every number is checked once, then any bytes of any tensor can be rebuilt.

use super::artifact::{Artifact, Chain};
use super::description::{Base, Description, FILE_NAMES, JSON_NAME, Payload};
use super::frame::Coder;
use super::index::{self, INDEX_ENTRY};
use super::layout::Layout;
use super::plane::{Cursors, Effort};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::reader::{check_entries, plain_file_name, read_description};
use crate::iebin::{self, Entry};
use crate::interrupt;
use crate::mapped::MappedFile;
use crate::progress::{self, ProgressBar};
use crate::sha256::{self, Digest, Sha256, hex};
use rayon::prelude::*;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Advice for files that contradict each other.
const DAMAGED: &str = "the files model.dedup.* are damaged or do not belong together; restore them from a backup or, \
                       while model.ie.bin is there, run `iec dedup` again";
/// A description larger than this is refused before it is parsed.
const JSON_LIMIT: u64 = 256 << 20;
/// Bytes rebuilt at once.
const PIECE: usize = 16 << 20;

/// Buffers for rebuilt bytes. They are reused, because page faults of new memory would take longer than decoding.
#[derive(Debug, Default)]
pub(crate) struct Room([Vec<u8>; 2]);

/// An opened store.
#[derive(Debug)]
pub(crate) struct Store {
    pub dir: PathBuf,
    pub description: Description,
    /// The tensors of the pack.
    pub entries: Vec<Entry>,
    pub(super) files: Vec<Arc<MappedFile>>,
    pub(super) layouts: Vec<Layout>,
    /// Payload of each tensor.
    pub(super) place: Vec<usize>,
    pub(super) bases: Vec<Artifact>,
    pub(super) effort: Effort,
}

impl Store {
    /// Opens the store in `dir`. `chain` holds the packs that are being opened and have this one as a base.
    ///
    /// # Errors
    /// A file is missing, or a number is out of range.
    pub fn open(dir: &Path, chain: &Chain) -> Result<Store> {
        Store::of(read_store(dir)?, &dir.join(iebin::JSON_NAME), dir, chain)
    }

    /// Opens a store with this description, for the pack that the file `pack` describes.
    pub fn of(mut description: Description, pack: &Path, dir: &Path, chain: &Chain) -> Result<Store> {
        let chain = chain.with(dir)?;
        let json = dir.join(JSON_NAME);
        plain_file_name(&description.weights_bin).at(&json).tensor("weights_bin")?;
        let mut packed = read_description(pack)?;
        if description
            .pack_sha256
            .as_ref()
            .is_some_and(|recorded| !sha256::of_file(pack, |_| {}).is_ok_and(|found| found == *recorded))
        {
            return Err(Error::corrupt(format!("found a store of another pack than the one of {}", pack.display()))
                .at(&json)
                .help(
                    "model.ie.json was changed or replaced after `iec dedup`: restore it from a backup; only if \
                     model.ie.bin is there, run `iec dedup` again",
                ));
        }
        let older = packed.is_older();
        let length = usize::try_from(description.total_bytes)
            .map_err(|_| Error::corrupt("found total_bytes larger than this machine can address").at(&json))?;
        let entries = check_entries(std::mem::take(&mut packed.tensors), length, older).at(pack)?;
        description.resolve(&entries).at(&json).help(DAMAGED)?;
        let open = |name: &&str| {
            MappedFile::open(&dir.join(name))
                .help("the files model.dedup.* belong together; restore this one from a backup")
        };
        let files = FILE_NAMES.iter().map(open).collect::<Result<Vec<_>>>()?;
        let effort = description.codec.effort(1);
        let open_base = |base: &Base| {
            let base = dir.join(&base.dir);
            if !files::exists(&base.join(iebin::JSON_NAME))? {
                return Err(Error::corrupt("found no pack here, expected the one this pack was deduplicated against")
                    .at(base)
                    .help("put that pack back into this directory; without it this pack cannot be rebuilt"));
            }
            Artifact::open_below(&base, &chain)
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
        store.check().at(&json).help(DAMAGED)?;
        Ok(store)
    }

    /// Compares every payload with its hash if the store does not record which pack it belongs to, as those of earlier
    /// versions do not. A store of another pack would otherwise be used for this one.
    pub(super) fn verify_unless_bound(&self) -> Result<()> {
        if self.description.pack_sha256.is_none() {
            self.verify_all()?;
        }
        Ok(())
    }

    /// Rebuilds every payload in memory and compares its hash; returns the number of bytes that were compared.
    pub fn verify_all(&self) -> Result<u64> {
        let total = self.description.payloads.iter().map(|payload| payload.nbytes).sum();
        let (bar, mut room) = (progress::bytes("verify", total), Room::default());
        (0..self.description.payloads.len()).try_for_each(|i| self.verify(i, &mut room, &bar)).at(&self.dir)?;
        Ok(total)
    }

    /// Returns the index of a unit with these streams.
    pub(super) fn index(&self, layout: &Layout, streams: [[u64; 2]; 3]) -> Result<&[[u8; INDEX_ENTRY]]> {
        let masks = &self.files[1].bytes()[streams[1][0] as usize..][..streams[1][1] as usize];
        let length = layout.frames().checked_mul(INDEX_ENTRY).filter(|length| *length <= masks.len());
        let length = length.ok_or_else(|| Error::corrupt("found masks that are too short for the index of frames"))?;
        Ok(masks[masks.len() - length..].as_chunks().0)
    }

    /// Returns the payload of tensor `i` of the pack.
    pub fn payload_of(&self, i: usize) -> usize {
        self.place[i]
    }

    /// Rebuilds payload `i` in pieces of about 16 MiB, frame by frame on all threads, and passes the pieces in order to
    /// `take`. While `take` runs, the next piece is rebuilt. Pages of the files are released after use, so memory does
    /// not grow with the size of the payload.
    pub fn pieces(&self, i: usize, room: &mut Room, mut take: impl FnMut(&[u8]) -> Result<()> + Send) -> Result<()> {
        let layout = &self.layouts[i];
        let unit_frames = |unit| (0..layout.frames()).map(move |frame| (unit * layout.unit_bytes, layout.frame(frame)));
        let frames = (0..layout.units).flat_map(unit_frames);
        let frames: Vec<Range<usize>> = frames.map(|(start, frame)| start + frame.start..start + frame.end).collect();
        let pieces = frames.chunks((PIECE / layout.frame_bytes).max(1));
        let mut pieces = pieces.map(|frames| frames[0].start..frames[frames.len() - 1].end);
        let read = |piece: Option<Range<usize>>, buffer: &mut Vec<u8>| {
            let piece = piece.unwrap_or_default();
            buffer.resize(piece.len(), 0);
            self.read_parallel(i, piece, buffer)
        };
        let [now, next] = &mut room.0;
        read(pieces.next(), now)?;
        while !now.is_empty() {
            interrupt::check()?;
            let following = pieces.next();
            let (taken, made) = rayon::join(|| take(now), || read(following, next));
            taken.and(made)?;
            std::mem::swap(now, next);
            self.files.iter().for_each(|file| file.release());
            self.bases.iter().for_each(Artifact::release);
        }
        Ok(())
    }

    /// Compares payload `i` with its hash.
    pub fn verify(&self, i: usize, room: &mut Room, bar: &ProgressBar) -> Result<()> {
        let payload = &self.description.payloads[i];
        let mut hasher = Sha256::new();
        self.pieces(i, room, |bytes| {
            hasher.update(bytes);
            bar.inc(bytes.len() as u64);
            Ok(())
        })?;
        self.compare(payload, hasher)
    }

    /// Compares the hash of a payload's bytes with the recorded one.
    pub fn compare(&self, payload: &Payload, hasher: Sha256) -> Result<()> {
        let (found, said) = (hex(hasher), &payload.hash);
        if found == *said {
            return Ok(());
        }
        Err(Error::refused(format!("found the sha256 {found}, expected {said}"))
            .at(&self.dir)
            .tensor(payload.label())
            .help("the files model.dedup.* of this pack or of a base pack are damaged; restore them from a backup"))
    }

    /// Reads bytes `range` of payload `i`.
    pub fn read(&self, i: usize, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let mut coder = Coder::new(self.effort);
        self.by_frame(i, range, out).into_iter().try_for_each(|(range, out)| self.part(&mut coder, i, range, out))
    }

    /// Reads bytes `range` of payload `i` on all threads.
    pub fn read_parallel(&self, i: usize, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let coder = || Coder::new(self.effort);
        let work = self.by_frame(i, range, out).into_par_iter();
        work.try_for_each_init(coder, |coder, (range, out)| self.part(coder, i, range, out))
    }

    /// Splits a range of payload `i` where frames end; each part has its slice of `out`.
    fn by_frame<'a>(&self, i: usize, range: Range<usize>, mut out: &'a mut [u8]) -> Vec<(Range<usize>, &'a mut [u8])> {
        let layout = &self.layouts[i];
        let (mut parts, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let within = at % layout.unit_bytes;
            let end = (at - within + layout.frame(within / layout.frame_bytes).end).min(range.end);
            let (part, rest) = out.split_at_mut(end - at);
            parts.push((at..end, part));
            (at, out) = (end, rest);
        }
        parts
    }

    /// Reads a range inside one frame.
    fn part(&self, coder: &mut Coder, i: usize, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let layout = &self.layouts[i];
        let (unit, within) = (range.start / layout.unit_bytes, range.start % layout.unit_bytes);
        let (number, frame) = (within / layout.frame_bytes, layout.frame(within / layout.frame_bytes));
        if frame.len() == out.len() {
            return self.frame(coder, i, unit, number, out);
        }
        let mut whole = vec![0; frame.len()];
        self.frame(coder, i, unit, number, &mut whole)?;
        out.copy_from_slice(&whole[within - frame.start..][..out.len()]);
        Ok(())
    }

    /// Rebuilds one frame.
    fn frame(&self, coder: &mut Coder, i: usize, unit: usize, frame: usize, out: &mut [u8]) -> Result<()> {
        let (payload, layout) = (&self.description.payloads[i], &self.layouts[i]);
        let mut base = None;
        if let Some(of) = &payload.units[unit].of {
            let bytes = base.insert(vec![0; out.len()]);
            match of.base {
                None => self.frame(coder, of.payload, of.unit, frame, bytes)?,
                Some(base) => {
                    let base = &self.bases[base];
                    let theirs = layout.facing(&base.entries()[of.payload], self.effort)?;
                    base.read_unit(of.payload, &theirs, of.unit, layout.frame(frame), bytes)?;
                }
            }
        }
        let Some(streams) = payload.units[unit].streams else {
            let base = base.ok_or_else(|| Error::corrupt("found a unit with neither streams nor an origin"))?;
            out.copy_from_slice(&base);
            return Ok(());
        };
        let cursors = self.cursors(layout, streams, frame).tensor(payload.label())?;
        let decoded = coder.decode(&layout.pattern, cursors, base.as_deref(), out);
        decoded.at(&self.dir).tensor(payload.label()).help(DAMAGED)
    }

    /// Returns the streams of a frame; fails if their checksum differs from the recorded one.
    pub(super) fn cursors(&self, layout: &Layout, streams: [[u64; 2]; 3], frame: usize) -> Result<Cursors<'_>> {
        let index = self.index(layout, streams)?;
        let before = index[..frame].iter().fold([0; 3], |sum, entry| {
            let lengths = index::lengths(entry);
            std::array::from_fn(|i| sum[i] + lengths[i])
        });
        let lengths = index::lengths(&index[frame]);
        let cursors = Cursors::of(std::array::from_fn(|i| {
            &self.files[i].bytes()[streams[i][0] as usize + before[i]..][..lengths[i]]
        }));
        if index::checksum(&cursors) != index::checksum_of(&index[frame]) {
            return Err(Error::corrupt(format!("found another checksum of frame {frame} than the recorded one"))
                .at(&self.dir)
                .help("the files model.dedup.* of this pack are damaged; restore them from a backup"));
        }
        Ok(cursors)
    }
}

/// Reads the description of the store in `dir`.
pub(super) fn read_store(dir: &Path) -> Result<Description> {
    let json = dir.join(JSON_NAME);
    files::read_limited(&json, JSON_LIMIT).and_then(|text| Description::parse(&text)).at(&json)
}
