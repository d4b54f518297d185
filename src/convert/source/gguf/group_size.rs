//! Decides which of two types number 42 means in a file.
//!
//! llama.cpp writes Q2_0 with groups of 64 elements (18 bytes each); forks wrote groups of 128 (34 bytes) under the
//! same name and number before. The header does not tell them apart, but the space between the offsets of tensors does.

use super::reader::GgufTensor;
use super::types::GgmlType;
use crate::error::{Error, Result};

/// Chooses one group size for all Q2_0 tensors of a file. `start` of a tensor is still its offset in the data, which
/// has `data_bytes` bytes.
///
/// # Errors
/// Neither size fits the space of every such tensor.
pub(super) fn choose(tensors: &mut [GgufTensor], data_bytes: u64, alignment: u64) -> Result<()> {
    let mut starts: Vec<u64> = tensors.iter().map(|t| t.start).chain([data_bytes]).collect();
    starts.sort_unstable();
    let space = |t: &GgufTensor| {
        let next = starts[starts.partition_point(|start| *start <= t.start)..].first();
        next.map_or(0, |next| next - t.start)
    };
    let fits = |t: &GgufTensor, kind: GgmlType| {
        let padded = |n: u64| n.checked_next_multiple_of(alignment);
        nbytes(t, kind).is_some_and(|n| n == space(t) || padded(n) == Some(space(t)))
    };
    let doubtful = || tensors.iter().filter(|t| t.kind == GgmlType::Q2_0);
    let kinds = [GgmlType::Q2_0, GgmlType::Q2_0_G128];
    let Some(kind) = kinds.into_iter().find(|kind| doubtful().all(|t| fits(t, *kind))) else {
        let wrong = doubtful().find(|t| !fits(t, GgmlType::Q2_0)).expect("some tensor does not fit");
        return Err(refusal(wrong, space(wrong)));
    };
    for tensor in tensors.iter_mut().filter(|t| t.kind == GgmlType::Q2_0) {
        tensor.nbytes = nbytes(tensor, kind).expect("the size fits");
        tensor.kind = kind;
    }
    Ok(())
}

/// Returns the size in bytes of the tensor in a type of this group size; `None` if its rows are no whole groups.
fn nbytes(tensor: &GgufTensor, kind: GgmlType) -> Option<u64> {
    let (cols, rows) = tensor.shape.split_last()?;
    let row = kind.row_bytes(*cols)?;
    rows.iter().try_fold(row, |n, d| n.checked_mul(*d)).map(|n| n as u64)
}

fn refusal(tensor: &GgufTensor, space: u64) -> Error {
    let size = |kind: GgmlType| nbytes(tensor, kind).map_or("none".into(), |n| n.to_string());
    let expected = [GgmlType::Q2_0, GgmlType::Q2_0_G128].map(|kind| format!("{} ({})", size(kind), kind.block()));
    let found = format!("found {space} bytes for {} elements of type Q2_0", tensor.elements());
    Error::corrupt(format!("{found}, expected {} by group size", expected.join(" or ")))
        .tensor(&tensor.name)
        .help("the file is damaged, or another program wrote it with a group size of its own; get it again")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[usize], start: u64) -> GgufTensor {
        let kind = GgmlType::Q2_0;
        GgufTensor { name: name.into(), kind, shape: shape.into(), file: 0, start, nbytes: 0 }
    }

    #[test]
    fn the_space_of_the_tensors_decides() {
        let two = |second: u64| [tensor("a", &[4, 128], 0), tensor("b", &[64, 256], second)];
        // Both sizes of the first tensor, 144 and 136 bytes, take 160 with their padding.
        for (end, kind, nbytes) in [(160 + 4608, GgmlType::Q2_0, 4608), (160 + 4352, GgmlType::Q2_0_G128, 4352)] {
            let mut tensors = two(160);
            choose(&mut tensors, end, 32).unwrap();
            assert!(tensors.iter().all(|t| t.kind == kind));
            assert_eq!(tensors[1].nbytes, nbytes);
        }
        for end in [160 + 4607, 160 + 4640, 160] {
            let error = choose(&mut two(160), end, 32).unwrap_err();
            assert_eq!(error.tensor_name(), Some("b"));
        }
        assert!(choose(&mut two(192), 192 + 4608, 32).is_err());
        // Rows of 64 elements exist only with groups of 64.
        assert!(choose(&mut [tensor("c", &[2, 64], 0)], 34, 32).is_err());
        choose(&mut [tensor("c", &[2, 64], 0)], 36, 32).unwrap();
    }

    #[test]
    fn an_offset_past_the_data_is_refused() {
        assert!(choose(&mut [tensor("a", &[4, 128], u64::MAX)], 10, 32).is_err());
    }
}
