//! What must a GGUF file hold to be a model, and in which store does each of its tensors go? Decided before a weight is read.

use super::super::blocks;
use super::super::config::config_json;
use super::super::family::Family;
use super::super::names::{MappedTensor, RowStack, is_vector, map};
use super::super::reader::{Gguf, GgufTensor};
use super::super::tokenizer_in::{TokenizerFiles, tokenizer_config, tokenizer_files};
use super::super::types::GgmlType;
use super::ImportOptions;
use crate::convert::arch::{Arch, ExpectedTensor, Fields, expected_tensors};
use crate::convert::companions::{self, Companions, TOKENIZER};
use crate::convert::json::read_limited;
use crate::dtype::DType;
use crate::error::{Context, Error, Result};
use crate::iebin::{PlannedTensor, Store};
use crate::model_config::ModelConfig;
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::path::Path;

const CONFIG: &str = "config.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Everything but the weights.
pub(super) struct GgufModel<'a> {
    pub(super) gguf: &'a Gguf,
    config_json: Map<String, Value>,
    pub(super) config: ModelConfig,
    expected: Vec<ExpectedTensor>,
    pub(super) mapped: Vec<MappedTensor>,
    /// The tensor of the file for each of `mapped`.
    pub(super) tensors: Vec<&'a GgufTensor>,
    pub(super) tokenizer: Option<TokenizerFiles>,
}

impl<'a> GgufModel<'a> {
    pub(super) fn read(gguf: &'a Gguf, options: &ImportOptions) -> Result<GgufModel<'a>> {
        let family = Family::of_file(gguf.metadata.text("general.architecture")?)?;
        let config_json = config_json(gguf)?;
        let fields = Fields::new(&config_json);
        let config = Arch::of(&fields)?.model_config(&fields, None)?;
        if config.n_layers > gguf.tensors.len() {
            let found = format!("{} layers, but the file has {} tensors", config.n_layers, gguf.tensors.len());
            return Err(Error::corrupt(found).tensor("block_count"));
        }
        let by_name: HashMap<&str, &GgufTensor> = gguf.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let expected = expected_tensors(&config);
        let fused = |name: &str| if name.contains(".attn_qkv.") { by_name.contains_key(name) } else { family.fused };
        let mapped = map(family, &config, &expected, fused)?;
        let tensors = mapped.iter().map(|m| bind(m, &by_name)).collect::<Result<Vec<_>>>()?;
        refuse_leftovers(gguf, &mapped)?;
        let tokenizer = read_tokenizer(gguf, config.vocab, options.tokenizer.as_deref())?;
        Ok(GgufModel { gguf, config_json, config, expected, mapped, tensors, tokenizer })
    }

    /// The small files of the pack.
    pub(super) fn companions(&self) -> Companions {
        let pretty = |value: &Value| serde_json::to_vec_pretty(value).expect("JSON values serialize");
        let mut files = vec![(CONFIG, pretty(&Value::Object(self.config_json.clone())))];
        if let Some(TokenizerFiles { tokenizer, config }) = &self.tokenizer {
            files.push((TOKENIZER, tokenizer.clone()));
            files.push((TOKENIZER_CONFIG, pretty(config)));
        }
        Companions::new(files)
    }

    pub(super) fn plan(&self, dtype: Option<DType>) -> Result<Vec<ImportedTensor>> {
        let mut sources: Vec<Vec<(usize, usize)>> = vec![Vec::new(); self.expected.len()];
        for (number, mapped) in self.mapped.iter().enumerate() {
            for (part, canonical) in mapped.canonical.iter().enumerate() {
                sources[*canonical].push((number, part));
            }
        }
        self.expected.iter().zip(sources).map(|(e, sources)| self.plan_one(e, sources, dtype).tensor(&e.name)).collect()
    }

    fn plan_one(
        &self,
        expected: &ExpectedTensor,
        sources: Vec<(usize, usize)>,
        dtype: Option<DType>,
    ) -> Result<ImportedTensor> {
        let kinds: Vec<GgmlType> = sources.iter().map(|(number, _)| self.tensors[*number].kind).collect();
        for ((number, _), kind) in sources.iter().zip(&kinds) {
            blocks::check_supported(*kind).tensor(&self.mapped[*number].name)?;
        }
        let one = kinds.iter().all(|kind| *kind == kinds[0]);
        let plus_one = sources.iter().any(|(number, _)| self.mapped[*number].plus_one);
        let vector = is_vector(&expected.name, &expected.shape);
        let float = blocks::plain(kinds[0]).filter(|_| one && !plus_one).unwrap_or(DType::F32);
        let store = match blocks::scheme(kinds[0]) {
            Some(spec) if one && !vector => Store::Tiled(spec),
            _ => Store::Plain(dtype.unwrap_or(float)),
        };
        let planned = PlannedTensor {
            name: expected.name.clone(),
            shape: expected.shape.clone(),
            store,
            source_layout: None,
            metrics: None,
        };
        let rows = RowStack::new(&expected.shape, vector);
        Ok(ImportedTensor { planned, rows, vector, sources, kinds, plus_one })
    }
}

fn bind<'a>(mapped: &MappedTensor, by_name: &HashMap<&str, &'a GgufTensor>) -> Result<&'a GgufTensor> {
    let Some(tensor) = by_name.get(mapped.name.as_str()) else {
        return Err(Error::corrupt(format!("missing from the file; the model needs it with shape {:?}", mapped.shape))
            .tensor(&mapped.name));
    };
    if tensor.shape != mapped.shape {
        let found = format!("shape {:?}, but the metadata says {:?}", tensor.shape, mapped.shape);
        return Err(Error::corrupt(found).tensor(&mapped.name));
    }
    Ok(tensor)
}

/// Refuses tensors without a place in the model, but for those that became part of the configuration.
fn refuse_leftovers(gguf: &Gguf, mapped: &[MappedTensor]) -> Result<()> {
    let used: HashSet<&str> = mapped.iter().map(|m| m.name.as_str()).collect();
    let read_already = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];
    let left =
        gguf.tensors.iter().find(|t| !used.contains(t.name.as_str()) && !read_already.contains(&t.name.as_str()));
    match left {
        Some(t) => Err(Error::unsupported("the model has no place for this tensor").tensor(&t.name)),
        None => Ok(()),
    }
}

fn read_tokenizer(gguf: &Gguf, rows: usize, given: Option<&Path>) -> Result<Option<TokenizerFiles>> {
    if let Some(path) = given {
        let tokenizer = read_limited(path)?;
        companions::check(TOKENIZER, &tokenizer).at(path)?;
        return Ok(Some(TokenizerFiles { tokenizer, config: tokenizer_config(&gguf.metadata)? }));
    }
    match gguf.metadata.text_opt("tokenizer.ggml.model")? {
        None | Some("none" | "no_vocab") => Ok(None),
        Some(_) => tokenizer_files(&gguf.metadata, rows).map(Some),
    }
}

/// One tensor of the pack and where its rows come from.
#[derive(Debug)]
pub(super) struct ImportedTensor {
    pub(super) planned: PlannedTensor,
    pub(super) rows: RowStack,
    pub(super) vector: bool,
    /// Numbers of the mapped tensors, and which part of them it is.
    pub(super) sources: Vec<(usize, usize)>,
    /// Their types.
    pub(super) kinds: Vec<GgmlType>,
    pub(super) plus_one: bool,
}

impl ImportedTensor {
    /// The type that had to be decoded, because no scheme of ours means the same.
    pub(super) fn decoded_from(&self) -> Option<GgmlType> {
        let coded = self.kinds.iter().find(|kind| blocks::plain(**kind).is_none());
        coded.copied().filter(|_| matches!(self.planned.store, Store::Plain(_)))
    }

    /// True when values may have changed.
    pub(super) fn is_rounded(&self) -> bool {
        let Store::Plain(to) = self.planned.store else { return false };
        self.kinds.iter().any(|kind| match (blocks::plain(*kind), to) {
            (Some(from), to) if from == to => false,
            (Some(DType::F16 | DType::BF16) | None, DType::F32) => false,
            (Some(DType::F32), DType::F32) => false,
            _ => true,
        })
    }
}
