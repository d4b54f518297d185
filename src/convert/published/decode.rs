//! Computes the floats of rows of a coded matrix. Only the rows that are asked for are read, so memory is bounded by
//! the caller's rows: one byte per code, and a scale and a zero point per group.

use super::bits;
use super::coded::{Coded, Codes, Grid, Meaning, Packing, ScaleValues, ZeroOrder, Zeros};
use super::floats8::{E2M1, E4M3};
use crate::convert::source::shards::Shards;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::decode_floats;
use crate::error::{Context, Error, Result};
use crate::quant::block::mxfp4;
use std::ops::{Range, RangeInclusive};

/// Advice for numbers that no quantizer writes.
const DAMAGED: &str = "the file is damaged, or the quantizer failed; get it again, or use another checkpoint";

/// Rows of a matrix that are read.
pub(super) struct RowsToDecode<'a> {
    pub coded: &'a Coded,
    pub shards: &'a Shards,
    /// Number of the matrix in the stack.
    pub matrix: usize,
    /// Rows of that matrix.
    pub range: Range<usize>,
}

impl Coded {
    /// Computes the floats of rows of matrix number `matrix`; `out` has `rows.len() * in` values.
    ///
    /// # Errors
    /// A scale or code is NaN or infinite, a scale is zero although codes are not, an index of a group is out of
    /// range, or reading fails.
    pub fn read_rows(&self, shards: &Shards, matrix: usize, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        RowsToDecode { coded: self, shards, matrix, range }.floats(out)
    }
}

impl RowsToDecode<'_> {
    fn floats(&self, out: &mut [f32]) -> Result<()> {
        let (_, cols) = self.coded.matrix();
        let (codes, scales, index) = (self.codes()?, self.scales()?, self.index()?);
        let (zeros, offsets) = match &self.coded.zeros {
            Zeros::Offsets(tensor) => {
                (Vec::new(), self.in_grid(&|first, out| floats(self.shards, tensor, first, out))?)
            }
            _ => (self.zeros()?, Vec::new()),
        };
        if offsets.is_empty() {
            self.refuse_zero_scales(&codes, &scales, &zeros, index.as_deref())?;
        }
        let groups = self.groups();
        for (number, row) in out.chunks_exact_mut(cols).enumerate() {
            let codes = &codes[number * cols..][..cols];
            let of_row = number * groups..(number + 1) * groups;
            let (scales, zeros) = (&scales[of_row.clone()], zeros.get(of_row.clone()).unwrap_or_default());
            let offsets = offsets.get(of_row).unwrap_or_default();
            self.each_run(number, index.as_deref(), |group, run| {
                let (codes, row) = (&codes[run.clone()], &mut row[run]);
                let zero = zeros.get(group).copied().unwrap_or(0);
                self.decode(codes, scales[group], zero, row);
                if let Some(offset) = offsets.get(group) {
                    row.iter_mut().for_each(|value| *value += offset);
                }
            });
        }
        self.refuse_nan(out)
    }

    /// Writes the products of codes and their scale.
    fn decode(&self, codes: &[u8], scale: f32, zero: i32, out: &mut [f32]) {
        let pairs = codes.iter().zip(out);
        match &self.coded.codes.meaning {
            Meaning::Unsigned => pairs.for_each(|(code, out)| *out = (i32::from(*code) - zero) as f32 * scale),
            Meaning::Signed => pairs.for_each(|(code, out)| *out = (i32::from(*code as i8) - zero) as f32 * scale),
            Meaning::E2m1 => pairs.for_each(|(code, out)| *out = E2M1[usize::from(*code & 15)] * scale),
            Meaning::Table(table) => pairs.for_each(|(code, out)| *out = table[usize::from(*code & 15)] * scale),
            Meaning::E4m3 => {
                let table = &*E4M3;
                pairs.for_each(|(code, out)| *out = table[usize::from(*code)] * scale);
            }
        }
    }

    /// Applies the factor of all products, and refuses values that are no numbers.
    fn refuse_nan(&self, out: &mut [f32]) -> Result<()> {
        let factor = self.coded.scales.factor;
        if factor != 1.0 {
            out.iter_mut().for_each(|value| *value *= factor);
        }
        match out.iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(at) => {
                let (_, cols) = self.coded.matrix();
                let (row, col) = (self.range.start + at / cols, at % cols);
                let found = format!("found {} in row {row}, column {col}, expected finite weights", out[at]);
                Err(self.damaged(&self.coded.codes.tensor, found))
            }
        }
    }

    /// Returns the number of groups of which a row may have elements.
    pub fn groups(&self) -> usize {
        match self.coded.scales.grid {
            // A row may begin and end within a group.
            Grid::Flat { length } => self.coded.matrix().1 / length + 2,
            _ => self.coded.scales.groups,
        }
    }

    /// Calls `run` for the groups of row number `number` of this range with the columns of each.
    pub fn each_run(&self, number: usize, index: Option<&[usize]>, mut run: impl FnMut(usize, Range<usize>)) {
        let (_, cols) = self.coded.matrix();
        if let Some(index) = index {
            index.iter().enumerate().for_each(|(col, group)| run(*group, col..col + 1));
            return;
        }
        let (width, first) = match self.coded.scales.grid {
            Grid::Blocks { width, .. } | Grid::Transposed { width } => (width, 0),
            Grid::Flat { length } => (length, (self.range.start + number) * cols % length),
        };
        let (mut group, mut start) = (0, 0);
        while start < cols {
            let end = cols.min((group + 1) * width - first);
            run(group, start..end);
            (group, start) = (group + 1, end);
        }
    }

    /// Returns the codes, one per byte.
    pub fn codes(&self) -> Result<Vec<u8>> {
        let ((n_rows, cols), codes) = (self.coded.matrix(), &self.coded.codes);
        let (rows, bits, shards) = (&self.range, codes.bits, self.shards);
        let mut out = vec![0; rows.len() * cols];
        if out.is_empty() {
            return Ok(out);
        }
        let first = self.matrix * n_rows + rows.start;
        let read = |start: usize, bytes: usize| -> Result<Vec<u8>> {
            let mut data = vec![0; bytes];
            shards.read(&codes.tensor, start, &mut data)?;
            Ok(data)
        };
        match codes.packing {
            Packing::Bytes => {
                shards.read(&codes.tensor, first * cols, &mut out)?;
                self.refuse_wide(&out)?;
            }
            Packing::Stream | Packing::Words => {
                let matrices = self.coded.shape.iter().product::<usize>() / (n_rows * cols);
                let row_bytes = codes.tensor.nbytes / (matrices * n_rows);
                let data = read(first * row_bytes, rows.len() * row_bytes)?;
                for (row, out) in data.chunks_exact(row_bytes).zip(out.chunks_exact_mut(cols)) {
                    match codes.packing {
                        Packing::Words => bits::words(row, bits, out),
                        _ => bits::stream(row, bits, 0, out),
                    }
                }
            }
            Packing::HighNibbleFirst => {
                let (from, to) = (first * cols, (first + rows.len()) * cols);
                let data = read(from / 2, to.div_ceil(2) - from / 2)?;
                bits::high_nibble_first(&data, from % 2, &mut out);
            }
            Packing::AlongInputs => {
                let lines = cols * bits as usize / 32;
                let strip = strip(shards, &codes.tensor, lines, n_rows, rows.clone())?;
                let mut column = vec![0; lines * 4];
                for (r, out) in out.chunks_exact_mut(cols).enumerate() {
                    for (to, line) in column.chunks_exact_mut(4).zip(strip.chunks_exact(rows.len() * 4)) {
                        to.copy_from_slice(&line[4 * r..4 * r + 4]);
                    }
                    bits::stream(&column, bits, 0, out);
                }
            }
            Packing::Interleaved => {
                let words = rows.start / 8..rows.end.div_ceil(8);
                let strip = strip(shards, &codes.tensor, cols, n_rows / 8, words)?;
                bits::interleaved_rows(&strip, rows.start % 8, cols, &mut out);
            }
        }
        Ok(out)
    }

    /// Refuses bytes that are no codes of as many bits as the format says.
    fn refuse_wide(&self, codes: &[u8]) -> Result<()> {
        let Codes { bits, meaning, tensor, .. } = &self.coded.codes;
        let is_signed = *meaning == Meaning::Signed;
        let range = range_of(*bits, is_signed);
        let number = |code: u8| if is_signed { i32::from(code as i8) } else { i32::from(code) };
        match codes.iter().map(|code| number(*code)).find(|code| *bits < 8 && !range.contains(code)) {
            None => Ok(()),
            Some(code) => Err(self.damaged(tensor, format!("found code {code}, expected {range:?} in {bits} bits"))),
        }
    }

    /// Refuses codes of FP8 that are no numbers.
    pub fn refuse_nan_codes(&self, codes: &[u8]) -> Result<()> {
        let Codes { meaning, tensor, .. } = &self.coded.codes;
        let is_nan = |code: &u8| code & 0x7F == 0x7F;
        // A loop without an early end is vectorized.
        if *meaning != Meaning::E4m3 || !codes.iter().fold(false, |found, code| found | is_nan(code)) {
            return Ok(());
        }
        let at = codes.iter().position(is_nan).unwrap_or(0);
        let (_, cols) = self.coded.matrix();
        let (row, col) = (self.range.start + at / cols, at % cols);
        Err(self.damaged(tensor, format!("found NaN in row {row}, column {col}, expected finite weights")))
    }

    /// Refuses groups with a scale of zero whose codes are not those of zero.
    pub fn refuse_zero_scales(
        &self,
        codes: &[u8],
        scales: &[f32],
        zeros: &[i32],
        index: Option<&[usize]>,
    ) -> Result<()> {
        let ((_, cols), groups) = (self.coded.matrix(), self.groups());
        let is_zero = |code: u8, zero: i32| match self.coded.codes.meaning {
            Meaning::Unsigned => i32::from(code) == zero,
            Meaning::Signed => i32::from(code as i8) == zero,
            Meaning::E2m1 => code & 7 == 0,
            Meaning::E4m3 => code & 0x7F == 0,
            // The quantizer of bitsandbytes writes any code for a block of zeros.
            Meaning::Table(_) => true,
        };
        for (number, row) in scales.chunks_exact(groups.max(1)).enumerate().filter(|(_, row)| row.contains(&0.0)) {
            let mut lost = None;
            self.each_run(number, index, |group, run| {
                let zero = zeros.get(number * groups + group).copied().unwrap_or(0);
                if row[group] == 0.0 && !codes[number * cols..][run].iter().all(|code| is_zero(*code, zero)) {
                    lost = Some(group);
                }
            });
            if let Some(group) = lost {
                let row = self.range.start + number;
                let found = format!("found scale 0 of row {row}, group {group}, but codes of other numbers");
                return Err(self.damaged(self.coded.tensors()[1], found));
            }
        }
        Ok(())
    }

    /// Returns the FP8 scales of the groups of a matrix with two levels of scales as codes, `(rows, groups)`.
    pub fn scale_codes(&self) -> Result<Vec<u8>> {
        let ScaleValues::TwoLevels { groups, .. } = &self.coded.scales.values else { return Ok(Vec::new()) };
        let numbers = self.in_grid(&|first, out| {
            let mut bytes = vec![0; out.len()];
            self.shards.read(groups, first, &mut bytes)?;
            bytes.into_iter().zip(out).for_each(|(byte, out)| *out = f32::from(byte));
            Ok(())
        })?;
        Ok(numbers.into_iter().map(|number| number as u8).collect())
    }

    /// Returns the number that multiplies all scales of a matrix with two levels of scales.
    pub fn tensor_scale(&self) -> Result<f32> {
        let ScaleValues::TwoLevels { tensor, divides, .. } = &self.coded.scales.values else { return Ok(1.0) };
        let mut whole = [0.0];
        floats(self.shards, tensor, 0, &mut whole)?;
        // The reciprocal of a tiny divisor may be infinite where the quotients are not.
        let factor = if *divides { 1.0 / whole[0] } else { whole[0] };
        match factor.is_finite() {
            true => Ok(factor),
            false => Err(self.damaged(tensor, format!("found {}, expected a finite scale of usual size", whole[0]))),
        }
    }

    /// Returns the scales, `(rows, groups)`.
    pub fn scales(&self) -> Result<Vec<f32>> {
        let values = &self.coded.scales.values;
        let scales = self.in_grid(&|first, out| read_scales(self.shards, values, first, out))?;
        match scales.iter().position(|scale| !scale.is_finite()) {
            None => Ok(scales),
            Some(at) => {
                let (row, group) = (self.range.start + at / self.groups(), at % self.groups());
                let tensor = self.coded.tensors()[1];
                let found = format!("found scale {} of row {row}, group {group}, expected a finite one", scales[at]);
                Err(self.damaged(tensor, found))
            }
        }
    }

    /// Reads numbers in the order of the scales as `(rows, groups)`. `read` fills its second argument with the numbers
    /// from its first on.
    fn in_grid(&self, read: &dyn Fn(usize, &mut [f32]) -> Result<()>) -> Result<Vec<f32>> {
        let ((n_rows, cols), rows, groups) = (self.coded.matrix(), &self.range, self.groups());
        let mut out = vec![0.0; rows.len() * groups];
        if out.is_empty() {
            return Ok(out);
        }
        match self.coded.scales.grid {
            Grid::Blocks { height, .. } => {
                let lines = rows.start / height..(rows.end - 1) / height + 1;
                let mut read_lines = vec![0.0; lines.len() * groups];
                read((self.matrix * n_rows.div_ceil(height) + lines.start) * groups, &mut read_lines)?;
                for (row, out) in rows.clone().zip(out.chunks_exact_mut(groups)) {
                    out.copy_from_slice(&read_lines[(row / height - lines.start) * groups..][..groups]);
                }
            }
            Grid::Transposed { .. } => {
                let mut line = vec![0.0; rows.len()];
                for group in 0..groups {
                    read(group * n_rows + rows.start, &mut line)?;
                    line.iter().enumerate().for_each(|(r, value)| out[r * groups + group] = *value);
                }
            }
            Grid::Flat { length } => {
                let (first, last) = (rows.start * cols / length, (rows.end * cols - 1) / length);
                let mut flat = vec![0.0; last + 1 - first];
                read(first, &mut flat)?;
                for (row, out) in rows.clone().zip(out.chunks_exact_mut(groups)) {
                    let of_row = &flat[row * cols / length - first..];
                    let n = groups.min(of_row.len());
                    out[..n].copy_from_slice(&of_row[..n]);
                }
            }
        }
        Ok(out)
    }

    /// Returns the zero points, `(rows, groups)`.
    pub fn zeros(&self) -> Result<Vec<i32>> {
        let (rows, groups) = (&self.range, self.groups());
        match &self.coded.zeros {
            Zeros::Constant(zero) => Ok(vec![*zero; rows.len() * groups]),
            Zeros::Offsets(_) => Ok(Vec::new()),
            Zeros::Bytes { tensor, is_signed } => {
                let read = |first: usize, out: &mut [f32]| {
                    let mut bytes = vec![0; out.len()];
                    self.shards.read(tensor, first, &mut bytes)?;
                    let number = |byte: u8| if *is_signed { f32::from(byte as i8) } else { f32::from(byte) };
                    bytes.iter().zip(out).for_each(|(byte, out)| *out = number(*byte));
                    Ok(())
                };
                let zeros: Vec<i32> = self.in_grid(&read)?.into_iter().map(|zero| zero as i32).collect();
                let range = range_of(self.coded.codes.bits, *is_signed);
                match zeros.iter().find(|zero| !range.contains(*zero)) {
                    None => Ok(zeros),
                    Some(zero) => Err(self.damaged(tensor, format!("found zero point {zero}, expected {range:?}"))),
                }
            }
            Zeros::Packed { tensor, order, add } => self.packed_zeros(tensor, *order, *add),
        }
    }

    fn packed_zeros(&self, tensor: &SourceTensor, order: ZeroOrder, add: i32) -> Result<Vec<i32>> {
        let ((n_rows, _), rows, groups) = (self.coded.matrix(), &self.range, self.groups());
        let bits = self.coded.codes.bits;
        let mut out = vec![add; rows.len() * groups];
        let mut put = |r: usize, group: usize, code: u8| out[r * groups + group] += i32::from(code);
        let words = rows.start * bits as usize / 32..(rows.end * bits as usize).div_ceil(32);
        let mut codes = vec![0; rows.len()];
        // The stream of a group begins with the word that holds its first code.
        let first = (rows.start * bits as usize - words.start * 32) / bits as usize;
        let is_aligned = (rows.start * bits as usize - words.start * 32).is_multiple_of(bits as usize);
        match order {
            ZeroOrder::Interleaved => {
                let words = rows.start / 8..rows.end.div_ceil(8);
                let strip = strip(self.shards, tensor, groups, n_rows / 8, words.clone())?;
                for (group, line) in strip.chunks_exact(words.len() * 4).enumerate() {
                    (0..rows.len()).for_each(|r| put(r, group, bits::interleaved(line, rows.start % 8 + r)));
                }
            }
            ZeroOrder::AlongOutputs | ZeroOrder::AlongRows if !is_aligned => {
                // Codes of 3, 5, 6 or 7 bits may begin anywhere in a word; every 32nd begins with one.
                let start = rows.start / 32 * 32;
                let wider = RowsToDecode { range: start..rows.end, matrix: self.matrix, ..*self };
                let zeros = wider.packed_zeros(tensor, order, add)?;
                return Ok(zeros[(rows.start - start) * groups..].to_vec());
            }
            ZeroOrder::AlongOutputs => {
                let strip = strip(self.shards, tensor, groups, (n_rows * bits as usize).div_ceil(32), words.clone())?;
                for (group, line) in strip.chunks_exact(words.len() * 4).enumerate() {
                    bits::stream(line, bits, first, &mut codes);
                    codes.iter().enumerate().for_each(|(r, code)| put(r, group, *code));
                }
            }
            ZeroOrder::AlongRows => {
                let mut lines = vec![0; words.len() * groups * 4];
                self.shards.read(tensor, words.start * groups * 4, &mut lines)?;
                for group in 0..groups {
                    let column: Vec<u8> =
                        lines.chunks_exact(groups * 4).flat_map(|line| line[4 * group..][..4].to_vec()).collect();
                    bits::stream(&column, bits, first, &mut codes);
                    codes.iter().enumerate().for_each(|(r, code)| put(r, group, *code));
                }
            }
        }
        Ok(out)
    }

    /// Returns the group of each column, if the source has an index.
    pub fn index(&self) -> Result<Option<Vec<usize>>> {
        let Some(tensor) = &self.coded.index else { return Ok(None) };
        let mut bytes = vec![0; tensor.nbytes];
        self.shards.read(tensor, 0, &mut bytes)?;
        let groups = self.coded.scales.groups;
        let group = |(col, word): (usize, &[u8; 4])| match usize::try_from(i32::from_le_bytes(*word)) {
            Ok(group) if group < groups => Ok(group),
            _ => {
                let found = format!("found group {} of column {col}", i32::from_le_bytes(*word));
                Err(self.damaged(tensor, format!("{found}, expected 0 to {}", groups - 1)))
            }
        };
        Ok(Some(bytes.as_chunks::<4>().0.iter().enumerate().map(group).collect::<Result<Vec<_>>>()?))
    }

    /// Makes an error about the numbers of a source tensor.
    pub fn damaged(&self, tensor: &SourceTensor, found: String) -> Error {
        Error::corrupt(found).at(self.shards.path(tensor)).tensor(&tensor.name).help(DAMAGED)
    }
}

/// Returns the integers of `bits` bits.
fn range_of(bits: u32, is_signed: bool) -> RangeInclusive<i32> {
    if is_signed { -(1 << (bits - 1))..=(1 << (bits - 1)) - 1 } else { 0..=(1 << bits) - 1 }
}

/// Reads some words of each of the `lines` of a tensor of 32-bit words, which are `width` words long.
fn strip(shards: &Shards, tensor: &SourceTensor, lines: usize, width: usize, words: Range<usize>) -> Result<Vec<u8>> {
    let bytes = words.len() * 4;
    let mut strip = vec![0; lines * bytes];
    if words.len() == width {
        shards.read(tensor, 0, &mut strip)?;
        return Ok(strip);
    }
    for (number, line) in strip.chunks_exact_mut(bytes.max(1)).enumerate() {
        shards.read(tensor, (number * width + words.start) * 4, line)?;
    }
    Ok(strip)
}

/// Reads floats of a tensor from number `first` on.
fn floats(shards: &Shards, tensor: &SourceTensor, first: usize, out: &mut [f32]) -> Result<()> {
    let mut bytes = vec![0; out.len() * tensor.dtype.size()];
    shards.read(tensor, first * tensor.dtype.size(), &mut bytes)?;
    decode_floats(tensor.dtype, &bytes, out).tensor(&tensor.name).at(shards.path(tensor))
}

/// Reads scales from number `first` on.
fn read_scales(shards: &Shards, values: &ScaleValues, first: usize, out: &mut [f32]) -> Result<()> {
    let bytes_of = |tensor: &SourceTensor, count: usize| -> Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        shards.read(tensor, first, &mut bytes)?;
        Ok(bytes)
    };
    match values {
        ScaleValues::Floats(tensor) => floats(shards, tensor, first, out),
        ScaleValues::E8m0(tensor) => {
            let bytes = bytes_of(tensor, out.len())?;
            mxfp4::check_scales(&bytes).tensor(&tensor.name).at(shards.path(tensor))?;
            bytes.iter().zip(out).for_each(|(byte, out)| *out = mxfp4::e8m0(*byte));
            Ok(())
        }
        ScaleValues::TwoLevels { groups, tensor, divides } => {
            let mut whole = [0.0];
            floats(shards, tensor, 0, &mut whole)?;
            for (byte, out) in bytes_of(groups, out.len())?.into_iter().zip(out) {
                let scale = E4M3[usize::from(byte)];
                *out = if *divides { scale / whole[0] } else { scale * whole[0] };
            }
            Ok(())
        }
        ScaleValues::Nested { codes, map, absmax, block, offset } => {
            let (start, end) = (first / block, (first + out.len()).div_ceil(*block));
            let mut outer = vec![0.0; end - start];
            floats(shards, absmax, start, &mut outer)?;
            for (i, (code, out)) in bytes_of(codes, out.len())?.into_iter().zip(out).enumerate() {
                let value = map.get(usize::from(code)).copied().unwrap_or(f32::NAN);
                *out = value * outer[(first + i) / block - start] + offset;
            }
            Ok(())
        }
    }
}
