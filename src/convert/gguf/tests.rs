//! Tests of the parser of GGUF headers, with valid and with damaged files.

use super::tokenizer_in::tokenizer_files;
use super::writer::{GgufEntry, lay_out};
use crate::convert::source::gguf::header::{Header, parse};
use crate::convert::source::gguf::types::GgmlType;
use crate::convert::source::gguf::value::{ARRAY, Metadata, Scalar, Value};
use crate::error::Result;
use proptest::prelude::*;

fn tensor(name: &str, kind: GgmlType, shape: &[usize]) -> GgufEntry {
    let elements: usize = shape.iter().product();
    let nbytes = (elements / kind.block() * kind.block_bytes()) as u64;
    GgufEntry { name: name.into(), kind, shape: shape.to_vec(), nbytes }
}

/// Returns a small valid file.
fn good() -> Vec<u8> {
    let metadata = vec![
        ("general.architecture".to_string(), Value::String("llama".into())),
        ("llama.block_count".to_string(), Value::u32(2)),
        ("llama.eps".to_string(), Value::f32(1e-5)),
        ("flag".to_string(), Value::bool(true)),
        ("tokens".to_string(), Value::Strings(vec!["a".into(), "".into(), "▁c".into()])),
        ("kinds".to_string(), Value::Numbers(Scalar::I32, vec![1, 0, 0, 0, 255, 255, 255, 255])),
    ];
    let tensors = [tensor("w", GgmlType::Q4_0, &[3, 64]), tensor("v", GgmlType::F32, &[5])];
    let layout = lay_out(&metadata, &tensors);
    let mut file = layout.header;
    file.resize(layout.total as usize, 7);
    file
}

fn open(bytes: &[u8]) -> Result<Header> {
    parse(&bytes, 0)
}

#[test]
fn what_is_written_reads_back() {
    let header = open(&good()).unwrap();
    let meta = &header.metadata;
    assert_eq!((header.version, meta.text("general.architecture").unwrap()), (3, "llama"));
    assert_eq!((meta.count("llama.block_count").unwrap(), meta.flag_opt("flag").unwrap()), (2, Some(true)));
    // An f32 is read as its shortest decimal form.
    assert_eq!(meta.number_opt("llama.eps").unwrap(), Some(1e-5));
    assert_eq!(meta.texts_opt("tokens").unwrap().unwrap()[2], "▁c");
    assert_eq!(meta.integers_opt("kinds").unwrap().unwrap(), [1, -1]);
    let [w, v] = &header.tensors[..] else { panic!("two tensors") };
    assert_eq!((w.kind, w.shape.as_slice(), w.nbytes, w.start % 32), (GgmlType::Q4_0, &[3, 64][..], 108, 0));
    assert_eq!((v.shape.as_slice(), v.start - w.start), (&[5][..], 128));
}

#[test]
fn a_value_of_another_type_is_refused_by_its_key() {
    let header = open(&good()).unwrap();
    let meta = &header.metadata;
    for error in [
        meta.count("general.architecture").unwrap_err(),
        meta.text("llama.block_count").unwrap_err(),
        meta.count("llama.eps").unwrap_err(),
        meta.count("kinds").unwrap_err(),
        meta.text("absent").unwrap_err(),
    ] {
        assert!(error.tensor_name().is_some(), "{error}");
    }
}

/// Builder of a file from little-endian numbers.
#[derive(Default)]
struct Raw(Vec<u8>);

impl Raw {
    fn start(version: u32, tensors: u64, keys: u64) -> Raw {
        Raw(b"GGUF".to_vec()).u32(version).u64(tensors).u64(keys)
    }
    fn u32(mut self, n: u32) -> Raw {
        self.0.extend_from_slice(&n.to_le_bytes());
        self
    }
    fn u64(mut self, n: u64) -> Raw {
        self.0.extend_from_slice(&n.to_le_bytes());
        self
    }
    fn text(self, text: &str) -> Raw {
        let mut raw = self.u64(text.len() as u64);
        raw.0.extend_from_slice(text.as_bytes());
        raw
    }
    fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Raw {
        let raw = self.text(name).u32(dims.len() as u32);
        dims.iter().fold(raw, |raw, d| raw.u64(*d)).u32(kind).u64(offset)
    }
    fn pad(mut self, n: usize) -> Raw {
        self.0.resize(self.0.len().next_multiple_of(32) + n, 0);
        self
    }
}

#[test]
fn every_way_to_break_a_header_is_refused() {
    let one = |dims: &[u64], kind, offset| Raw::start(3, 1, 0).tensor("t", dims, kind, offset).pad(64);
    let two = |a: &str, b: &str, offset| Raw::start(3, 2, 0).tensor(a, &[8], 0, 0).tensor(b, &[8], 0, offset).pad(64);
    let key = |kind: u32| Raw::start(3, 0, 1).text("k").u32(kind);
    let huge = 1u64 << 62;
    let cases: Vec<(&str, Raw, &str)> = vec![
        ("empty", Raw::default(), "other first bytes than `GGUF`"),
        ("another format", Raw(b"PK\x03\x04 and so on".to_vec()), "other first bytes than `GGUF`"),
        ("only the magic", Raw(b"GGUF".to_vec()), "past the end"),
        ("version 1", Raw::start(1, 0, 0), "GGUF version 1"),
        ("version 4", Raw::start(4, 0, 0), "GGUF version 4"),
        ("big-endian", Raw::start(3u32.swap_bytes(), 0, 0), "big-endian"),
        ("huge tensor count", Raw::start(3, huge, 0), "tensor_count: found a count of 4611686018427387904, but only"),
        ("huge key count", Raw::start(3, 0, huge), "metadata_kv_count: found a count of 4611686018427387904, but only"),
        ("key longer than the file", Raw::start(3, 0, 1).u64(60_000).pad(32), "past the end"),
        ("absurd key", Raw::start(3, 0, 1).u64(u64::MAX).pad(32), "a name of 18446744073709551615 bytes"),
        ("key that is no text", Raw::start(3, 0, 1).u64(2).u32(0xffff_ffff).pad(32), "not UTF-8"),
        ("unknown value type", key(13).pad(32), "k: found value type number 13"),
        ("text longer than the file", key(8).u64(huge).pad(32), "k: 4611686018427387904 bytes"),
        (
            "list longer than the file",
            key(ARRAY).u32(4).u64(huge).pad(32),
            "list: found a count of 4611686018427387904",
        ),
        (
            "texts longer than the file",
            key(ARRAY).u32(8).u64(huge).pad(32),
            "list: found a count of 4611686018427387904",
        ),
        ("list of lists", key(ARRAY).u32(ARRAY).u64(1).u32(ARRAY).u64(1).pad(32), "k: found a list of lists"),
        ("list of nothing", key(ARRAY).u32(99).u64(1).pad(32), "k: found value type number 99"),
        (
            "key twice",
            Raw::start(3, 0, 2).text("k").u32(4).u32(1).text("k").u32(4).u32(2).pad(32),
            "k: found this key twice",
        ),
        ("no dimensions", one(&[], 0, 0), "t: found 0 dimensions"),
        ("five dimensions", one(&[1; 5], 0, 0), "t: found 5 dimensions"),
        ("empty tensor", one(&[4, 0], 0, 0), "overflows or is 0"),
        ("shape overflow", one(&[huge, huge], 0, 0), "overflows"),
        ("size overflow", one(&[huge], 0, 0), "overflows"),
        ("unknown type", one(&[8], 99, 0), "t: found element type number 99"),
        ("removed type", one(&[8], 4, 0), "t: found type Q4_2 (number 4), which llama.cpp has removed"),
        ("row of half a block", one(&[48], 2, 0), "t: found rows of 48 elements, expected a multiple of 32"),
        ("past the end", one(&[17], 0, 0), "reach past the end of the file"),
        ("far past the end", one(&[8], 0, u64::MAX - 31), "reach past the end of the file"),
        ("misaligned", one(&[4], 0, 4), "t: found offset 4, expected a multiple of 32"),
        ("overlap", two("a", "b", 0), "overlaps tensor"),
        (
            "bad alignment",
            Raw::start(3, 0, 1).text("general.alignment").u32(4).u32(48).pad(0),
            "general.alignment: found 48",
        ),
        (
            "zero alignment",
            Raw::start(3, 0, 1).text("general.alignment").u32(4).u32(0).pad(0),
            "general.alignment: found 0",
        ),
    ];
    let mut failures = Vec::new();
    for (what, raw, message) in cases {
        match open(&raw.0) {
            Ok(_) => failures.push(format!("{what}: accepted")),
            Err(e) if e.to_string().contains(message) => {}
            Err(e) => failures.push(format!("{what}: {e}")),
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn a_truncated_file_is_refused_at_every_length() {
    let good = good();
    for length in 0..good.len() - 1 {
        // The padding after the last tensor may be missing.
        assert!(open(&good[..length]).is_err() || length >= good.len() - 12, "{length} of {} bytes", good.len());
    }
}

/// Returns the metadata of a SentencePiece vocabulary with these pieces, all of one token type.
fn pieces(pieces: Vec<String>, kind: i32) -> Metadata {
    let n = pieces.len();
    let repeated = |bytes: &[u8]| bytes.iter().copied().cycle().take(n * bytes.len()).collect();
    Metadata::new(vec![
        ("tokenizer.ggml.model".into(), Value::String("llama".into())),
        ("tokenizer.ggml.tokens".into(), Value::Strings(pieces)),
        ("tokenizer.ggml.scores".into(), Value::Numbers(Scalar::F32, repeated(&0f32.to_le_bytes()))),
        ("tokenizer.ggml.token_type".into(), Value::Numbers(Scalar::I32, repeated(&kind.to_le_bytes()))),
    ])
    .unwrap()
}

#[test]
fn vocabularies_that_would_explode_are_refused() {
    let few = pieces((1..9).map(|n| "a".repeat(n)).collect(), 1);
    assert!(tokenizer_files(&few, 100).is_ok());
    // Every split of every piece is a merge, so the number of merges grows with the square of the number of pieces.
    let many = pieces((1..60).map(|n| "a".repeat(n)).collect(), 1);
    assert!(tokenizer_files(&many, 100).unwrap_err().to_string().contains("merges"));
    let long = pieces(vec!["a".repeat(600)], 1);
    assert!(tokenizer_files(&long, 100).unwrap_err().to_string().contains("a piece of 600 bytes"));
    let special = pieces((0..70_000).map(|n| n.to_string()).collect(), 3);
    assert!(tokenizer_files(&special, 1 << 20).unwrap_err().help_text().unwrap().contains("--tokenizer"));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(tail in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tail);
        let _ = open(&bytes);
    }

    #[test]
    fn a_damaged_header_never_panics_and_accepted_ranges_exist(
        edits in prop::collection::vec((0usize..400, any::<u8>()), 1..6),
    ) {
        let mut bytes = good();
        for (at, byte) in edits {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        if let Ok(header) = open(&bytes) {
            prop_assert!(header.tensors.iter().all(|t| t.start + t.nbytes <= bytes.len() as u64));
        }
    }
}
