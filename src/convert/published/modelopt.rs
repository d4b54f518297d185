//! `modelopt`: NVFP4, FP8 and MXFP8 of NVIDIA's Model Optimizer (`modelopt/torch/quantization/qtensor`). Its settings
//! are in `config.json` or, before 2026, in `hf_quant_config.json` alone.
//!
//! NVFP4: `M.weight` U8 `(out, in / 2)`, `M.weight_scale` F8_E4M3 `(out, in / 16)`, `M.weight_scale_2` F32; the value
//! is E2M1 * (scale * scale_2). FP8: `M.weight` F8_E4M3 with one `M.weight_scale`, or one for each row. MXFP8: the same
//! with powers of two `(out, in / 32)`. The tensors of a module say which; the settings are only checked.

use super::format::{Describe, Format, Settings};
use super::{fp4, fp8};
use crate::dtype::DType;
use crate::error::Result;
use crate::scheme::BLOCK;

pub(super) const MODELOPT: Format = Format {
    name: "ModelOpt",
    methods: &["modelopt", "modelopt_fp4"],
    file: Some("hf_quant_config.json"),
    file_object: Some("quantization"),
    markers: &[".weight_scale"],
    excluded: &["exclude_modules", "ignore"],
    open,
    ..Format::NONE
};

/// Values of `quant_algo` whose tensors have one of the forms above.
const ALGORITHMS: [&str; 7] =
    ["NVFP4", "W4A16_NVFP4", "FP8", "MXFP8", "MIXED_PRECISION", "FP8_PER_CHANNEL_PER_TOKEN", "W4A8_NVFP4_FP8"];

fn open(settings: &Settings<'_>) -> Result<Describe> {
    let fields = settings.fields()?;
    if let Some(algorithm) = fields.word_opt("quant_algo")? {
        fp8::refuse_fnuz(algorithm)?;
        if !ALGORITHMS.contains(&algorithm) {
            let known = ALGORITHMS.join(", ");
            return Err(fields.unsupported("quant_algo", &format!("expected one of {known}")));
        }
    }
    Ok(Box::new(|parts, scale| {
        let (weight, name) = (parts.need(".weight")?, format!("{}.weight", parts.stem));
        if weight.dtype == DType::U8 {
            return fp4::nvfp4(&name, parts, weight, [scale, parts.need(".weight_scale_2")?], false);
        }
        let is_mx = matches!(scale.dtype, DType::U8 | DType::F8E8M0);
        let scales = fp8::scales(parts, weight, scale, is_mx.then_some([1, BLOCK]))?;
        Ok(fp8::matrix(&name, weight, if is_mx { "MXFP8" } else { "ModelOpt FP8" }, scales))
    }))
}
