//! `model.dedup.json`: what every payload of a pack is rebuilt from.
//!
//! Its last field is the SHA-256 of all text before it, so that no number can change unnoticed. Apart from that it comes from
//! strangers: [`super::store`] holds every range against the files, and every tensor against the pack's description.

use super::plane::Effort;
use crate::error::{Error, Result};
use crate::sha256::{Digest, Sha256, hex};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// File name of the description.
pub use crate::iebin::DEDUP_JSON_NAME as JSON_NAME;
/// File names of the streams: what is kept in full, masks, exceptions.
pub const FILE_NAMES: [&str; 3] = ["model.dedup.defaults.bin", "model.dedup.masks.bin", "model.dedup.exceptions.bin"];
/// Name of the format.
pub const FORMAT: &str = "iec_dedup_v2";

/// The top level.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Description {
    pub format: String,
    pub codec: Codec,
    /// The binary that can be rebuilt.
    pub weights_bin: String,
    pub total_bytes: u64,
    /// Lengths of the files of streams.
    pub files: [u64; 3],
    /// Packs whose tensors are referred to.
    pub bases: Vec<Base>,
    /// All bytes of the binary that are not zeros between tensors, in file order.
    pub payloads: Vec<Payload>,
}

/// How much is done for size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// What decodes at the speed of memory.
    Auto,
    /// Only what is equal elsewhere is left out.
    None,
    /// zstd behind the taking apart: the smallest.
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

/// A pack that is needed, too.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Base {
    /// Its directory, relative to this one.
    pub dir: String,
}

/// Consecutive bytes of the binary: a tensor, or what somebody put between tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Payload {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub offset: u64,
    pub nbytes: u64,
    pub sha256: String,
    /// Equal parts: the matrices of a stack, or one.
    pub units: Vec<Unit>,
}

impl Payload {
    /// Its name in messages.
    pub fn label(&self) -> &str {
        self.name.as_deref().unwrap_or("(between tensors)")
    }
}

/// A part of a payload and where its bytes come from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Unit {
    pub encoding: Encoding,
    /// What it is equal to, or differs from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<Origin>,
    /// Start and length in each file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streams: Option<[[u64; 2]; 3]>,
}

/// How a unit is rebuilt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Encoding {
    /// From its streams.
    Frames,
    /// As a copy of another unit.
    Same,
    /// From its streams and another unit.
    Delta,
}

/// A unit of this pack, encoded in frames, or of a base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<usize>,
    /// Place among the payloads; of a base, among its tensors.
    pub payload: usize,
    pub unit: usize,
    /// Of the base's tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

const SEAL: &str = ",\n  \"sha256\": \"";

/// The text of a description whose closing brace is missing, with its hash behind it.
pub fn sealed(body: &str) -> String {
    format!("{body}{SEAL}{}\"\n}}\n", hex(Sha256::new_with_prefix(body)))
}

impl Description {
    /// The text of the file. One line per payload: made to be read, searched and compared.
    pub fn to_text(&self) -> String {
        let head = [
            ("format", json!(self.format)),
            ("created_by", json!(concat!("iec ", env!("CARGO_PKG_VERSION")))),
            ("codec", json!(self.codec)),
            ("weights_bin", json!(self.weights_bin)),
            ("total_bytes", json!(self.total_bytes)),
            ("files", json!(self.files)),
            ("bases", json!(self.bases)),
        ];
        let head: Vec<String> = head.iter().map(|(key, value)| format!("  \"{key}\": {value}")).collect();
        let payloads: Vec<String> = self.payloads.iter().map(|payload| format!("    {}", json!(payload))).collect();
        sealed(&format!("{{\n{},\n  \"payloads\": [\n{}\n  ]", head.join(",\n"), payloads.join(",\n")))
    }

    /// Reads [`Description::to_text`].
    ///
    /// # Errors
    /// A byte of it was changed, or it is of another version.
    pub fn parse(text: &[u8]) -> Result<Description> {
        let broken = |what: &str| Error::corrupt(what).help("restore it from a backup, or run `iec dedup` again");
        let text = std::str::from_utf8(text).map_err(|_| broken("not UTF-8"))?;
        let (body, _) = text.rsplit_once(SEAL).ok_or_else(|| broken("no sha256 of its own at the end"))?;
        if sealed(body) != text {
            return Err(broken("was changed: its own sha256 is another one"));
        }
        let description: Description =
            serde_json::from_str(&format!("{body}}}")).map_err(|e| broken(&format!("not a description: {e}")))?;
        if description.format != FORMAT {
            return Err(Error::unsupported(format!("format `{}`, expected `{FORMAT}`", description.format))
                .help("restore the pack with the program that wrote it, and run `iec dedup` again"));
        }
        Ok(description)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Description {
        let of = Some(Origin { base: None, payload: 0, unit: 0, sha256: None });
        let unit = |encoding, of| Unit { encoding, of, streams: Some([[0, 1], [2, 3], [4, 5]]) };
        let payload = |name: &str, units| Payload {
            name: Some(name.to_string()),
            offset: 64,
            nbytes: 128,
            sha256: "ab".repeat(32),
            units,
        };
        Description {
            format: FORMAT.to_string(),
            codec: Codec::Auto,
            weights_bin: "model.ie.bin".to_string(),
            total_bytes: 1024,
            files: [1, 2, 3],
            bases: vec![Base { dir: "../base".to_string() }],
            payloads: vec![
                payload("a", vec![unit(Encoding::Frames, None)]),
                payload("b", vec![unit(Encoding::Delta, of)]),
            ],
        }
    }

    #[test]
    fn a_description_reads_as_it_was_written() {
        let text = example().to_text();
        assert_eq!(Description::parse(text.as_bytes()).unwrap().to_text(), text);
        serde_json::from_str::<serde_json::Value>(&text).unwrap();
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
