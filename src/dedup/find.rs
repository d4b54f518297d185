//! Which units are equal to others, or near to them?

use super::artifact::Artifact;
use super::description::{Encoding, Origin};
use super::frame::Coder;
use super::layout::Layout;
use super::plane::Effort;
use crate::error::Result;
use crate::sha256::{Digest, Sha256};
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;

/// Bytes compared at a time.
const CHUNK: usize = 1 << 20;
/// Bytes of a unit that are tried out.
const SAMPLE: usize = 128 << 10;
/// A difference is worth it when it takes less than this of what the unit takes alone.
const WORTH: f64 = 0.95;
/// Units of the same stack that a unit is held against.
const NEIGHBOURS: usize = 4;

/// A unit of the pack at hand.
pub(super) struct Candidate<'a> {
    pub payload: usize,
    pub unit: usize,
    pub layout: &'a Layout,
    pub bytes: &'a [u8],
    /// Name of the tensor; none between tensors.
    pub name: Option<&'a str>,
}

/// Bytes that are hashed before they are let go.
const HASHED: usize = 256 << 20;

/// For each unit what it is rebuilt from, if from another one. `release` lets go of what was read.
pub(super) fn origins(
    units: &[Candidate<'_>],
    release: impl Fn(),
    bases: &[Artifact],
    effort: Effort,
) -> Result<Vec<Option<(Encoding, Origin)>>> {
    let mut hashes: Vec<[u8; 32]> = Vec::with_capacity(units.len());
    while hashes.len() < units.len() {
        let (rest, mut bytes) = (&units[hashes.len()..], 0);
        let fits = |unit: &&Candidate<'_>| {
            let first = bytes == 0;
            bytes += unit.bytes.len();
            first || bytes <= HASHED
        };
        let batch = &rest[..rest.iter().take_while(fits).count()];
        hashes.par_extend(batch.par_iter().map(|unit| <[u8; 32]>::from(Sha256::digest(unit.bytes))));
        release();
    }
    let names: Vec<HashMap<&str, usize>> = bases
        .iter()
        .map(|base| base.entries().iter().enumerate().map(|(i, entry)| (entry.name.as_str(), i)).collect())
        .collect();
    let mut first: HashMap<[u8; 32], usize> = HashMap::new();
    let mut found: Vec<Option<(Encoding, Origin)>> = Vec::with_capacity(units.len());
    for (i, unit) in units.iter().enumerate() {
        let alike = |j: &usize| units[*j].layout.alike(unit.layout) && units[*j].bytes == unit.bytes;
        let origin = match first.get(&hashes[i]).copied().filter(|j| !unit.bytes.is_empty() && alike(j)) {
            // Copies of copies would have to be followed: what the other one is a copy of is one step away.
            Some(j) => match &found[j] {
                Some((Encoding::Same, of)) => Some((Encoding::Same, of.clone())),
                _ => Some((Encoding::Same, own(&units[j]))),
            },
            None => {
                first.insert(hashes[i], i);
                match in_bases(unit, bases, &names, effort)? {
                    None => near_in_stack(i, units, &found, effort),
                    origin => origin,
                }
            }
        };
        found.push(origin);
    }
    Ok(found)
}

fn own(unit: &Candidate<'_>) -> Origin {
    Origin { base: None, payload: unit.payload, unit: unit.unit, sha256: None }
}

/// The unit of the same tensor in a base, if it is equal or near.
fn in_bases(
    unit: &Candidate<'_>,
    bases: &[Artifact],
    names: &[HashMap<&str, usize>],
    effort: Effort,
) -> Result<Option<(Encoding, Origin)>> {
    for (b, (base, names)) in bases.iter().zip(names).enumerate() {
        for payload in partners(unit, base, names) {
            let entry = &base.entries()[payload];
            let layout = Layout::of(Some(entry), entry.nbytes, effort)?;
            if !layout.alike(unit.layout) || unit.unit >= layout.units || entry.sha256.is_none() {
                continue;
            }
            let origin = Origin { base: Some(b), payload, unit: unit.unit, sha256: entry.sha256.clone() };
            let start = unit.unit * layout.unit_bytes;
            if equal(unit.bytes, base, payload, start)? {
                return Ok(Some((Encoding::Same, origin)));
            }
            let range = sample(unit.layout);
            let mut theirs = vec![0; range.len()];
            base.read(payload, start + range.start..start + range.end, &mut theirs)?;
            if worth(unit.layout, &unit.bytes[range], &theirs, effort) {
                return Ok(Some((Encoding::Delta, origin)));
            }
        }
    }
    Ok(None)
}

/// Tensors of a base that may be what a unit was made from: the one of its name, else those that look like it at a glance.
fn partners(unit: &Candidate<'_>, base: &Artifact, names: &HashMap<&str, usize>) -> Vec<usize> {
    if let Some(named) = unit.name.and_then(|name| names.get(name)) {
        return vec![*named];
    }
    let range = sample(unit.layout);
    let range = range.start
        ..range.end.min(range.start + GLANCE / unit.layout.pattern.period.max(1) * unit.layout.pattern.period);
    let mut theirs = vec![0; range.len()];
    let mut alike = |i: &usize| {
        let entry = &base.entries()[*i];
        let start = unit.unit * unit.layout.unit_bytes;
        let fits = entry.nbytes == unit.layout.units * unit.layout.unit_bytes && !range.is_empty();
        fits && base.read(*i, start + range.start..start + range.end, &mut theirs).is_ok() && {
            let differing = |(a, b): (&u8, &u8)| (a ^ b).count_ones() as usize;
            // Strangers differ in three bits of eight or more, exponents being alike.
            unit.bytes[range.clone()].iter().zip(&theirs).map(differing).sum::<usize>() < range.len() * 2
        }
    };
    (0..base.entries().len()).filter(|i| alike(i)).take(NEIGHBOURS).collect()
}

/// Bytes of a glance.
const GLANCE: usize = 4096;

/// One of the first units of the same stack, if it is near.
fn near_in_stack(
    i: usize,
    units: &[Candidate<'_>],
    found: &[Option<(Encoding, Origin)>],
    effort: Effort,
) -> Option<(Encoding, Origin)> {
    let unit = &units[i];
    if unit.unit == 0 || effort == Effort::None {
        return None;
    }
    let range = sample(unit.layout);
    let stack = i - unit.unit..i;
    let whole = stack.filter(|j| found[*j].is_none()).take(NEIGHBOURS);
    let mut near =
        whole.filter(|j| worth(unit.layout, &unit.bytes[range.clone()], &units[*j].bytes[range.clone()], effort));
    near.next().map(|j| (Encoding::Delta, own(&units[j])))
}

fn equal(bytes: &[u8], base: &Artifact, payload: usize, start: usize) -> Result<bool> {
    let mut theirs = vec![0; bytes.len().min(CHUNK)];
    for (i, ours) in bytes.chunks(CHUNK).enumerate() {
        let theirs = &mut theirs[..ours.len()];
        let at = start + i * CHUNK;
        base.read(payload, at..at + ours.len(), theirs)?;
        if ours != theirs {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A range of whole periods in the middle of a unit.
fn sample(layout: &Layout) -> Range<usize> {
    let period = layout.pattern.period;
    let length = layout.pattern.frame_bytes(SAMPLE).min(layout.unit_bytes / period * period);
    let start = (layout.unit_bytes - length) / 2 / period * period;
    start..start + length
}

/// True when differences take clearly less room.
fn worth(layout: &Layout, ours: &[u8], theirs: &[u8], effort: Effort) -> bool {
    let mut coder = Coder::new(effort);
    let alone = coder.encode(&layout.pattern, ours, None).len();
    let delta = coder.encode(&layout.pattern, ours, Some(theirs)).len();
    (delta as f64) < WORTH * alone as f64
}
