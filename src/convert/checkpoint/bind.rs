//! Binds every view to source tensors of the right shape and type, which gives the location of each canonical tensor
//! in the source. No tensor of the source may be left over.

use super::{BoundView, CanonicalTensor, output_matrix};
use crate::convert::arch::{Arch, ExpectedTensor, LeftOut, Naming, View, expected_tensors, is_ignorable};
use crate::convert::source::shards::Shards;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::iebin::Store;
use crate::manifest::Manifest;
use crate::model_config::{Mlp, ModelConfig};
use crate::scheme::{BLOCK, QuantSpec};
use std::collections::HashSet;

/// Advice for a tensor that the configuration describes and the weights lack.
const INCOMPLETE: &str = "check that the download is complete (`iec verify-source --hf-dir DIR`), and that config.json \
                          belongs to these weights";

/// Finds every expected tensor in the source and refuses tensors that are left over, except those of the parts that
/// `left_out` names. Tensors that are not in the weights may be in the files of `manifest`.
pub(super) fn bind(
    arch: &Arch,
    model: &ModelConfig,
    left_out: &LeftOut,
    shards: &Shards,
    manifest: Option<&Manifest>,
) -> Result<Vec<CanonicalTensor>> {
    let naming = Naming::of(shards.tensors().map(|tensor| tensor.name.as_str()));
    refuse_exaggeration(model, shards)?;
    let mut used: HashSet<String> = HashSet::new();
    let mut tensors = Vec::new();
    for expected in expected_tensors(model) {
        let views: Vec<View> = arch.views(model, &expected).into_iter().map(|view| naming.view(view)).collect();
        let absent = !views.iter().any(|view| view.sources().iter().any(|name| shards.get(name).is_some()));
        if absent && let Some(packed) = finished(&expected, shards, manifest)? {
            used.insert(expected.name.clone());
            tensors.push(packed);
            continue;
        }
        let tensor = bind_one(views, expected, shards)?;
        used.extend(tensor.source.tensors().into_iter().map(|t| t.name.clone()));
        tensors.push(tensor);
    }
    let output = output_matrix::name(naming);
    let tied_copy = |name: &str| model.tied_embeddings && name == output;
    let ignored = |name: &str| is_ignorable(name) || tied_copy(name) || left_out.part(name).is_some();
    let left = shards.tensors().find(|t| !used.contains(&t.name) && !ignored(&t.name));
    if let Some(name) = shards.packed.keys().find(|name| !used.contains(*name) && !tied_copy(name)) {
        let found = format!("unexpected tensor for {}", model.architecture);
        return Err(Error::unsupported(found)
            .tensor(name)
            .help("check that config.json belongs to this pack; no tensor is left out silently"));
    }
    match left {
        Some(t) => Err(Error::unsupported(format!("unexpected tensor for {}", model.architecture))
            .at(shards.path(t))
            .tensor(&t.name)
            .help("check that config.json belongs to these weights; no tensor is left out silently")),
        None => Ok(tensors),
    }
}

/// Binds the tensors of multi-token prediction, which keep their shapes, to their canonical names.
///
/// # Errors
/// There are none, one holds no floats, or `iec unpack` could not give one its name back.
pub(super) fn predictions(left_out: &LeftOut, naming: Naming, shards: &Shards) -> Result<Vec<CanonicalTensor>> {
    let mut tensors: Vec<CanonicalTensor> = Vec::new();
    for tensor in shards.tensors() {
        let Some(name) = left_out.prediction_name(&tensor.name) else { continue };
        let is_lost = left_out.prediction_source(&name, naming) != tensor.name;
        if is_lost || !tensor.dtype.is_float() || !(1..=3).contains(&tensor.shape.len()) || name.starts_with("model.") {
            let found = format!("found {} {:?} in multi-token prediction", tensor.dtype, tensor.shape);
            return Err(Error::unsupported(format!(
                "{found}, expected floats of one to three axes under a usual name"
            ))
            .at(shards.path(tensor))
            .tensor(&tensor.name)
            .help("leave out --with-mtp"));
        }
        tensors.push(CanonicalTensor {
            name,
            shape: tensor.shape.clone(),
            store: Store::Plain(tensor.dtype),
            source: BoundView::Straight { tensor: tensor.clone(), skip: 0 },
        });
    }
    if tensors.is_empty() {
        let found = Error::usage("--with-mtp: found no tensors of multi-token prediction in the checkpoint");
        return Err(found.help("leave out --with-mtp"));
    }
    Ok(tensors)
}

/// Refuses a configuration with far more layers or experts than the weights have, because lists of names grow with
/// these numbers.
fn refuse_exaggeration(model: &ModelConfig, shards: &Shards) -> Result<()> {
    let n = shards.tensors.len() + shards.packed.len();
    if model.n_layers > n {
        let found = format!("found {} layers in config.json, but only {n} tensors in the checkpoint", model.n_layers);
        return Err(Error::corrupt(found).tensor("num_hidden_layers"));
    }
    let Mlp::Moe { experts, .. } = model.mlp else { return Ok(()) };
    if experts > n && !shards.tensors().any(|t| t.shape.first() == Some(&experts)) {
        let found = format!(
            "found {experts} experts in config.json, but only {n} tensors in the checkpoint, none of which is a stack \
             of {experts}"
        );
        return Err(Error::corrupt(found).tensor("num_experts"));
    }
    Ok(())
}

/// Binds a tensor whose finished codes are in the source, or in the files of a manifest; returns `None` if neither has
/// such codes.
fn finished(
    expected: &ExpectedTensor,
    shards: &Shards,
    manifest: Option<&Manifest>,
) -> Result<Option<CanonicalTensor>> {
    let of_manifest = || manifest?.finished(&expected.name);
    let Some(packed) = shards.packed.get(&expected.name).cloned().or_else(of_manifest) else {
        if shards.unexplained.contains(&expected.name) {
            return Err(Error::unsupported("found 4-bit codes without a record of their scales")
                .tensor(&expected.name)
                .help("give the manifest with which these codes were packed: `iec pack --q4-map MANIFEST`"));
        }
        return Ok(None);
    };
    if packed.shape != expected.shape {
        let found = format!("found shape {:?}, expected {:?} from config.json", packed.shape, expected.shape);
        return Err(Error::corrupt(found).tensor(&expected.name));
    }
    Ok(Some(CanonicalTensor {
        name: expected.name.clone(),
        shape: expected.shape.clone(),
        store: Store::Tiled(packed.spec),
        source: BoundView::Packed(packed),
    }))
}

fn bind_one(views: Vec<View>, expected: ExpectedTensor, shards: &Shards) -> Result<CanonicalTensor> {
    let binder = Binder { expected: &expected, shards };
    let there = views.iter().filter(|view| view.sources().iter().any(|name| shards.get(name).is_some()));
    let mut bound = there.map(|view| binder.bind(view, &expected.shape));
    let Some(first) = bound.next() else {
        let names = views.iter().map(|v| v.sources().join(" + ")).collect::<Vec<_>>().join(" or ");
        return Err(Error::corrupt(format!("missing from the checkpoint (looked for {names:.200})"))
            .tensor(expected.name)
            .help(INCOMPLETE));
    };
    // Where one tensor may have either of two shapes, the view that fits is taken.
    let (store, source) = first.or_else(|e| bound.find_map(Result::ok).ok_or(e))?;
    drop(bound);
    Ok(CanonicalTensor { store, source, name: expected.name, shape: expected.shape })
}

struct Binder<'a> {
    expected: &'a ExpectedTensor,
    shards: &'a Shards,
}

impl Binder<'_> {
    /// Binds a view that must be of `shape`.
    fn bind(&self, view: &View, shape: &[usize]) -> Result<(Store, BoundView)> {
        let (lead, last) = (&shape[..shape.len() - 1], shape[shape.len() - 1]);
        Ok(match view {
            View::Rows { source: name, first, of } => {
                let tensor = self.source(name)?;
                let dtype = self.float(tensor, &[&[*of], &shape[1..]].concat())?;
                let entry: usize = shape[1..].iter().product();
                (
                    Store::Plain(dtype),
                    BoundView::Straight { tensor: tensor.clone(), skip: first * entry * dtype.size() },
                )
            }
            View::Slices { source: name, first, of } => {
                let tensor = self.source(name)?;
                let dtype = self.float(tensor, &[shape[0], *of, last])?;
                (Store::Plain(dtype), BoundView::Slices { tensor: tensor.clone(), first: *first, of: *of })
            }
            View::Transposed { source: name, stacks } => {
                let tensor = self.source(name)?;
                let mut swapped = shape.to_vec();
                swapped.swap(shape.len() - 1, shape.len() - 2);
                let store = Store::Plain(self.float(tensor, &swapped)?);
                let of = shape[shape.len() - 2];
                let columns =
                    |stack| BoundView::Transposed { tensor: tensor.clone(), first: stack * (of / stacks), of };
                match stacks {
                    1 => (store, columns(0)),
                    _ => (store, BoundView::Interleaved((0..*stacks).map(columns).collect())),
                }
            }
            View::Mxfp4 { blocks, scales } => {
                let (blocks, scales) = (self.source(blocks)?, self.source(scales)?);
                if !last.is_multiple_of(BLOCK) {
                    let found = format!("found {last} columns, expected a multiple of {BLOCK} for MXFP4 blocks");
                    return Err(Error::corrupt(found).tensor(&blocks.name));
                }
                self.require(blocks, DType::U8, &[lead, &[last / BLOCK, BLOCK / 2]].concat())?;
                self.require(scales, DType::U8, &[lead, &[last / BLOCK]].concat())?;
                (Store::Tiled(QuantSpec::MXFP4), BoundView::Mxfp4 { blocks: blocks.clone(), scales: scales.clone() })
            }
            View::Stacked(parts) => {
                assert_eq!(parts.len(), shape[0], "one view for each matrix of {}", self.expected.name);
                let (store, sources) = self.bind_alike(parts, &shape[1..])?;
                (store, BoundView::Stacked(sources))
            }
            View::Interleaved(parts) => {
                assert!(shape.len() == 3 && shape[1].is_multiple_of(parts.len()), "{}", self.expected.name);
                let (store, sources) = self.bind_alike(parts, &[shape[0], shape[1] / parts.len(), shape[2]])?;
                (store, BoundView::Interleaved(sources))
            }
        })
    }

    /// Binds parts of one shape, which must have one float type.
    fn bind_alike(&self, parts: &[View], shape: &[usize]) -> Result<(Store, Vec<BoundView>)> {
        let mut sources: Vec<BoundView> = Vec::with_capacity(parts.len());
        let mut first = None;
        for part in parts {
            let (store, source) = self.bind(part, shape)?;
            let (Store::Plain(dtype), Store::Plain(expected)) = (store, *first.get_or_insert(store)) else {
                unreachable!("families put floats together only");
            };
            if dtype != expected {
                let found = format!("found {dtype}, expected {expected} as in {}", sources[0].tensors()[0].name);
                let tensor = source.tensors()[0];
                return Err(Error::unsupported(format!("{found}; both become part of {}", self.expected.name))
                    .at(self.shards.path(tensor))
                    .tensor(&tensor.name)
                    .help("save the checkpoint with one float type for all weights"));
            }
            sources.push(source);
        }
        Ok((first.expect("families put at least one tensor together"), sources))
    }

    fn source(&self, name: &str) -> Result<&SourceTensor> {
        let missing = || {
            Error::corrupt(format!("missing from the checkpoint (needed for {})", self.expected.name))
                .tensor(name)
                .help(INCOMPLETE)
        };
        self.shards.get(name).ok_or_else(missing)
    }

    /// Checks that a tensor has floats and this shape; returns its element type.
    fn float(&self, tensor: &SourceTensor, shape: &[usize]) -> Result<DType> {
        if !tensor.dtype.is_float() {
            let found = format!("found {} elements, expected floats", tensor.dtype);
            return Err(Error::unsupported(found)
                .at(self.shards.path(tensor))
                .tensor(&tensor.name)
                .help("convert from a checkpoint with float weights; of quantized ones only MXFP4 is supported"));
        }
        self.require(tensor, tensor.dtype, shape)?;
        Ok(tensor.dtype)
    }

    fn require(&self, tensor: &SourceTensor, dtype: DType, shape: &[usize]) -> Result<()> {
        if tensor.shape == shape && tensor.dtype == dtype {
            return Ok(());
        }
        let found = format!("found {} {:?}, expected {dtype} {shape:?} from config.json", tensor.dtype, tensor.shape);
        Err(Error::corrupt(found)
            .at(self.shards.path(tensor))
            .tensor(&tensor.name)
            .help("check that config.json belongs to these weights"))
    }
}
