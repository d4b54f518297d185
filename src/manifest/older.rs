//! Reads manifests in the shapes that older tools wrote and converts them to the current [`Document`].
//!
//! | shape | meaning |
//! |---|---|
//! | `{version, rules: [{pattern, dtype, group, zero, scale}]}` | quantizes the tensors whose names match |
//! | `{defaults, rules: [{include_re}, {exclude_re}]}` | the same; an exclusion overrides all includes |
//! | `{name: entry}` | the finished bytes of each tensor |
//! | `[{name, …entry}]`, `{name, …entry}` or one such object per line | the same |
//!
//! An entry names the files of its codes and scales, with or without byte ranges in them. Without ranges, a file
//! contains the tensors that name it one after another, in the order of the manifest. Directories in file names are
//! dropped: the files lie in the directory of the manifest.

use super::packed::length_beside;
use super::{Document, PackedJson, Rule, TensorEntry};
use crate::error::{Context, Error, Result};
use crate::iebin::int4::{Int4Terms, TERMS, granularity, scale_type};
use crate::quant_spec::{Method, QuantFields, TensorQuant};
use crate::scheme::{SCHEMES, SchemeInfo, TileLayout};
use crate::strict_json;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

const ENTRY: &[&str] = &[
    "name",
    "rows",
    "cols",
    "shape",
    "int4_bin",
    "packed_bin",
    "scale_bin",
    "q4_offset",
    "q4_nbytes",
    "scale_offset",
    "scale_nbytes",
];
const RULE: &[&str] = &[
    "pattern",
    "include_re",
    "exclude_re",
    "dtype",
    "bits",
    "group",
    "group_size",
    "per",
    "zero",
    "scale",
    "symmetric",
    "scale_dtype",
];

type Object = Map<String, Value>;

/// Converts a manifest of an older tool to a document; returns `None` for a manifest in the current shape.
///
/// # Errors
/// A field is unknown, or the length of a file does not match the entries.
pub(super) fn read(value: &Value, dir: &Path) -> Result<Option<Document>> {
    let foreign = |rule: &Value| ["pattern", "include_re", "exclude_re"].iter().any(|k| rule.get(k).is_some());
    match value {
        Value::Array(list) => named(list).and_then(|entries| expanded(entries, dir)).map(Some),
        Value::Object(map) if map.get("name").is_some_and(Value::is_string) => {
            named(std::slice::from_ref(value)).and_then(|entries| expanded(entries, dir)).map(Some)
        }
        Value::Object(map) => match map.get("rules").and_then(Value::as_array) {
            Some(rules) if rules.iter().any(foreign) => from_rules(map, rules).map(Some),
            None if !map.contains_key("version") && map.values().any(Value::is_object) => {
                let entries = map.iter().map(|(name, entry)| match entry.as_object() {
                    Some(entry) => Ok((name.as_str(), entry)),
                    None => Err(Error::corrupt("found no JSON object, expected one").tensor(name)),
                });
                expanded(entries.collect::<Result<_>>()?, dir).map(Some)
            }
            _ => Ok(None),
        },
        _ => Ok(None),
    }
}

/// Parses a list in the form of one JSON object per line, as some tools wrote it.
pub(super) fn lines(text: &[u8]) -> Option<Value> {
    let lines: Vec<&[u8]> = text.split(|b| *b == b'\n').map(<[u8]>::trim_ascii).filter(|l| !l.is_empty()).collect();
    let objects = lines.len() > 1 && lines.iter().all(|line| line.starts_with(b"{") && line.ends_with(b"}"));
    let list = || [b"[".as_slice(), &lines.join(&b','), b"]"].concat();
    objects.then(|| strict_json::parse(&list()).ok()).flatten()
}

fn named(list: &[Value]) -> Result<Vec<(&str, &Object)>> {
    let entry = |(i, value): (usize, &'_ Value)| -> Result<()> {
        let named = value.get("name").is_some_and(Value::is_string);
        if named {
            Ok(())
        } else {
            Err(Error::corrupt("found no JSON object with a name, expected one").tensor(format!("[{i}]")))
        }
    };
    list.iter().enumerate().try_for_each(entry)?;
    Ok(list.iter().filter_map(|v| Some((v.get("name")?.as_str()?, v.as_object()?))).collect())
}

fn expanded(entries: Vec<(&str, &Object)>, dir: &Path) -> Result<Document> {
    let mut tensors = BTreeMap::new();
    let mut ends = BTreeMap::new();
    for (name, entry) in entries {
        let read = self::entry(entry, &mut ends).tensor(name)?;
        if tensors.insert(name.to_string(), read).is_some() {
            return Err(Error::corrupt("found this tensor twice").tensor(name));
        }
    }
    for (file, end) in ends {
        let (path, len) = (dir.join(&file), length_beside(dir, &file)?);
        if len != end {
            let found =
                format!("found {len} bytes, expected {end}, the total of the manifest's entries that have no offsets");
            return Err(Error::corrupt(found).at(&path));
        }
    }
    Ok(Document { tensors, ..Document::default() })
}

/// Reads the entry of a tensor with finished bytes. `ends` holds, for each file, the end of the bytes used so far by
/// entries without ranges.
///
/// # Errors
/// A field is unknown or has an unsupported value.
pub(crate) fn entry(entry: &Object, ends: &mut BTreeMap<String, u64>) -> Result<TensorEntry> {
    known(entry, &[ENTRY, TERMS])?;
    let terms = Int4Terms::read(entry)?;
    let (rows, cols) = dimensions(entry)?;
    let layout = TileLayout::new(terms.spec, rows, cols)?;
    let (codes, scales, _) = layout.canonical_sizes(rows);
    let (packed_bin, q4_offset) =
        place(entry, ["packed_bin", "int4_bin"], ["q4_offset", "q4_nbytes"], codes as u64, ends)?;
    let (scale_bin, scale_offset) =
        place(entry, ["scale_bin", "scale_bin"], ["scale_offset", "scale_nbytes"], scales as u64, ends)?;
    let packed = PackedJson {
        packed_bin,
        q4_offset,
        q4_nbytes: codes as u64,
        scale_bin,
        scale_offset,
        scale_nbytes: scales as u64,
        zero_offset: None,
        zero_nbytes: None,
        bias: if terms.biased { 8 } else { 0 },
    };
    Ok(TensorEntry {
        rows,
        cols,
        count: 1,
        quant: Some(TensorQuant { spec: terms.spec, method: Method::Rtn, clamp: None, percentile: None }),
        keep: None,
        metrics: None,
        verdict: None,
        reasons: vec![],
        packed: Some(packed),
    })
}

fn dimensions(entry: &Object) -> Result<(usize, usize)> {
    let whole = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let shape = entry.get("shape").and_then(Value::as_array).filter(|shape| shape.len() == 2);
    let rows = entry.get("rows").or_else(|| shape.map(|s| &s[0])).and_then(whole);
    let cols = entry.get("cols").or_else(|| shape.map(|s| &s[1])).and_then(whole);
    rows.zip(cols).ok_or_else(|| Error::corrupt("found no matrix, expected rows and cols, or a shape of two numbers"))
}

/// Returns the file name in one of the fields `names`, and the offset at which the bytes start in this file.
fn place(
    entry: &Object,
    names: [&str; 2],
    [offset, nbytes]: [&str; 2],
    expected: u64,
    ends: &mut BTreeMap<String, u64>,
) -> Result<(String, u64)> {
    let text = names.iter().find_map(|name| entry.get(*name)).and_then(Value::as_str);
    let Some(file) = text.and_then(|text| Path::new(text).file_name()).and_then(|name| name.to_str()) else {
        return Err(Error::corrupt(format!("{}: expected a file name", names[0])));
    };
    let number = |field: &str| match entry.get(field) {
        None => Ok(None),
        Some(value) => value
            .as_u64()
            .map(Some)
            .ok_or_else(|| Error::corrupt(format!("{field}: found {value}, expected a whole number"))),
    };
    if let Some(found) = number(nbytes)?.filter(|found| *found != expected) {
        return Err(Error::corrupt(format!("{nbytes}: found {found}, expected {expected}")));
    }
    if let Some(start) = number(offset)? {
        return Ok((file.to_string(), start));
    }
    let end = ends.entry(file.to_string()).or_insert(0);
    let start = *end;
    *end = start.checked_add(expected).ok_or_else(|| Error::corrupt("found sizes whose sum overflows"))?;
    Ok((file.to_string(), start))
}

/// Converts older rules. Places all exclusions first, because in the older shape an exclusion also overrides includes
/// that precede it.
fn from_rules(map: &Object, rules: &[Value]) -> Result<Document> {
    known(map, &[&["version", "defaults", "rules", "name", "description", "model"]])?;
    if let Some(version) = map.get("version").filter(|version| **version != 1 && **version != "1") {
        return Err(Error::unsupported(format!("found version {version}, expected 1")).tensor("version"));
    }
    let defaults = match map.get("defaults") {
        None | Some(Value::Null) => Object::new(),
        Some(Value::Object(defaults)) => known(defaults, &[RULE]).map(|()| defaults.clone()).tensor("defaults")?,
        Some(_) => return Err(Error::corrupt("found no JSON object, expected one").tensor("defaults")),
    };
    let (mut excluded, mut included) = (Vec::new(), Vec::new());
    for (i, value) in rules.iter().enumerate() {
        let place = format!("rules[{i}]");
        let rule =
            value.as_object().ok_or_else(|| Error::corrupt("found no JSON object, expected one")).tensor(&place)?;
        known(rule, &[RULE]).tensor(&place)?;
        let mut filled = defaults.clone();
        filled.extend(rule.clone());
        let quantized = fields(&filled).tensor(&place)?;
        let pattern = |field: &str| rule.get(field).and_then(Value::as_str).map(String::from);
        excluded.extend(pattern("exclude_re").map(exclude));
        let Some(include) = pattern("pattern").or_else(|| pattern("include_re")) else {
            if pattern("exclude_re").is_none() {
                return Err(Error::corrupt("expected pattern, include_re or exclude_re").tensor(place));
            }
            continue;
        };
        included.push(match quantized {
            Some(fields) => Rule { include: Some(include), exclude: None, fields },
            None => exclude(include),
        });
    }
    excluded.extend(included);
    Ok(Document { rules: excluded, ..Document::default() })
}

fn exclude(pattern: String) -> Rule {
    Rule { exclude: Some(pattern), ..Rule::default() }
}

/// Reads the quantization parameters of a rule; `None` when its dtype is a float, so that the tensor is kept.
fn fields(rule: &Object) -> Result<Option<QuantFields>> {
    let no = |field: &str, value: &Value, expected: &str| {
        Error::unsupported(format!("{field}: found {value}, expected {expected}"))
    };
    let bits = match rule.get("bits") {
        None => None,
        Some(bits) if *bits == 4 || *bits == 8 => bits.as_u64(),
        Some(bits) => return Err(no("bits", bits, "4 or 8")),
    };
    let usual = if bits == Some(8) { "int8" } else { "int4" };
    let word = rule.get("dtype").map_or(usual, |dtype| dtype.as_str().unwrap_or_default());
    if ["fp32", "fp16", "bf16", "f32", "f16", "keep"].contains(&word) {
        return Ok(None);
    }
    let Some(SchemeInfo { scheme, .. }) = SCHEMES.iter().find(|row| row.older_names.contains(&word)) else {
        return Err(no("dtype", &rule["dtype"], "int4w or int8w"));
    };
    let symmetric = match (rule.get("zero"), rule.get("symmetric")) {
        (None | Some(Value::Null), None) => None,
        (None, Some(Value::Bool(symmetric))) => Some(*symmetric),
        (Some(zero), None) if *zero == 0 || *zero == 8 || *zero == false || *zero == "none" => Some(true),
        (Some(zero), None) if *zero == true => Some(false),
        (Some(zero), _) => return Err(no("zero", zero, "0, or true for a zero point per group")),
        (_, Some(symmetric)) => return Err(no("symmetric", symmetric, "true or false")),
    };
    let scale_dtype = match rule.get("scale").or_else(|| rule.get("scale_dtype")) {
        None => None,
        Some(word) if *word == "absmax" || *word == "per_group" || *word == "per_row" => None,
        Some(word) => Some(scale_type(word)?),
    };
    // Without a group size, the older tools used one scale per row.
    let (scheme, group_size) = (Some(*scheme), Some(granularity(rule)?));
    Ok(Some(QuantFields { scheme, group_size, symmetric, scale_dtype, ..QuantFields::default() }))
}

fn known(object: &Object, lists: &[&[&str]]) -> Result<()> {
    match object.keys().find(|key| !lists.iter().any(|list| list.contains(&key.as_str()))) {
        Some(key) => Err(Error::corrupt(format!("unknown field `{key}`")).help(
            "remove the field if it affects neither the choice nor the encoding of tensors; docs/FORMAT.md lists the \
             supported fields of older manifests",
        )),
        None => Ok(()),
    }
}
