//! Encodes and decodes frames: pieces of a payload that can be decoded independently.

use super::pattern::{Numbers, Pattern, Way, delta, join, split};
use super::plane::{self, Cursors, Effort, PlaneKind, Streams, take};
use crate::error::{Error, Result};
use crate::simd::Level;

/// Returns the number of bytes of a frame, a multiple of the period.
pub(crate) fn frame_bytes(pattern: &Pattern, effort: Effort) -> usize {
    let coded = pattern.parts.iter().any(|part| part.numbers.planes().contains(&PlaneKind::SparseExponents));
    match effort {
        Effort::None | Effort::Fast if !coded => pattern.frame_bytes(256 << 10),
        // An entropy coder stores a table per frame, so larger frames need fewer tables.
        _ => pattern.frame_of_rows(1 << 20),
    }
}

/// First byte of the masks of a frame that is stored unchanged.
const AS_IT_IS: u8 = 0;
/// First byte of the masks of a frame of planes.
const PLANES: u8 = 1;

/// Encoder and decoder of frames, with the buffers that both reuse.
#[derive(Debug)]
pub(crate) struct Coder {
    level: Level,
    effort: Effort,
    part: Vec<u8>,
    base: Vec<u8>,
    planes: [Vec<u8>; 4],
    scratch: plane::Scratch,
}

impl Coder {
    pub fn new(effort: Effort) -> Coder {
        Coder {
            level: Level::detect(),
            effort,
            part: Vec::new(),
            base: Vec::new(),
            planes: Default::default(),
            scratch: plane::Scratch::new(effort),
        }
    }

    /// Encodes a frame, or its differences from `base`, which has the same length. The result has at most one byte
    /// more than the frame.
    ///
    /// # Errors
    /// There is no memory for the tables of zstd.
    pub fn encode(&mut self, pattern: &Pattern, frame: &[u8], base: Option<&[u8]>) -> Result<Streams> {
        let mut out = Streams::default();
        out.masks.push(PLANES);
        self.encode_planes(pattern, frame, base, &mut out)?;
        if out.len() > frame.len() {
            return Ok(Streams { defaults: frame.to_vec(), masks: vec![AS_IT_IS], exceptions: Vec::new() });
        }
        Ok(out)
    }

    fn encode_planes(&mut self, pattern: &Pattern, frame: &[u8], base: Option<&[u8]>, out: &mut Streams) -> Result<()> {
        // Differences save space only with an entropy coder, because they are mostly small numbers.
        let effort = match self.effort {
            Effort::Fast if base.is_some() => Effort::Small(1),
            effort => effort,
        };
        for (i, part) in pattern.parts.iter().enumerate() {
            let (numbers, kinds) = numbers_of(part.numbers, base.is_some(), self.effort);
            let mut bytes = pattern.gather(i, frame, &mut self.part);
            if let Some(base) = base {
                let base = pattern.gather(i, base, &mut self.base);
                if pattern.parts.len() == 1 {
                    self.part.clear();
                    self.part.extend_from_slice(frame);
                }
                delta(self.level, part.numbers, Way::ToDifference, &mut self.part, base);
                bytes = &self.part;
            }
            split(self.level, numbers, bytes, &mut self.planes);
            let (alone, floats) = match kinds {
                [alone @ .., below, kind @ (PlaneKind::Exponents | PlaneKind::SparseExponents)] => {
                    (alone, Some([*below, *kind]))
                }
                _ => (kinds, None),
            };
            for (plane, kind) in self.planes.iter().zip(alone) {
                plane::encode(self.level, plane, *kind, effort, &mut self.scratch, out)?;
            }
            if let Some(kinds) = floats {
                let planes = [&self.planes[alone.len()][..], &self.planes[alone.len() + 1]];
                plane::encode_floats(self.level, planes, kinds, pattern.window(), effort, &mut self.scratch, out)?;
            }
        }
        Ok(())
    }

    /// Decodes a frame from its streams into `out`, whose length is that of the frame. `base` is the frame from which
    /// this one is stored as differences, if it is.
    ///
    /// # Errors
    /// The streams are not those of such a frame.
    pub fn decode(
        &mut self,
        pattern: &Pattern,
        mut from: Cursors<'_>,
        base: Option<&[u8]>,
        out: &mut [u8],
    ) -> Result<()> {
        match take(&mut from.masks, 1)?[0] {
            AS_IT_IS => out.copy_from_slice(take(&mut from.defaults, out.len())?),
            PLANES => self.decode_planes(pattern, &mut from, base, out)?,
            other => return Err(Error::corrupt(format!("found an encoded frame of kind {other}, expected 0 or 1"))),
        }
        match from {
            Cursors { defaults: [], masks: [], exceptions: [] } => Ok(()),
            _ => Err(Error::corrupt("found an encoded frame that is longer than its content")),
        }
    }

    fn decode_planes(
        &mut self,
        pattern: &Pattern,
        from: &mut Cursors<'_>,
        base: Option<&[u8]>,
        out: &mut [u8],
    ) -> Result<()> {
        let whole = pattern.parts.len() == 1;
        for (i, part) in pattern.parts.iter().enumerate() {
            let (numbers, kinds) = numbers_of(part.numbers, base.is_some(), self.effort);
            let length = out.len() / pattern.period * part.bytes;
            self.part.resize(if whole { 0 } else { length }, 0);
            let bytes = if whole { &mut *out } else { &mut self.part[..] };
            let mut there: [Option<&[u8]>; 4] = [None; 4];
            for (p, kind) in kinds.iter().enumerate() {
                let count = length / numbers.size();
                there[p] = plane::in_place(*kind, from, count);
                if there[p].is_some() {
                    continue;
                }
                let (before, buffers) = self.planes.split_at_mut(p);
                buffers[0].resize(count, 0);
                let before = before.last_mut().filter(|_| there[p - 1].is_none());
                let lower = before.map(|lower| (kinds[p - 1], &mut lower[..]));
                let (window, scratch) = (pattern.window(), &mut self.scratch);
                plane::decode(self.level, *kind, from, window, scratch, lower, &mut buffers[0])?;
            }
            let planes = std::array::from_fn(|p| there[p].unwrap_or(&self.planes[p]));
            join(self.level, numbers, planes, bytes);
            if let Some(base) = base {
                delta(self.level, part.numbers, Way::FromDifference, bytes, pattern.gather(i, base, &mut self.base));
            }
            if !whole {
                pattern.scatter(i, &self.part, out);
            }
        }
        Ok(())
    }
}

/// Returns the type and planes of numbers or their differences. Without an entropy coder, codes of quantized weights
/// are treated as bytes, because splitting them would save nothing.
fn numbers_of(numbers: Numbers, differences: bool, effort: Effort) -> (Numbers, &'static [PlaneKind]) {
    match (numbers, effort) {
        _ if differences => numbers.differences(),
        (Numbers::Codes(_), Effort::None | Effort::Fast) => (Numbers::Bytes, Numbers::Bytes.planes()),
        _ => (numbers, numbers.planes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dedup::pattern::{Codes, NumberRun};
    use crate::rng::Rng;
    use proptest::prelude::*;

    fn patterns() -> Vec<Pattern> {
        let pattern = |parts: &[(Numbers, usize)]| Pattern {
            parts: parts.iter().map(|&(numbers, bytes)| NumberRun { numbers, bytes }).collect(),
            period: parts.iter().map(|part| part.1).sum(),
            row: 0,
        };
        let rows = |pattern: Pattern, row: usize| Pattern { row, ..pattern };
        vec![
            pattern(&[(Numbers::Bf16, 2)]),
            pattern(&[(Numbers::F16, 2)]),
            pattern(&[(Numbers::F32, 4)]),
            pattern(&[(Numbers::Bytes, 1)]),
            pattern(&[(Numbers::F16, 96), (Numbers::Bytes, 32), (Numbers::Bytes, 768)]),
            pattern(&[(Numbers::F32, 64), (Numbers::Bytes, 4096)]),
            rows(pattern(&[(Numbers::Bf16, 2)]), 100),
            rows(pattern(&[(Numbers::F16, 2)]), 2880),
            rows(pattern(&[(Numbers::F32, 4)]), 9000),
            pattern(&[(Numbers::F16, 96), (Numbers::Codes(Codes::Offset), 768)]),
            pattern(&[(Numbers::Bytes, 96), (Numbers::Codes(Codes::Magnitude), 768)]),
            pattern(&[(Numbers::F32, 64), (Numbers::Codes(Codes::Bytes), 4096)]),
        ]
    }

    fn round_trip(pattern: &Pattern, frame: &[u8], base: Option<&[u8]>) {
        for effort in [Effort::Fast, Effort::Small(1)] {
            let mut coder = Coder::new(effort);
            let streams = coder.encode(pattern, frame, base).unwrap();
            assert!(streams.len() <= frame.len() + 1, "{} for {} bytes of {pattern:?}", streams.len(), frame.len());
            let cursors =
                Cursors { defaults: &streams.defaults, masks: &streams.masks, exceptions: &streams.exceptions };
            let mut back = vec![0; frame.len()];
            coder.decode(pattern, cursors, base, &mut back).unwrap();
            assert!(back == frame, "{pattern:?} {effort:?}");
        }
    }

    /// Returns the bytes of bf16 or f32 weights, some of them with arbitrary bits, zero or subnormal.
    fn weights(seed: u64, count: usize, width: usize) -> Vec<u8> {
        let mut rng = Rng::new(seed);
        let mut weights = Vec::new();
        for i in 0..count {
            let x = match i % 97 {
                0 => f32::from_bits(rng.next_u64() as u32),
                1 => 0.0,
                2 => -f32::from_bits(3),
                _ => rng.next_normal() as f32 * 0.02 * (1.0 + (i / 700 % 3) as f32),
            };
            weights.extend_from_slice(&x.to_le_bytes()[4 - width..]);
        }
        weights
    }

    #[test]
    fn weights_come_back_bit_by_bit_whatever_their_number() {
        for pattern in patterns() {
            for count in [1, 63, 511, 513, 4097, 20_000, 140_000] {
                for width in [2, 4] {
                    let bytes = weights(count as u64, count, width);
                    let frame = &bytes[..bytes.len() / pattern.period * pattern.period];
                    if frame.is_empty() {
                        continue;
                    }
                    round_trip(&pattern, frame, None);
                    let mut near = frame.to_vec();
                    near.iter_mut().step_by(13).for_each(|byte| *byte = byte.wrapping_add(1));
                    round_trip(&pattern, frame, Some(&near));
                    round_trip(&pattern, frame, Some(frame));
                }
            }
        }
    }

    #[test]
    fn weights_become_as_small_as_promised() {
        let mut rng = Rng::new(5);
        let normal: Vec<f32> = (0..1 << 18).map(|_| rng.next_normal() as f32 * 0.02).collect();
        let bf16: Vec<u8> = normal.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
        let tuned: Vec<u8> = normal
            .iter()
            .flat_map(|x| half::bf16::from_f32(x + 0.0002 * rng.next_normal() as f32).to_le_bytes())
            .collect();
        let f32: Vec<u8> = normal.iter().flat_map(|x| x.to_le_bytes()).collect();
        let pattern = |numbers: Numbers| Pattern {
            parts: vec![NumberRun { numbers, bytes: numbers.size() }],
            period: numbers.size(),
            row: 0,
        };
        let ratio = |numbers, frame: &[u8], base, effort| {
            let streams = Coder::new(effort).encode(&pattern(numbers), frame, base).unwrap();
            streams.len() as f64 / frame.len() as f64
        };
        assert!(ratio(Numbers::Bf16, &bf16, None, Effort::Fast) < 0.70);
        assert!(ratio(Numbers::Bf16, &bf16, None, Effort::Small(1)) < 0.665);
        for effort in [Effort::Fast, Effort::Small(1)] {
            assert!(ratio(Numbers::F32, &f32, None, effort) < 0.833);
        }
        assert!(ratio(Numbers::Bf16, &tuned, Some(&bf16), Effort::Small(1)) < 0.46);
        assert!(ratio(Numbers::Bf16, &bf16, Some(&bf16), Effort::Fast) < 0.001);
    }

    proptest! {
        #[test]
        fn any_bytes_come_back(bytes in prop::collection::vec(any::<u8>(), 1..3000), period in 0usize..12, spread in 0u8..8) {
            let pattern = &patterns()[period];
            // Bytes with few distinct values, too.
            let bytes: Vec<u8> = bytes.iter().map(|byte| byte >> spread).collect();
            let frame = &bytes[..bytes.len() / pattern.period * pattern.period];
            if !frame.is_empty() {
                round_trip(pattern, frame, None);
                let base: Vec<u8> = frame.iter().rev().copied().collect();
                round_trip(pattern, frame, Some(&base));
            }
        }

        #[test]
        fn hostile_streams_are_errors(defaults in prop::collection::vec(any::<u8>(), 0..600),
                                      mut masks in prop::collection::vec(any::<u8>(), 2..900),
                                      exceptions in prop::collection::vec(any::<u8>(), 0..300), codec in 0u8..8, period in 0usize..12) {
            masks[..2].copy_from_slice(&[PLANES, codec]);
            let pattern = &patterns()[period];
            let mut out = vec![0; pattern.period * 600 / pattern.period.min(600)];
            let cursors = Cursors { defaults: &defaults, masks: &masks, exceptions: &exceptions };
            let _ = Coder::new(Effort::Fast).decode(pattern, cursors, None, &mut out);
        }
    }
}
