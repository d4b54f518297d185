//! Deduplicates a pack into a store.

use super::artifact::{Artifact, Chain};
use super::description::{Base, Codec, Description, Encoding, FILE_NAMES, FORMAT, JSON_NAME, Origin, Payload, Unit};
use super::find::{Candidate, origins};
use super::frame::Coder;
use super::index::entry_of;
use super::layout::Layout;
use super::plane::{Effort, Streams};
use super::report::Summary;
use super::restore::is_reduced;
use super::slices::slices;
use crate::error::{Context, Error, Result};
use crate::iebin::dependants::{add_dependant, relative};
use crate::iebin::writer::PACK;
use crate::iebin::{self, Entry, IebinReader};
use crate::interrupt;
use crate::mapped::MappedFile;
use crate::output::{AtomicFile, DirLock, remove_if_there, swap, write_atomically};
use crate::progress;
use crate::sha256::{self, Digest, Sha256, hex};
use rayon::prelude::*;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

/// Frames that are encoded at once, per thread.
const FRAMES_PER_THREAD: usize = 8;

/// Options of a deduplication.
#[derive(Debug, Clone)]
pub struct MakeOptions {
    /// Directory of the pack.
    pub model_dir: PathBuf,
    /// Other packs to which this pack may be similar.
    pub bases: Vec<PathBuf>,
    /// Trade-off between size and speed.
    pub codec: Codec,
    /// Level of zstd, 1 to 22.
    pub level: i32,
    /// True to write the store even if it is not smaller than the binary.
    pub even_if_larger: bool,
}

/// Writes the four files of the store next to the binary, which is kept. If they would not be smaller than the binary,
/// nothing is written, unless `even_if_larger` is set.
///
/// # Errors
/// There is no binary, a tensor differs from its recorded hash, or the disk is full.
pub fn dedup(options: &MakeOptions) -> Result<Made> {
    let dir = &options.model_dir;
    let _lock = DirLock::acquire(dir).map_err(Error::while_opening_model)?;
    swap::settle(dir, PACK)?;
    if is_reduced(dir)? {
        return Err(Error::usage("found a deduplicated pack whose binary was removed")
            .at(dir)
            .help("restore the binary first: `iec dedup --restore --model-dir DIR`"));
    }
    let pack_sha256 = sha256::of_file(&dir.join(iebin::JSON_NAME), |_| {}).map_err(Error::while_opening_model)?;
    let reader = IebinReader::open(dir).map_err(Error::while_opening_model)?;
    let chain = Chain::default().with(dir)?;
    let bases = options.bases.iter().map(|base| Artifact::open_below(base, &chain).map_err(Error::while_opening_model));
    let bases = bases.collect::<Result<Vec<_>>>()?;
    let effort = options.codec.effort(options.level);
    let mut plan = Plan::of(&reader, effort)?;
    plan.cut(&reader);
    let mut found = origins(&plan.candidates(), || plan.bin.release(), &bases, effort)?;
    let bases = only_needed(bases, &mut found);
    let create = |name: &&str| Ok(BufWriter::with_capacity(1 << 20, AtomicFile::create(&dir.join(name))?));
    let files = FILE_NAMES.iter().map(create).collect::<Result<Vec<_>>>()?;
    let mut writer = Writer { plan: &plan, bases: &bases, effort, files, lengths: [0; 3] };
    let payloads = writer.write(found)?;
    let (files, lengths) = (writer.files, writer.lengths);
    let unbuffered = |file: BufWriter<AtomicFile>| file.into_inner().map_err(|e| Error::from(e.into_error()));
    let files = files.into_iter().map(unbuffered).collect::<Result<Vec<_>>>()?;
    let base_dirs = bases.iter().map(|base| relative(&base.dir, dir).map(|dir| Base { dir }));
    let mut description = Description {
        format: FORMAT.to_string(),
        codec: options.codec,
        pack_sha256: Some(pack_sha256),
        weights_bin: reader.description.weights_bin.clone(),
        total_bytes: plan.bin.bytes().len() as u64,
        files: lengths,
        bases: base_dirs.collect::<Result<_>>()?,
        payloads,
    };
    description.resolve(reader.entries())?;
    let text = description.to_text();
    let summary = Summary::of(&description, reader.entries(), text.len() as u64);
    if summary.stored_bytes >= summary.original_bytes && !options.even_if_larger {
        return Ok(Made { summary: summary.nothing_gained(), unlisted: Vec::new() });
    }
    // An older store is invalidated first, because its description must not be mixed with the new files.
    remove_if_there(&dir.join(JSON_NAME))?;
    files.into_iter().try_for_each(AtomicFile::commit)?;
    let listed: Vec<Result<()>> = bases.iter().map(|base| add_dependant(&base.dir, dir)).collect();
    write_atomically(&dir.join(JSON_NAME), text.as_bytes())?;
    let unlisted = bases.into_iter().zip(listed).filter_map(|(base, listed)| listed.err().map(|e| (base.dir, e)));
    Ok(Made { summary, unlisted: unlisted.collect() })
}

/// Result of a deduplication.
#[derive(Debug)]
pub struct Made {
    /// Bytes before and after.
    pub summary: Summary,
    /// Bases whose list of dependent packs could not be written, with the error: `iec dedup --remove` would not
    /// refuse to remove them.
    pub unlisted: Vec<(PathBuf, Error)>,
}

/// Returns the bases to which units refer, and renumbers the references in `found` accordingly. The other bases are
/// dropped, so that the pack does not depend on them.
fn only_needed(bases: Vec<Artifact>, found: &mut [Option<(Encoding, Origin)>]) -> Vec<Artifact> {
    let mut place: Vec<Option<usize>> = vec![None; bases.len()];
    for base in found.iter().flatten().filter_map(|(_, of)| of.base) {
        place[base] = Some(0);
    }
    for (new, place) in place.iter_mut().flatten().enumerate() {
        *place = new;
    }
    for of in found.iter_mut().flatten().map(|(_, of)| of) {
        of.base = of.base.and_then(|base| place[base]);
    }
    bases.into_iter().zip(place).filter_map(|(base, place)| place.map(|_| base)).collect()
}

/// Payloads of the binary.
struct Plan<'a> {
    bin: &'a MappedFile,
    parts: Vec<Planned<'a>>,
}

struct Planned<'a> {
    entry: Option<&'a Entry>,
    offset: usize,
    nbytes: usize,
    layout: Layout,
}

impl<'a> Plan<'a> {
    /// Lists all tensors in file order, and the bytes between them that are not zeros.
    fn of(reader: &'a IebinReader, effort: Effort) -> Result<Plan<'a>> {
        let bin = reader.bin()?;
        let bytes = bin.bytes();
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
                return Err(Error::unsupported(
                    "found bytes that another tensor uses too, as in packs of older programs",
                )
                .tensor(&entry.name)
                .help("convert the pack first: `iec pack --hf-dir OLD_PACK --out-dir NEW_PACK`"));
            }
            gap(&mut parts, end, entry.offset)?;
            let layout = Layout::of(Some(entry), entry.nbytes, effort).tensor(&entry.name)?;
            parts.push(Planned { entry: Some(entry), offset: entry.offset, nbytes: entry.nbytes, layout });
            end = entry.offset + entry.nbytes;
        }
        gap(&mut parts, end, bytes.len())?;
        Ok(Plan { bin, parts })
    }

    /// Divides matrices into slices of rows (attention heads) where such slices repeat.
    fn cut(&mut self, reader: &IebinReader) {
        let Some(model) = &reader.description.model else { return };
        let tensors = self.parts.iter().enumerate().filter_map(|(i, part)| {
            self.bin.release();
            let bytes = &self.bin.bytes()[part.offset..][..part.nbytes];
            Some((i, part.entry?, &part.layout, bytes))
        });
        for (i, layout) in slices(model, tensors) {
            self.parts[i].layout = layout;
        }
    }

    fn candidates(&self) -> Vec<Candidate<'_>> {
        let units = self.parts.iter().enumerate().flat_map(|(payload, part)| {
            (0..part.layout.units).map(move |unit| Candidate {
                payload,
                unit,
                layout: &part.layout,
                bytes: part.unit(unit, self.bin),
                name: part.entry.map(|entry| entry.name.as_str()),
                sha256: part.entry.and_then(|entry| entry.sha256.as_deref()),
            })
        });
        units.collect()
    }
}

impl Planned<'_> {
    fn unit<'b>(&self, unit: usize, bin: &'b MappedFile) -> &'b [u8] {
        &bin.bytes()[self.offset + unit * self.layout.unit_bytes..][..self.layout.unit_bytes]
    }
}

/// Files of the streams while they are written.
struct Writer<'a> {
    plan: &'a Plan<'a>,
    bases: &'a [Artifact],
    effort: Effort,
    files: Vec<BufWriter<AtomicFile>>,
    lengths: [u64; 3],
}

impl Writer<'_> {
    /// Writes the streams of all payloads; returns the payloads for the description. `found` has the encoding and the
    /// origin of each unit.
    fn write(&mut self, found: Vec<Option<(Encoding, Origin)>>) -> Result<Vec<Payload>> {
        let plan = self.plan;
        let bar = progress::bytes("dedup", plan.bin.bytes().len() as u64);
        let mut found = found.into_iter();
        let mut payloads = Vec::with_capacity(plan.parts.len());
        for part in &plan.parts {
            let mut units = Vec::with_capacity(part.layout.units);
            for unit in 0..part.layout.units {
                let (encoding, of) = found.next().flatten().map_or((Encoding::Frames, None), |(e, of)| (e, Some(of)));
                let streams = match encoding {
                    Encoding::Same => None,
                    _ => Some(self.write_unit(part, unit, of.as_ref())?),
                };
                bar.inc(part.layout.unit_bytes as u64);
                units.push(Unit { of, streams });
            }
            let bytes = &plan.bin.bytes()[part.offset..][..part.nbytes];
            let recorded = part.entry.and_then(|entry| Some((&entry.name, entry.sha256.as_ref()?)));
            let found = hex(Sha256::new_with_prefix(bytes));
            if let Some((name, expected)) = recorded.filter(|(_, expected)| !found.eq_ignore_ascii_case(expected)) {
                let message = format!("found the SHA-256 {found}, expected the recorded {expected}");
                let error = Error::refused(message).at(plan.bin.path()).tensor(name);
                return Err(
                    error.help("the pack is damaged; restore model.ie.bin from a backup, or make the pack again")
                );
            }
            payloads.push(Payload {
                name: part.entry.map(|entry| entry.name.clone()),
                place: part.entry.is_none().then_some([part.offset as u64, part.nbytes as u64]),
                sha256: recorded.is_none().then_some(found),
                units,
                ..Payload::default()
            });
            plan.bin.release();
        }
        Ok(payloads)
    }

    /// Appends the frames of a unit and their index; returns their start and length in bytes in each of the files.
    fn write_unit(&mut self, part: &Planned<'_>, unit: usize, of: Option<&Origin>) -> Result<[[u64; 2]; 3]> {
        let Writer { plan, bases, effort, lengths: starts, .. } = *self;
        let (layout, bytes) = (&part.layout, part.unit(unit, plan.bin));
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
                        Some(&plan.parts[*payload].unit(*unit, plan.bin)[range.clone()])
                    }
                    Some(Origin { base: Some(base), payload, unit, .. }) => {
                        buffer.resize(range.len(), 0);
                        let base = &bases[*base];
                        let theirs = layout.facing(&base.entries()[*payload], effort)?;
                        base.read_unit(*payload, &theirs, *unit, range.clone(), &mut buffer)?;
                        Some(&buffer[..])
                    }
                };
                coder.encode(&layout.pattern, &bytes[range], base)
            };
            let encoded: Vec<Streams> =
                batch.par_iter().map_init(|| Coder::new(effort), encode).collect::<Result<_>>()?;
            for streams in &encoded {
                self.append(streams.cursors().all())?;
                index.extend(entry_of(streams));
            }
            bases.iter().for_each(Artifact::release);
            plan.bin.release();
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
