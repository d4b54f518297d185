//! Reads the header of a safetensors file.
//!
//! The file is a `u64` header length, a JSON header `{name: {dtype, shape, data_offsets: [start, end]}}`, and the
//! data. Everything in the header is checked when the file is opened: the range of a [`SourceTensor`] is always
//! within the file.

use super::read_at::ReadAt;
use super::source_tensor::SourceTensor;
use crate::convert::json::Pairs;
use crate::dtype::DType;
use crate::error::{Context, Error, Result};
use serde::Deserialize;
use std::collections::{BTreeMap, HashSet};

/// Maximum length of the header in bytes, the same as in the `safetensors` library.
const HEADER_LIMIT: u64 = 100_000_000;

#[derive(Debug, Deserialize)]
struct RawTensor {
    dtype: String,
    #[serde(deserialize_with = "crate::strict_json::dimensions")]
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Lists the tensors of shard number `shard` in file order.
///
/// # Errors
/// The header is longer than the file or malformed, or a tensor's dtype, shape or range is invalid.
pub fn list(file: &dyn ReadAt, shard: usize) -> Result<Vec<SourceTensor>> {
    let len = file.nbytes();
    let (data_start, raw) = read_header(file, len)?;
    check(raw, data_start, len, shard)
        .help("the file is damaged, or not written by a safetensors library; get it again")
}

/// Returns the texts of `__metadata__` in the header.
///
/// # Errors
/// The header is longer than the file or malformed.
pub fn metadata(file: &dyn ReadAt) -> Result<BTreeMap<String, String>> {
    #[derive(Deserialize)]
    struct Header {
        #[serde(default)]
        __metadata__: BTreeMap<String, String>,
    }
    let (_, header) = header_text(file, file.nbytes())?;
    let parsed: Header = serde_json::from_slice(&header)
        .map_err(|e| Error::corrupt(format!("malformed metadata: {e}")))
        .help("the file is damaged or no safetensors file; get it again")?;
    Ok(parsed.__metadata__)
}

fn read_header(file: &dyn ReadAt, len: u64) -> Result<(u64, Vec<(String, RawTensor)>)> {
    let (start, header) = header_text(file, len)?;
    let Pairs(raw) = serde_json::from_slice(&header)
        .map_err(|e| Error::corrupt(format!("malformed header: {e}")))
        .help("the file is damaged or no safetensors file; get it again")?;
    Ok((start, raw))
}

/// Returns the position of the data, and the text of the header.
fn header_text(file: &dyn ReadAt, len: u64) -> Result<(u64, Vec<u8>)> {
    let mut word = [0; 8];
    if len < 8 {
        return Err(Error::corrupt(format!("found {len} bytes, expected a safetensors file"))
            .help("the file is truncated; get it again"));
    }
    file.read_at(0, &mut word)?;
    let header_len = u64::from_le_bytes(word);
    if header_len > HEADER_LIMIT {
        // The length itself is not shown: it may be the first bytes of another file.
        let found = format!("found a length of the header out of range, expected at most {HEADER_LIMIT} bytes");
        return Err(Error::corrupt(found).help("the file is not a safetensors file or is damaged; download it again"));
    }
    if header_len > len - 8 {
        let found = format!("found a header that is longer than the file ({len} bytes)");
        return Err(Error::corrupt(found).help("the file is truncated; get it again"));
    }
    Ok((8 + header_len, file.read_vec(8, header_len)?))
}

/// Checks names, sizes, and that the ranges cover the data without overlap or hole.
fn check(raw: Vec<(String, RawTensor)>, data_start: u64, file_len: u64, shard: usize) -> Result<Vec<SourceTensor>> {
    let mut names = HashSet::new();
    let mut tensors = Vec::with_capacity(raw.len());
    for (name, raw) in raw {
        if !names.insert(name.clone()) {
            return Err(Error::corrupt("found this tensor twice in the header").tensor(name));
        }
        tensors.push(check_one(&name, &raw, data_start, file_len, shard).tensor(&name)?);
    }
    tensors.sort_by_key(|t| (t.start, t.nbytes));
    let mut end = data_start;
    let mut previous = None;
    for tensor in &tensors {
        let name = &tensor.name;
        if tensor.start < end {
            let before: &SourceTensor = previous.unwrap_or(tensor);
            return Err(Error::corrupt(format!("found data that overlaps tensor {}", before.name)).tensor(name));
        }
        if tensor.start > end {
            return Err(
                Error::corrupt(format!("found {} unused bytes before this tensor", tensor.start - end)).tensor(name)
            );
        }
        end = tensor.start + tensor.nbytes as u64;
        previous = Some(tensor);
    }
    if end != file_len {
        return Err(Error::corrupt(format!("found {} bytes after the last tensor", file_len - end)));
    }
    Ok(tensors)
}

fn check_one(name: &str, raw: &RawTensor, data_start: u64, file_len: u64, shard: usize) -> Result<SourceTensor> {
    let dtype = DType::of_header(&raw.dtype).help("convert from a checkpoint with float weights (f32, f16 or bf16)")?;
    let (start, end) = raw.data_offsets;
    let expected = raw.shape.iter().try_fold(dtype.size() as u64, |n, d| n.checked_mul(*d));
    let Some(expected) = expected else {
        return Err(Error::corrupt(format!("found shape {:?} of {dtype}, whose size in bytes overflows", raw.shape)));
    };
    if end.checked_sub(start) != Some(expected) {
        let found = format!(
            "found data_offsets {start}..{end}, expected {expected} bytes for shape {:?} of {dtype}",
            raw.shape
        );
        return Err(Error::corrupt(found));
    }
    if data_start.checked_add(end).is_none_or(|end| end > file_len) {
        let found = format!(
            "found data_offsets {start}..{end}, which reach past the file's {} bytes of data",
            file_len - data_start
        );
        return Err(Error::corrupt(found).help("the file is truncated or damaged; get it again"));
    }
    let fits = |n: u64| {
        usize::try_from(n).map_err(|_| Error::corrupt(format!("found size {n}, more than this machine can address")))
    };
    Ok(SourceTensor {
        name: name.to_string(),
        dtype,
        shape: raw.shape.iter().map(|d| fits(*d)).collect::<Result<_>>()?,
        shard,
        start: data_start + start,
        nbytes: fits(expected)?,
        strides: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn open(bytes: &[u8]) -> Result<Vec<SourceTensor>> {
        list(&bytes, 0)
    }

    const GOOD: &str = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
        "b":{"dtype":"U8","shape":[],"data_offsets":[24,25]},"e":{"dtype":"F16","shape":[0],"data_offsets":[24,24]}}  "#;

    #[test]
    fn a_good_file_lists_its_tensors_in_file_order() {
        let bytes = file(GOOD, 25);
        let tensors = open(&bytes).unwrap();
        assert_eq!(tensors.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["a", "e", "b"]);
        let mut byte = [0];
        bytes.as_slice().read_at(tensors[2].start, &mut byte).unwrap();
        assert_eq!(byte, [7]);
    }

    #[test]
    fn every_way_to_break_a_header_is_refused() {
        let one = |entry: &str| format!("{{\"a\":{entry}}}");
        let huge = 1u64 << 63;
        let cases: Vec<(&str, Vec<u8>, &str)> = vec![
            ("empty file", Vec::new(), "found 0 bytes"),
            ("header longer than file", (1u64 << 20).to_le_bytes().to_vec(), "longer than the file"),
            ("header beyond the limit", u64::MAX.to_le_bytes().to_vec(), "expected at most"),
            ("no JSON", file("hello", 0), "malformed header"),
            ("not an object", file("[1]", 0), "malformed header"),
            ("no shape", file(&one(r#"{"dtype":"U8","data_offsets":[0,1]}"#), 1), "a: missing field `shape`"),
            ("negative dimension", file(&one(r#"{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}"#), 1), "a: invalid"),
            (
                "unknown dtype",
                file(&one(r#"{"dtype":"F9","shape":[1],"data_offsets":[0,1]}"#), 1),
                "a: found dtype `F9`",
            ),
            ("size differs", file(&one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#), 4), "expected 8 bytes"),
            ("reversed", file(&one(r#"{"dtype":"U8","shape":[1],"data_offsets":[1,0]}"#), 1), "data_offsets 1..0"),
            (
                "overflow",
                file(&one(&format!(r#"{{"dtype":"F32","shape":[{huge},{huge}],"data_offsets":[0,4]}}"#)), 4),
                "overflows",
            ),
            (
                "past the end",
                file(&one(r#"{"dtype":"U8","shape":[9],"data_offsets":[0,9]}"#), 8),
                "reach past the file",
            ),
            (
                "far past the end",
                file(
                    &one(&format!(r#"{{"dtype":"U8","shape":[1],"data_offsets":[{},{}]}}"#, u64::MAX - 1, u64::MAX)),
                    8,
                ),
                "reach past the file",
            ),
            ("hole", file(&one(r#"{"dtype":"U8","shape":[4],"data_offsets":[4,8]}"#), 8), "4 unused bytes"),
            ("trailing bytes", file(GOOD, 26), "1 bytes after"),
            (
                "overlap",
                file(
                    r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}"#,
                    7,
                ),
                "b: found data that overlaps tensor a",
            ),
            (
                "duplicate",
                file(
                    r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#,
                    8,
                ),
                "a: found this tensor twice",
            ),
        ];
        let mut failures = Vec::new();
        for (what, bytes, message) in cases {
            match open(&bytes) {
                Ok(_) => failures.push(format!("{what}: accepted")),
                Err(e) if e.to_string().contains(message) => {}
                Err(e) => failures.push(format!("{what}: {e}")),
            }
        }
        assert!(failures.is_empty(), "{failures:#?}");
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = open(&bytes);
        }

        #[test]
        fn a_damaged_header_never_panics_and_accepted_ranges_exist(
            edits in prop::collection::vec((8usize..8 + GOOD.len(), any::<u8>()), 1..4),
            data in 0usize..40,
        ) {
            let mut bytes = file(GOOD, data);
            for (at, byte) in edits {
                bytes[at] = byte;
            }
            if let Ok(tensors) = open(&bytes) {
                prop_assert!(tensors.iter().all(|t| t.start + t.nbytes as u64 <= bytes.len() as u64));
            }
        }
    }
}
