//! Finds units that are equal or similar to others.
//!
//! Equal units are found by their hashes. The candidates for similarity are, in each base pack, the tensors with the
//! same hash or name, then units with a similar fingerprint; and last, earlier units of the same pack with a similar
//! fingerprint. A sample of the differences from each candidate is encoded to choose the best one, or none.

use super::artifact::Artifact;
use super::description::{Encoding, Origin};
use super::fingerprint::{Fingerprint, Lineup, RELATED};
use super::frame::Coder;
use super::layout::Layout;
use super::plane::Effort;
use crate::error::Result;
use crate::interrupt;
use crate::sha256::{Digest, Sha256};
use rayon::prelude::*;
use std::collections::HashMap;

/// Bytes that are compared at a time.
const CHUNK: usize = 1 << 20;
/// Bytes of a unit that are encoded as a sample.
const SAMPLE: usize = 128 << 10;
/// Differences are used if they take less than this fraction of the bytes of the unit encoded alone.
const WORTH: f64 = 0.95;
/// Bytes that are hashed before their pages are released.
const HASHED: usize = 256 << 20;

/// Number of units of a base that are fingerprinted before their pages are released.
const GLANCES: usize = 64;

/// Unit of the pack that is being deduplicated.
pub(super) struct Candidate<'a> {
    pub payload: usize,
    pub unit: usize,
    pub layout: &'a Layout,
    pub bytes: &'a [u8],
    /// Name of the tensor; none for bytes between tensors.
    pub name: Option<&'a str>,
    /// Recorded hash of the tensor.
    pub sha256: Option<&'a str>,
}

impl Candidate<'_> {
    fn fingerprint(&self) -> Option<Fingerprint> {
        Fingerprint::of(self.layout, &self.bytes[Fingerprint::range(self.layout)])
    }

    fn origin(&self) -> Origin {
        Origin { base: None, payload: self.payload, unit: self.unit, sha256: None }
    }
}

/// Origin of a unit that is rebuilt from another one, and its encoding.
type Found = Option<(Encoding, Origin)>;

/// Returns, for each unit, the encoding and the origin with which it is stored; `None` for units that are stored
/// without reference to another. `release` releases the pages of the pack that were read.
pub(super) fn origins(
    units: &[Candidate<'_>],
    release: impl Fn(),
    bases: &[Artifact],
    effort: Effort,
) -> Result<Vec<Found>> {
    let hashes = hashes(units, &release);
    let bases = bases.iter().map(|base| Base::new(base, effort)).collect::<Result<Vec<_>>>()?;
    let mut first: HashMap<[u8; 32], usize> = HashMap::new();
    let mut own = Lineup::new();
    let mut found: Vec<Found> = Vec::with_capacity(units.len());
    for (i, unit) in units.iter().enumerate() {
        interrupt::check()?;
        let alike = |j: &usize| units[*j].layout.alike(unit.layout) && units[*j].bytes == unit.bytes;
        let origin = match first.get(&hashes[i]).copied().filter(|j| !unit.bytes.is_empty() && alike(j)) {
            // The origin of a copy must not be a copy itself, so the origin of the other unit is used.
            Some(j) => match &found[j] {
                Some((Encoding::Same, of)) => Some((Encoding::Same, of.clone())),
                _ => Some((Encoding::Same, units[j].origin())),
            },
            None => {
                first.insert(hashes[i], i);
                let trial = Trial::of(unit, effort);
                match in_bases(&trial, &bases)? {
                    None => near_in_pack(&trial, units, &mut own, i)?,
                    origin => origin,
                }
            }
        };
        found.push(origin);
        // Reading the few KiB of a fingerprint may map 2 MiB.
        release();
        bases.iter().for_each(|base| base.artifact.release());
    }
    Ok(found)
}

fn hashes(units: &[Candidate<'_>], release: impl Fn()) -> Vec<[u8; 32]> {
    let mut hashes: Vec<[u8; 32]> = Vec::with_capacity(units.len());
    while hashes.len() < units.len() {
        let (rest, mut bytes) = (&units[hashes.len()..], 0);
        let fits = |unit: &&Candidate<'_>| {
            let first = bytes == 0;
            bytes += unit.bytes.len();
            first || bytes <= HASHED
        };
        let batch = &rest[..rest.iter().take_while(fits).count()];
        if let [one] = batch {
            let mut hasher = Sha256::new();
            for piece in one.bytes.chunks(HASHED) {
                hasher.update(piece);
                release();
            }
            hashes.push(hasher.finalize().into());
            continue;
        }
        hashes.par_extend(batch.par_iter().map(|unit| <[u8; 32]>::from(Sha256::digest(unit.bytes))));
        release();
    }
    hashes
}

/// Base pack with the hashes and fingerprints of its tensors.
struct Base<'a> {
    artifact: &'a Artifact,
    by_name: HashMap<&'a str, usize>,
    by_hash: HashMap<&'a str, usize>,
    /// Fingerprints of the units of the pack, by payload and number of the unit.
    lineup: Lineup<(usize, usize)>,
}

impl<'a> Base<'a> {
    fn new(artifact: &'a Artifact, effort: Effort) -> Result<Base<'a>> {
        let entries = artifact.entries();
        let layouts = entries.iter().map(|entry| Layout::of(Some(entry), entry.nbytes, effort));
        let layouts = layouts.collect::<Result<Vec<_>>>()?;
        let by_name = entries.iter().enumerate().map(|(i, entry)| (entry.name.as_str(), i)).collect();
        let hash = |(i, entry): (usize, &'a crate::iebin::Entry)| Some((entry.sha256.as_deref()?, i));
        let by_hash = entries.iter().enumerate().filter_map(hash).collect();
        let mut lineup = Lineup::new();
        let units: Vec<(usize, usize)> =
            layouts.iter().enumerate().flat_map(|(i, layout)| (0..layout.units).map(move |unit| (i, unit))).collect();
        let print = |&(i, unit): &(usize, usize)| -> Result<Option<Fingerprint>> {
            interrupt::check()?;
            let (layout, range) = (&layouts[i], Fingerprint::range(&layouts[i]));
            let mut bytes = vec![0; range.len()];
            let start = unit * layout.unit_bytes;
            artifact.read(i, start + range.start..start + range.end, &mut bytes)?;
            Ok(Fingerprint::of(layout, &bytes))
        };
        for units in units.chunks(GLANCES) {
            let prints = units.par_iter().map(print).collect::<Result<Vec<_>>>()?;
            for (&(i, unit), print) in units.iter().zip(prints) {
                lineup.add(&layouts[i], print, (i, unit));
            }
            artifact.release();
        }
        Ok(Base { artifact, by_name, by_hash, lineup })
    }
}

/// Unit that is compared with others.
struct Trial<'a> {
    unit: &'a Candidate<'a>,
    print: Option<Fingerprint>,
    effort: Effort,
}

impl<'a> Trial<'a> {
    fn of(unit: &'a Candidate<'a>, effort: Effort) -> Trial<'a> {
        Trial { unit, print: unit.fingerprint(), effort }
    }

    /// Returns the encoded size of the sample as differences from `theirs`, the bytes of [`Trial::sample`] in another
    /// unit, as a fraction of its encoded size alone; `None` if the fraction is not below [`WORTH`].
    fn worth(&self, theirs: &[u8]) -> Result<Option<f64>> {
        let ours = &self.unit.bytes[self.sample()];
        let mut coder = Coder::new(self.effort);
        let alone = coder.encode(&self.unit.layout.pattern, ours, None)?.len();
        let delta = coder.encode(&self.unit.layout.pattern, ours, Some(theirs))?.len();
        let share = delta as f64 / alone.max(1) as f64;
        Ok((share < WORTH).then_some(share))
    }

    fn sample(&self) -> std::ops::Range<usize> {
        self.unit.layout.middle(SAMPLE)
    }
}

/// Finds a unit of a base that is equal or similar to the unit of `trial`; takes the first base that has one.
fn in_bases(trial: &Trial<'_>, bases: &[Base<'_>]) -> Result<Found> {
    let unit = trial.unit;
    for (b, base) in bases.iter().enumerate() {
        let named = unit.name.and_then(|name| base.by_name.get(name)).copied();
        let equal = unit.sha256.and_then(|hash| base.by_hash.get(hash)).copied();
        let likely = equal.into_iter().chain(named).map(|payload| (payload, unit.unit));
        let found = match best(trial, b, base, likely)? {
            None => best(trial, b, base, base.lineup.nearest(unit.layout, trial.print.as_ref(), RELATED).into_iter())?,
            found => found,
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// Returns the best of the `likely` units of base number `b`: an equal one if there is one, otherwise the one with the
/// smallest differences, if these are small enough ([`WORTH`]). `likely` gives the tensor and the unit within it.
fn best(trial: &Trial<'_>, b: usize, base: &Base<'_>, likely: impl Iterator<Item = (usize, usize)>) -> Result<Found> {
    let (unit, mut best) = (trial.unit, (f64::INFINITY, None));
    for (payload, place) in likely {
        let entry = &base.artifact.entries()[payload];
        let layout = unit.layout.facing(entry, trial.effort)?;
        if !layout.can_help(unit.layout) || place >= layout.units || entry.sha256.is_none() {
            continue;
        }
        let origin = Origin { base: Some(b), payload, unit: place, sha256: entry.sha256.clone() };
        if layout.alike(unit.layout) && equal(unit.bytes, base.artifact, payload, place * layout.unit_bytes)? {
            return Ok(Some((Encoding::Same, origin)));
        }
        let mut theirs = vec![0; trial.sample().len()];
        base.artifact.read_unit(payload, &layout, place, trial.sample(), &mut theirs)?;
        if trial.effort != Effort::None
            && let Some(share) = trial.worth(&theirs)?
            && share < best.0
        {
            best = (share, Some((Encoding::Delta, origin)));
        }
    }
    Ok(best.1)
}

/// Returns the unit in `own` that is most similar to unit `i` of this pack. `own` holds the earlier units that are
/// stored without reference to another; if none of them is similar enough, unit `i` is added.
fn near_in_pack(trial: &Trial<'_>, units: &[Candidate<'_>], own: &mut Lineup<usize>, i: usize) -> Result<Found> {
    if trial.effort == Effort::None {
        return Ok(None);
    }
    let shares = own.nearest(trial.unit.layout, trial.print.as_ref(), RELATED).into_iter();
    let shares = shares.map(|j| Ok(trial.worth(&units[j].bytes[trial.sample()])?.map(|share| (share, j))));
    let shares = shares.collect::<Result<Vec<_>>>()?;
    let best = shares.into_iter().flatten().min_by(|a, b| a.0.total_cmp(&b.0));
    if best.is_none() {
        own.add(trial.unit.layout, trial.print.clone(), i);
    }
    Ok(best.map(|(_, j)| (Encoding::Delta, units[j].origin())))
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
