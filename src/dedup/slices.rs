//! Finds matrices that are to be cut into slices of rows because slices repeat: attention heads that were duplicated
//! within a matrix, or that are equal in two layers.

use super::fingerprint::{COPIES, Fingerprint, Lineup};
use super::layout::Layout;
use crate::iebin::Entry;
use crate::model_config::ModelConfig;
use std::collections::BTreeSet;

/// Returns the payload numbers of the tensors that are to be cut, each with its new layout. `tensors` gives the payload
/// number, the entry, the present layout and the bytes of each tensor.
pub(super) fn slices<'a>(
    model: &ModelConfig,
    tensors: impl Iterator<Item = (usize, &'a Entry, &'a Layout, &'a [u8])>,
) -> Vec<(usize, Layout)> {
    let mut seen: Lineup<(usize, usize)> = Lineup::new();
    let (mut cut, mut repeated) = (Vec::new(), BTreeSet::new());
    for (payload, entry, layout, bytes) in tensors {
        let Some(layout) = heads(model, entry).and_then(|heads| layout.cut(heads)) else { continue };
        let range = Fingerprint::range(&layout);
        for slice in 0..layout.units {
            let print = Fingerprint::of(&layout, &bytes[slice * layout.unit_bytes..][range.clone()]);
            // Slices at the same position in another tensor are better compared as whole tensors.
            for (other, place) in seen.nearest(&layout, print.as_ref(), COPIES) {
                if other == payload || place != slice {
                    repeated.extend([payload, other]);
                }
            }
            seen.add(&layout, print, (payload, slice));
        }
        cut.push((payload, layout));
    }
    cut.retain(|(payload, _)| repeated.contains(payload));
    cut
}

/// Returns the number of attention heads if the matrix has as many rows as all query heads or all key/value heads.
fn heads(model: &ModelConfig, entry: &Entry) -> Option<usize> {
    let [rows, _] = entry.shape[..] else { return None };
    let heads = [model.n_heads, model.n_kv_heads];
    heads.into_iter().find(|heads| *heads > 1 && heads.checked_mul(model.head_dim) == Some(rows))
}
