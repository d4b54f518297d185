//! Checks every number of a description once against the files and the pack.

use super::description::{Encoding, FILE_NAMES, Origin, Payload, Unit};
use super::index::{INDEX_ENTRY, lengths};
use super::layout::Layout;
use super::store::Store;
use crate::error::{Context, Error, Result};
use crate::iebin::Entry;
use std::collections::HashMap;

impl Store {
    pub(super) fn check(&mut self) -> Result<()> {
        for ((file, said), name) in self.files.iter().zip(self.description.files).zip(FILE_NAMES) {
            if file.bytes().len() as u64 != said {
                return Err(Error::corrupt(format!("found {} bytes, expected {said}", file.bytes().len()))
                    .at(self.dir.join(name)));
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
                    let entry = found.ok_or_else(|| {
                        Error::corrupt("this tensor is listed twice, or missing from model.ie.json").tensor(label)
                    })?;
                    place[entry] = Some(i);
                    Some(&self.entries[entry])
                }
            };
            layouts.push(self.check_payload(payload, entry, end).tensor(label)?);
            end = payload.offset + payload.nbytes;
        }
        let missing = |(entry, place): (&Entry, Option<usize>)| {
            place.ok_or_else(|| {
                Error::corrupt("this tensor is listed in model.ie.json, but not in this file").tensor(&entry.name)
            })
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
            return Err(Error::corrupt(format!(
                "found {} bytes at offset {}, which differs from model.ie.json or overlaps the bytes listed before",
                payload.nbytes, payload.offset
            )));
        }
        let layout = Layout::of(entry, payload.nbytes as usize, self.effort)?;
        let units = payload.units.len();
        if units == layout.units {
            return Ok(layout);
        }
        layout.cut(units).ok_or_else(|| {
            Error::corrupt(format!("found {} bytes, which cannot be divided into {units} units", payload.nbytes))
        })
    }

    fn check_unit(&self, payload: usize, unit: &Unit) -> Result<()> {
        let layout = &self.layouts[payload];
        if let Some(of) = &unit.of {
            self.check_origin(layout, unit.encoding(), of)?;
        }
        let Some(streams) = unit.streams else { return Ok(()) };
        for ((range, file), name) in streams.iter().zip(&self.files).zip(FILE_NAMES) {
            if range[0].checked_add(range[1]).is_none_or(|end| end > file.bytes().len() as u64) {
                return Err(Error::corrupt(format!(
                    "found {} bytes at offset {} of {name}, which reach past its end",
                    range[1], range[0]
                )));
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
            return Err(Error::corrupt(format!(
                "found frames of {sums:?} bytes in the three streams, expected the lengths of the streams, {found:?}"
            )));
        }
        Ok(())
    }

    /// Checks that the origin of a unit exists and has a suitable layout. Within a pack, differences may refer only to
    /// units without an origin, and copies to all units but copies, so that references cannot form a cycle.
    fn check_origin(&self, layout: &Layout, encoding: Encoding, of: &Origin) -> Result<()> {
        let wrong = || Error::corrupt("found a reference to a unit that does not exist or has another layout");
        let Some(base) = of.base else {
            let payload = self.description.payloads.get(of.payload).ok_or_else(wrong)?;
            let unit = payload.units.get(of.unit).ok_or_else(wrong)?;
            let ends =
                unit.encoding() == Encoding::Frames || (unit.encoding(), encoding) == (Encoding::Delta, Encoding::Same);
            let good = ends && layout.alike(&self.layouts[of.payload]);
            return if good { Ok(()) } else { Err(wrong()) };
        };
        let (base, of_pack) = self.bases.get(base).zip(self.description.bases.get(base)).ok_or_else(wrong)?;
        let entry = base.entries().get(of.payload).ok_or_else(wrong)?;
        let other = layout.facing(entry, self.effort)?;
        let fits = layout.alike(&other) || encoding == Encoding::Delta && other.can_help(layout);
        if !fits || of.unit >= other.units {
            return Err(wrong());
        }
        if entry.sha256.is_none() || entry.sha256 != of.sha256 {
            let found = format!(
                "found tensor {} of the base pack {} changed since this pack was deduplicated",
                entry.name,
                self.dir.join(&of_pack.dir).display()
            );
            return Err(Error::corrupt(found).help(
                "put the unchanged base pack back into that directory; without it these weights cannot be rebuilt",
            ));
        }
        Ok(())
    }
}
