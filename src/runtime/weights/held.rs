//! Bytes of memory that bound weights take, computed from the description of a pack without reading weights.

use super::shape::{Shape, per_head_bytes};
use crate::catalogue::Role;
use crate::dtype::DType;
use crate::error::Result;
use crate::iebin::{IebinReader, stored_bytes};
use crate::model_config::ModelConfig;
use crate::runtime::cpu::{Arithmetic, MatrixStore};

/// End of the names of the matrices that are divided into those of heads.
const KV_B: &str = ".self_attn.kv_b_proj.weight";

/// Bytes of the weights of a model in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// Bytes that are read from the mapped file. The system can drop them and read them again.
    pub mapped: u64,
    /// Bytes of converted matrices, of matrices that are divided into those of heads, of vectors as f32, and of weights
    /// that a deduplicated pack rebuilds, which stay in memory.
    pub owned: u64,
}

impl HeldBytes {
    /// Computes the bytes that [`super::Weights::bind`] maps and allocates with the same arguments, and those of the
    /// matrices of heads. All weights of a deduplicated pack count as rebuilt.
    ///
    /// # Errors
    /// The shape of a tensor is not valid.
    pub fn of(
        reader: &IebinReader,
        config: &ModelConfig,
        convert: Option<DType>,
        arithmetic: Arithmetic,
    ) -> Result<HeldBytes> {
        let mut bytes = HeldBytes::default();
        for entry in reader.entries().iter().filter(|entry| Role::of(&entry.name) != Role::Prediction) {
            let Ok((count, rows, cols)) = entry.matrices() else {
                bytes.owned += (entry.elements() * size_of::<f32>()) as u64;
                continue;
            };
            let shape = Shape::new(entry.store, rows, cols, convert)?;
            if let Some(latent) = config.attention.latent.filter(|_| entry.name.ends_with(KV_B)) {
                let divided = per_head_bytes(&shape.store, config.n_heads, &latent, arithmetic)?;
                bytes.owned = bytes.owned.saturating_add(divided);
                if reader.rebuilt().is_none() {
                    continue;
                }
            }
            let held = match shape.store {
                MatrixStore::Plain(dtype) => stored_bytes(crate::iebin::Store::Plain(dtype), &[rows, cols])?,
                MatrixStore::Tiled(layout) => layout.nbytes(),
            };
            let held = (held as u64).saturating_mul(count as u64);
            let is_mapped = shape.from.is_none() && reader.rebuilt().is_none();
            let place = if is_mapped { &mut bytes.mapped } else { &mut bytes.owned };
            *place = place.saturating_add(held);
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::pack::{PackOptions, pack};
    use crate::runtime::weights::{Weight, Weights};
    use std::path::Path;

    #[test]
    fn the_bytes_are_those_of_the_bound_matrices() {
        for (name, convert) in [("llama-gqa", None), ("llama-gqa", Some(DType::F16)), ("qwen3moe", Some(DType::BF16))] {
            let dir = tempfile::tempdir().unwrap();
            let hf_dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
            pack(&PackOptions { hf_dir, out_dir: dir.path().into(), ..PackOptions::default() }).unwrap();
            let reader = IebinReader::open(dir.path()).unwrap();
            let config = reader.description.model.clone().unwrap();
            let held = HeldBytes::of(&reader, &config, convert, Arithmetic::Float).unwrap();
            let weights =
                Weights::bind(&reader, &config, convert, crate::runtime::weights::BindForm::default()).unwrap();
            let tied = usize::from(config.tied_embeddings);
            let matrices: Vec<&Weight> = weights.matrices().skip(tied).collect();
            let bound: u64 = matrices.iter().map(|matrix| matrix.nbytes() as u64).sum();
            let vectors: u64 =
                reader.entries().iter().filter(|e| e.matrices().is_err()).map(|e| 4 * e.elements() as u64).sum();
            // Biases of experts are stored as matrices and bound as vectors; these models have none.
            assert_eq!(held.mapped + held.owned, bound + vectors, "{name} as {convert:?}");
            assert_eq!(held.owned > vectors, convert.is_some(), "{name} as {convert:?}: {held:?}");
        }
    }
}
