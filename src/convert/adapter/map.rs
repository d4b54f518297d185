//! Maps the modules of an adapter to the canonical tensors of a model.

use super::config::AdapterConfig;
use super::experts;
use super::modules::{ModulePart, Modules, Values};
use crate::adapter::{Change, LowRank, transposed};
use crate::catalogue::Role;
use crate::convert::arch::{Arch, ExpectedTensor, View, expected_tensors, tower};
use crate::error::{Error, Result};
use crate::model_config::ModelConfig;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// Advice for a module that does not fit the model.
pub(super) const WRONG_BASE: &str = "the adapter was trained for another model; name the pack of its base model";

/// Inputs of the mapping.
pub(super) struct Mapper<'a> {
    pub settings: &'a AdapterConfig,
    pub arch: &'a Arch,
    pub model: &'a ModelConfig,
    pub modules: &'a Modules,
    /// Modules whose changes were found.
    pub used: RefCell<BTreeSet<String>>,
}

/// Rows of a source tensor that a canonical matrix consists of.
#[derive(Clone, Copy)]
struct Rows {
    first: usize,
    count: usize,
    /// Rows of the source tensor.
    of: usize,
}

/// Returns the tensors that an adapter may change. With tied embeddings they include the output matrix, since it may be
/// changed alone.
pub(super) fn expected(model: &ModelConfig) -> Vec<ExpectedTensor> {
    let mut expected = expected_tensors(model);
    expected.retain(|tensor| Role::of(&tensor.name) != Role::Prediction);
    if model.tied_embeddings {
        expected.push(ExpectedTensor { name: "lm_head.weight".into(), shape: vec![model.vocab, model.hidden] });
    }
    expected
}

impl Mapper<'_> {
    /// Returns the changes of all canonical tensors.
    ///
    /// # Errors
    /// A module is no matrix of the model, or a part of it has another shape.
    pub fn map(&self) -> Result<BTreeMap<String, Vec<Change>>> {
        let mut changes = BTreeMap::new();
        for tensor in expected(self.model).iter().filter(|tensor| tensor.shape.len() > 1) {
            let found = self.tensor(tensor)?;
            if found.iter().any(|change| !change.is_empty()) {
                changes.insert(tensor.name.clone(), found);
            }
        }
        let used = self.used.borrow();
        // Text does not use the parts of a wrapper for images and sound; `Summary::unused` names them.
        match self.modules.keys().find(|name| !used.contains(*name) && tower(name).is_none()) {
            Some(name) => Err(Error::unsupported(format!(
                "found changes of a module that is no matrix of {}",
                self.model.architecture
            ))
            .tensor(name)
            .help(WRONG_BASE)),
            None => Ok(changes),
        }
    }

    /// Returns the changes of a canonical tensor: one, one per expert, or none.
    fn tensor(&self, tensor: &ExpectedTensor) -> Result<Vec<Change>> {
        if let Some(changes) = experts::of_parameter(self, tensor)? {
            return Ok(changes);
        }
        // The embedding of a model with tied embeddings may be saved under the name of the output matrix; an adapter
        // tells the two apart.
        let views = match tensor.name.as_str() {
            "model.embed_tokens.weight" | "lm_head.weight" => {
                vec![View::Rows { source: tensor.name.clone(), first: 0, of: tensor.shape[0] }]
            }
            _ => self.arch.views(self.model, tensor),
        };
        for view in views {
            let changes = self.view(&view, &tensor.shape)?;
            if changes.iter().any(|change| !change.is_empty()) {
                return Ok(changes);
            }
        }
        Ok(Vec::new())
    }

    fn view(&self, view: &View, shape: &[usize]) -> Result<Vec<Change>> {
        match view {
            View::Rows { source, first, of } if shape.len() == 2 => {
                let rows = Rows { first: *first, count: shape[0], of: *of };
                Ok(self.source(source, rows, shape[1])?.into_iter().collect())
            }
            View::Stacked(parts) => {
                let changes = parts.iter().map(|part| Ok(self.view(part, &shape[1..])?.pop().unwrap_or_default()));
                changes.collect()
            }
            View::Joined(parts) => {
                let part = [shape[0] / parts.len(), shape[1]];
                let changes = parts.iter().map(|view| Ok(self.view(view, &part)?.pop().unwrap_or_default()));
                Ok(vec![joined(changes.collect::<Result<Vec<Change>>>()?)])
            }
            View::Interleaved(stacks) => {
                let part = [shape[0], shape[1] / stacks.len(), shape[2]];
                let stacks = stacks.iter().map(|stack| self.view(stack, &part)).collect::<Result<Vec<_>>>()?;
                (0..shape[0]).map(|i| interleaved(stacks.iter().map(|stack| stack.get(i)).collect(), part[1])).collect()
            }
            View::Rows { .. } | View::Slices { .. } | View::Transposed { .. } | View::Coded { .. } => Ok(Vec::new()),
        }
    }

    /// Returns the change of some rows of a source tensor with `cols` columns, if its module is changed.
    fn source(&self, source: &str, rows: Rows, cols: usize) -> Result<Option<Change>> {
        let Some(name) = self.known_name(source.strip_suffix(".weight").unwrap_or(source)) else { return Ok(None) };
        let parts = &self.modules[&name];
        self.used.borrow_mut().insert(name.clone());
        let part = |part: ModulePart| parts.get(&part);
        let sized = |part: ModulePart, expected: &[usize]| sized(parts.get(&part), expected, &name, part);
        let is_embedding = part(ModulePart::EmbeddingA).is_some() || part(ModulePart::EmbeddingB).is_some();
        let pair = if is_embedding {
            (ModulePart::EmbeddingA, ModulePart::EmbeddingB)
        } else {
            (ModulePart::A, ModulePart::B)
        };
        let low_rank = match (part(pair.0), part(pair.1)) {
            (None, None) => None,
            (Some(a), Some(b)) => Some(self.low_rank(&name, is_embedding, [a, b], rows, cols)?),
            _ => return Err(incomplete(&name)),
        };
        let added = sized(ModulePart::BiasOfB, &[rows.of])?.map(|bias| {
            let scale = low_rank.as_ref().map_or(0.0, |factors| factors.scale);
            bias.values[rows.first..][..rows.count].iter().map(|x| x * scale).collect()
        });
        if added.is_some() && !self.settings.lora_bias {
            return Err(Error::corrupt("found a bias of lora_B, but `lora_bias` is not true").tensor(name));
        }
        if part(ModulePart::Weight).is_some() && !["embed_tokens", "lm_head"].iter().any(|last| name.ends_with(last)) {
            let found = "found a whole weight, which is supported for embed_tokens and lm_head only";
            return Err(Error::unsupported(found).tensor(name));
        }
        let vector = |values: &Values| values.values[rows.first..][..rows.count].to_vec();
        let magnitude = match is_embedding {
            true => sized(ModulePart::Magnitude, &[cols])?.map(|values| values.values.clone()),
            false => sized(ModulePart::Magnitude, &[rows.of])?.map(vector),
        };
        if magnitude.is_some() != (self.settings.dora && low_rank.is_some()) {
            let found = if magnitude.is_some() { "a magnitude vector, but" } else { "no magnitude vector, although" };
            return Err(Error::corrupt(format!("found {found} `use_dora` is {}", self.settings.dora)).tensor(name));
        }
        Ok(Some(Change {
            low_rank,
            magnitude,
            replaced: sized(ModulePart::Weight, &[rows.of, cols])?
                .map(|weight| weight.values[rows.first * cols..][..rows.count * cols].to_vec()),
            added,
            bias: sized(ModulePart::Bias, &[rows.of])?.map(vector),
        }))
    }

    /// Returns the name under which a module is changed: its own, or that of another version of `transformers`.
    pub fn known_name(&self, module: &str) -> Option<String> {
        let names = [
            module.to_string(),
            module.replace(".block_sparse_moe.", ".mlp."),
            module.replace(".mlp.router", ".mlp.gate"),
            // Adapters of wrappers name the modules of the language model inside.
            module.replacen("model.", "model.language_model.", 1),
            format!("language_model.{module}"),
        ];
        names.into_iter().find(|name| self.modules.contains_key(name))
    }

    /// Returns the factors of some rows of a module. Those of an embedding are transposed.
    fn low_rank(
        &self,
        name: &str,
        is_embedding: bool,
        [a, b]: [&Values; 2],
        rows: Rows,
        cols: usize,
    ) -> Result<LowRank> {
        let (rank, found) = match (a.matrix(), b.matrix()) {
            (Some((rank, of)), Some((hidden, other))) if is_embedding => (rank, (rank == other, of, hidden)),
            (Some((rank, cols)), Some((of, other))) => (rank, (rank == other, of, cols)),
            _ => return Err(Error::corrupt("found factors that are no matrices").tensor(name)),
        };
        if found != (true, rows.of, cols) {
            let expected = format!("expected lora_A (r, in) and lora_B (out, r) for a matrix of {} x {cols}", rows.of);
            let found = format!("found lora_A {:?} and lora_B {:?}, {expected}", a.shape, b.shape);
            return Err(Error::corrupt(found).tensor(name).help(WRONG_BASE));
        }
        let key = self.settings.key(name);
        self.settings.check_rank(&key, rank)?;
        let scale = self.settings.scale(&key, rank);
        Ok(match is_embedding {
            true => LowRank {
                rank,
                scale,
                a: transposed(&b.values, cols, rank),
                b: transposed(&a.values, rank, rows.of),
                dtype: a.dtype,
                int8: [None, None],
            },
            false => LowRank {
                rank,
                scale,
                a: a.values.clone(),
                b: b.values[rows.first * rank..][..rows.count * rank].to_vec(),
                dtype: a.dtype,
                int8: [None, None],
            },
        })
    }
}

/// Checks the shape of a part that may be absent.
fn sized<'a>(
    found: Option<&'a Values>,
    expected: &[usize],
    name: &str,
    part: ModulePart,
) -> Result<Option<&'a Values>> {
    match found {
        Some(values) if values.shape != expected => {
            let found = format!("{part:?}: found shape {:?}, expected {expected:?}", values.shape);
            Err(Error::corrupt(found).tensor(name).help(WRONG_BASE))
        }
        found => Ok(found),
    }
}

pub(super) fn incomplete(name: &str) -> Error {
    Error::corrupt("found only one of lora_A and lora_B").tensor(name).help("save the adapter again with PEFT")
}

/// Joins the changes of ranges of the rows of one module, which have the same factors A.
fn joined(parts: Vec<Change>) -> Change {
    let mut parts = parts.into_iter();
    let mut whole = parts.next().unwrap_or_default();
    for part in parts {
        if let (Some(to), Some(from)) = (&mut whole.low_rank, part.low_rank) {
            to.b.extend(from.b);
        }
        for (to, from) in [
            (&mut whole.magnitude, part.magnitude),
            (&mut whole.replaced, part.replaced),
            (&mut whole.added, part.added),
            (&mut whole.bias, part.bias),
        ] {
            to.iter_mut().zip(from).for_each(|(to, from)| to.extend(from));
        }
    }
    whole
}

/// Joins the changes of matrices of `rows` rows to that of the matrix with their rows in turn: the factors A are
/// stacked, and the rows of B have zeros for those of the others.
fn interleaved(parts: Vec<Option<&Change>>, rows: usize) -> Result<Change> {
    let present = || parts.iter().flatten().filter_map(|change| change.low_rank.as_ref());
    let plain = |change: &&Change| {
        change.low_rank.is_some() && **change == Change { low_rank: change.low_rank.clone(), ..Change::default() }
    };
    if let Some(other) = parts.iter().flatten().find(|change| !change.is_empty() && !plain(change)) {
        let what = if other.magnitude.is_some() { "DoRA" } else { "a bias or a replaced weight" };
        return Err(Error::unsupported(format!("found {what} in experts, expected LoRA")));
    }
    let Some(first) = present().next() else { return Ok(Change::default()) };
    let rank = present().map(|factors| factors.rank).sum();
    let b = vec![0.0; rows * parts.len() * rank];
    let mut joined = LowRank { rank, scale: 1.0, a: Vec::new(), b, dtype: first.dtype, int8: [None, None] };
    for (turn, part) in parts.iter().enumerate() {
        let Some(factors) = part.and_then(|change| change.low_rank.as_ref()) else { continue };
        let before = joined.a.len() / (first.a.len() / first.rank);
        joined.a.extend(&factors.a);
        for row in 0..rows {
            let to = &mut joined.b[(row * parts.len() + turn) * rank + before..][..factors.rank];
            let from = &factors.b[row * factors.rank..][..factors.rank];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from * factors.scale);
        }
    }
    Ok(Change { low_rank: Some(joined), ..Change::default() })
}
