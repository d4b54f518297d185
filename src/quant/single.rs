//! Quantizes a tile whose groups are single blocks: block by block, sixteen rows at once.

use super::input_stats::InputStats;
use super::lanes::{self, Choices, Encode, EncodeQ4_0, Lanes, Turned};
use super::plain::{self, CodeRange, LANES};
use super::search::{lopsided, small};
use crate::error::Result;
use crate::quant_spec::{Method, TensorQuant};
use crate::scheme::{BLOCK, PlainScale, ScaleType, TILE_ROWS, TileLayout};
use crate::simd::{Level, black_box};

/// Tile to be quantized.
pub(super) struct Tile<'a> {
    /// Instruction set of the loops.
    pub level: Level,
    /// Scheme, method and parameters.
    pub quant: &'a TensorQuant,
    /// Layout of the tile.
    pub layout: &'a TileLayout,
    /// Whole rows, at most [`TILE_ROWS`], of finite numbers.
    pub values: &'a [f32],
    /// Statistics of the inputs, if the method uses them.
    pub inputs: Option<&'a InputStats>,
}

/// Whole steps that are tried for a scale beside the next one above it. The error is not smooth in the scale, so that
/// the best of several is as good as the scale that a search without steps finds.
const STEPS_AROUND: [f32; 4] = [-2.0, -1.0, 1.0, 2.0];

/// One block of each of the 16 rows, and the number of its columns that belong to the matrix; the others are padding.
type Rows<'a> = (&'a [[f32; BLOCK]; LANES], usize);

impl Tile<'_> {
    /// Fills the tile; missing rows are filled with zeros.
    ///
    /// # Errors
    /// A scale does not fit its storage type.
    pub fn encode(&self, tile: &mut [u8]) -> Result<()> {
        if self.layout.spec.scale_dtype == ScaleType::I8Row {
            return self.encode_steps(tile);
        }
        let (head, codes) = tile.split_at_mut(self.layout.codes_offset);
        let (scales, zeros) = head.split_at_mut(self.layout.zeros_offset);
        let spec = &self.layout.spec;
        let of_block = TILE_ROWS * spec.scale_dtype.size();
        let mut blocks = codes.chunks_exact_mut(self.layout.block_bytes);
        self.each_block(|block, x, unrounded, choices| {
            let out = blocks.next().expect("codes for every block");
            if self.quant.method == Method::Rtn && plain::rounds_as_ggml(spec) {
                self.level.run(EncodeQ4_0 { x, scale: unrounded.scale, out });
            } else {
                self.level.run(Encode { x, spec, choices, out });
            }
            let Choices { scale, zero } = choices;
            lanes::put_scales(spec.scale_dtype, &scale, &mut scales[block * of_block..][..of_block]);
            if let Some(zeros) = zeros.get_mut(block * TILE_ROWS..(block + 1) * TILE_ROWS) {
                zeros.iter_mut().zip(zero).for_each(|(stored, zero)| *stored = zero as u8);
            }
        })
    }

    /// Fills a tile whose scales are multiples of a number of their row.
    fn encode_steps(&self, tile: &mut [u8]) -> Result<()> {
        let (head, codes) = tile.split_at_mut(self.layout.codes_offset);
        let (scales, supers) = head.split_at_mut(self.layout.supers_offset);
        let (choices, steps) = self.choices()?;
        let steps = steps.expect("scales of rows have steps");
        supers.as_chunks_mut().0.iter_mut().zip(steps).for_each(|(number, step)| *number = step.to_le_bytes());
        let mut blocks = codes.chunks_exact_mut(self.layout.block_bytes).zip(scales.chunks_exact_mut(TILE_ROWS));
        self.each_turned(|block, _, x, _| {
            let (out, scales) = blocks.next().expect("codes for every block");
            lanes::put_steps(&choices[block].scale, &steps, scales);
            self.level.run(Encode { x, spec: &self.layout.spec, choices: choices[block], out });
            Ok(())
        })
    }

    /// Returns scale and zero point of each block without computing codes, and the steps of [`ScaleType::I8Row`].
    ///
    /// # Errors
    /// A scale does not fit its storage type.
    pub fn choices(&self) -> Result<(Vec<Choices>, Option<Lanes>)> {
        let mut all = Vec::with_capacity(self.layout.blocks);
        self.each_block(|_, _, _, choices| all.push(choices))?;
        if self.layout.spec.scale_dtype != ScaleType::I8Row {
            return Ok((all, None));
        }
        let steps = lanes::steps_of_rows(all.iter().map(|choices| &choices.scale));
        self.each_turned(|block, _, x, importance| {
            // The peak of a plain choice must not be cut.
            let mut best = lanes::rounded_up(&all[block], &steps, 0.0);
            if self.quant.method != Method::Rtn {
                for more in STEPS_AROUND {
                    let other = lanes::rounded_up(&all[block], &steps, more);
                    best = small::better(self.level, x, importance, &self.layout.spec, &other, &best);
                }
            }
            all[block] = best;
            Ok(())
        })?;
        Ok((all, Some(steps)))
    }

    /// Calls `f` for each block of columns with its index, its transposed columns, and the choices of all rows: the
    /// plain ones, whose scales are not yet rounded to their storage type, and the final ones.
    fn each_block(&self, mut f: impl FnMut(usize, Turned<'_>, Choices, Choices)) -> Result<()> {
        self.each_turned(|block, rows, x, importance| {
            let unrounded = self.plain(rows, x);
            f(block, x, unrounded, self.choose(x, importance, &unrounded)?);
            Ok(())
        })
    }

    /// Calls `f` for each block of columns with its index, its rows, its transposed columns, and the weights of their
    /// squared errors.
    fn each_turned(&self, mut f: impl FnMut(usize, Rows<'_>, Turned<'_>, Option<&[f32]>) -> Result<()>) -> Result<()> {
        let spec = &self.layout.spec;
        let mut rows = [[0f32; BLOCK]; LANES];
        let mut turned = lanes::Block([[0f32; LANES]; BLOCK]);
        for block in 0..self.layout.blocks {
            let width = BLOCK.min(self.layout.cols - block * BLOCK);
            self.load(block * BLOCK, width, &mut rows);
            lanes::turn(&rows, &mut turned);
            let x = black_box(&turned.0);
            let mut real = [0f32; BLOCK];
            real[..width].fill(1.0);
            let importance = match self.inputs {
                Some(inputs) => Some(inputs.importance(block * BLOCK..(block + 1) * BLOCK)),
                // A table without a zero value would otherwise also fit the zeros of the padding columns.
                None if spec.has_table() && width < BLOCK => Some(&real[..]),
                None => None,
            };
            f(block, (&rows, width), x, importance)?;
        }
        Ok(())
    }

    /// Loads one block of every row, clamped and padded with zeros.
    fn load(&self, start: usize, width: usize, rows: &mut [[f32; BLOCK]; LANES]) {
        for (i, row) in rows[..self.values.len() / self.layout.cols].iter_mut().enumerate() {
            row[..width].copy_from_slice(&self.values[i * self.layout.cols + start..][..width]);
            row[width..].fill(0.0);
            if let Some(limit) = self.quant.clamp {
                row.iter_mut().for_each(|x| *x = x.clamp(-limit, limit));
            }
        }
    }

    /// Returns the final choices, with scales rounded to their storage type.
    fn choose(&self, x: Turned<'_>, importance: Option<&[f32]>, unrounded: &Choices) -> Result<Choices> {
        let TensorQuant { spec, method, .. } = self.quant;
        let plain = unrounded.stored(spec)?;
        if *method == Method::Rtn {
            return Ok(plain);
        }
        let from = if lopsided(spec) { self.peaks(x) } else { unrounded.scale };
        Ok(small::improve(self.level, x, importance, spec, &from, &plain))
    }

    /// Returns the plain choices; their scales are not yet rounded to their storage type.
    fn plain(&self, rows: Rows<'_>, x: Turned<'_>) -> Choices {
        let spec = &self.quant.spec;
        if let Some(p) = self.quant.percentile {
            return Choices::each(|lane| plain::choose_by_percentile(spec, &rows.0[lane][..rows.1], p));
        }
        if spec.scheme.info().plain_scale == PlainScale::SignedPeak {
            return Choices { scale: self.peaks(x), zero: [0.0; LANES] };
        }
        let (min, max) = self.level.run(lanes::Extremes(x));
        Choices::each(|lane| plain::choose(spec, min[lane], max[lane]))
    }

    /// Returns the scales under which the peak of each row, its value of largest magnitude, gets the lowest code.
    fn peaks(&self, x: Turned<'_>) -> Lanes {
        let CodeRange { low, .. } = CodeRange::of(&self.quant.spec, 0);
        let mut peaks = self.level.run(lanes::Peaks(x));
        for peak in &mut peaks {
            *peak /= low;
        }
        peaks
    }
}
