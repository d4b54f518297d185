//! Reads a tensor that is stored with strides, such as a saved transpose, in row-major order.
//!
//! The requested range of elements is cut into boxes (products of index ranges). A box is read in runs along the axis
//! whose neighbours lie closest together in the file, each with one positioned read, and scattered into the output.

use super::read_at::ReadAt;
use crate::error::Result;
use crate::interrupt;
use std::ops::Range;

/// Bytes read at once; longer runs are read in pieces.
const RUN_BYTES: usize = 1 << 16;

/// A tensor with strides in a file.
pub(super) struct Strided<'a> {
    pub file: &'a dyn ReadAt,
    /// Position of the first element in the file.
    pub start: u64,
    /// Bytes of an element.
    pub size: usize,
    /// Dimensions, slowest first.
    pub shape: &'a [usize],
    /// Elements from one index to the next along each axis.
    pub strides: &'a [usize],
}

impl Strided<'_> {
    /// Fills `out` with the data from byte `offset` on, in row-major order.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let size = self.size;
        let (first, last) = (offset / size, (offset + out.len()).div_ceil(size));
        if offset.is_multiple_of(size) && out.len().is_multiple_of(size) {
            return self.range(first..last, out);
        }
        let mut whole = vec![0; (last - first) * size];
        self.range(first..last, &mut whole)?;
        out.copy_from_slice(&whole[offset - first * size..][..out.len()]);
        Ok(())
    }

    /// Reads a range of elements in row-major order.
    fn range(&self, elements: Range<usize>, out: &mut [u8]) -> Result<()> {
        let mut fixed = Vec::with_capacity(self.shape.len());
        self.part(&mut fixed, elements, out)
    }

    /// Reads elements of the sub-tensor whose first indices are `fixed`.
    fn part(&self, fixed: &mut Vec<Range<usize>>, elements: Range<usize>, out: &mut [u8]) -> Result<()> {
        if elements.is_empty() {
            return Ok(());
        }
        let axis = fixed.len();
        if axis == self.shape.len() {
            return self.read_box(fixed, out);
        }
        let inner: usize = self.shape[axis + 1..].iter().product();
        let mut at = elements.start;
        let mut rest = out;
        while at < elements.end {
            let index = at / inner;
            // Consecutive whole entries of this axis are one box; the rest at either end is cut along the next axis.
            let whole = if at.is_multiple_of(inner) { (elements.end - at) / inner } else { 0 };
            let end = if whole > 0 { at + whole * inner } else { elements.end.min((index + 1) * inner) };
            let (now, later) = rest.split_at_mut((end - at) * self.size);
            if whole > 0 {
                let mut ranges = fixed.clone();
                ranges.push(index..index + whole);
                ranges.extend(self.shape[axis + 1..].iter().map(|n| 0..*n));
                self.read_box(&ranges, now)?;
            } else {
                fixed.push(index..index + 1);
                self.part(fixed, at - index * inner..end - index * inner, now)?;
                fixed.pop();
            }
            (at, rest) = (end, later);
        }
        Ok(())
    }

    /// Reads a product of index ranges, none empty, in row-major order.
    fn read_box(&self, ranges: &[Range<usize>], out: &mut [u8]) -> Result<()> {
        let distance = |axis: &usize| (ranges[*axis].len() == 1, self.strides[*axis]);
        let Some(along) = (0..ranges.len()).min_by_key(distance) else {
            return self.file.read_at(self.start, out);
        };
        // Distances in the output, in elements.
        let mut steps = vec![1; ranges.len()];
        for axis in (1..ranges.len()).rev() {
            steps[axis - 1] = steps[axis] * ranges[axis].len();
        }
        let mut index: Vec<usize> = ranges.iter().map(|r| r.start).collect();
        let mut line = Vec::new();
        loop {
            interrupt::check()?;
            let from: u64 = index.iter().zip(self.strides).map(|(i, s)| *i as u64 * *s as u64).sum();
            let to: usize = (0..ranges.len()).map(|axis| (index[axis] - ranges[axis].start) * steps[axis]).sum();
            let run =
                StridedRun { from, stride: self.strides[along], to, step: steps[along], count: ranges[along].len() };
            self.read_run(&run, &mut line, out)?;
            // The next line: count up like an odometer, skipping the axis that is read in runs.
            let mut axes = (0..ranges.len()).rev().filter(|axis| *axis != along);
            loop {
                let Some(axis) = axes.next() else { return Ok(()) };
                index[axis] += 1;
                if index[axis] < ranges[axis].end {
                    break;
                }
                index[axis] = ranges[axis].start;
            }
        }
    }

    fn read_run(&self, run: &StridedRun, line: &mut Vec<u8>, out: &mut [u8]) -> Result<()> {
        let size = self.size;
        let piece = (RUN_BYTES / size / run.stride.max(1)).max(1);
        for first in (0..run.count).step_by(piece) {
            let n = piece.min(run.count - first);
            line.resize(((n - 1) * run.stride + 1) * size, 0);
            let element = run.from + first as u64 * run.stride as u64;
            self.file.read_at(self.start + element * size as u64, line)?;
            for i in 0..n {
                let (from, to) = (i * run.stride * size, (run.to + (first + i) * run.step) * size);
                out[to..to + size].copy_from_slice(&line[from..from + size]);
            }
        }
        Ok(())
    }
}

/// Elements of a box along one axis, all numbers counted in elements.
struct StridedRun {
    /// Position of the first element in the file, relative to the start of the tensor.
    from: u64,
    /// Distance of neighbours in the file.
    stride: usize,
    /// Position of the first element in the output.
    to: usize,
    /// Distance of neighbours in the output.
    step: usize,
    /// Number of elements.
    count: usize,
}

#[cfg(test)]
mod tests {
    use crate::convert::source::source_tensor::SourceTensor;
    use crate::dtype::DType;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_range_of_any_strided_tensor_is_read_in_row_major_order(
            shape in prop::collection::vec(1usize..6, 0..4),
            strides in prop::collection::vec(0usize..9, 4),
            cut in (0usize..200, 0usize..200),
            start in 0u64..3,
        ) {
            let bytes: Vec<u8> = (0..400).map(|i| (i * 7 % 251) as u8).collect();
            let strides = strides[..shape.len()].to_vec();
            let elements: usize = shape.iter().product();
            let tensor = SourceTensor {
                name: "t".into(), dtype: DType::F16, shape: shape.clone(), shard: 0, start, nbytes: 2 * elements,
                strides: Some(strides.clone()),
            };
            let mut expected = Vec::new();
            for flat in 0..elements {
                let (mut rest, mut at) = (flat, 0);
                for axis in (0..shape.len()).rev() {
                    at += rest % shape[axis] * strides[axis];
                    rest /= shape[axis];
                }
                expected.extend_from_slice(&bytes[start as usize + 2 * at..][..2]);
            }
            let from = cut.0.min(2 * elements);
            let to = cut.1.clamp(from, 2 * elements);
            let mut out = vec![0xee; to - from];
            tensor.read(&bytes.as_slice(), from, &mut out).unwrap();
            prop_assert_eq!(&out[..], &expected[from..to]);
        }
    }
}
