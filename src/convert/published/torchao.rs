//! `torchao`: matrices of tensor subclasses that `transformers` 5 writes to safetensors. The metadata of the header say
//! how each parameter is put together; its parts are `M._weight_qdata`, `M._weight_scale` and `M._weight_zero_point`.
//!
//! `IntxUnpackedToInt8Tensor` and `Int8Tensor` have one code in each I8: the value is `(code - zero) * scale`, with a
//! scale for each group or row. `Float8Tensor` has e4m3 codes with a scale for each row or for the tensor. Kinds with
//! two codes a byte are in the order of a GPU kernel, and are refused.

use super::coded::{Coded, Codes, Meaning, Packing, ScaleValues, Scales, Zeros};
use super::format::{Describe, Format, Settings};
use super::fp8;
use super::parts::Parts;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::{Error, Result};
use serde_json::Value;

pub(super) const TORCHAO: Format = Format {
    name: "torchao",
    methods: &["torchao"],
    markers: &["._weight_qdata"],
    excluded: &["modules_to_not_convert"],
    open,
    ..Format::NONE
};

fn open(settings: &Settings<'_>) -> Result<Describe> {
    let metadata = settings.shards.metadata()?;
    Ok(Box::new(move |parts, codes| {
        let name = format!("{}.weight", parts.stem);
        let text = metadata.get(&name).map_or("{}", String::as_str);
        let record: Value = serde_json::from_str(text).unwrap_or_default();
        match record["_type"].as_str() {
            Some("IntxUnpackedToInt8Tensor" | "Int8Tensor") => integers(&name, parts, codes, &record["_data"]),
            Some("Float8Tensor") => {
                let scales = fp8::scales(parts, codes, parts.need("._weight_scale")?, None)?;
                Ok(fp8::matrix(&name, codes, "torchao FP8", scales))
            }
            other => {
                let other: String = other.unwrap_or("no kind").chars().take(60).collect();
                let known = "IntxUnpackedToInt8Tensor, Int8Tensor or Float8Tensor";
                Err(Error::unsupported(format!("found {other} in the metadata of the file, expected {known}"))
                    .at(parts.shards.path(codes))
                    .tensor(&name)
                    .help("convert from the checkpoint before quantization"))
            }
        }
    }))
}

fn integers(name: &str, parts: &Parts<'_>, codes: &SourceTensor, data: &Value) -> Result<Coded> {
    let [rows, cols] = parts.matrix(codes)?;
    parts.check(codes, &[DType::I8], &[rows, cols])?;
    let bits = match data["target_dtype"]["_data"].as_str().and_then(|word| word.rsplit_once("int")) {
        None => 8,
        Some((_, bits)) => match bits.parse() {
            Ok(bits @ 1..=8) => bits,
            _ => return Err(parts.wrong(codes, "a target_dtype of int1 to int8 in the metadata")),
        },
    };
    let scale = parts.need("._weight_scale")?;
    let groups = match scale.shape[..] {
        [r, groups] if r == rows && groups > 0 && cols.is_multiple_of(groups) => groups,
        [r] if r == rows => 1,
        _ => return Err(parts.wrong(scale, format!("floats of shape {:?}", [rows, 1]))),
    };
    parts.check_floats(scale, &[&scale.shape])?;
    let codes = Codes::new(codes, Packing::Bytes, bits, Meaning::Signed);
    let scales = Scales::blocks(ScaleValues::Floats(scale.clone()), 1, cols / groups, cols);
    let mut coded = Coded::new(name, &[rows, cols], format!("torchao int{bits}"), codes, scales);
    if let Some(zero) = parts.get("._weight_zero_point") {
        parts.check(zero, &[DType::I8], &scale.shape)?;
        coded.zeros = Zeros::Bytes { tensor: zero.clone(), is_signed: true };
    }
    Ok(coded)
}
