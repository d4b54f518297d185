//! Loads manifests as untrusted input: validates every name, number and pattern before it is used.

use super::recipes::SCHEMA;
use super::{Document, Manifest, Rules, TensorEntry, VERSION, Verdict, older};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::reader::plain_file_name;
use crate::progress;
use crate::quant_spec::QuantFields;
use crate::scheme::TileLayout;
use crate::strict_json;
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// A manifest larger than this is refused before it is parsed.
const LIMIT: u64 = 128 << 20;

/// Names of the fields that an object may have.
type Names = Vec<String>;

/// The known fields, by the object that contains them.
struct Fields {
    document: Names,
    /// Fields of a rule, in addition to the parameters.
    rule: Names,
    /// Quantization parameters, in entries and in rules.
    parameters: Names,
    /// Fields of an entry, in addition to the parameters and the packed ranges.
    entry: Names,
    packed: Names,
}

static FIELDS: LazyLock<Fields> = LazyLock::new(|| {
    let schema: Value = serde_json::from_str(SCHEMA).expect("the schema is JSON");
    let names = |pointer: &str| -> Names {
        let properties = schema.pointer(pointer).and_then(Value::as_object).expect("the schema has these properties");
        properties.keys().cloned().collect()
    };
    Fields {
        document: names("/properties"),
        rule: [names("/$defs/rule/oneOf/0/properties"), names("/$defs/rule/oneOf/1/properties")].concat(),
        parameters: names("/$defs/parameters/properties"),
        entry: names("/$defs/entry/properties"),
        packed: names("/$defs/packed/properties"),
    }
});

/// Advice for a manifest that cannot be read.
const MAKE: &str = "check the path, or make a manifest with `iec ptq --out MANIFEST`";
/// Advice for a manifest with invalid content.
const CORRECT: &str = "correct it (manifests/q4_manifest.schema.json describes every field), or make it with `iec ptq`";

impl Manifest {
    /// Reads and validates a manifest. Relative paths in it start at its directory.
    ///
    /// # Errors
    /// The file is missing, is not a manifest of this version, or has an invalid field.
    pub fn load(path: &Path) -> Result<Manifest> {
        Self::load_with(path, &QuantFields::default())
    }

    /// Reads and validates a manifest; `fields` supplies the parameters that its `defaults` do not set.
    ///
    /// # Errors
    /// The errors of [`Manifest::load`]; or `fields` contradict the parameters of a rule.
    pub fn load_with(path: &Path, fields: &QuantFields) -> Result<Manifest> {
        let text = files::read_limited(path, LIMIT).help(MAKE)?;
        let manifest = Self::parse(&text, path.parent().unwrap_or(Path::new("")));
        let mut manifest = manifest.at(path).help(CORRECT)?;
        if *fields != QuantFields::default() {
            manifest.document.defaults = manifest.document.defaults.or(fields);
            manifest.rules = Rules::compile(&manifest.document.rules, &manifest.document.defaults).at(path)?;
        }
        Ok(Manifest { path: path.to_path_buf(), ..manifest })
    }

    /// Notes that the gate refused the quantization, if the manifest was written all the same.
    pub fn note_refusal(&self) {
        if self.document.refused {
            progress::detail(0, || {
                format!(
                    "note: {}: the gate refused this quantization; its manifest was written with --force",
                    self.path.display()
                )
            });
        }
    }

    /// Validates the text of a manifest that lies in `dir`.
    pub fn parse(text: &[u8], dir: &Path) -> Result<Manifest> {
        let value = match strict_json::parse(text) {
            Ok(value) => value,
            Err(e) => older::lines(text).ok_or_else(|| Error::corrupt(format!("not a quantization manifest: {e}")))?,
        };
        let document = match older::read(&value, dir)? {
            Some(document) => document,
            None => current(&value)?,
        };
        let rules = Rules::compile(&document.rules, &document.defaults)?;
        for file in &document.files {
            plain_file_name(&file.name).tensor("files")?;
        }
        for (name, entry) in &document.tensors {
            entry.check(dir).tensor(name)?;
        }
        Ok(Manifest { document, rules, path: PathBuf::new(), dir: dir.to_path_buf() })
    }
}

/// Reads a manifest in the shape that this program writes.
fn current(value: &Value) -> Result<Document> {
    match value.get("version").and_then(Value::as_u64) {
        Some(v) if v == u64::from(VERSION) => {}
        Some(v) => {
            return Err(Error::unsupported(format!(
                "found version {v}, expected {VERSION}; use the version of iec that wrote it"
            ))
            .tensor("version"));
        }
        None => {
            return Err(Error::corrupt(format!("found no version number, expected {VERSION} as in every manifest"))
                .tensor("version"));
        }
    }
    refuse_unknown_fields(value)?;
    let document = Document::deserialize(value)
        .map_err(|e| Error::corrupt(format!("not a quantization manifest: {e}")))
        .help("manifests/q4_manifest.schema.json describes every field")?;
    for (name, entry) in &document.tensors {
        refuse_half_given(entry, &value["tensors"][name]).tensor(name)?;
    }
    Ok(document)
}

/// Refuses entries with an incomplete set of parameters or ranges: serde's `flatten` would read them as if all were
/// absent.
fn refuse_half_given(entry: &TensorEntry, value: &Value) -> Result<()> {
    let given = |fields: &[String]| fields.iter().any(|field| value.get(field).is_some());
    if given(&FIELDS.parameters) && entry.quant.is_none() {
        return Err(Error::corrupt(
            "quantization parameters are incomplete; expected scheme, group_size, symmetric, scale_dtype and method",
        ));
    }
    if given(&FIELDS.packed) && entry.packed.is_none() {
        return Err(Error::corrupt(
            "packed ranges are incomplete; expected packed_bin, q4_offset, q4_nbytes, scale_bin, scale_offset and \
             scale_nbytes",
        ));
    }
    Ok(())
}

impl TensorEntry {
    /// Checks every number of an entry, and its ranges against the files of `dir`.
    pub(crate) fn check(&self, dir: &Path) -> Result<()> {
        if self.quant.is_some() == self.keep.is_some() {
            return Err(Error::corrupt("expected either quantization parameters or `keep`, found both or neither"));
        }
        if self.count == 0 {
            return Err(Error::corrupt("count: found 0 matrices, expected at least 1"));
        }
        if (self.verdict == Some(Verdict::Kept)) != self.keep.is_some() {
            return Err(Error::corrupt("verdict `kept` belongs to entries with `keep`, and only to them"));
        }
        let Some(quant) = &self.quant else {
            return match self.packed {
                Some(_) => Err(Error::corrupt("found packed bytes of a kept tensor, expected none")),
                None => Ok(()),
            };
        };
        quant.validate()?;
        let layout = TileLayout::new(quant.spec, self.rows, self.cols)?;
        match &self.packed {
            None => Ok(()),
            Some(packed) => packed.check(&layout, self.count, dir),
        }
    }
}

/// Refuses unknown fields, so that a misspelt option is not ignored. (serde cannot refuse unknown fields together with
/// `flatten`.)
fn refuse_unknown_fields(value: &Value) -> Result<()> {
    let Fields { document, rule, parameters, entry, packed } = &*FIELDS;
    known(value, "manifest", &[document])?;
    for (i, value) in value.get("rules").and_then(Value::as_array).into_iter().flatten().enumerate() {
        known(value, &format!("rules[{i}]"), &[rule, parameters])?;
    }
    for (name, value) in value.get("tensors").and_then(Value::as_object).into_iter().flatten() {
        if value.get(BITS).is_some() {
            return Err(Error::corrupt(format!(
                "unknown field `{BITS}`, expected `scheme`; only rules may have `{BITS}`"
            ))
            .tensor(name));
        }
        known(value, name, &[entry, parameters, packed])?;
    }
    Ok(())
}

/// The parameter that is allowed in rules, but not in entries.
const BITS: &str = "bits";

fn known(value: &Value, place: &str, lists: &[&Names]) -> Result<()> {
    let Value::Object(map) = value else {
        return Err(Error::corrupt("found no JSON object, expected one").tensor(place));
    };
    match map.keys().find(|key| !lists.iter().any(|list| list.contains(key))) {
        Some(key) => Err(Error::corrupt(format!("unknown field `{key}`")).tensor(place)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Rule;
    use crate::manifest::{Keep, Metrics};
    use crate::provenance::Gate;
    use crate::quant_spec::{Method, QuantFields, TensorQuant};
    use crate::scheme::{Granularity, QuantSpec, SCHEMES, ScaleType, Scheme};
    use std::collections::BTreeMap;

    fn entry() -> TensorEntry {
        TensorEntry {
            rows: 4,
            cols: 32,
            count: 1,
            quant: Some(TensorQuant { spec: QuantSpec::Q4_0, method: Method::Rtn, clamp: None, percentile: None }),
            keep: None,
            metrics: Some(Metrics {
                cosine_mean: 0.99,
                cosine_min: 0.98,
                relative_rms: 0.1,
                max_abs_error: 0.5,
                output_error: None,
            }),
            verdict: Some(Verdict::Accepted),
            reasons: vec![],
            packed: None,
        }
    }

    fn document() -> Document {
        let kept = TensorEntry { quant: None, keep: Some(Keep::Bf16), verdict: Some(Verdict::Kept), ..entry() };
        Document {
            gate: Some(Gate { cosine: Some(0.99), kl: Some(0.01), ..Gate::default() }),
            tensors: BTreeMap::from([("a".to_string(), entry()), ("b".to_string(), kept)]),
            ..Document::default()
        }
    }

    #[test]
    fn what_is_written_reads_back_equal() {
        let manifest = Manifest::parse(&document().to_json(), Path::new("")).unwrap();
        assert_eq!(*manifest.document(), document());
        assert_eq!(manifest.decide("a", &[4, 32]).unwrap().unwrap().quant.spec, QuantSpec::Q4_0);
        assert!(manifest.decide("b", &[4, 32]).unwrap().is_none());
        assert_eq!(manifest.keep("b"), Some(crate::dtype::DType::BF16));
        assert!(manifest.decide("c", &[4, 32]).unwrap().is_none());
        assert!(manifest.decide("a", &[4, 64]).is_err(), "another shape");
    }

    #[test]
    fn hostile_manifests_are_refused_with_the_place() {
        let with = |edit: &dyn Fn(&mut Value)| {
            let mut value = serde_json::to_value(document()).unwrap();
            edit(&mut value);
            Manifest::parse(&serde_json::to_vec(&value).unwrap(), Path::new("/nowhere"))
        };
        assert!(with(&|_| ()).is_ok());
        let packed = |bin: &str, nbytes: u64| {
            serde_json::json!({"packed_bin": bin, "q4_offset": 0, "q4_nbytes": nbytes,
                "scale_bin": "s.bin", "scale_offset": 0, "scale_nbytes": 8})
        };
        let merge = |v: &mut Value, extra: Value| {
            let entry = v["tensors"]["a"].as_object_mut().unwrap();
            entry.extend(extra.as_object().unwrap().clone());
        };
        type Edit<'a> = &'a dyn Fn(&mut Value);
        let cases: [(&str, Edit<'_>); 13] = [
            ("are incomplete", &|v| drop(v["tensors"]["a"].as_object_mut().unwrap().remove("method"))),
            ("are incomplete", &|v| v["tensors"]["a"]["packed_bin"] = "q.bin".into()),
            ("version 2", &|v| v["version"] = 2.into()),
            ("found no version number", &|v| v["version"] = "1".into()),
            ("unknown field `rool`", &|v| v["rool"] = 1.into()),
            ("unknown field `schem`", &|v| v["tensors"]["a"]["schem"] = "q4_0".into()),
            ("either", &|v| v["tensors"]["a"]["keep"] = "bf16".into()),
            ("count: found 0", &|v| v["tensors"]["a"]["count"] = 0.into()),
            ("0 x 32", &|v| v["tensors"]["a"]["rows"] = 0.into()),
            ("overflows", &|v| v["tensors"]["a"]["rows"] = (u64::MAX / 2).into()),
            ("only", &|v| v["tensors"]["a"]["group_size"] = 64.into()),
            ("plain file name", &|v| merge(v, packed("../../etc/passwd", 64))),
            ("expected 64", &|v| merge(v, packed("q.bin", 65))),
        ];
        for (expected, edit) in cases {
            let message = with(edit).unwrap_err().to_string();
            assert!(message.contains(expected), "`{message}` should say `{expected}`");
        }
    }

    /// Returns the fields of `names` that have no effect on the result of reading `base`, even with a value that is
    /// invalid for every field.
    fn ignored<T: for<'de> Deserialize<'de> + PartialEq>(base: &Value, names: &[&Names]) -> Vec<String> {
        let read = |value: &Value| T::deserialize(value).ok();
        let makes_no_difference = |name: &&String| {
            let mut other = base.clone();
            other[name.as_str()] = serde_json::json!([{"?": [[]]}]);
            read(&other) == read(base)
        };
        names.iter().flat_map(|names| names.iter()).filter(makes_no_difference).cloned().collect()
    }

    #[test]
    fn every_field_of_the_schema_is_read_and_every_field_that_is_written_is_in_it() {
        let Fields { document: of_document, rule, parameters, entry: of_entry, packed } = &*FIELDS;
        let range = serde_json::json!({"packed_bin": "q.bin", "q4_offset": 0, "q4_nbytes": 64, "scale_bin": "s.bin",
            "scale_offset": 0, "scale_nbytes": 8, "zero_offset": 0, "zero_nbytes": 0, "bias": 8});
        let mut written = serde_json::to_value(document()).unwrap();
        let whole = written["tensors"]["a"].as_object_mut().unwrap();
        whole.extend(range.as_object().unwrap().clone());
        let base = Value::Object(whole.clone());
        assert_eq!(ignored::<Document>(&written, &[of_document]), ["$schema"]);
        assert_eq!(ignored::<Rule>(&serde_json::json!({}), &[rule, parameters]), [""; 0]);
        assert_eq!(ignored::<TensorEntry>(&base, &[of_entry, parameters, packed]), [BITS]);
        refuse_unknown_fields(&written).unwrap();
        let fields = QuantFields {
            scheme: Some(Scheme::Int4),
            bits: Some(4),
            group_size: Some(Granularity::Row),
            symmetric: Some(true),
            scale_dtype: Some(ScaleType::F16),
            method: Some(Method::Rtn),
            clamp: Some(1.0),
            percentile: Some(99.0),
        };
        known(&serde_json::to_value(fields).unwrap(), "parameters", &[parameters]).unwrap();
    }

    #[test]
    fn the_schema_names_every_scheme() {
        let schema: Value = serde_json::from_str(SCHEMA).unwrap();
        let names: Vec<&str> = SCHEMES.iter().filter(|row| row.scheme.has_encoder()).map(|row| row.name).collect();
        assert_eq!(schema["$defs"]["parameters"]["properties"]["scheme"]["enum"], serde_json::json!(names));
    }

    #[test]
    fn the_recipes_load_and_decide_as_their_names_promise() {
        let recipe = |text: &str| Manifest::parse(text.as_bytes(), Path::new("")).unwrap();
        let scheme = |manifest: &Manifest, name: &str| {
            manifest.decide(name, &[64, 64]).unwrap().map(|decision| decision.quant.spec.scheme)
        };
        let (attention, experts) = ("model.layers.11.self_attn.o_proj.weight", "model.layers.3.mlp.experts.down_proj");
        let gpt_oss = recipe(include_str!("../../manifests/gpt-oss-20b.json"));
        let tinyllama = recipe(include_str!("../../manifests/tinyllama-1.1b.json"));
        for (manifest, name, expected) in [
            (&gpt_oss, attention, Some(Scheme::Q4_0)),
            (&gpt_oss, "lm_head.weight", Some(Scheme::Q4_0)),
            (&gpt_oss, experts, None),
            (&gpt_oss, "model.layers.3.mlp.router.weight", None),
            (&gpt_oss, "model.embed_tokens.weight", None),
            (&tinyllama, attention, Some(Scheme::Q4_0)),
            (&tinyllama, "model.layers.0.mlp.gate_proj.weight", Some(Scheme::Q4_0)),
            (&tinyllama, "lm_head.weight", Some(Scheme::Int8)),
            (&tinyllama, "model.embed_tokens.weight", None),
        ] {
            assert_eq!(scheme(manifest, name), expected, "{name}");
        }
    }
}
