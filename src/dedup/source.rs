//! Reads a deduplicated pack in place of its binary, for the runtime and other readers of packs.

use super::artifact::Chain;
use super::description::Encoding;
use super::index;
use super::pattern::{NumberRun, Numbers};
use super::store::{Room, Store, read_store};
use crate::error::{Context, Result};
use crate::iebin::rebuild::Rebuild;
use crate::interrupt;
use crate::mapped::MappedFile;
use crate::sha256::{Digest, Sha256, hex};
use crate::windowed::Windowed;
use rayon::prelude::*;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Checks that are made when a store is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Trust {
    /// No checks of data: it is compared with its checksums only when it is rebuilt into memory.
    #[default]
    Files,
    /// All data is compared with its checksums.
    Nothing,
}

/// Opens the four files in `dir` for the pack that `json` describes.
///
/// # Errors
/// A file is missing, a number is out of range, or with [`Trust::Nothing`] a checksum differs.
pub fn open(json: &Path, dir: &Path, trust: Trust) -> Result<Arc<dyn Rebuild>> {
    let store = Store::of(read_store(dir)?, json, dir, &Chain::default())?;
    store.verify_unless_bound()?;
    if trust == Trust::Nothing {
        store.check_frames()?;
    }
    Ok(Arc::new(store))
}

/// Hashes the `count` zero bytes of padding between two payloads.
fn zeros(hasher: &mut Sha256, count: u64) {
    (0..count).for_each(|_| hasher.update([0]));
}

impl Rebuild for Store {
    fn total_bytes(&self) -> u64 {
        self.description.total_bytes
    }

    fn sha256(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<String> {
        let payloads = &self.description.payloads;
        let mut order: Vec<usize> = (0..payloads.len()).collect();
        order.sort_unstable_by_key(|i| payloads[*i].offset);
        let (mut hasher, mut room, mut at) = (Sha256::new(), Room::default(), 0);
        for i in order {
            zeros(&mut hasher, payloads[i].offset - at);
            self.pieces(i, &mut room, |bytes| {
                hasher.update(bytes);
                progress(bytes.len() as u64);
                Ok(())
            })?;
            at = payloads[i].offset + payloads[i].nbytes;
        }
        zeros(&mut hasher, self.description.total_bytes - at);
        Ok(hex(hasher))
    }

    fn read(&self, tensor: usize, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let payload = self.payload_of(tensor);
        self.read_parallel(payload, range, out)?;
        for streams in self.description.payloads[payload].units.iter().filter_map(|unit| unit.streams) {
            for (file, range) in self.files.iter().zip(streams) {
                file.release_range(range[0] as usize..(range[0] + range[1]) as usize);
            }
        }
        Ok(())
    }

    fn windowed(&self, tensor: usize, range: Range<usize>) -> Option<Windowed> {
        let (payload, unit) = (self.payload_of(tensor), self.layouts[self.payload_of(tensor)].unit_bytes);
        let whole = unit > 0 && range.start.is_multiple_of(unit) && range.len() == unit;
        if whole { self.windowed_unit(payload, range.start / unit) } else { None }
    }

    fn files(&self) -> &[Arc<MappedFile>] {
        &self.files
    }
}

impl Store {
    /// Compares every frame with its checksum.
    fn check_frames(&self) -> Result<()> {
        let units = self.description.payloads.iter().zip(&self.layouts);
        let units: Vec<_> = units.flat_map(|(p, layout)| p.units.iter().map(move |unit| (p, layout, unit))).collect();
        units.into_par_iter().try_for_each(|(payload, layout, unit)| {
            let Some(streams) = unit.streams else { return Ok(()) };
            (0..layout.frames()).into_par_iter().try_for_each(|frame| {
                interrupt::check()?;
                self.cursors(layout, streams, frame).map(drop).tensor(payload.label())
            })
        })
    }

    /// Returns the numbers of a unit, if kernels can read them in their stored form.
    fn windowed_unit(&self, payload: usize, unit: usize) -> Option<Windowed> {
        let (layout, stored) = (&self.layouts[payload], &self.description.payloads[payload].units[unit]);
        match (stored.encoding(), &stored.of) {
            (Encoding::Same, Some(of)) => match of.base {
                // The source of a copy is not itself a copy, so this recursion ends.
                None => return self.windowed_unit(of.payload, of.unit),
                Some(base) => {
                    let base = self.bases[base].store()?;
                    let payload = base.payload_of(of.payload);
                    // The base may have been deduplicated with another division into units than this pack refers to.
                    let same = base.layouts[payload].alike(layout) && of.unit < base.layouts[payload].units;
                    return if same { base.windowed_unit(payload, of.unit) } else { None };
                }
            },
            (Encoding::Frames, _) if layout.pattern.parts == [NumberRun { numbers: Numbers::Bf16, bytes: 2 }] => {}
            _ => return None,
        }
        let streams = stored.streams?;
        let mut starts = streams.map(|range| range[0] as usize);
        let frames = self.index(layout, streams).ok()?.iter().map(|entry| {
            let lengths = index::lengths(entry);
            std::array::from_fn(|i| {
                starts[i] += lengths[i];
                starts[i] - lengths[i]..starts[i]
            })
        });
        let files = self.files.clone().try_into().ok()?;
        Windowed::new(files, frames.collect(), layout.frame_bytes / 2, layout.unit_bytes / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dedup::frame::{Coder, frame_bytes};
    use crate::dedup::pattern::Pattern;
    use crate::dedup::plane::{Effort, Streams};
    use crate::rng::Rng;
    use std::path::PathBuf;

    /// Returns the bits of numbers, one of `rarity` of which has arbitrary bits, and their frames in stored form.
    fn numbers(count: usize, rarity: usize) -> (Vec<u16>, Vec<Streams>) {
        let mut rng = Rng::new(count as u64);
        let number = |i: usize| match i % rarity {
            1 => rng.next_u64() as u16,
            _ => (((rng.next_normal() * 0.02) as f32).to_bits() >> 16) as u16,
        };
        let numbers: Vec<u16> = (0..count).map(number).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let pattern = Pattern { parts: vec![NumberRun { numbers: Numbers::Bf16, bytes: 2 }], period: 2, row: 0 };
        let mut coder = Coder::new(Effort::Fast);
        let frames = bytes.chunks(frame_bytes(&pattern, Effort::Fast));
        let frames = frames.map(|frame| coder.encode(&pattern, frame, None).unwrap()).collect();
        (numbers, frames)
    }

    fn stored(frames: &[Streams], dir: &Path, count: usize) -> Option<Windowed> {
        let mut files: [Vec<u8>; 3] = Default::default();
        let ranges = frames.iter().map(|frame| {
            [&frame.defaults, &frame.masks, &frame.exceptions].map(|stream| stream.as_slice()).iter().enumerate().fold(
                [0..0, 0..0, 0..0],
                |mut ranges, (i, stream)| {
                    ranges[i] = files[i].len()..files[i].len() + stream.len();
                    files[i].extend_from_slice(stream);
                    ranges
                },
            )
        });
        let ranges = ranges.collect();
        let paths: [PathBuf; 3] = std::array::from_fn(|i| dir.join(format!("{i}")));
        for (path, bytes) in paths.iter().zip(&files) {
            // Some systems cannot map an empty file.
            std::fs::write(path, [&bytes[..], &[0]].concat()).unwrap();
        }
        Windowed::new(paths.map(|path| MappedFile::open(&path).unwrap()), ranges, 1 << 17, count)
    }

    #[test]
    fn numbers_are_unpacked_from_any_place_as_frames_are_decoded() {
        if !Windowed::is_fast() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        for (count, rarity) in [(512, 97), (2048, 1000), (5000, 40), (131_072, 97), (300_001, 97), (140_000, 30)] {
            let (numbers, frames) = numbers(count, rarity);
            let windowed = stored(&frames, dir.path(), count).expect("exponents in windows");
            let mut rng = Rng::new(7);
            let any = |rng: &mut Rng| rng.next_u64() as usize % (count + 1);
            for i in 0..40 {
                let (a, b) = if i == 0 { (0, count) } else { (any(&mut rng), any(&mut rng)) };
                let range = a.min(b)..a.max(b);
                let mut out = vec![0; range.len()];
                assert!(windowed.unpack(range.clone(), &mut out), "{count} {range:?}");
                assert!(out == numbers[range.clone()], "{count} {range:?}: other numbers");
            }
        }
    }

    #[test]
    fn changed_bytes_give_other_numbers_or_none_but_never_a_panic() {
        if !Windowed::is_fast() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (_, frames) = numbers(9000, 60);
        let mut rng = Rng::new(3);
        let mut refused = 0;
        for _ in 0..300 {
            let mut frame = frames[0].clone();
            let stream = if rng.next_u64().is_multiple_of(2) { &mut frame.masks } else { &mut frame.exceptions };
            let at = rng.next_u64() as usize % stream.len().min(64);
            stream[at] ^= 1 << (rng.next_u64() % 8);
            let good = stored(&[frame], dir.path(), 9000).is_some_and(|w| w.unpack(0..9000, &mut vec![0; 9000]));
            refused += usize::from(!good);
        }
        assert!(refused > 30, "{refused}");
    }
}
