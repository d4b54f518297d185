//! `awq`: 4-bit integers with zero points in the order of AutoAWQ's GEMM kernel (`awq/modules/linear/gemm.py`).
//!
//! `M.qweight` I32 `(in, out / 8)`, `M.qzeros` I32 `(groups, out / 8)`, `M.scales` F16 `(groups, out)`. Nibble `i` of
//! word `c` is output `8 c + [0, 2, 4, 6, 1, 3, 5, 7][i]`. Zero points are stored as they are.

use super::coded::{Coded, Codes, Grid, Meaning, Packing, ScaleValues, Scales, ZeroOrder, Zeros};
use super::format::{Describe, Format, Settings};
use super::gptq;
use super::parts::Parts;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::Result;

pub(super) const AWQ: Format = Format {
    name: "AWQ",
    methods: &["awq"],
    file: Some("quant_config.json"),
    markers: &[".qweight"],
    excluded: &["modules_to_not_convert"],
    open,
    ..Format::NONE
};

fn open(settings: &Settings<'_>) -> Result<Describe> {
    let fields = settings.fields()?;
    match fields.word_opt("version")?.map(str::to_ascii_lowercase).as_deref() {
        None | Some("gemm") => {}
        Some(_) => return Err(fields.unsupported("version", "expected gemm")),
    }
    // Files of 2023 have other names for both.
    let bits = fields.count_opt("bits")?.or(fields.count_opt("w_bit")?).unwrap_or(4);
    if bits != 4 {
        let key = if fields.get("bits").is_some() { "bits" } else { "w_bit" };
        return Err(fields.unsupported(key, "expected 4"));
    }
    let key = if fields.get("group_size").is_some() { "group_size" } else { "q_group_size" };
    let group = gptq::group(&fields, key)?;
    Ok(Box::new(move |parts, qweight| matrix(parts, qweight, group, "AWQ 4 bit")))
}

/// Describes a matrix.
///
/// # Errors
/// A tensor has another type or shape.
pub(super) fn matrix(parts: &Parts<'_>, qweight: &SourceTensor, group: Option<usize>, form: &str) -> Result<Coded> {
    let [cols, words] = parts.matrix(qweight)?;
    parts.check(qweight, &[DType::I32], &qweight.shape)?;
    let rows = words.checked_mul(8).ok_or_else(|| parts.wrong(qweight, "fewer words"))?;
    let width = parts.group(qweight, group, cols)?;
    let groups = cols / width;
    let (scales, qzeros) = (parts.need(".scales")?, parts.need(".qzeros")?);
    parts.check_floats(scales, &[&[groups, rows]])?;
    parts.check(qzeros, &[DType::I32], &[groups, words])?;
    let codes = Codes::new(qweight, Packing::Interleaved, 4, Meaning::Unsigned);
    let values = ScaleValues::Floats(scales.clone());
    let scales = Scales { values, grid: Grid::Transposed { width }, groups, factor: 1.0 };
    let mut coded = Coded::new(&format!("{}.weight", parts.stem), &[rows, cols], form, codes, scales);
    coded.zeros = Zeros::Packed { tensor: qzeros.clone(), order: ZeroOrder::Interleaved, add: 0 };
    Ok(coded)
}
