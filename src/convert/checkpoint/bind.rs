//! Binds every view to source tensors of the right shape and type, which gives the location of each canonical tensor
//! in the source. No tensor of the source may be left over.

use super::{BoundView, CanonicalTensor, output_matrix};
use crate::catalogue::Role;
use crate::convert::arch::{Arch, ExpectedTensor, LeftOut, Naming, View, expected_tensors, is_ignorable};
use crate::convert::published::{Coded, Published};
use crate::convert::source::shards::Shards;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::iebin::Store;
use crate::manifest::Manifest;
use crate::model_config::{Mlp, ModelConfig};
use crate::scheme::QuantSpec;
use std::collections::HashSet;
use std::sync::Arc;

/// Advice for a tensor that the configuration describes and the weights lack.
const INCOMPLETE: &str = "check that the download is complete (`iec verify-source --hf-dir DIR`), and that config.json \
                          belongs to these weights";

/// Advice for a tensor of multi-token prediction that the weights lack.
const WITHOUT_MTP: &str = "leave out --with-mtp, or get all files of a checkpoint that has these layers";

/// Tensors from which those of the model are made.
pub(super) struct Weights<'a> {
    pub shards: &'a Shards,
    /// Quantized matrices, each of several tensors of `shards`.
    pub published: &'a Published,
    /// Manifest whose files have tensors that are not in the weights.
    pub manifest: Option<&'a Manifest>,
}

impl<'a> Weights<'a> {
    /// Finds a tensor by its name in the unquantized model.
    fn get(&self, name: &str) -> Option<SourceForm<'a>> {
        match self.published.get(name) {
            Some(coded) => Some(SourceForm::Coded(coded)),
            None => self.shards.get(name).map(SourceForm::Floats),
        }
    }

    /// Returns true if a tensor of the view exists.
    fn has(&self, view: &View) -> bool {
        match view {
            View::Coded { source } => self.published.get(source).is_some(),
            _ => view.sources().iter().any(|name| self.get(name).is_some()),
        }
    }
}

/// Tensor of the source.
enum SourceForm<'a> {
    Floats(&'a SourceTensor),
    Coded(&'a Arc<Coded>),
}

/// Finds every expected tensor in the source and refuses tensors that are left over, except those of the parts that
/// `left_out` names.
pub(super) fn bind(
    arch: &Arch,
    model: &ModelConfig,
    left_out: &LeftOut,
    weights: &Weights<'_>,
) -> Result<Vec<CanonicalTensor>> {
    let (shards, published) = (weights.shards, weights.published);
    let naming = Naming::of(shards.tensors().map(|tensor| tensor.name.as_str()));
    refuse_exaggeration(model, shards)?;
    let mut used: HashSet<String> = HashSet::new();
    let mut tensors = Vec::new();
    for expected in expected_tensors(model) {
        let views: Vec<View> = arch.views(model, &expected).into_iter().map(|view| naming.view(view)).collect();
        let absent = !views.iter().any(|view| weights.has(view));
        if absent && let Some(packed) = finished(&expected, shards, weights.manifest)? {
            used.insert(expected.name.clone());
            tensors.push(packed);
            continue;
        }
        let tensor = bind_one(views, expected, weights)?;
        used.extend(tensor.source.tensors().into_iter().map(|t| t.name.clone()));
        used.extend(tensor.source.coded().into_iter().map(|coded| coded.name.clone()));
        tensors.push(tensor);
    }
    let output = output_matrix::name(naming);
    let tied_copy = |name: &str| model.tied_embeddings && name == output;
    let ignored = |name: &str| is_ignorable(name) || tied_copy(name) || left_out.part(name).is_some();
    let is_left = |t: &&SourceTensor| !used.contains(&t.name) && !ignored(&t.name) && !published.explains(&t.name);
    let left = shards.tensors().find(|tensor| is_left(tensor) && !published.is_idle_bias(shards, tensor));
    let left_codes = published.names().find(|name| !used.contains(*name) && !ignored(name));
    if let Some(name) = left_codes.filter(|_| left.is_none()) {
        return Err(Error::unsupported(format!("unexpected quantized tensor for {}", model.architecture))
            .tensor(name)
            .help("check that config.json belongs to these weights; no tensor is left out silently"));
    }
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

/// Binds the tensors of multi-token prediction that no tensor of `bound` is made of, and which nothing computes: those
/// of families whose layers are not known, and copies of the embedding and of the output matrix. Shapes are kept.
///
/// # Errors
/// There are no tensors of multi-token prediction, one holds no floats, or `iec unpack` could not give one its name
/// back.
pub(super) fn further_predictions(
    left_out: &LeftOut,
    naming: Naming,
    weights: &Weights<'_>,
    bound: &[CanonicalTensor],
) -> Result<Vec<CanonicalTensor>> {
    let shards = weights.shards;
    let used: HashSet<&str> =
        bound.iter().flat_map(|tensor| tensor.source.tensors()).map(|tensor| tensor.name.as_str()).collect();
    let mut tensors: Vec<CanonicalTensor> = Vec::new();
    for tensor in shards.tensors().filter(|tensor| !used.contains(tensor.name.as_str())) {
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
    if tensors.is_empty() && !bound.iter().any(|tensor| Role::of(&tensor.name) == Role::Prediction) {
        let found = Error::usage("--with-mtp: found no tensors of multi-token prediction in the checkpoint");
        return Err(found.help("leave out --with-mtp"));
    }
    Ok(tensors)
}

/// Refuses a configuration with far more layers or experts than the weights have, because lists of names grow with
/// these numbers.
fn refuse_exaggeration(model: &ModelConfig, shards: &Shards) -> Result<()> {
    let n = shards.tensors.len() + shards.packed.len();
    let layers = model.n_layers + model.prediction_layers;
    if layers > n {
        let found = format!("found {layers} layers in config.json, but only {n} tensors in the checkpoint");
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

fn bind_one(views: Vec<View>, expected: ExpectedTensor, weights: &Weights<'_>) -> Result<CanonicalTensor> {
    let binder = Binder { expected: &expected, weights, shards: weights.shards };
    let there = views.iter().filter(|view| weights.has(view));
    let mut bound = there.map(|view| binder.bind(view, &expected.shape));
    let Some(first) = bound.next() else {
        let mut names = views.iter().map(|v| v.sources().join(" + ")).collect::<Vec<_>>();
        names.dedup();
        let names = names.join(" or ");
        return Err(Error::corrupt(format!("missing from the checkpoint (looked for {names:.200})"))
            .help(if Role::of(&expected.name) == Role::Prediction { WITHOUT_MTP } else { INCOMPLETE })
            .tensor(expected.name));
    };
    // Where one tensor may have either of two shapes, the view that fits is taken.
    let (store, source) = first.or_else(|e| bound.find_map(Result::ok).ok_or(e))?;
    drop(bound);
    Ok(CanonicalTensor { store, source, name: expected.name, shape: expected.shape })
}

struct Binder<'a> {
    expected: &'a ExpectedTensor,
    weights: &'a Weights<'a>,
    shards: &'a Shards,
}

impl<'a> Binder<'a> {
    /// Binds a view that must be of `shape`.
    fn bind(&self, view: &View, shape: &[usize]) -> Result<(Store, BoundView)> {
        let last = shape[shape.len() - 1];
        Ok(match view {
            View::Rows { source: name, first, of } => {
                let whole = [&[*of], &shape[1..]].concat();
                let entry: usize = shape[1..].iter().product();
                match self.found(name)? {
                    SourceForm::Coded(coded) => {
                        let rows = entry / last.max(1);
                        self.coded(coded, &whole, if shape.len() == 2 { [*first, *of] } else { [first * rows, rows] })?
                    }
                    SourceForm::Floats(tensor) => {
                        let dtype = self.float(tensor, &whole)?;
                        let skip = first * entry * dtype.size();
                        (Store::Plain(dtype), BoundView::Straight { tensor: tensor.clone(), skip })
                    }
                }
            }
            View::Slices { source: name, first, of } => {
                let whole = [shape[0], *of, last];
                match self.found(name)? {
                    SourceForm::Coded(coded) => self.coded(coded, &whole, [*first, *of])?,
                    SourceForm::Floats(tensor) => {
                        let store = Store::Plain(self.float(tensor, &whole)?);
                        (store, BoundView::Slices { tensor: tensor.clone(), first: *first, of: *of })
                    }
                }
            }
            View::Coded { source: name } => match self.found(name)? {
                SourceForm::Coded(coded) => self.coded(coded, shape, [0, shape[shape.len() - 2]])?,
                SourceForm::Floats(tensor) => return Err(self.wrong_form(tensor, "quantized codes")),
            },
            View::Transposed { source, stacks } => self.transposed(source, *stacks, shape)?,
            View::Stacked(parts) => {
                assert_eq!(parts.len(), shape[0], "one view for each matrix of {}", self.expected.name);
                let (store, sources) = self.bind_alike(parts, &shape[1..])?;
                (store, BoundView::Stacked(sources))
            }
            View::Joined(parts) => {
                assert!(shape.len() == 2 && shape[0].is_multiple_of(parts.len()), "{}", self.expected.name);
                let rows = shape[0] / parts.len();
                let (store, parts) = self.bind_alike(parts, &[rows, shape[1]])?;
                (store, BoundView::Joined { parts, rows })
            }
            View::Interleaved(parts) => {
                assert!(shape.len() == 3 && shape[1].is_multiple_of(parts.len()), "{}", self.expected.name);
                let (store, sources) = self.bind_alike(parts, &[shape[0], shape[1] / parts.len(), shape[2]])?;
                (store, BoundView::Interleaved(sources))
            }
        })
    }

    /// Binds a matrix that is stored with its last two axes swapped.
    fn transposed(&self, name: &str, stacks: usize, shape: &[usize]) -> Result<(Store, BoundView)> {
        let tensor = match self.found(name)? {
            SourceForm::Floats(tensor) => tensor,
            SourceForm::Coded(coded) => return Err(self.wrong_form(coded.tensors()[0], "floats (in, out)")),
        };
        let mut swapped = shape.to_vec();
        swapped.swap(shape.len() - 1, shape.len() - 2);
        let store = Store::Plain(self.float(tensor, &swapped)?);
        let of = shape[shape.len() - 2];
        let columns = |stack| BoundView::Transposed { tensor: tensor.clone(), first: stack * (of / stacks), of };
        Ok(match stacks {
            1 => (store, columns(0)),
            _ => (store, BoundView::Interleaved((0..stacks).map(columns).collect())),
        })
    }

    /// Binds rows of a quantized tensor, which must be of `shape`; row `r` of matrix `m` is row `m * of + first + r`.
    fn coded(&self, coded: &Arc<Coded>, shape: &[usize], [first, of]: [usize; 2]) -> Result<(Store, BoundView)> {
        if coded.shape != shape {
            let codes = coded.tensors()[0];
            let found =
                format!("found a {} matrix of {:?}, expected {shape:?} from config.json", coded.form, coded.shape);
            return Err(Error::corrupt(found)
                .at(self.shards.path(codes))
                .tensor(&coded.name)
                .help("check that config.json, with its quantization settings, belongs to these weights"));
        }
        let store = if coded.is_final() { Store::Tiled(QuantSpec::MXFP4) } else { Store::Plain(DType::F32) };
        Ok((store, BoundView::Coded { coded: coded.clone(), first, of }))
    }

    /// Binds parts of one shape, which must have one float type. Floats beside quantized parts are widened to f32.
    fn bind_alike(&self, parts: &[View], shape: &[usize]) -> Result<(Store, Vec<BoundView>)> {
        let bound = parts.iter().map(|part| self.bind(part, shape)).collect::<Result<Vec<_>>>()?;
        let (first, source) = bound.first().expect("families put at least one tensor together");
        let (first, first_name) = (*first, source.tensors()[0].name.clone());
        let Some((store, other)) = bound.iter().find(|(store, _)| *store != first) else {
            return Ok((first, bound.into_iter().map(|(_, source)| source).collect()));
        };
        if bound.iter().all(|(_, source)| source.coded().is_empty()) {
            let found = format!("found {}, expected {} as in {first_name}", store.name(), first.name());
            let tensor = other.tensors()[0];
            return Err(Error::unsupported(format!("{found}; both become part of {}", self.expected.name))
                .at(self.shards.path(tensor))
                .tensor(&tensor.name)
                .help("save the checkpoint with one float type for all weights"));
        }
        let widened = |(store, source): (Store, BoundView)| match store {
            Store::Plain(from) if from != DType::F32 => BoundView::Widened { view: Box::new(source), from },
            _ => source,
        };
        Ok((Store::Plain(DType::F32), bound.into_iter().map(widened).collect()))
    }

    fn found(&self, name: &str) -> Result<SourceForm<'a>> {
        let missing = || {
            Error::corrupt(format!("missing from the checkpoint (needed for {})", self.expected.name))
                .tensor(name)
                .help(INCOMPLETE)
        };
        self.weights.get(name).ok_or_else(missing)
    }

    /// Checks that a tensor has floats and this shape; returns its element type.
    fn float(&self, tensor: &SourceTensor, shape: &[usize]) -> Result<DType> {
        if !tensor.dtype.is_float() {
            return Err(self.wrong_form(tensor, "floats"));
        }
        self.require(tensor, tensor.dtype, shape)?;
        Ok(tensor.dtype)
    }

    fn wrong_form(&self, tensor: &SourceTensor, expected: &str) -> Error {
        Error::unsupported(format!("found {} elements, expected {expected}", tensor.dtype))
            .at(self.shards.path(tensor))
            .tensor(&tensor.name)
            .help(
                "the weights are quantized in a way that config.json does not describe; get all files of the same \
                 revision, or a checkpoint with float weights",
            )
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
