//! Describes a GGUF file: its metadata and its tensor types.

use super::{Sum, Totals, shape};
use crate::convert::source::gguf::reader::{Gguf, GgufTensor};
use crate::convert::source::gguf::value::Value as Meta;
use crate::report::table::{Column, Table};
use crate::units::{human_bytes, human_count};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::path::Path;

/// Longest printed value in characters.
const SHOWN: usize = 60;

/// Returns a text with the metadata, the types and, with `tensors`, every tensor.
pub fn text(path: &Path, gguf: &Gguf, tensors: bool) -> String {
    let totals = totals(gguf);
    let mut text = format!("{}: GGUF file, version {}\n", path.display(), gguf.version);
    for file in gguf.files() {
        let _ = writeln!(text, "  weights in    {}, {}", file.name(), human_bytes(file.nbytes()));
    }
    let _ = writeln!(
        text,
        "  parameters    {} at {:.3} bits\n",
        human_count(totals.all.parameters),
        totals.all.bits_per_weight()
    );
    let metadata =
        Table::of(gguf.metadata.entries(), &[("key", &|(key, _)| key.clone()), ("value", &|(_, value)| shown(value))]);
    let types: [Column<'_, (&String, &Sum)>; 5] = [
        ("type", &|(kind, _)| kind.to_string()),
        (">tensors", &|(_, sum)| sum.tensors.to_string()),
        (">parameters", &|(_, sum)| human_count(sum.parameters)),
        (">bytes", &|(_, sum)| human_bytes(sum.bytes)),
        (">bits/weight", &|(_, sum)| format!("{:.3}", sum.bits_per_weight())),
    ];
    let _ = write!(text, "{metadata}\n{}", Table::of(&totals.parts, &types));
    if tensors {
        let columns: [Column<'_, &GgufTensor>; 4] = [
            ("tensor", &|tensor| tensor.name.clone()),
            ("type", &|tensor| tensor.kind.to_string()),
            ("shape", &|tensor| shape(&tensor.shape)),
            (">bytes", &|tensor| human_bytes(tensor.nbytes)),
        ];
        let _ = write!(text, "\n{}", Table::of(&gguf.tensors, &columns));
    }
    text
}

/// Returns the description as JSON, with all values in full.
pub fn as_json(path: &Path, gguf: &Gguf, tensors: bool) -> Value {
    let metadata: Map<String, Value> =
        gguf.metadata.entries().iter().map(|(key, value)| (key.clone(), full(value))).collect();
    let totals = totals(gguf);
    let types: Map<String, Value> = totals.parts.iter().map(|(kind, sum)| (kind.clone(), sum.json())).collect();
    let files: Vec<Value> = gguf.files().iter().map(|f| json!({"path": f.path(), "bytes": f.nbytes()})).collect();
    let mut object = json!({
        "schema_version": 1, "path": path, "kind": "GGUF file", "version": gguf.version, "files": files, "metadata": metadata,
        "total": totals.all.json(), "types": types,
    });
    if tensors {
        let list = gguf.tensors.iter().map(|t| {
            json!({"name": t.name, "type": t.kind.to_string(), "shape": t.shape, "bytes": t.nbytes, "file": t.file,
                   "start": t.start})
        });
        object["tensors"] = list.collect();
    }
    object
}

fn totals(gguf: &Gguf) -> Totals<String> {
    Totals::of(gguf.tensors.iter().map(|t| (t.kind.to_string(), "", t.elements() as u64, t.nbytes)))
}

/// Formats a value as one short line.
fn shown(value: &Meta) -> String {
    let text = match (value.list_len(), value) {
        (Some(n), Meta::Strings(list)) => {
            let first: Vec<String> = list.iter().take(6).map(|t| Value::from(t.as_str()).to_string()).collect();
            format!("{n} texts: {}", first.join(" "))
        }
        (Some(n), _) => {
            let first: Vec<String> =
                value.numbers().into_iter().flatten().take(8).map(|n| number(&n).to_string()).collect();
            format!("{n} numbers: {}", first.join(" "))
        }
        (None, Meta::String(text)) => text.escape_debug().to_string(),
        (None, Meta::Number(n)) => number(n).to_string(),
        (None, _) => String::new(),
    };
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn full(value: &Meta) -> Value {
    match value {
        Meta::Number(n) => number(n),
        Meta::String(text) => json!(text),
        Meta::Strings(list) => json!(list),
        Meta::Numbers(..) => value.numbers().into_iter().flatten().map(|n| number(&n)).collect(),
    }
}

fn number(n: &crate::convert::source::gguf::value::Number) -> Value {
    match (n.as_bool(), n.as_integer()) {
        (Some(flag), _) => json!(flag),
        (None, Some(whole)) => i64::try_from(whole).map_or_else(|_| json!(whole as u64), |n| json!(n)),
        (None, None) => json!(n.as_f64()),
    }
}
