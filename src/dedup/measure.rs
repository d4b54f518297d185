//! Measures size and speed of the deduplication of a pack: every frame is encoded and decoded in memory.

use super::description::Codec;
use super::frame::Coder;
use super::layout::Layout;
use super::report::kind;
use crate::error::{Context, Error, Result};
use crate::iebin::IebinReader;
use crate::{interrupt, progress};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Frames that are read before their pages are released.
const LET_GO: usize = 256;

/// Measurement of all frames of one kind of tensor.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// The dtype or scheme; `all` for the sum.
    pub kind: String,
    /// Bytes of the tensors.
    pub original_bytes: u64,
    /// Bytes of their frames, without the description.
    pub stored_bytes: u64,
    /// Stored bytes divided by original bytes.
    pub ratio: f64,
    /// Encoding speed in GB (10⁹ bytes of weights) per second of one thread.
    pub encode_gb_per_s: f64,
    /// Decoding speed in GB (10⁹ bytes of weights) per second of one thread.
    pub decode_gb_per_s: f64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Sum {
    original: u64,
    stored: u64,
    encode: Duration,
    decode: Duration,
}

impl Sum {
    fn add(&mut self, other: Sum) {
        self.original += other.original;
        self.stored += other.stored;
        self.encode += other.encode;
        self.decode += other.decode;
    }

    fn measured(self, kind: &str) -> Measured {
        let rate = |time: Duration| self.original as f64 / 1e9 / time.as_secs_f64().max(1e-9);
        Measured {
            kind: kind.to_string(),
            original_bytes: self.original,
            stored_bytes: self.stored,
            ratio: self.stored as f64 / self.original.max(1) as f64,
            encode_gb_per_s: rate(self.encode),
            decode_gb_per_s: rate(self.decode),
        }
    }
}

/// Encodes and decodes all tensors on this thread, frame by frame, and compares; nothing is written. Returns the
/// measurements by kind of tensor, the sum last.
///
/// # Errors
/// There is no pack, or a frame is not restored exactly.
pub fn measure(dir: &Path, codec: Codec, level: i32) -> Result<Vec<Measured>> {
    let reader = IebinReader::open(dir).map_err(Error::while_opening_model)?;
    let bin = reader.bin()?;
    let effort = codec.effort(level);
    let mut coder = Coder::new(effort);
    let mut sums: BTreeMap<&str, Sum> = BTreeMap::new();
    let (mut frame, mut back) = (Vec::new(), Vec::new());
    let bar = progress::bytes("measure", bin.bytes().len() as u64);
    for entry in reader.entries() {
        let layout = Layout::of(Some(entry), entry.nbytes, effort).tensor(&entry.name)?;
        let payload = &bin.bytes()[entry.offset..][..entry.nbytes];
        let units = payload.chunks(layout.unit_bytes.max(1));
        for (i, bytes) in units.flat_map(|unit| unit.chunks(layout.frame_bytes)).enumerate() {
            interrupt::check()?;
            if i % LET_GO == 0 {
                bin.release();
            }
            // Copies the frame first, because the time of page faults of the file is not measured.
            frame.clear();
            frame.extend_from_slice(bytes);
            back.resize(bytes.len(), 0);
            let sum = round_trip(&mut coder, &layout, &frame, &mut back).tensor(&entry.name)?;
            sums.entry(kind(entry)).or_default().add(sum);
        }
        bar.inc(entry.nbytes as u64);
    }
    let mut all = Sum::default();
    sums.values().for_each(|sum| all.add(*sum));
    let kinds = sums.iter().map(|(kind, sum)| sum.measured(kind));
    Ok(kinds.chain([all.measured("all")]).collect())
}

fn round_trip(coder: &mut Coder, layout: &Layout, frame: &[u8], back: &mut [u8]) -> Result<Sum> {
    let start = Instant::now();
    let streams = coder.encode(&layout.pattern, frame, None)?;
    let encode = start.elapsed();
    let start = Instant::now();
    coder.decode(&layout.pattern, streams.cursors(), None, back)?;
    let decode = start.elapsed();
    if frame != back {
        return Err(Error::refused(
            "found a frame that does not decode to its original bytes; this is a fault of iec, please report it",
        ));
    }
    Ok(Sum { original: frame.len() as u64, stored: streams.len() as u64, encode, decode })
}
