//! Plans how each tensor is stored and how its bytes are made. The plan is plain data, made before any weights are
//! read.

use crate::catalogue::{Role, name_in_layer, prediction};
use crate::convert::dry_run::in_words;
use crate::convert::published::Native;
use crate::convert::{CanonicalTensor, Checkpoint};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::iebin::{PlannedTensor, Store};
use crate::manifest::{Decision, Manifest, PackedRange, is_weight_matrix};
use crate::quant_spec::{Method, TensorQuant};
use crate::scheme::QuantSpec;
use serde::{Deserialize, Serialize};

/// Reason for copying codes that are already in their final form.
const FINISHED: &str = "already quantized";

/// Tensor with its place in the pack and its conversion.
#[derive(Debug)]
pub struct PackItem<'a> {
    /// The tensor of the checkpoint.
    pub tensor: &'a CanonicalTensor,
    /// Entry of the tensor in the pack.
    pub planned: PlannedTensor,
    /// Conversion of its bytes.
    pub work: Encoding,
    /// Reason, for the dry run.
    pub why: String,
}

/// Conversion of the bytes of a payload.
#[derive(Debug, Clone, PartialEq)]
pub enum Encoding {
    /// Copied (transposed if the source is).
    Copy,
    /// Rounded to another float type.
    Convert(DType),
    /// Codes and scales of the source: those of a published checkpoint, permuted into tiles, or tiles of a pack.
    Codes(Native),
    /// Quantized here.
    Quantize(TensorQuant),
    /// Codes and scales that `iec q4` or an older program wrote, permuted into tiles.
    Packed(QuantSpec, PackedRange),
}

impl PackItem<'_> {
    /// Returns the stored form in a word or two.
    pub fn stored_as(&self) -> String {
        match &self.planned.store {
            Store::Plain(dtype) => dtype.name().to_string(),
            Store::Tiled(spec) => in_words(spec),
        }
    }
}

impl Encoding {
    /// Returns a text with everything that determines the bytes except the weights and paths.
    pub fn in_full(&self) -> String {
        match self {
            Encoding::Packed(spec, r) => format!("{spec:?} {:?} {:?} {:?} {}", r.codes, r.scales, r.zeros, r.biased),
            other => format!("{other:?}"),
        }
    }
}

/// Form in which a pack holds matrices that are quantized in the checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PublishedForm {
    /// Their codes, where a scheme of packs holds them bit for bit; otherwise floats.
    #[default]
    Published,
    /// The exact values as floats.
    Float,
}

/// Choices for tensors that the manifest does not decide.
#[derive(Debug, Clone, Copy, Default)]
pub struct Choices {
    /// Type of floats; `None` keeps theirs, and is f32 for the values of codes.
    pub dtype: Option<DType>,
    /// Form of matrices that are quantized in the checkpoint.
    pub form: PublishedForm,
}

/// Plans every tensor of a checkpoint.
///
/// # Errors
/// The manifest names tensors that do not exist, or requires a conversion that is not supported.
pub fn plan<'a>(
    checkpoint: &'a Checkpoint,
    choices: Choices,
    manifest: Option<&Manifest>,
) -> Result<Vec<PackItem<'a>>> {
    manifest.map_or(Ok(()), |manifest| manifest.refuse_strangers(|name| checkpoint.get(name).is_some()))?;
    let items =
        checkpoint.tensors().iter().map(|t| decide(checkpoint, t, choices, manifest)).collect::<Result<Vec<_>>>()?;
    let matches = |manifest: &Manifest, tensor: &CanonicalTensor| {
        matches!(manifest.decide(&tensor.name, &tensor.shape), Ok(Some(_)))
    };
    if let Some(manifest) = manifest
        && manifest.document().tensors.is_empty()
        && !checkpoint.tensors().iter().any(|tensor| matches(manifest, tensor))
    {
        return Err(Error::usage("no rule of the manifest matches a tensor of this model")
            .help("compare the patterns with the names that `iec pack --dry-run` prints without --q4-map"));
    }
    Ok(items)
}

fn decide<'a>(
    checkpoint: &Checkpoint,
    tensor: &'a CanonicalTensor,
    Choices { dtype, form }: Choices,
    manifest: Option<&Manifest>,
) -> Result<PackItem<'a>> {
    // What is not quantized of multi-token prediction keeps its bytes, so that `unpack` gives it back.
    let is_kept = Role::of(&tensor.name) == Role::Prediction;
    let decide = |manifest: &Manifest| match is_kept {
        true => of_prediction(checkpoint, tensor, manifest),
        false => manifest.decide(&tensor.name, &tensor.shape),
    };
    let decision = manifest.map_or(Ok(None), decide)?;
    let (dtype, manifest) = (dtype.filter(|_| !is_kept), manifest.filter(|_| !is_kept));
    let keep = manifest.and_then(|manifest| manifest.keep(&tensor.name));
    let listed = manifest.and_then(|m| m.document().tensors.get(&tensor.name));
    let decided_by = if listed.is_some() { "manifest entry" } else { "manifest rule" };
    let measured = decision.as_ref().and_then(|d| d.metrics.clone());
    let (codes, lost) = codes(checkpoint, tensor, form, keep.is_none() && decision.is_none())?;
    let (store, work, why) = match (decision, codes) {
        (Some(Decision { quant, packed: Some(range), .. }), _) => {
            (Store::Tiled(quant.spec), Encoding::Packed(quant.spec, range), FINISHED.to_string())
        }
        (Some(d), Some((spec, work, why))) if spec == d.quant.spec => (Store::Tiled(spec), work, why),
        (None, Some((spec, work, why))) if keep.is_none() => (Store::Tiled(spec), work, why),
        (_, Some((spec, Encoding::Packed(..), _))) => return Err(refuse_again(tensor, &spec)),
        (Some(d), _) => {
            let again =
                if tensor.is_coded() { format!(", again after {}", tensor.store_name()) } else { String::new() };
            let why = format!("{decided_by}, {}{again}", d.quant.method.name());
            (Store::Tiled(d.quant.spec), Encoding::Quantize(d.quant), why)
        }
        (None, _) => {
            let source = float_type(tensor, form, keep)?;
            let is_float = matches!(tensor.store, Store::Plain(_));
            let target = keep.or(dtype).unwrap_or(source);
            let work = if target == source && is_float { Encoding::Copy } else { Encoding::Convert(target) };
            let why = match listed {
                Some(entry) if !entry.reasons.is_empty() => entry.reasons.join("; "),
                Some(_) => decided_by.to_string(),
                None if lost.is_some() => lost.unwrap_or_default(),
                None if is_kept && !tensor.is_stored() => "kept by --with-mtp".to_string(),
                None if target != source => "--dtype".to_string(),
                None if manifest.is_none() => "as it is".to_string(),
                None if is_weight_matrix(&tensor.name, &tensor.shape) => "no rule".to_string(),
                None => "no weight matrix".to_string(),
            };
            (Store::Plain(target), work, why)
        }
    };
    let recorded = tensor.recorded_metrics().filter(|_| matches!(work, Encoding::Codes(_)));
    let metrics = recorded.cloned().or(measured);
    let planned = PlannedTensor {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        store,
        source_layout: tensor.source_layout().map(str::to_string),
        metrics,
    };
    Ok(PackItem { tensor, planned, work, why })
}

/// Returns the quantization of a matrix in a layer of multi-token prediction: that of the same matrix in the last layer
/// of the model that has it, by a method without statistics, because there are none of these layers. Their results need
/// not be exact.
fn of_prediction(checkpoint: &Checkpoint, tensor: &CanonicalTensor, manifest: &Manifest) -> Result<Option<Decision>> {
    let Some((_, leaf)) = prediction::part(&tensor.name).filter(|_| !tensor.is_coded()) else { return Ok(None) };
    let same = (0..checkpoint.config().n_layers).rev().filter_map(|n| checkpoint.get(&name_in_layer(n, leaf)));
    let Some(like) = same.into_iter().find(|like| like.shape == tensor.shape) else { return Ok(None) };
    let Some(Decision { quant, .. }) = manifest.decide(&like.name, &like.shape)? else { return Ok(None) };
    let is_possible = !quant.method.needs_inputs() && quant.method != Method::Exact;
    let method = if is_possible { quant.method } else { Method::Search };
    Ok(Some(Decision { quant: TensorQuant { method, ..quant }, metrics: None, packed: None }))
}

/// Codes of the source that are taken over: their scheme, how, and the reason.
type Taken = (QuantSpec, Encoding, String);

/// Returns how codes of the source are taken over, and otherwise the reason why they become floats; neither for floats.
/// Codes are exact; quantizing their values again could only lose accuracy. If the manifest decides about a published
/// matrix (`is_free` is false), it is quantized again.
fn codes(
    checkpoint: &Checkpoint,
    tensor: &CanonicalTensor,
    form: PublishedForm,
    is_free: bool,
) -> Result<(Option<Taken>, Option<String>)> {
    if let (Store::Tiled(spec), Some(range)) = (tensor.store, tensor.packed()) {
        return Ok((Some((spec, Encoding::Packed(spec, range.clone()), FINISHED.to_string())), None));
    }
    let name = tensor.store_name();
    let is_coded = tensor.is_coded();
    match form {
        _ if !is_coded || matches!(tensor.store, Store::Plain(_)) && !is_free => return Ok((None, None)),
        PublishedForm::Float => return Ok((None, Some(format!("{name} as floats: --as float")))),
        PublishedForm::Published => {}
    }
    Ok(match checkpoint.native(tensor)? {
        None => (None, None),
        Some(Ok(native)) => {
            let why = format!("{}-bit codes stay as they are", native.spec.scheme.bits());
            (Some((native.spec, Encoding::Codes(native), why)), None)
        }
        Some(Err(why)) => (None, Some(format!("{name} becomes floats: {why}"))),
    })
}

/// Returns the type of the floats of a tensor that is not stored as codes; the values of codes are f32.
///
/// # Errors
/// The tensor holds MXFP4 in the checkpoint, and the manifest keeps it as floats.
fn float_type(tensor: &CanonicalTensor, form: PublishedForm, keep: Option<DType>) -> Result<DType> {
    match tensor.store {
        Store::Plain(source) => Ok(source),
        Store::Tiled(_) if form == PublishedForm::Float || tensor.is_stored() => Ok(DType::F32),
        Store::Tiled(_) => Err(refuse_decoding(tensor, keep)),
    }
}

fn refuse_decoding(tensor: &CanonicalTensor, keep: Option<DType>) -> Error {
    let keep = keep.map_or("", DType::name);
    Error::unsupported(format!("found MXFP4 in the checkpoint, but the manifest keeps it as {keep}"))
        .tensor(&tensor.name)
        .help("leave the tensor out of the manifest; its 4-bit codes are then kept as they are")
}

fn refuse_again(tensor: &CanonicalTensor, spec: &QuantSpec) -> Error {
    Error::unsupported(format!(
        "found finished {} codes in the source, but the manifest requires another quantization",
        spec.scheme.name()
    ))
    .tensor(&tensor.name)
    .help("leave the tensor out of the manifest, or pack from the original weights")
}
