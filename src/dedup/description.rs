//! Reads and writes `model.dedup.json`, which describes how every payload of a pack is rebuilt.
//!
//! Its last field is the SHA-256 of all text before it, so that a changed number is detected. The text is
//! nevertheless untrusted input: [`super::store`] checks every range against the files, and every tensor against the
//! pack's description.

use super::plane::Effort;
use crate::error::{Context, Error, Result};
use crate::iebin::Entry;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::HashMap;

/// File names of the streams: values in full, masks, exceptions.
pub use crate::iebin::DEDUP_FILE_NAMES as FILE_NAMES;
/// Name of the format.
pub use crate::iebin::DEDUP_FORMAT as FORMAT;
/// File name of the description.
pub use crate::iebin::DEDUP_JSON_NAME as JSON_NAME;
/// Reference to a base pack.
pub use crate::iebin::dependants::Base;
/// Functions that append the hash to a description and check it.
pub use crate::iebin::seal::{sealed, unsealed};

/// Advice for a damaged description.
const RESTORE: &str = "restore it from a backup or, while model.ie.bin is there, run `iec dedup` again";

/// Top-level object of the file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Description {
    pub format: String,
    pub codec: Codec,
    /// SHA-256 of the `model.ie.json` that the store belongs to; `None` in stores of earlier versions.
    #[serde(default)]
    pub pack_sha256: Option<String>,
    /// File name of the binary that can be rebuilt.
    pub weights_bin: String,
    pub total_bytes: u64,
    /// Lengths in bytes of the three files of streams ([`FILE_NAMES`]).
    pub files: [u64; 3],
    /// Base packs; units may refer to their tensors.
    pub bases: Vec<Base>,
    /// All bytes of the binary that are not zeros between tensors, in file order.
    pub payloads: Vec<Payload>,
}

/// Trade-off between size and speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// Codecs that decode at about memory bandwidth.
    Auto,
    /// Equal units are stored once; nothing is compressed.
    None,
    /// Planes compressed by zstd: the smallest.
    Zstd,
}

impl Codec {
    pub(crate) fn effort(self, level: i32) -> Effort {
        match self {
            Codec::Auto => Effort::Fast,
            Codec::None => Effort::None,
            Codec::Zstd => Effort::Small(level),
        }
    }
}

/// Consecutive bytes of the binary: a tensor, or bytes between tensors that are not zeros. Properties of a
/// tensor that are in `model.ie.json` are not repeated here.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Payload {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Offset and length of bytes that belong to no tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<[u64; 2]>,
    /// SHA-256 of the bytes, unless `model.ie.json` records it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Units of equal size: the matrices of a stack, slices of rows of a matrix, or the whole payload as one unit.
    pub units: Vec<Unit>,
    /// Offset in the binary; set by [`Description::resolve`].
    #[serde(skip)]
    pub offset: u64,
    /// Length in bytes; set with the offset.
    #[serde(skip)]
    pub nbytes: u64,
    /// SHA-256 of the bytes, from this file or from `model.ie.json`.
    #[serde(skip)]
    pub hash: String,
}

impl Payload {
    /// Returns the name of the payload for messages.
    pub fn label(&self) -> &str {
        self.name.as_deref().unwrap_or("(between tensors)")
    }
}

/// Part of a payload, and the source of its bytes: its own streams, another unit, or both.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Unit {
    /// Unit that this one equals, or from which it is stored as differences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<Origin>,
    /// Start and length in bytes in each of the three files; the streams begin where those of the preceding unit end.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "lengths")]
    pub streams: Option<[[u64; 2]; 3]>,
}

impl Unit {
    pub fn encoding(&self) -> Encoding {
        match (&self.of, &self.streams) {
            (None, _) => Encoding::Frames,
            (Some(_), None) => Encoding::Same,
            (Some(_), Some(_)) => Encoding::Delta,
        }
    }
}

/// (De)serializes streams: start and length in memory, lengths in the file.
mod lengths {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(streams: &Option<[[u64; 2]; 3]>, to: S) -> Result<S::Ok, S::Error> {
        streams.map(|streams| streams.map(|[_, length]| length)).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<[[u64; 2]; 3]>, D::Error> {
        Ok(Option::<[u64; 3]>::deserialize(from)?.map(|lengths| lengths.map(|length| [0, length])))
    }
}

/// Way in which a unit is rebuilt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Encoding {
    /// From its streams.
    Frames,
    /// Copy of another unit.
    Same,
    /// From its streams and another unit.
    Delta,
}

/// Reference to a unit of this pack that is not itself a copy, or to a unit of a base pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// Index in [`Description::bases`]; `None` for a unit of this pack.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<usize>,
    /// Index among the payloads; in a base, among its tensors.
    pub payload: usize,
    /// Number of the unit within that payload or tensor.
    pub unit: usize,
    /// SHA-256 that the base recorded for its tensor when this pack was deduplicated; absent without `base`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

impl Description {
    /// Returns the text of the file. Each payload has a line, so that the file can be searched and compared.
    pub fn to_text(&self) -> String {
        let head = [
            ("format", json!(self.format)),
            ("created_by", json!(concat!("iec ", env!("CARGO_PKG_VERSION")))),
            ("codec", json!(self.codec)),
            ("pack_sha256", json!(self.pack_sha256)),
            ("weights_bin", json!(self.weights_bin)),
            ("total_bytes", json!(self.total_bytes)),
            ("files", json!(self.files)),
            ("bases", json!(self.bases)),
        ];
        let head: Vec<String> = head.iter().map(|(key, value)| format!("  \"{key}\": {value}")).collect();
        let payloads: Vec<String> = self.payloads.iter().map(|payload| format!("    {}", json!(payload))).collect();
        sealed(&format!("{{\n{},\n  \"payloads\": [\n{}\n  ]", head.join(",\n"), payloads.join(",\n")))
    }

    /// Parses the output of [`Description::to_text`].
    ///
    /// # Errors
    /// A byte was changed, or the version is another one.
    pub fn parse(text: &[u8]) -> Result<Description> {
        let broken = |what: &str| Error::corrupt(what).help(RESTORE);
        let text = std::str::from_utf8(text).map_err(|_| broken("found text that is not UTF-8"))?;
        let body =
            unsealed(text).ok_or_else(|| broken("found changed text: the sha256 in its last field does not match"))?;
        let description: Description =
            serde_json::from_str(&format!("{body}}}")).map_err(|e| broken(&format!("invalid description: {e}")))?;
        if description.format != FORMAT {
            return Err(Error::unsupported(format!("found format `{}`, expected `{FORMAT}`", description.format))
                .help(
                    "restore model.ie.bin with the version of iec that wrote this file (`iec dedup --restore`), then \
                     run `iec dedup` again",
                ));
        }
        description.place_streams().help(RESTORE)
    }

    /// Computes the start of the streams of each unit.
    fn place_streams(mut self) -> Result<Description> {
        let mut ends = [0u64; 3];
        for unit in self.payloads.iter_mut().flat_map(|payload| &mut payload.units) {
            let Some(streams) = &mut unit.streams else {
                if unit.of.is_none() {
                    return Err(Error::corrupt("found a unit with neither streams nor an origin"));
                }
                continue;
            };
            for ([start, length], end) in streams.iter_mut().zip(&mut ends) {
                *start = *end;
                let next = end.checked_add(*length);
                *end = next.ok_or_else(|| Error::corrupt("found streams of more than 2^64 - 1 bytes in total"))?;
            }
        }
        if ends != self.files {
            let found = format!("found files of {:?} bytes, expected {ends:?}, the sums of all streams", self.files);
            return Err(Error::corrupt(found));
        }
        Ok(self)
    }

    /// Sets offsets, lengths and hashes from the tensors of the pack.
    ///
    /// # Errors
    /// A tensor has no hash in either file.
    pub fn resolve(&mut self, entries: &[Entry]) -> Result<()> {
        let by_name: HashMap<&str, &Entry> = entries.iter().map(|entry| (entry.name.as_str(), entry)).collect();
        for payload in &mut self.payloads {
            let entry = payload.name.as_deref().and_then(|name| by_name.get(name));
            let place = match (&payload.name, entry) {
                (None, _) => payload.place,
                (Some(_), entry) => entry.map(|entry| [entry.offset as u64, entry.nbytes as u64]),
            };
            [payload.offset, payload.nbytes] = place.unwrap_or_default();
            let missing = || Error::corrupt("found no sha256, neither here nor in model.ie.json");
            payload.hash = match (&payload.sha256, entry) {
                (Some(hash), _) => hash.clone(),
                (None, Some(entry)) => {
                    entry.sha256.as_ref().ok_or_else(missing).tensor(&entry.name)?.to_ascii_lowercase()
                }
                (None, None) => String::new(),
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Description {
        let of = Some(Origin { base: None, payload: 0, unit: 0, sha256: None });
        let unit = |start, of| Unit { of, streams: Some([[start, 1], [3 * start, 3], [5 * start, 5]]) };
        Description {
            format: FORMAT.to_string(),
            codec: Codec::Auto,
            pack_sha256: Some("cd".repeat(32)),
            weights_bin: "model.ie.bin".to_string(),
            total_bytes: 1024,
            files: [2, 6, 10],
            bases: vec![Base { dir: "../base".to_string() }],
            payloads: vec![
                Payload { name: Some("a".into()), units: vec![unit(0, None)], ..Payload::default() },
                Payload {
                    place: Some([64, 128]),
                    sha256: Some("ab".repeat(32)),
                    units: vec![unit(1, of.clone()), Unit { of, streams: None }],
                    ..Payload::default()
                },
            ],
        }
    }

    #[test]
    fn a_description_reads_as_it_was_written() {
        let text = example().to_text();
        let again = Description::parse(text.as_bytes()).unwrap();
        assert_eq!(again.to_text(), text);
        assert_eq!(again.payloads, example().payloads);
        serde_json::from_str::<serde_json::Value>(&text).unwrap();
    }

    #[test]
    fn streams_that_do_not_fill_the_files_are_refused() {
        for files in [[2, 6, 11], [0, 6, 10], [u64::MAX, 6, 10]] {
            assert!(Description::parse(Description { files, ..example() }.to_text().as_bytes()).is_err());
        }
        let mut endless = example();
        endless.payloads[1].units[0].streams = Some([[0, u64::MAX], [0, 1], [0, 1]]);
        assert!(Description::parse(endless.to_text().as_bytes()).is_err());
        let mut nothing = example();
        nothing.payloads[1].units[1].of = None;
        assert!(Description::parse(nothing.to_text().as_bytes()).is_err());
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let text = example().to_text().into_bytes();
        for i in 0..text.len() * 8 {
            let mut changed = text.clone();
            changed[i / 8] ^= 1 << (i % 8);
            assert!(Description::parse(&changed).is_err(), "bit {i}");
        }
    }
}
