//! Where does each tensor lie in the two files? All lengths follow from shapes and schemes, before a weight is read.

use crate::convert::executor::Section;
use crate::convert::quantize::entry::already_quantized;
use crate::convert::quantize::ptq::selected;
use crate::convert::quantize::select::Selection;
use crate::convert::quantize::weights::{Tensor, Weights};
use crate::error::{Context, Error, Result};
use crate::manifest::{PackedJson, TensorEntry};
use crate::quant_spec::TensorQuant;
use crate::scheme::TileLayout;
use std::ops::Range;

/// A selected tensor.
#[derive(Debug)]
pub(super) struct Q4Tensor {
    pub tensor: Tensor,
    pub quant: TensorQuant,
    pub fate: Q4Decision,
}

/// What becomes of it.
#[derive(Debug)]
pub(super) enum Q4Decision {
    /// Its codes are those of the checkpoint, and stay there.
    Stays(Box<TensorEntry>),
    /// It is quantized into these ranges.
    Quantized(Q4Ranges),
}

/// Where the bytes of a tensor lie: codes in one file, scales and then zero points in the other.
#[derive(Debug, Clone)]
pub(super) struct Q4Ranges {
    pub codes: Range<u64>,
    pub scales: Range<u64>,
    pub zeros: Range<u64>,
}

/// All selected tensors, and the lengths of the two files.
#[derive(Debug)]
pub(super) struct Q4Layout {
    pub slots: Vec<Q4Tensor>,
    pub codes_len: u64,
    pub scales_len: u64,
}

impl Q4Layout {
    /// Lays the selected tensors out in the order of the model.
    ///
    /// # Errors
    /// Nothing is selected, or a tensor cannot be quantized.
    pub fn new(weights: &Weights, selection: &Selection) -> Result<Q4Layout> {
        let mut layout = Q4Layout { slots: Vec::new(), codes_len: 0, scales_len: 0 };
        for (tensor, quant) in selected(weights, selection)? {
            let fate = match already_quantized(&tensor)? {
                Some(entry) => Q4Decision::Stays(Box::new(entry)),
                None => Q4Decision::Quantized(layout.place(&tensor, quant).tensor(&tensor.name)?),
            };
            layout.slots.push(Q4Tensor { tensor, quant, fate });
        }
        Ok(layout)
    }

    fn place(&mut self, tensor: &Tensor, quant: TensorQuant) -> Result<Q4Ranges> {
        let (count, rows, cols) = tensor.matrices()?;
        let (codes, scales, zeros) = TileLayout::new(quant.spec, rows, cols)?.canonical_sizes(rows);
        let after = |end: &mut u64, per_matrix: usize| {
            let start = *end;
            *end = (per_matrix as u64)
                .checked_mul(count as u64)
                .and_then(|n| n.checked_add(start))
                .filter(|end| i64::try_from(*end).is_ok())
                .ok_or_else(|| Error::corrupt("the file grows beyond what a file can hold"))?;
            Ok::<_, Error>(start..*end)
        };
        Ok(Q4Ranges {
            codes: after(&mut self.codes_len, codes)?,
            scales: after(&mut self.scales_len, scales)?,
            zeros: after(&mut self.scales_len, zeros)?,
        })
    }
}

impl Q4Tensor {
    /// Where its bytes lie, unless it stays in the checkpoint.
    pub fn ranges(&self) -> Option<&Q4Ranges> {
        match &self.fate {
            Q4Decision::Stays(_) => None,
            Q4Decision::Quantized(ranges) => Some(ranges),
        }
    }
}

impl Q4Ranges {
    /// Codes in the first file, scales and zero points in the second.
    pub fn sections(&self) -> Vec<Section> {
        vec![
            Section { file: 0, range: self.codes.clone() },
            Section { file: 1, range: self.scales.start..self.zeros.end },
        ]
    }

    pub fn nbytes(&self) -> u64 {
        self.codes.end - self.codes.start + self.zeros.end - self.scales.start
    }

    /// As the manifest says it.
    pub fn to_json(&self, quant: &TensorQuant) -> PackedJson {
        let affine = !quant.spec.symmetric;
        PackedJson {
            packed_bin: super::CODES_NAME.to_string(),
            q4_offset: self.codes.start,
            q4_nbytes: self.codes.end - self.codes.start,
            scale_bin: super::SCALES_NAME.to_string(),
            scale_offset: self.scales.start,
            scale_nbytes: self.scales.end - self.scales.start,
            zero_offset: affine.then_some(self.zeros.start),
            zero_nbytes: affine.then_some(self.zeros.end - self.zeros.start),
            bias: 0,
        }
    }
}
