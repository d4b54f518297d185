//! Fingerprints of units, by which similar units are found under any name.
//!
//! A bit of a fingerprint is set if a number is larger than the next one. Further training, merging an adapter or
//! rounding changes numbers by far less than they differ from their neighbours, so related units agree in nearly all
//! bits and unrelated ones in half of them. A fingerprint takes 64 bytes per unit, so that a unit can be compared with
//! very many others.

use super::layout::Layout;
use super::pattern::{NumberRun, Numbers};
use std::ops::Range;

/// Number of bits of a fingerprint.
const BITS: usize = 512;
/// Minimum number of bits for a comparison.
const FEWEST: usize = 64;
/// Related units differ in less than `1 / RELATED` of their bits. Unrelated units differ in half of them, or in fewer
/// if many neighbours are equal.
pub(super) const RELATED: u32 = 3;
/// Copies, rounded or slightly changed, differ in less than `1 / COPIES` of their bits.
pub(super) const COPIES: u32 = 16;
/// Number of most similar units that are compared in detail.
const NEAREST: usize = 3;
/// Bytes of a unit from which its fingerprint is computed.
const GLANCE: usize = 4096;

/// Fingerprint of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fingerprint {
    bits: [u64; BITS / 64],
    count: u32,
}

impl Fingerprint {
    /// Returns the bytes of a unit from which its fingerprint is computed: whole periods in its middle.
    pub fn range(layout: &Layout) -> Range<usize> {
        layout.middle(GLANCE)
    }

    /// Computes the fingerprint from the bytes of [`Fingerprint::range`]; `None` if they hold too few numbers.
    pub fn of(layout: &Layout, bytes: &[u8]) -> Option<Fingerprint> {
        let (start, part) = largest(&layout.pattern.parts)?;
        let period = bytes.get(..layout.pattern.period)?;
        // Numbers of one period, or of all periods if a period is one number.
        let bytes = if part.bytes == layout.pattern.period { bytes } else { &period[start..start + part.bytes] };
        let numbers: Vec<i16> = match part.numbers {
            Numbers::Bytes | Numbers::Codes(_) => bytes.iter().take(BITS + 1).map(|byte| i16::from(*byte)).collect(),
            Numbers::Bf16 | Numbers::F16 | Numbers::F32 => {
                let size = part.numbers.size();
                bytes.chunks_exact(size).take(BITS + 1).map(|number| ordered(&number[size - 2..])).collect()
            }
        };
        let mut print = Fingerprint { bits: [0; BITS / 64], count: numbers.len().saturating_sub(1) as u32 };
        for (i, pair) in numbers.windows(2).enumerate() {
            print.bits[i / 64] |= u64::from(pair[0] > pair[1]) << (i % 64);
        }
        (print.count as usize >= FEWEST).then_some(print)
    }

    /// Returns the number of bits that differ.
    fn distance(&self, other: &Fingerprint) -> u32 {
        self.bits.iter().zip(&other.bits).map(|(a, b)| (a ^ b).count_ones()).sum()
    }
}

/// Returns the upper 16 bits of a float as an integer with the order of floats.
fn ordered(upper: &[u8]) -> i16 {
    let bits = i16::from_le_bytes([upper[0], upper[1]]);
    bits ^ (bits >> 15 & i16::MAX)
}

/// Returns the largest part of a period and its start.
fn largest(parts: &[NumberRun]) -> Option<(usize, NumberRun)> {
    let starts = parts.iter().scan(0, |end, part| {
        *end += part.bytes;
        Some((*end - part.bytes, *part))
    });
    starts.max_by_key(|(_, part)| part.bytes)
}

/// Fingerprints of units seen before, by layout.
#[derive(Debug)]
pub(super) struct Lineup<T> {
    groups: Vec<(Layout, Vec<(Fingerprint, T)>)>,
}

impl<T: Copy> Lineup<T> {
    pub fn new() -> Lineup<T> {
        Lineup { groups: Vec::new() }
    }

    /// Adds a unit with the name `who`; does nothing without a fingerprint.
    pub fn add(&mut self, layout: &Layout, print: Option<Fingerprint>, who: T) {
        let Some(print) = print else { return };
        match self.groups.iter_mut().find(|(other, _)| other.alike(layout)) {
            Some((_, group)) => group.push((print, who)),
            None => self.groups.push((layout.clone(), vec![(print, who)])),
        }
    }

    /// Returns up to [`NEAREST`] units, the most similar first; in each, less than `1 / part` of the bits differ.
    pub fn nearest(&self, layout: &Layout, print: Option<&Fingerprint>, part: u32) -> Vec<T> {
        let group = self.groups.iter().find(|(other, _)| other.alike(layout));
        let (Some((_, group)), Some(print)) = (group, print) else { return Vec::new() };
        let mut near: Vec<(u32, T)> = Vec::with_capacity(NEAREST + 1);
        for (other, who) in group {
            let distance = print.distance(other);
            if distance * part >= print.count {
                continue;
            }
            let place = near.partition_point(|(nearer, _)| *nearer <= distance);
            near.insert(place, (distance, *who));
            near.truncate(NEAREST);
        }
        near.into_iter().map(|(_, who)| who).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dedup::pattern::Pattern;
    use crate::rng::Rng;

    #[test]
    fn a_changed_unit_is_found_among_strangers() {
        let mut rng = Rng::new(9);
        for (numbers, noise) in
            [(Numbers::Bf16, 0.05), (Numbers::F32, 0.05), (Numbers::F16, 0.05), (Numbers::Bytes, 0.0)]
        {
            let size = numbers.size();
            let pattern = Pattern { parts: vec![NumberRun { numbers, bytes: size }], period: size, row: 0 };
            let layout = Layout { pattern, units: 1, unit_bytes: 1024 * size, frame_bytes: 1024 * size };
            let mut unit = |near: Option<&[f32]>| -> Vec<f32> {
                (0..1024)
                    .map(|i| near.map_or(0.0, |near| near[i]) + rng.next_normal() as f32 * near.map_or(1.0, |_| noise))
                    .collect()
            };
            let bytes = |unit: &[f32]| -> Vec<u8> {
                match numbers {
                    Numbers::F16 => unit.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
                    Numbers::Bytes => unit.iter().map(|x| (x * 40.0 + 128.0) as u8).collect(),
                    _ => unit.iter().flat_map(|x| x.to_le_bytes()[4 - size..].to_vec()).collect(),
                }
            };
            let unrelated: Vec<Vec<f32>> = (0..200).map(|_| unit(None)).collect();
            let near = unit(Some(&unrelated[77]));
            let mut lineup = Lineup::new();
            let print = |unit: &[f32]| Fingerprint::of(&layout, &bytes(unit)[Fingerprint::range(&layout)]);
            unrelated.iter().enumerate().for_each(|(i, unit)| lineup.add(&layout, print(unit), i));
            assert_eq!(lineup.nearest(&layout, print(&near).as_ref(), RELATED), [77], "{numbers:?}");
            assert!(lineup.nearest(&layout, print(&unit(None)).as_ref(), RELATED).is_empty());
        }
    }
}
