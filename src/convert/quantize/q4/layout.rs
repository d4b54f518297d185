//! Where does each tensor lie in the two files? All lengths follow from shapes and schemes, before a weight is read.

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
pub(super) struct Slot {
    pub tensor: Tensor,
    pub quant: TensorQuant,
    pub fate: Fate,
}

/// What becomes of it.
#[derive(Debug)]
pub(super) enum Fate {
    /// Its codes are those of the checkpoint, and stay there.
    Stays(Box<TensorEntry>),
    /// It is quantized into these ranges.
    Quantized(Ranges),
}

/// Where the bytes of a tensor lie: codes in one file, scales and then zero points in the other.
#[derive(Debug, Clone)]
pub(super) struct Ranges {
    pub codes: Range<u64>,
    pub scales: Range<u64>,
    pub zeros: Range<u64>,
}

/// All selected tensors, and the lengths of the two files.
#[derive(Debug)]
pub(super) struct Layout {
    pub slots: Vec<Slot>,
    pub codes_len: u64,
    pub scales_len: u64,
}

impl Layout {
    /// Lays the selected tensors out in the order of the model.
    ///
    /// # Errors
    /// Nothing is selected, or a tensor cannot be quantized.
    pub fn new(weights: &Weights, selection: &Selection) -> Result<Layout> {
        let mut layout = Layout { slots: Vec::new(), codes_len: 0, scales_len: 0 };
        for (tensor, quant) in selected(weights, selection)? {
            let fate = match already_quantized(&tensor)? {
                Some(entry) => Fate::Stays(Box::new(entry)),
                None => Fate::Quantized(layout.place(&tensor, quant).tensor(&tensor.name)?),
            };
            layout.slots.push(Slot { tensor, quant, fate });
        }
        Ok(layout)
    }

    fn place(&mut self, tensor: &Tensor, quant: TensorQuant) -> Result<Ranges> {
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
        Ok(Ranges {
            codes: after(&mut self.codes_len, codes)?,
            scales: after(&mut self.scales_len, scales)?,
            zeros: after(&mut self.scales_len, zeros)?,
        })
    }
}

impl Slot {
    /// Where its bytes lie, unless it stays in the checkpoint.
    pub fn ranges(&self) -> Option<&Ranges> {
        match &self.fate {
            Fate::Stays(_) => None,
            Fate::Quantized(ranges) => Some(ranges),
        }
    }
}

impl Ranges {
    /// Scales and zero points together.
    pub fn scales_and_zeros(&self) -> Range<u64> {
        self.scales.start..self.zeros.end
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
