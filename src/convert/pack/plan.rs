//! Which store does each tensor get, and how are its bytes made? Plain data, decided before anything is read.

use crate::convert::outlook::in_words;
use crate::convert::{CanonicalTensor, Checkpoint, Kind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::iebin::{PlannedTensor, Store};
use crate::manifest::{Manifest, PackedRange, is_weight_matrix};
use crate::quant_spec::TensorQuant;
use crate::scheme::QuantSpec;

/// Why MXFP4 is never computed again.
const CODES_STAY: &str = "4-bit codes stay as they are";

/// Why finished codes are taken over.
const FINISHED: &str = "codes are finished";

/// A tensor, where it goes and how.
#[derive(Debug)]
pub struct PackItem<'a> {
    /// The tensor of the checkpoint.
    pub tensor: &'a CanonicalTensor,
    /// Its entry in the pack.
    pub planned: PlannedTensor,
    /// How its bytes are made.
    pub work: Encoding,
    /// Why so, for people.
    pub why: String,
}

/// How the bytes of a payload are made.
#[derive(Debug, Clone, PartialEq)]
pub enum Encoding {
    /// As they are (transposed where the source is).
    Copy,
    /// Rounded to another float type.
    Convert(DType),
    /// MXFP4 codes and scales, permuted into tiles.
    Mxfp4,
    /// Quantized here.
    Quantize(TensorQuant),
    /// Finished bytes of `iec q4`, permuted into tiles.
    Packed(QuantSpec, PackedRange),
}

impl PackItem<'_> {
    /// True when the payload is tiles.
    pub fn is_quantized(&self) -> bool {
        matches!(self.planned.store, Store::Tiled(_))
    }

    /// What it becomes, in a word or two.
    pub fn stored_as(&self) -> String {
        match &self.planned.store {
            Store::Plain(dtype) => dtype.name().to_string(),
            Store::Tiled(spec) => in_words(spec),
        }
    }
}

impl Encoding {
    /// Everything that decides about the bytes but the weights themselves; no paths.
    pub fn in_full(&self) -> String {
        match self {
            Encoding::Packed(spec, r) => format!("{spec:?} {:?} {:?} {:?} {}", r.codes, r.scales, r.zeros, r.biased),
            other => format!("{other:?}"),
        }
    }
}

/// Decides for every tensor of a checkpoint; `dtype` is for floats about which the manifest says nothing.
///
/// # Errors
/// The manifest names tensors that do not exist, or asks for something that cannot be done.
pub fn plan<'a>(
    checkpoint: &'a Checkpoint,
    dtype: Option<DType>,
    manifest: Option<&Manifest>,
) -> Result<Vec<PackItem<'a>>> {
    if let Some(manifest) = manifest {
        refuse_strangers(checkpoint, manifest)?;
    }
    let items = checkpoint.tensors().iter().map(|t| decide(t, dtype, manifest)).collect::<Result<Vec<_>>>()?;
    let obeyed = |item: &PackItem| matches!(item.work, Encoding::Quantize(_) | Encoding::Packed(..));
    if let Some(manifest) = manifest
        && manifest.document().tensors.is_empty()
        && !items.iter().any(obeyed)
    {
        return Err(Error::usage("no rule of the manifest matches a tensor of this checkpoint")
            .help("compare the patterns with the names that `iec inspect --tensors` prints"));
    }
    Ok(items)
}

fn refuse_strangers(checkpoint: &Checkpoint, manifest: &Manifest) -> Result<()> {
    match manifest.document().tensors.keys().find(|name| checkpoint.get(name).is_none()) {
        Some(name) => Err(Error::corrupt("is in the manifest, but not in the checkpoint")
            .tensor(name)
            .help("make the manifest again with `iec ptq` from this checkpoint")),
        None => Ok(()),
    }
}

fn decide<'a>(tensor: &'a CanonicalTensor, dtype: Option<DType>, manifest: Option<&Manifest>) -> Result<PackItem<'a>> {
    let decision = match manifest {
        Some(manifest) => manifest.decide(&tensor.name, &tensor.shape)?,
        None => None,
    };
    let listed = manifest.and_then(|m| m.document().tensors.get(&tensor.name));
    let decided_by = if listed.is_some() { "manifest entry" } else { "manifest rule" };
    let (store, work, metrics, why) = match decision {
        // The codes of the checkpoint are exact; computing them again from their values could only lose.
        Some(d) if tensor.kind == Kind::Mxfp4 && d.quant.spec == QuantSpec::MXFP4 && d.packed.is_none() => {
            (Store::Tiled(QuantSpec::MXFP4), Encoding::Mxfp4, d.metrics, CODES_STAY.to_string())
        }
        Some(d) => {
            let (work, why) = match (d.packed, tensor.kind) {
                (Some(range), _) => (Encoding::Packed(d.quant.spec, range), FINISHED.to_string()),
                (None, Kind::Packed(spec)) if spec == d.quant.spec => (take_over(tensor, spec), FINISHED.to_string()),
                (None, Kind::Packed(spec)) => return Err(refuse_again(tensor, &spec)),
                (None, _) => (Encoding::Quantize(d.quant), format!("{decided_by}, {}", d.quant.method.name())),
            };
            (Store::Tiled(d.quant.spec), work, d.metrics, why)
        }
        None => {
            let (store, work) = unquantized(tensor, dtype, manifest.and_then(|m| m.keep(&tensor.name)))?;
            let why = match (&work, listed) {
                (Encoding::Mxfp4, _) => CODES_STAY.to_string(),
                (Encoding::Packed(..), _) => FINISHED.to_string(),
                (_, Some(entry)) if !entry.reasons.is_empty() => entry.reasons.join("; "),
                (_, Some(_)) => decided_by.to_string(),
                (Encoding::Convert(_), None) => "--dtype".to_string(),
                (_, None) if manifest.is_none() => "as it is".to_string(),
                (_, None) if is_weight_matrix(&tensor.name, &tensor.shape) => "no rule".to_string(),
                _ => "no weight matrix".to_string(),
            };
            (store, work, None, why)
        }
    };
    let planned = PlannedTensor {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        store,
        source_layout: tensor.source_layout().map(str::to_string),
        metrics,
    };
    Ok(PackItem { tensor, planned, work, why })
}

fn unquantized(tensor: &CanonicalTensor, dtype: Option<DType>, keep: Option<DType>) -> Result<(Store, Encoding)> {
    match tensor.kind {
        Kind::Mxfp4 => match keep {
            None => Ok((Store::Tiled(QuantSpec::MXFP4), Encoding::Mxfp4)),
            Some(keep) => Err(Error::unsupported(format!("the checkpoint has MXFP4, the manifest keeps it as {keep}"))
                .tensor(&tensor.name)
                .help("leave the tensor out of the manifest; its 4-bit codes are then kept as they are")),
        },
        Kind::Packed(spec) => match keep {
            None => Ok((Store::Tiled(spec), take_over(tensor, spec))),
            Some(_) => Err(refuse_again(tensor, &spec)),
        },
        Kind::Float(source) => {
            let target = keep.or(dtype).unwrap_or(source);
            let work = if target == source { Encoding::Copy } else { Encoding::Convert(target) };
            Ok((Store::Plain(target), work))
        }
    }
}

/// The finished codes of the source, as they are.
fn take_over(tensor: &CanonicalTensor, spec: QuantSpec) -> Encoding {
    Encoding::Packed(spec, tensor.packed().expect("this kind has finished bytes").clone())
}

fn refuse_again(tensor: &CanonicalTensor, spec: &QuantSpec) -> Error {
    Error::unsupported(format!(
        "the source holds finished {} codes, the manifest wants another form",
        spec.scheme.name()
    ))
    .tensor(&tensor.name)
    .help("leave the tensor out of the manifest, or pack from the original weights")
}
