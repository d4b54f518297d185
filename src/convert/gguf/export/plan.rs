//! Plans an export: the tensors of the GGUF file, their types, and their sources in the pack,
//! before any weight is read.

use super::super::config_out::GgufDescription;
use super::super::family::Family;
use super::super::heads::{HeadBlock, fill_heads};
use super::super::names::{MappedTensor, RowOrder, is_vector, map};
use super::super::writer::GgufEntry;
use super::{Dequantize, ExportOptions};
use crate::catalogue::Role;
use crate::convert::arch::{ExpectedTensor, expected_tensors};
use crate::convert::executor::{OnlyBytes, TaskOutput};
use crate::convert::rows::{Put, RowSource, RowStack, RowTarget};
use crate::convert::source::gguf::blocks;
use crate::convert::source::gguf::types::GgmlType;
use crate::dtype::{DType, encode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::{Entry, IebinReader, Store};
use crate::model_config::ModelConfig;
use crate::quant::block::CodedRow;
use crate::scheme::TILE_ROWS;
use std::collections::{BTreeMap, HashSet};

/// Advice for a pack that lacks a tensor of its model.
const PACK_AGAIN: &str = "the pack is damaged; make it again with `iec pack`";

/// Advice for codes that have no type in GGML.
const FLOATS: &str = "add --dequantize to write such tensors as floats";
/// Reason why NVFP4 codes have no type in GGML.
const DIFFERENT_NUMBERS: &str = "found different numbers that multiply the NVFP4 scales of a matrix, expected one, as \
                                 files of GGUF have";

/// Reason why the columns of a matrix cannot be moved as codes.
const CUT_GROUPS: &str = "found groups of codes that lie across heads, whose order is another one in GGUF";

/// A tensor of the file and the source of its rows.
#[derive(Debug)]
pub(super) struct ExportedTensor {
    pub(super) tensor: GgufEntry,
    pub(super) rows: RowStack,
    pub(super) from: RowOrigin,
}

#[derive(Debug)]
pub(super) enum RowOrigin {
    /// Indices of entries of the pack.
    Entries { entries: Vec<usize>, order: RowOrder, plus_one: bool },
    /// Values given by the model's description.
    Values(Vec<f32>),
}

/// The pack and the mapping of its tensors to those of the file.
pub(super) struct ExportSource<'a> {
    reader: &'a IebinReader,
    options: &'a ExportOptions,
    expected: Vec<ExpectedTensor>,
    mapped: Vec<MappedTensor>,
}

impl ExportedTensor {
    /// Plans a vector of f32 numbers.
    fn of_values(name: String, values: Vec<f32>) -> ExportedTensor {
        let (shape, nbytes) = (vec![values.len()], 4 * values.len() as u64);
        let rows = RowStack { count: 1, rows: values.len(), cols: 1 };
        let tensor = GgufEntry { name, kind: GgmlType::F32, nbytes, shape };
        ExportedTensor { tensor, rows, from: RowOrigin::Values(values) }
    }
}

impl<'a> ExportSource<'a> {
    pub(super) fn new(
        reader: &'a IebinReader,
        options: &'a ExportOptions,
        family: &Family,
        config: &ModelConfig,
    ) -> Result<ExportSource<'a>> {
        let mut expected = expected_tensors(config);
        expected.retain(|tensor| Role::of(&tensor.name) != Role::Prediction);
        let mapped = map(family, config, &expected, |_| family.fused)?;
        Ok(ExportSource { reader, options, expected, mapped })
    }

    pub(super) fn plan(&self, description: &GgufDescription) -> Result<Vec<ExportedTensor>> {
        let positions: BTreeMap<&str, usize> =
            self.reader.entries().iter().enumerate().map(|(i, e)| (e.name.as_str(), i)).collect();
        let mut all = Vec::new();
        for (name, values) in &description.factors {
            all.push(ExportedTensor::of_values(name.to_string(), values.clone()));
        }
        for mapped in &self.mapped {
            if let Some(factors) = self.decay_factors(&positions, mapped)? {
                let mut planned = ExportedTensor::of_values(mapped.name.clone(), factors);
                planned.tensor.shape.clone_from(&mapped.shape);
                all.push(planned);
                continue;
            }
            let entries = mapped.canonical.iter().map(|c| self.entry(&positions, &self.expected[*c]));
            let entries = entries.collect::<Result<Vec<_>>>()?;
            let planned = self.plan_one(mapped, entries)?;
            all.extend(self.further_scales(&planned)?);
            all.push(planned);
        }
        Ok(all)
    }

    /// Returns the factors of the logarithms of decays, `-exp(A_log)`, which GGUF has in place of `A_log`.
    fn decay_factors(&self, positions: &BTreeMap<&str, usize>, mapped: &MappedTensor) -> Result<Option<Vec<f32>>> {
        let expected = &self.expected[mapped.canonical[0]];
        if !expected.name.ends_with(".A_log") {
            return Ok(None);
        }
        let entry = &self.reader.entries()[self.entry(positions, expected)?];
        let rows = RowStack::new(&entry.shape, false);
        let read = |at: usize, out: &mut [u8]| self.reader.read(entry, at, out);
        let logs = RowSource::new(&entry.name, entry.store.into(), rows, read)?.floats(0..rows.rows)?;
        let factor = |row: usize| -logs[mapped.order.canonical_row(row).1].exp();
        Ok(Some((0..logs.len()).map(factor).collect()))
    }

    /// Returns a note if tensors of the pack have no place in the file.
    pub(super) fn note_left_out(&self) -> Option<String> {
        let used: HashSet<&str> = self.expected.iter().map(|expected| expected.name.as_str()).collect();
        let mut unused = self.reader.entries().iter().filter(|entry| !used.contains(entry.name.as_str()));
        let first = unused.next()?;
        let count = 1 + unused.count();
        Some(format!("left out: tensors that no layer of the model computes ({count}, the first is `{}`)", first.name))
    }

    fn entry(&self, positions: &BTreeMap<&str, usize>, expected: &ExpectedTensor) -> Result<usize> {
        let missing = || Error::corrupt("found no such tensor in the pack").tensor(&expected.name).help(PACK_AGAIN);
        let position = *positions.get(expected.name.as_str()).ok_or_else(missing)?;
        let entry = &self.reader.entries()[position];
        if entry.shape != expected.shape {
            let found = format!("found shape {:?}, expected {:?}", entry.shape, expected.shape);
            return Err(Error::corrupt(found).tensor(&expected.name).help(PACK_AGAIN));
        }
        Ok(position)
    }

    fn plan_one(&self, mapped: &MappedTensor, entries: Vec<usize>) -> Result<ExportedTensor> {
        let first = &self.reader.entries()[entries[0]];
        let vector = is_vector(&first.name, &first.shape);
        let rows = mapped.order.stack(&mapped.shape, vector);
        // llama.cpp computes with f32 vectors and convolutions, and its own converter keeps routers in f32.
        let is_state = ["conv", "ssm_a", "ssm_d"].iter().any(|part| mapped.name.contains(part));
        let small = vector || is_state || first.name.contains(".mlp.router.");
        let kinds = entries
            .iter()
            .map(|i| {
                let entry = &self.reader.entries()[*i];
                self.kind(entry, small, mapped.order.is_transposed()).tensor(&entry.name)
            })
            .collect::<Result<Vec<_>>>()?;
        let kind = match kinds.iter().all(|kind| *kind == kinds[0]) {
            true if kinds[0] == GgmlType::NVFP4 && self.numbers(&entries)?.is_none() => {
                self.floats_instead(DIFFERENT_NUMBERS.into(), FLOATS.into()).tensor(&mapped.name)?
            }
            true if self.cuts_groups(mapped, first)? => {
                self.floats_instead(CUT_GROUPS.into(), FLOATS.into()).tensor(&mapped.name)?
            }
            true => kinds[0],
            false => self.mixed(&kinds).tensor(&mapped.name)?,
        };
        let bytes = kind.row_bytes(rows.cols).and_then(|row| row.checked_mul(rows.count * rows.rows));
        let bytes = bytes.ok_or_else(|| Error::corrupt("found a size that overflows").tensor(&mapped.name))?;
        let tensor = GgufEntry { name: mapped.name.clone(), kind, shape: mapped.shape.clone(), nbytes: bytes as u64 };
        let from = RowOrigin::Entries { entries, order: mapped.order.clone(), plus_one: mapped.plus_one };
        Ok(ExportedTensor { tensor, rows, from })
    }

    /// Returns true for codes whose groups do not lie inside of the heads that GGUF has in another order.
    fn cuts_groups(&self, mapped: &MappedTensor, entry: &Entry) -> Result<bool> {
        let (RowOrder::TiledColumns(heads), Some(layout)) = (&mapped.order, entry.layout().transpose()?) else {
            return Ok(false);
        };
        Ok(!CodedRow::has_movable_runs(&layout, heads.width))
    }

    /// Returns the type in which an entry is written. `small` is true for tensors that llama.cpp expects in f32,
    /// `transposed` for those whose rows become columns.
    fn kind(&self, entry: &Entry, small: bool, transposed: bool) -> Result<GgmlType> {
        match entry.store {
            Store::Plain(_) if small => Ok(GgmlType::F32),
            Store::Plain(dtype) => ggml_float(self.options.dtype.unwrap_or(dtype)),
            Store::Tiled(_) if small => {
                Err(Error::unsupported("found quantized codes, but llama.cpp needs floats here")
                    .help("pack again with a manifest that leaves this tensor out (`iec ptq --exclude RE`)"))
            }
            Store::Tiled(spec) => {
                let cols = entry.shape[entry.shape.len() - 1];
                let (why, help) = match blocks::twin(&spec) {
                    _ if transposed => (
                        "found quantized codes, but GGUF stores this matrix transposed".to_string(),
                        FLOATS.to_string(),
                    ),
                    Some(kind) if cols.is_multiple_of(kind.block()) && self.options.dequantize != Dequantize::All => {
                        return Ok(kind);
                    }
                    Some(kind) => (
                        format!(
                            "found rows of {cols} weights, expected a multiple of {} for {kind} blocks",
                            kind.block()
                        ),
                        FLOATS.to_string(),
                    ),
                    None => {
                        let scales = match (spec.symmetric, spec.has_two_levels()) {
                            (false, _) => "zero points",
                            (true, true) => "scales of rows",
                            (true, false) => "f32 scales",
                        };
                        let (scheme, group) = (spec.scheme.name(), spec.granularity);
                        let found =
                            format!("found {scheme} with group size {group} and {scales}, which has no type in GGML");
                        (found, format!("{FLOATS}, or pack again with a manifest of `iec ptq --scheme q4_0`"))
                    }
                };
                self.floats_instead(why, help)
            }
        }
    }

    /// Returns the type of floats for codes that have no type in GGML, if the options allow it.
    fn floats_instead(&self, why: String, help: String) -> Result<GgmlType> {
        match self.options.dequantize {
            Dequantize::Needed | Dequantize::All => ggml_float(self.options.dtype.unwrap_or(DType::F32)),
            Dequantize::None => Err(Error::unsupported(why).help(help)),
        }
    }

    /// Plans the tensor of the numbers that multiply the scales of an NVFP4 tensor, unless they are all 1.
    fn further_scales(&self, planned: &ExportedTensor) -> Result<Option<ExportedTensor>> {
        let RowOrigin::Entries { entries, .. } = &planned.from else { return Ok(None) };
        let stem = planned.tensor.name.strip_suffix(".weight").filter(|_| planned.tensor.kind == GgmlType::NVFP4);
        let (Some(stem), Some(numbers)) = (stem, self.numbers(entries)?) else { return Ok(None) };
        let is_needed = numbers.iter().any(|number| *number != 1.0);
        Ok(is_needed.then(|| ExportedTensor::of_values(format!("{stem}.scale"), numbers)))
    }

    /// Returns the numbers that multiply the scales of the matrices of an NVFP4 entry, or of several entries that
    /// become one matrix; `None` if a matrix has several.
    fn numbers(&self, entries: &[usize]) -> Result<Option<Vec<f32>>> {
        let mut common: Option<Vec<f32>> = None;
        for entry in entries.iter().map(|number| &self.reader.entries()[*number]) {
            let Some(layout) = entry.layout().transpose()? else { return Ok(None) };
            let mut numbers = Vec::new();
            for matrix in (0..entry.nbytes).step_by(layout.nbytes()) {
                let mut of_matrix = Vec::with_capacity(layout.tiles * TILE_ROWS);
                for tile in 0..layout.tiles {
                    let mut bytes = [0; 4 * TILE_ROWS];
                    self.reader.read(entry, matrix + tile * layout.tile_bytes + layout.supers_offset, &mut bytes)?;
                    of_matrix.extend(bytes.as_chunks::<4>().0.iter().map(|number| f32::from_le_bytes(*number)));
                }
                if of_matrix[..layout.rows].windows(2).any(|pair| pair[0] != pair[1]) {
                    return Ok(None);
                }
                numbers.push(of_matrix[0]);
            }
            if common.get_or_insert_with(|| numbers.clone()) != &numbers {
                return Ok(None);
            }
        }
        Ok(common)
    }

    /// Returns the common type of entries that are stacked in one tensor but stored in different types.
    fn mixed(&self, kinds: &[GgmlType]) -> Result<GgmlType> {
        if self.options.dequantize != Dequantize::None || kinds.iter().all(|kind| blocks::plain(*kind).is_some()) {
            return ggml_float(self.options.dtype.unwrap_or(DType::F32));
        }
        let found = format!(
            "found the types {kinds:?}, expected one type, because GGUF stores q, k and v of a layer as one \
             tensor, and gate and up as another"
        );
        Err(Error::unsupported(found).help(
            "add --dequantize to write this tensor as floats, or pack again with the same scheme for all its matrices",
        ))
    }

    /// Writes the data of one tensor.
    pub(super) fn fill(&self, planned: &ExportedTensor, out: &mut TaskOutput<'_>) -> Result<OnlyBytes> {
        let (entries, order, plus_one) = match &planned.from {
            RowOrigin::Values(values) => {
                let mut encoded = Vec::new();
                encode_floats(DType::F32, values, &mut encoded)?;
                return out.append(0, &encoded).map(|()| OnlyBytes {});
            }
            RowOrigin::Entries { entries, order, plus_one } => (entries, order, *plus_one),
        };
        let source = |entry: &usize| {
            let entry = &self.reader.entries()[*entry];
            let mut rows = RowStack::new(&entry.shape, is_vector(&entry.name, &entry.shape));
            if matches!(order, RowOrder::Tiled { .. }) {
                // The channels of a convolution are matrices of one row.
                rows = RowStack { count: 1, rows: rows.count * rows.rows, cols: rows.cols };
            }
            let read = |at: usize, out: &mut [u8]| self.reader.read(entry, at, out);
            RowSource::new(&entry.name, entry.store.into(), rows, read)
        };
        let mut sources = entries.iter().map(source).collect::<Result<Vec<_>>>()?;
        let put: &mut Put<'_> = &mut |bytes| out.append(0, bytes);
        if let RowOrder::HeadColumns { head, rows } = *order {
            let block = HeadBlock { source: 0, head, rows, transposed: true };
            let dtype = blocks::plain(planned.tensor.kind).expect("transposed matrices are floats");
            let heads = planned.tensor.shape[0];
            let filled = fill_heads(&mut sources, 0..heads, &[block], dtype, put).tensor(&planned.tensor.name);
            return filled.map(|()| OnlyBytes {});
        }
        let add = if plus_one { 1.0 } else { 0.0 };
        let (form, RowStack { count, rows, cols }) = (planned.tensor.kind.into(), planned.rows);
        let columns = match order {
            RowOrder::TiledColumns(heads) => Some(heads.columns()),
            _ => None,
        };
        let target = RowTarget { form, matrices: 0..count, rows, cols, add, columns };
        let filled = target.fill(&mut sources, |row| order.canonical_row(row), put).tensor(&planned.tensor.name);
        filled.map(|()| OnlyBytes {})
    }

    pub(super) fn is_dequantized(&self, planned: &ExportedTensor) -> bool {
        let RowOrigin::Entries { entries, .. } = &planned.from else { return false };
        let tiled = |i: &usize| matches!(self.reader.entries()[*i].store, Store::Tiled(_));
        blocks::plain(planned.tensor.kind).is_some() && entries.iter().any(tiled)
    }
}

fn ggml_float(dtype: DType) -> Result<GgmlType> {
    match dtype {
        DType::F32 => Ok(GgmlType::F32),
        DType::F16 => Ok(GgmlType::F16),
        DType::BF16 => Ok(GgmlType::BF16),
        other => Err(Error::unsupported(format!("found {other} elements, which GGUF has no type for"))
            .help("add --dtype fp32, fp16 or bf16")),
    }
}
