//! Weight quantization: converts floats to quantized blocks and measures the result.
//!
//! A [`Quantizer`] converts the rows of one matrix to codes as specified by a [`TensorQuant`]. For each group it
//! chooses a scale and, for affine schemes, a zero point; both together are a *choice*. The *plain* choice, that of
//! rounding to nearest, follows from the largest magnitude or from the extremes of the group. A search looks for a
//! choice with a smaller squared error.
//!
//! [`block`] defines the meaning of the bytes, [`stream`] quantizes whole tensors and measures them ([`metrics`]), and
//! [`Gate`](crate::provenance::Gate) compares the metrics with thresholds.

pub mod block;
pub mod budget;
mod exact_codes;
mod gate;
mod gptq;
mod group;
mod input_stats;
mod lanes;
pub mod metrics;
mod observe;
pub mod packed;
mod plain;
mod search;
mod single;
pub mod spread;
pub mod stream;
mod trellis;
pub mod trial;

use crate::error::{Error, Result};
use crate::quant_spec::{Method, TensorQuant};
use crate::scheme::{BLOCK, Granularity, ScaleType, TILE_ROWS, TileLayout};
use crate::simd::{Kernel, Level};
use block::{CodedRow, iq4_nl, mxfp4, tile};
use gptq::Correlations;
use group::Group;
pub use input_stats::{InputStats, TensorInputStats};
use lanes::Choices;
use observe::Observation;
use plain::{Choice, CodeRange};
use std::sync::OnceLock;

/// Quantizer of one matrix. Rows can be quantized in any order and from any number of threads with the same result.
#[derive(Debug)]
pub struct Quantizer {
    quant: TensorQuant,
    layout: TileLayout,
    observation: Observation,
    /// Scale and zero point of the whole matrix, computed from the observation.
    shared: OnceLock<Choice>,
    /// Statistics of the inputs, if the method uses them.
    inputs: Option<InputStats>,
    level: Level,
}

/// Buffers of [`Quantizer::quantize_row`], which stores its result here.
struct Workspace {
    /// Values of the row, clamped and padded with zeros to whole blocks.
    values: Vec<f32>,
    /// Quantized row.
    row: CodedRow,
}

impl Quantizer {
    /// Creates a quantizer for one `rows x cols` matrix.
    ///
    /// # Errors
    /// The combination of scheme, method and parameters is not supported.
    pub fn new(quant: TensorQuant, rows: usize, cols: usize) -> Result<Quantizer> {
        quant.validate()?;
        let layout = TileLayout::new(quant.spec, rows, cols)?;
        Ok(Quantizer {
            quant,
            layout,
            observation: Observation::new(&quant),
            shared: OnceLock::new(),
            inputs: None,
            level: Level::detect(),
        })
    }

    /// Sets the statistics of the inputs, which methods `imatrix` and `gptq` require. Other methods ignore them.
    #[must_use]
    pub fn with_inputs(self, inputs: Option<InputStats>) -> Quantizer {
        Quantizer { inputs: inputs.filter(|_| self.quant.method.needs_inputs()), ..self }
    }

    /// Returns the byte layout of the matrix.
    pub fn layout(&self) -> &TileLayout {
        &self.layout
    }

    /// Returns true when one scale spans the matrix: all rows must be passed to [`Quantizer::observe`] first.
    pub fn needs_observation(&self) -> bool {
        self.quant.spec.granularity == Granularity::Tensor
    }

    /// Adds rows to the statistics for a matrix-wide scale; their order does not matter.
    ///
    /// # Errors
    /// A value is NaN or infinite.
    pub fn observe(&mut self, values: &[f32]) -> Result<()> {
        self.refuse_non_finite(values)?;
        self.shared = OnceLock::new();
        self.observation.add(values, self.quant.clamp);
        Ok(())
    }

    /// Quantizes whole rows into tiles: `n * cols` values become `ceil(n / 16)` tiles. A partial last tile is padded
    /// with rows of zeros.
    ///
    /// # Errors
    /// A value is NaN or infinite, or a scale does not fit its storage type.
    pub fn encode_tiles(&self, values: &[f32], out: &mut [u8]) -> Result<()> {
        let n_rows = values.len() / self.layout.cols;
        assert_eq!(
            (n_rows * self.layout.cols, n_rows.div_ceil(TILE_ROWS) * self.layout.tile_bytes),
            (values.len(), out.len())
        );
        if self.inputs.is_none() && self.quant.method.needs_inputs() {
            let found = format!("method {} needs statistics of the inputs", self.quant.method.name());
            return Err(Error::usage(found)
                .help("collect them with `iec calib` (for gptq with --hessian) and give them with --calib"));
        }
        let tile_values = values.chunks(TILE_ROWS * self.layout.cols);
        for (tile, values) in out.chunks_exact_mut(self.layout.tile_bytes).zip(tile_values) {
            self.refuse_non_finite(values)?;
            tile.fill(0);
            let inputs = self.inputs.as_ref();
            if self.quant.spec.trellis().is_some() {
                let Quantizer { level, quant, layout, .. } = self;
                trellis::TrellisTile { level: *level, quant, layout, values, inputs }.encode(tile);
            } else if let Some(correlations) = inputs.and_then(InputStats::correlations) {
                self.compensate(correlations, values, tile)?;
            } else if self.has_single_blocks() {
                let Quantizer { level, quant, layout, .. } = self;
                single::Tile { level: *level, quant, layout, values, inputs }.encode(tile)?;
            } else {
                self.encode_rows(values, tile)?;
            }
            tile::pad_tile(&self.layout, tile, values.len() / self.layout.cols);
        }
        Ok(())
    }

    /// Quantizes and dequantizes the rows of one tile.
    ///
    /// # Errors
    /// The same as for [`Quantizer::encode_tiles`].
    pub(crate) fn round_trip(&self, values: &[f32]) -> Result<Vec<f32>> {
        let mut tile = vec![0; self.layout.tile_bytes];
        self.encode_tiles(values, &mut tile)?;
        let (mut coded, mut decoded) = (CodedRow::new(&self.layout), vec![0f32; values.len()]);
        for (r, row) in decoded.chunks_exact_mut(self.layout.cols).enumerate() {
            tile::get_row(&self.layout, &tile, r, &mut coded);
            coded.dequantize(&self.layout, row);
        }
        Ok(decoded)
    }

    /// Returns true when groups are single blocks that can be quantized sixteen at a time.
    fn has_single_blocks(&self) -> bool {
        let otherwise = self.has_power_scales() || self.quant.method == Method::Exact;
        self.layout.group_blocks == 1 && !self.needs_observation() && !otherwise
    }

    /// Returns true for MXFP4, whose scales are powers of two.
    fn has_power_scales(&self) -> bool {
        self.quant.spec.scale_dtype == ScaleType::E8m0
    }

    fn encode_rows(&self, values: &[f32], tile: &mut [u8]) -> Result<()> {
        let padded = vec![0.0; self.layout.blocks * BLOCK];
        let mut work = Workspace { values: padded, row: CodedRow::new(&self.layout) };
        for (r, row) in values.chunks_exact(self.layout.cols).enumerate() {
            self.quantize_row(row, &mut work)?;
            tile::put_row(&self.layout, tile, r, &work.row);
        }
        Ok(())
    }

    /// Chooses the scales of a tile first, then its codes with error compensation.
    fn compensate(&self, correlations: &Correlations, values: &[f32], tile: &mut [u8]) -> Result<()> {
        let Quantizer { level, quant: TensorQuant { spec, .. }, layout, .. } = self;
        let width = layout.blocks * BLOCK;
        let mut work = Workspace { values: vec![0.0; width], row: CodedRow::new(layout) };
        let mut weights = vec![[0f32; TILE_ROWS]; width];
        let mut choices = vec![Choices { scale: [0.0; TILE_ROWS], zero: [0.0; TILE_ROWS] }; layout.groups];
        let single = self.has_single_blocks();
        let mut steps = None;
        if single {
            let (quant, inputs) = (&self.quant, self.inputs.as_ref());
            (choices, steps) = single::Tile { level: *level, quant, layout, values, inputs }.choices()?;
        }
        for (r, row) in values.chunks_exact(layout.cols).enumerate() {
            self.load(row, &mut work.values);
            for (lanes, x) in weights.iter_mut().zip(&work.values) {
                lanes[r] = *x;
            }
            if single {
                continue;
            }
            for (group, choices) in choices.iter_mut().enumerate() {
                let Choice { scale, zero } = self.group(group, &mut work).choose()?;
                (choices.scale[r], choices.zero[r]) = (scale, f32::from(zero));
            }
        }
        let coded = gptq::Tile { level: *level, layout, correlations, weights: &weights, choices, steps }.encode();
        for r in 0..values.len() / layout.cols {
            if let Some(steps) = &steps {
                work.row.supers.copy_from_slice(&steps[r].to_le_bytes());
            }
            for (group, choices) in coded.choices.iter().enumerate() {
                let zero = choices.zero[r] as u8;
                work.row.set_choice(spec, group, choices.scale[r], zero);
                let bias = CodeRange::of(spec, zero).bias;
                let first = group * layout.group_blocks * BLOCK;
                let codes = work.row.group_codes(layout, group);
                for (code, lanes) in codes.iter_mut().zip(&coded.codes[first..]) {
                    *code = match spec.has_table() {
                        true => iq4_nl::code_of(lanes[r]),
                        false => (lanes[r] as i8 as u8).wrapping_add(bias),
                    };
                }
            }
            self.neutralize_padding(&mut work.row);
            tile::put_row(layout, tile, r, &work.row);
        }
        Ok(())
    }

    /// Copies a row into `padded` and clamps it; the rest of `padded` is unchanged.
    fn load(&self, values: &[f32], padded: &mut [f32]) {
        match self.quant.clamp {
            None => padded[..values.len()].copy_from_slice(values),
            Some(limit) => padded.iter_mut().zip(values).for_each(|(p, x)| *p = x.clamp(-limit, limit)),
        }
    }

    /// Sets the codes of padding columns to the code of zero under the zero point of the last group.
    fn neutralize_padding(&self, row: &mut CodedRow) {
        let zero = row.zeros.last().copied().unwrap_or(0);
        row.codes[self.layout.cols..].fill(self.quant.spec.code_map().neutral(zero));
    }

    /// Quantizes a row into `work.row`.
    fn quantize_row(&self, values: &[f32], work: &mut Workspace) -> Result<()> {
        self.load(values, &mut work.values);
        for group in 0..self.layout.groups {
            self.quantize_group(group, work)?;
        }
        self.neutralize_padding(&mut work.row);
        Ok(())
    }

    fn quantize_group(&self, group: usize, work: &mut Workspace) -> Result<()> {
        let choice = if self.quant.method == Method::Exact {
            let Group { values, codes, real, .. } = self.group(group, work);
            let levels = exact_codes::levels(&self.quant.spec);
            let Some(scale) = exact_codes::recover(&levels, &values[..real], codes) else {
                let found = format!("found weights that are not codes of {}", self.quant.spec.scheme.name());
                return Err(Error::unsupported(found)
                    .help("choose another --method; exact is for weights that were decoded from such codes"));
            };
            Choice { scale, zero: 0 }
        } else if self.has_power_scales() {
            let Group { values, codes, .. } = self.group(group, work);
            Choice { scale: mxfp4::e8m0(mxfp4::encode_block(values, codes)), zero: 0 }
        } else {
            self.group(group, work).encode()?
        };
        work.row.set_choice(&self.quant.spec, group, choice.scale, choice.zero);
        Ok(())
    }

    /// Returns the values of group `group` of the row in `work`, with the parameters of their quantization.
    fn group<'a>(&'a self, group: usize, work: &'a mut Workspace) -> Group<'a> {
        let width = self.layout.group_blocks * BLOCK;
        let start = group * width;
        let end = (start + width).min(self.layout.blocks * BLOCK);
        let values = &work.values[start..end];
        Group {
            level: self.level,
            quant: &self.quant,
            shared: self.needs_observation().then(|| *self.shared.get_or_init(|| self.observation.choose(&self.quant))),
            values,
            importance: self.inputs.as_ref().map(|inputs| inputs.importance(start..end)),
            real: (self.layout.cols - start).min(values.len()),
            codes: work.row.group_codes(&self.layout, group),
        }
    }

    /// Returns an error that names the first value that is NaN or infinite.
    fn refuse_non_finite(&self, values: &[f32]) -> Result<()> {
        if self.level.run(AllFinite(values)) {
            return Ok(());
        }
        let at = values.iter().position(|x| !x.is_finite()).unwrap_or(0);
        let (value, column) = (values[at], at % self.layout.cols);
        Err(Error::corrupt(format!("found the weight {value} in column {column}, which cannot be quantized")).help(
            "the checkpoint is damaged or its training diverged; download it again, or leave this tensor unquantized \
                 with `iec ptq --exclude`",
        ))
    }
}

/// Kernel that returns true when all values are finite.
struct AllFinite<'a>(&'a [f32]);

impl Kernel<bool> for AllFinite<'_> {
    #[inline(always)]
    fn run(self) -> bool {
        // Infinity and NaN have the largest bit patterns, and an integer maximum needs no branches.
        let mut largest = 0;
        for x in self.0 {
            largest = largest.max(x.abs().to_bits());
        }
        largest < f32::INFINITY.to_bits()
    }
}
