//! Decides whether the output matrix of a checkpoint is its embedding.
//!
//! `tie_word_embeddings` alone does not say so: fine-tuning may leave an output matrix of its own beside the embedding
//! and the field as it was. As in transformers 5, a model is tied only if the weights have one matrix, or two with the
//! same numbers.

use crate::convert::arch::Naming;
use crate::convert::published::{Coded, Published};
use crate::convert::source::shards::Shards;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::decode_floats;
use crate::error::{Context, Result};
use crate::interrupt;
use crate::progress;

/// Canonical names of both matrices.
const EMBEDDING: &str = "model.embed_tokens.weight";
const OUTPUT: &str = "lm_head.weight";
/// Elements that are compared at once.
const PIECE: usize = 1 << 18;

/// Returns the name that the output matrix has in the source.
pub(super) fn name(naming: Naming) -> String {
    naming.name(OUTPUT)
}

/// Returns true if the weights have no output matrix that differs from their embedding, so that a model whose
/// configuration ties both may use one for the other.
///
/// # Errors
/// A matrix cannot be read, or the user interrupts.
pub(super) fn is_embedding(shards: &Shards, published: &Published) -> Result<bool> {
    let naming = Naming::of(shards.tensors().map(|tensor| tensor.name.as_str()));
    let names = [EMBEDDING, OUTPUT].map(|plain| naming.name(plain));
    let is_same = if names.iter().any(|name| published.get(name).is_some()) {
        let [embedding, output] = names.each_ref().map(|name| ComparedMatrix::of(shards, published, name));
        let (Some(embedding), Some(output)) = (embedding, output) else { return Ok(true) };
        have_equal_rows(shards, &embedding, &output)?
    } else {
        let [embedding, output] = names.each_ref().map(|name| shards.get(name));
        let (Some(embedding), Some(output)) = (embedding, output) else { return Ok(true) };
        are_equal(shards, embedding, output)?
    };
    if !is_same {
        progress::detail(0, || {
            format!(
                "note: `{}` differs from the embedding, so it is used, although config.json says \
                 tie_word_embeddings: true",
                names[1]
            )
        });
    }
    Ok(is_same)
}

/// Matrix of floats or of codes.
enum ComparedMatrix<'a> {
    Floats(&'a SourceTensor),
    Coded(&'a Coded),
}

impl<'a> ComparedMatrix<'a> {
    fn of(shards: &'a Shards, published: &'a Published, name: &str) -> Option<ComparedMatrix<'a>> {
        let coded = published.get(name).map(|coded| ComparedMatrix::Coded(coded));
        coded.or_else(|| shards.get(name).map(ComparedMatrix::Floats))
    }

    fn shape(&self) -> &[usize] {
        match self {
            ComparedMatrix::Floats(tensor) => &tensor.shape,
            ComparedMatrix::Coded(coded) => &coded.shape,
        }
    }

    fn read(&self, shards: &Shards, first: usize, [rows, cols]: [usize; 2]) -> Result<Vec<f32>> {
        match self {
            ComparedMatrix::Floats(tensor) => read(shards, tensor, first * cols, rows * cols),
            ComparedMatrix::Coded(coded) => {
                let mut numbers = vec![0.0; rows * cols];
                coded.read_rows(shards, 0, first..first + rows, &mut numbers).map(|()| numbers)
            }
        }
    }
}

/// Compares the numbers of two matrices of which one is in codes.
fn have_equal_rows(shards: &Shards, one: &ComparedMatrix<'_>, other: &ComparedMatrix<'_>) -> Result<bool> {
    let ([rows, cols], true) = (one.shape(), one.shape() == other.shape()) else { return Ok(false) };
    let is_number =
        |matrix: &ComparedMatrix<'_>| !matches!(matrix, ComparedMatrix::Floats(tensor) if !tensor.dtype.is_float());
    if !is_number(one) || !is_number(other) {
        return Ok(false);
    }
    let height = (PIECE / cols.max(&1)).max(1);
    for first in (0..*rows).step_by(height) {
        interrupt::check()?;
        let piece = [height.min(rows - first), *cols];
        if one.read(shards, first, piece)? != other.read(shards, first, piece)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Compares the numbers of two matrices.
fn are_equal(shards: &Shards, one: &SourceTensor, other: &SourceTensor) -> Result<bool> {
    let is_stored_once = (one.shard, one.start, &one.strides) == (other.shard, other.start, &other.strides);
    if one.shape != other.shape || !one.dtype.is_float() || !other.dtype.is_float() {
        return Ok(false);
    }
    if is_stored_once && one.dtype == other.dtype {
        return Ok(true);
    }
    let elements: usize = one.shape.iter().product();
    let mut numbers = [Vec::new(), Vec::new()];
    for first in (0..elements).step_by(PIECE) {
        interrupt::check()?;
        for (tensor, numbers) in [one, other].into_iter().zip(&mut numbers) {
            *numbers = read(shards, tensor, first, PIECE.min(elements - first))?;
        }
        if numbers[0] != numbers[1] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reads `count` numbers of a tensor from number `first` on.
fn read(shards: &Shards, tensor: &SourceTensor, first: usize, count: usize) -> Result<Vec<f32>> {
    let size = tensor.dtype.size();
    let (mut bytes, mut numbers) = (vec![0; count * size], vec![0.0; count]);
    shards.read(tensor, first * size, &mut bytes).at(shards.path(tensor))?;
    decode_floats(tensor.dtype, &bytes, &mut numbers).tensor(&tensor.name)?;
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use crate::convert::Checkpoint;
    use serde_json::{Value, json};
    use std::path::Path;

    /// Copies a checkpoint whose output matrix is stored beside the embedding, with changes.
    fn changed(change: impl FnOnce(&mut Value, &mut [u8], [std::ops::Range<usize>; 2])) -> tempfile::TempDir {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen3");
        let dir = tempfile::tempdir().unwrap();
        let mut weights = std::fs::read(source.join("model.safetensors")).unwrap();
        let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
        let length = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&weights[8..8 + length]).unwrap();
        let range = |name: &str| {
            let at = |i: usize| 8 + length + header[name]["data_offsets"][i].as_u64().unwrap() as usize;
            at(0)..at(1)
        };
        let ranges = [range(super::EMBEDDING), range(super::OUTPUT)];
        change(&mut config, &mut weights, ranges);
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), weights).unwrap();
        dir
    }

    #[test]
    fn a_head_of_its_own_is_kept_unless_it_equals_the_embedding() {
        struct Case {
            name: &'static str,
            tie: Option<bool>,
            equal: bool,
            tied: bool,
        }
        let case = |name, tie, equal, tied| Case { name, tie, equal, tied };
        let cases = [
            case("a head of its own", Some(true), false, false),
            case("a copy of the embedding", Some(true), true, true),
            case("not tied by the configuration", Some(false), true, false),
            case("not tied by default", None, false, false),
        ];
        let mut wrong = Vec::new();
        for Case { name, tie, equal, tied } in cases {
            let dir = changed(|config, weights, [embedding, output]| {
                config["tie_word_embeddings"] = json!(tie);
                if equal {
                    weights.copy_within(embedding, output.start);
                }
            });
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            let has_head = checkpoint.get(super::OUTPUT).is_some();
            if (checkpoint.config().tied_embeddings, has_head) != (tied, !tied) {
                wrong.push(name);
            }
        }
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn one_number_that_differs_makes_a_head_of_its_own() {
        let dir = changed(|config, weights, [embedding, output]| {
            config["tie_word_embeddings"] = json!(true);
            weights.copy_within(embedding, output.start);
            weights[output.end - 1] ^= 1;
        });
        assert!(!Checkpoint::open(dir.path()).unwrap().config().tied_embeddings);
    }
}
