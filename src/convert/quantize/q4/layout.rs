//! Computes the positions of tensors in the files of codes and of scales. All lengths follow from shapes and schemes,
//! so that they are known before any weight is read.

use super::{CODES_NAME, SCALES_NAME};
use crate::convert::executor::Section;
use crate::convert::quantize::entry::{already_quantized, blank_entry};
use crate::convert::quantize::ptq::selected;
use crate::convert::quantize::select::Selection;
use crate::convert::quantize::weights::{Tensor, Weights};
use crate::error::{Context, Error, Result};
use crate::manifest::{PackedJson, TensorEntry};
use crate::quant_spec::TensorQuant;
use crate::scheme::TileLayout;

/// All selected tensors, and the lengths of the two files in bytes.
#[derive(Debug)]
pub(super) struct Q4Layout {
    /// Each tensor with its entry in the manifest, which lacks only the metrics. Entries without `packed`
    /// belong to tensors that keep the codes of the source and are not written here.
    pub tensors: Vec<(Tensor, TensorEntry)>,
    /// Length of the file of codes.
    pub codes_len: u64,
    /// Length of the file of scales and zero points.
    pub scales_len: u64,
}

impl Q4Layout {
    /// Lays out the selected tensors in the order of the model.
    ///
    /// # Errors
    /// Nothing is selected, or a tensor cannot be quantized.
    pub fn new(weights: &Weights, selection: &Selection) -> Result<Q4Layout> {
        let mut layout = Q4Layout { tensors: Vec::new(), codes_len: 0, scales_len: 0 };
        let decided = selection.manifest().map(|manifest| &manifest.document().tensors);
        for (tensor, quant) in selected(weights, selection)? {
            let entry = match already_quantized(&tensor, &quant.spec)? {
                Some(entry) => entry,
                None => {
                    let packed = layout.place(&tensor, quant).tensor(&tensor.name)?;
                    let entry = decided.and_then(|entries| entries.get(&tensor.name)).cloned();
                    let entry = entry.map_or_else(|| blank_entry(&tensor), Ok)?;
                    TensorEntry { quant: Some(quant), packed: Some(packed), ..entry }
                }
            };
            layout.tensors.push((tensor, entry));
        }
        Ok(layout)
    }

    fn place(&mut self, tensor: &Tensor, quant: TensorQuant) -> Result<PackedJson> {
        let (count, rows, cols) = tensor.matrices()?;
        let layout = TileLayout::new(quant.spec, rows, cols)?;
        layout.refuse_two_levels()?;
        let (codes, scales, zeros) = layout.canonical_sizes(rows);
        let after = |end: &mut u64, per_matrix: usize| {
            let start = *end;
            *end = (per_matrix as u64)
                .checked_mul(count as u64)
                .and_then(|n| n.checked_add(start))
                .filter(|end| i64::try_from(*end).is_ok())
                .ok_or_else(|| Error::corrupt("found a size of more than 2^63 - 1 bytes, which no file can have"))?;
            Ok::<_, Error>((start, *end - start))
        };
        let (q4_offset, q4_nbytes) = after(&mut self.codes_len, codes)?;
        let (scale_offset, scale_nbytes) = after(&mut self.scales_len, scales)?;
        let (zero_offset, zero_nbytes) = after(&mut self.scales_len, zeros)?;
        let affine = !quant.spec.symmetric;
        Ok(PackedJson {
            packed_bin: CODES_NAME.to_string(),
            q4_offset,
            q4_nbytes,
            scale_bin: SCALES_NAME.to_string(),
            scale_offset,
            scale_nbytes,
            zero_offset: affine.then_some(zero_offset),
            zero_nbytes: affine.then_some(zero_nbytes),
            bias: 0,
        })
    }
}

/// Returns the sections that a tensor fills: its codes in the first file, its scales and then its zero points in the
/// second one.
pub(super) fn sections(packed: &PackedJson) -> Vec<Section> {
    let scales = packed.scale_nbytes + packed.zero_nbytes.unwrap_or(0);
    [(packed.q4_offset, packed.q4_nbytes), (packed.scale_offset, scales)]
        .into_iter()
        .enumerate()
        .map(|(file, (start, nbytes))| Section { file, range: start..start + nbytes })
        .collect()
}
