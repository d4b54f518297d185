//! Plans the checkpoint: which tensors of `iec unpack` are linear layers in codes, and which stay floats.

use super::format::{Format, Stored, describe};
use crate::catalogue::Role;
use crate::convert::sharding::Listed;
use crate::convert::unpack::plan::{PartForm, TargetPart, UnpackPlan, UnpackedTensor};
use crate::error::{Context, Error, Result};
use crate::iebin::{IebinReader, Store};
use crate::scheme::{QuantSpec, ScaleType};
use std::collections::HashSet;

/// Linear layer whose weight is written in codes.
#[derive(Debug, Clone)]
pub(super) struct Module {
    /// Name in the checkpoint, without `.weight`.
    pub(super) name: String,
    /// Number of outputs.
    pub(super) rows: usize,
    /// Number of inputs.
    pub(super) cols: usize,
    /// Codes and scales in the pack; `None` for floats.
    pub(super) spec: Option<QuantSpec>,
    /// Matrices of the pack whose rows follow each other in the weight.
    pub(super) parts: Vec<TargetPart>,
}

impl Module {
    /// Returns true if the scales are f16 numbers.
    pub(super) fn has_f16_scales(&self) -> bool {
        self.spec.is_some_and(|spec| spec.scale_dtype == ScaleType::F16)
    }
}

/// Tensors that one task writes.
#[derive(Debug)]
pub(super) enum Item {
    /// A tensor of floats or of other plain elements.
    Plain(UnpackedTensor),
    /// The tensors of a linear layer in codes.
    Coded(Module),
}

impl Item {
    /// Returns the name of the tensor or of the linear layer.
    pub(super) fn name(&self) -> &str {
        match self {
            Item::Plain(target) => &target.name,
            Item::Coded(module) => &module.name,
        }
    }
}

/// Number of the item to which a tensor belongs, and the number of the tensor among those of the item.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TensorOfItem {
    pub(super) item: usize,
    pub(super) part: usize,
}

/// Plan of the checkpoint.
pub(super) struct HfPlan {
    /// Items in the order of the model.
    pub(super) items: Vec<Item>,
    /// Tensors of all items.
    pub(super) tensors: Vec<Listed<TensorOfItem>>,
    /// Names of the linear layers that stay floats.
    pub(super) unquantized: Vec<String>,
    /// Canonical names of tensors that are quantized in the pack and are decoded.
    pub(super) dequantized: Vec<String>,
}

impl HfPlan {
    /// Returns the linear layers in codes.
    pub(super) fn modules(&self) -> Vec<&Module> {
        let modules = self.items.iter().filter_map(|item| match item {
            Item::Coded(module) => Some(module),
            Item::Plain(_) => None,
        });
        modules.collect()
    }
}

/// Plans every tensor of the checkpoint that `unpacked` describes.
///
/// # Errors
/// A quantized tensor has no equivalent in the format, and `dequantize` is false; or no linear layer would be in codes.
pub(super) fn plan(reader: &IebinReader, unpacked: UnpackPlan, format: &Format, dequantize: bool) -> Result<HfPlan> {
    let mut plan =
        HfPlan { items: Vec::new(), tensors: Vec::new(), unquantized: Vec::new(), dequantized: unpacked.dequantized };
    let mut kept = HashSet::new();
    for target in unpacked.targets {
        let coded = Reading { reader, format, dequantize }.module(&target).tensor(&target.name)?;
        let item = plan.items.len();
        let Some((module, tensors)) = coded else {
            if let Some(name) = linear_layer(reader, &target) {
                plan.unquantized.push(name.to_string());
            }
            let UnpackedTensor { name, dtype, shape, .. } = target.clone();
            plan.tensors.push(Listed { name, dtype, shape, content: TensorOfItem { item, part: 0 } });
            plan.items.push(Item::Plain(target));
            continue;
        };
        if !format.quantizes_floats {
            kept.extend(module.parts.iter().map(|part| reader.entries()[part.entry].name.clone()));
        }
        plan.tensors.extend(tensors.into_iter().enumerate().map(|(part, stored)| Listed {
            name: format!("{}.{}", module.name, stored.name),
            dtype: stored.dtype,
            shape: stored.shape,
            content: TensorOfItem { item, part },
        }));
        plan.items.push(Item::Coded(module));
    }
    plan.dequantized.retain(|name| !kept.contains(name));
    match plan.modules().is_empty() {
        true => Err(Error::usage(format!("found no matrix that {} would hold in codes", format.name)).help(
            "quantize first: `iec ptq --bits 4 --scheme int4 --group-size 128`, then `iec pack --q4-map`; \
             `--format fp8` quantizes floats, and `iec unpack` writes floats",
        )),
        false => Ok(plan),
    }
}

/// Returns the name of the linear layer whose weight a target is, as far as formats may quantize or list it.
fn linear_layer<'a>(reader: &IebinReader, target: &'a UnpackedTensor) -> Option<&'a str> {
    let roles = [Role::Attention, Role::Mlp, Role::Experts, Role::Router, Role::LmHead, Role::Other];
    let is_linear = |part: &TargetPart| roles.contains(&Role::of(&reader.entries()[part.entry].name));
    let name = target.name.strip_suffix(".weight")?;
    (target.shape.len() == 2 && target.content.iter().all(is_linear)).then_some(name)
}

/// Facts by which [`Reading::module`] decides whether a target is written in codes.
struct Reading<'a> {
    reader: &'a IebinReader,
    format: &'a Format,
    dequantize: bool,
}

impl Reading<'_> {
    /// Returns the linear layer of a target that is written in codes, with its tensors; `None` if the target stays
    /// floats.
    fn module(&self, target: &UnpackedTensor) -> Result<Option<(Module, Vec<Stored>)>> {
        if target.content.iter().any(|part| matches!(part.form, PartForm::Codes | PartForm::Scales)) {
            return Err(Error::unsupported("found MXFP4 in the layout of gpt-oss, expected matrices of linear layers")
                .help("`iec unpack` writes this layout, which vLLM, SGLang and transformers read as it is"));
        }
        let specs: Vec<Option<QuantSpec>> = target.content.iter().map(|part| self.spec(part)).collect();
        let has_codes = specs.iter().any(Option::is_some);
        let attempt = self.attempt(target, &specs);
        match attempt {
            Ok(Some(found)) if !(self.format.quantizes_floats && has_codes && !self.dequantize) => Ok(Some(found)),
            _ if !has_codes || self.dequantize => Ok(None),
            Ok(_) => {
                let why = format!("found codes, expected floats, which {} quantizes", self.format.name);
                Err(self.advise(Error::unsupported(why)))
            }
            Err(error) => Err(self.advise(error)),
        }
    }

    fn advise(&self, error: Error) -> Error {
        let other = if self.format.quantizes_floats {
            "compressed-tensors keeps the codes of the pack"
        } else {
            "`iec unpack` writes all tensors as floats"
        };
        error.help(format!("add --dequantize to decode such tensors first; {other}"))
    }

    fn spec(&self, part: &TargetPart) -> Option<QuantSpec> {
        match self.reader.entries()[part.entry].store {
            Store::Tiled(spec) => Some(spec),
            Store::Plain(_) => None,
        }
    }

    /// Returns the linear layer in codes; `None` for floats that stay as they are.
    fn attempt(&self, target: &UnpackedTensor, specs: &[Option<QuantSpec>]) -> Result<Option<(Module, Vec<Stored>)>> {
        let (name, format) = (linear_layer(self.reader, target), self.format.name);
        let role = Role::of(&self.reader.entries()[target.content[0].entry].name);
        let may_be_coded = match self.format.quantizes_floats {
            true => matches!(role, Role::Attention | Role::Mlp | Role::Experts),
            false => specs.iter().any(Option::is_some),
        };
        if !may_be_coded {
            return Ok(None);
        }
        let Some(name) = name.filter(|_| role != Role::Router) else {
            return Err(Error::unsupported(format!("found codes, but {format} keeps floats here")));
        };
        if !self.format.quantizes_floats && specs.iter().any(|spec| *spec != specs[0]) {
            let name = |spec: &Option<QuantSpec>| spec.map_or("floats".into(), |spec| describe(&spec));
            let found = specs.iter().map(name).collect::<Vec<_>>().join(", ");
            return Err(Error::unsupported(format!(
                "found {found}, expected one specification for all matrices that form this one"
            )));
        }
        let module = Module {
            name: name.to_string(),
            rows: target.shape[0],
            cols: target.shape[1],
            spec: specs[0],
            parts: in_order(target)?,
        };
        let tensors = (self.format.tensors)(&module)?;
        Ok(Some((module, tensors)))
    }
}

/// Returns the parts of a target in the order of its rows.
///
/// # Errors
/// Rows are columns in the checkpoint.
fn in_order(target: &UnpackedTensor) -> Result<Vec<TargetPart>> {
    let is_plain = |part: &TargetPart| part.form == PartForm::Rows && part.matrices.len() == 1;
    if !target.content.iter().all(is_plain) {
        return Err(Error::unsupported("found rows that are columns in the checkpoint, expected rows"));
    }
    let mut parts = target.content.clone();
    parts.sort_by_key(|part| part.first);
    Ok(parts)
}
