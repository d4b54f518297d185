//! Fills the two files, tensor after tensor, and hashes them on the way.
//!
//! Tensors come in the order of the files, each spread over all threads. What an earlier run or a part has finished is
//! read back instead of made, so that its hash is compared and the hash of the whole file goes on.

use super::layout::{Fate, Layout, Ranges, Slot};
use super::{CODES_NAME, SCALES_NAME};
use crate::calibration::Calibration;
use crate::convert::digest::hash_range;
use crate::convert::quantize::source;
use crate::convert::quantize::weights::Weights;
use crate::error::{Context, Result};
use crate::job::{Found, Job, Share, deal};
use crate::manifest::Metrics;
use crate::output::AtomicFile;
use crate::progress::{self, ProgressBar};
use crate::provenance::SourceFile;
use crate::quant::TensorInputStats;
use crate::quant::stream::{self, CanonicalChunk, Stack};
use crate::sha256::{Digest, Sha256, hex};
use serde::{Deserialize, Serialize};
use std::os::unix::fs::FileExt;

/// What hashing costs a part against quantizing the same bytes.
const QUANTIZE_FACTOR: u64 = 32;

/// Everything that a run works with.
pub(super) struct Writing<'a> {
    pub weights: &'a Weights,
    pub layout: &'a Layout,
    pub calibration: Option<&'a Calibration>,
    pub codes: &'a AtomicFile,
    pub scales: &'a AtomicFile,
    pub chunk_rows: Option<usize>,
    pub share: &'a Share,
    pub job: &'a Job,
}

/// A finished tensor, as the journal has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Done {
    /// SHA-256 of the codes.
    codes: String,
    /// SHA-256 of the scales and zero points.
    scales: String,
    pub metrics: Metrics,
}

/// What a run resulted in.
pub(super) struct Written {
    /// Per slot; `None` where a tensor stays in the checkpoint or belongs to another part.
    pub done: Vec<Option<Done>>,
    /// The shards that this run hashed.
    pub shards: Vec<SourceFile>,
    /// SHA-256 of codes and scales; meaningless for a part.
    pub files: [String; 2],
    /// Tensors that were taken over instead of made.
    pub resumed: usize,
}

/// For every slot, then for every shard: the number of the part that does it.
pub(super) fn dealt(count: usize, weights: &Weights, layout: &Layout) -> Vec<usize> {
    let slots = layout.slots.iter().map(|slot| slot.ranges().map_or(0, |_| slot.tensor.nbytes() * QUANTIZE_FACTOR));
    let shards = weights.shards().iter().map(|shard| shard.nbytes());
    deal(&slots.chain(shards).collect::<Vec<_>>(), count)
}

/// For every slot, then for every shard: whether this run does it.
pub(super) fn mine(share: &Share, weights: &Weights, layout: &Layout) -> Vec<bool> {
    match share {
        Share::Part(part) => dealt(part.count, weights, layout).into_iter().map(|n| n == part.number).collect(),
        Share::Whole | Share::Merge(_) => vec![true; layout.slots.len() + weights.shards().len()],
    }
}

impl Writing<'_> {
    pub fn run(&self) -> Result<Written> {
        let mine = mine(self.share, self.weights, self.layout);
        if let Share::Merge(_) = self.share {
            self.refuse_missing()?;
        }
        let (slots, shards) = mine.split_at(self.layout.slots.len());
        let elements = |(slot, mine): (&Slot, &bool)| if *mine { slot.tensor.elements() } else { 0 };
        let bar = progress::bytes("quantizing", self.layout.slots.iter().zip(slots).map(elements).sum());
        self.job.keep(&[self.codes.file(), self.scales.file()], || {
            let (shards, tensors) =
                rayon::join(|| source::hash_shards(self.weights, shards, Some(self.job)), || self.tensors(slots, &bar));
            bar.finish_and_clear();
            tensors.and_then(|written| Ok(Written { shards: shards?, ..written }))
        })
    }

    /// Names the parts whose work is not there.
    fn refuse_missing(&self) -> Result<()> {
        let slots = self.layout.slots.iter().map(|slot| slot.ranges().map(|_| task(slot)));
        let tasks: Vec<Option<String>> =
            slots.chain(self.weights.shards().iter().map(|shard| Some(source::task(shard)))).collect();
        if tasks.iter().flatten().all(|task| self.job.found::<serde_json::Value>(task).next().is_some()) {
            return Ok(());
        }
        let dealt = |count| {
            let numbers = dealt(count, self.weights, self.layout);
            tasks.into_iter().zip(numbers).filter_map(|(task, number)| Some((task?, number))).collect()
        };
        Err(self.job.missing(dealt))
    }

    fn tensors(&self, mine: &[bool], bar: &ProgressBar) -> Result<Written> {
        let mut hashes = [Sha256::new(), Sha256::new()];
        let mut written = Written { done: Vec::new(), shards: Vec::new(), files: Default::default(), resumed: 0 };
        for (slot, mine) in self.layout.slots.iter().zip(mine) {
            let done = match &slot.fate {
                Fate::Quantized(ranges) if *mine => {
                    let taken = self.take_over(slot, ranges, &mut hashes, bar).tensor(&slot.tensor.name)?;
                    written.resumed += usize::from(taken.is_some());
                    let made = || self.make(slot, ranges, &mut hashes, bar).tensor(&slot.tensor.name);
                    Some(taken.map_or_else(made, Ok)?)
                }
                _ => None,
            };
            written.done.push(done);
        }
        written.files = hashes.map(hex);
        Ok(written)
    }

    fn take_over(
        &self,
        slot: &Slot,
        ranges: &Ranges,
        hashes: &mut [Sha256; 2],
        bar: &ProgressBar,
    ) -> Result<Option<Done>> {
        let name = task(slot);
        let mut damaged = None;
        for found in self.job.found::<Done>(&name) {
            let mut after = hashes.clone();
            if self.read_back(ranges, &found, &mut after)? {
                *hashes = after;
                if found.part.is_some() {
                    self.job.record(&name, &found.result, ranges.nbytes())?;
                }
                bar.inc(slot.tensor.elements());
                return Ok(Some(found.result));
            }
            damaged = found.part.or(damaged);
        }
        match (damaged, self.share) {
            (Some(part), Share::Merge(_)) => Err(Job::damaged(part)),
            _ => Ok(None),
        }
    }

    /// True when both ranges hold what the journal says; a part's are copied on the way.
    fn read_back(&self, ranges: &Ranges, found: &Found<'_, Done>, hashes: &mut [Sha256; 2]) -> Result<bool> {
        let sections = [
            (CODES_NAME, self.codes, ranges.codes.clone(), &found.result.codes),
            (SCALES_NAME, self.scales, ranges.scales_and_zeros(), &found.result.scales),
        ];
        for ((name, file, range, expected), hash) in sections.into_iter().zip(hashes) {
            let Some(data) = self.job.open_data(found, name, range.end) else { return Ok(false) };
            let each = |at: u64, bytes: &[u8]| {
                hash.update(bytes);
                match found.part {
                    Some(_) => file.file().write_all_at(bytes, at).at(file.path()),
                    None => Ok(()),
                }
            };
            let sha256 = hash_range(range, &ProgressBar::hidden(), |at, out| data.read_at(at, out), each)?;
            if sha256 != *expected {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn make(&self, slot: &Slot, ranges: &Ranges, hashes: &mut [Sha256; 2], bar: &ProgressBar) -> Result<Done> {
        let (count, rows, cols) = slot.tensor.matrices()?;
        let [all_codes, all_scales] = hashes;
        let mut codes = Section::new(self.codes, ranges.codes.start, all_codes);
        let mut scales = Section::new(self.scales, ranges.scales.start, all_scales);
        let mut zeros = Vec::new();
        let read = |matrix: usize, rows: std::ops::Range<usize>, out: &mut [f32]| {
            bar.inc(out.len() as u64);
            self.weights.read_rows_f32(&slot.tensor, matrix, rows, out)
        };
        let calibration = self.calibration.filter(|_| slot.quant.method.needs_inputs());
        let inputs = calibration
            .map(|c| TensorInputStats::new(c, &slot.tensor.name, (count, cols), None, slot.quant.method))
            .transpose()?
            .flatten();
        let stack = Stack { count, rows, cols, read: &read, chunk_rows: self.chunk_rows, inputs: inputs.as_ref() };
        let outcome = stream::quantize(slot.quant, &stack, &mut |chunk: CanonicalChunk| {
            zeros.extend_from_slice(&chunk.zeros);
            codes.append(&chunk.codes)?;
            scales.append(&chunk.scales)
        })?;
        scales.append(&zeros)?;
        let (codes, scales) = (codes.finish(ranges.codes.end), scales.finish(ranges.zeros.end));
        let done = Done { codes, scales, metrics: outcome.metrics };
        self.job.record(&task(slot), &done, ranges.nbytes())?;
        Ok(done)
    }
}

fn task(slot: &Slot) -> String {
    format!("tensor {}", slot.tensor.name)
}

/// A range of a file being written in order; its bytes go into the hash of the range and into that of the file.
struct Section<'a> {
    file: &'a AtomicFile,
    at: u64,
    own: Sha256,
    all: &'a mut Sha256,
}

impl<'a> Section<'a> {
    fn new(file: &'a AtomicFile, at: u64, all: &'a mut Sha256) -> Section<'a> {
        Section { file, at, own: Sha256::new(), all }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.own.update(bytes);
        self.all.update(bytes);
        self.file.file().write_all_at(bytes, self.at).at(self.file.path())?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn finish(self, end: u64) -> String {
        assert_eq!(self.at, end, "the section is complete");
        hex(self.own)
    }
}
