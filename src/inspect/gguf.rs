//! The description of a GGUF file: its metadata and its tensor types.

use crate::convert::gguf::reader::{Gguf, GgufTensor};
use crate::convert::gguf::value::Value as Meta;
use crate::report::table::Table;
use crate::units::{human_bytes, human_count};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// Longest value in the text for people, in characters.
const SHOWN: usize = 60;

/// Text for people: metadata, then the types; with `tensors`, every tensor.
pub fn text(path: &Path, gguf: &Gguf, tensors: bool) -> String {
    let all = Sum::of(gguf.tensors.iter());
    let mut text = format!("{}: GGUF file, version {}\n", path.display(), gguf.version);
    for file in gguf.files() {
        let _ = writeln!(text, "  weights in    {}, {}", file.name(), human_bytes(file.nbytes()));
    }
    let _ = writeln!(text, "  parameters    {} at {:.3} bits\n", human_count(all.parameters), all.bits());
    let mut table = Table::new(&["key", "value"]);
    for (key, value) in gguf.metadata.entries() {
        table.row([key.clone(), shown(value)]);
    }
    let _ = write!(text, "{table}\n{}", types_table(gguf));
    if tensors {
        let mut table = Table::new(&["tensor", "type", "shape", ">bytes"]);
        for tensor in &gguf.tensors {
            let shape = tensor.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
            table.row([tensor.name.clone(), tensor.kind.to_string(), shape, human_bytes(tensor.nbytes)]);
        }
        let _ = write!(text, "\n{table}");
    }
    text
}

/// The description as JSON, with all values in full.
pub fn as_json(path: &Path, gguf: &Gguf, tensors: bool) -> Value {
    let metadata: Map<String, Value> =
        gguf.metadata.entries().iter().map(|(key, value)| (key.clone(), full(value))).collect();
    let types: Map<String, Value> = by_type(gguf).iter().map(|(kind, sum)| (kind.clone(), sum.json())).collect();
    let files: Vec<Value> = gguf.files().iter().map(|f| json!({"path": f.path(), "bytes": f.nbytes()})).collect();
    let mut object = json!({
        "path": path, "kind": "GGUF file", "version": gguf.version, "files": files, "metadata": metadata,
        "total": Sum::of(gguf.tensors.iter()).json(), "types": types,
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

#[derive(Default)]
struct Sum {
    tensors: usize,
    parameters: u64,
    bytes: u64,
}

impl Sum {
    fn of<'a>(tensors: impl Iterator<Item = &'a GgufTensor>) -> Sum {
        tensors.fold(Sum::default(), |mut sum, tensor| {
            sum.add(tensor);
            sum
        })
    }

    fn add(&mut self, tensor: &GgufTensor) {
        self.tensors += 1;
        self.parameters += tensor.elements() as u64;
        self.bytes += tensor.nbytes;
    }

    fn bits(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.parameters.max(1) as f64
    }

    fn json(&self) -> Value {
        json!({"tensors": self.tensors, "parameters": self.parameters, "bytes": self.bytes,
               "bits_per_weight": self.bits()})
    }
}

fn by_type(gguf: &Gguf) -> BTreeMap<String, Sum> {
    let mut types: BTreeMap<String, Sum> = BTreeMap::new();
    gguf.tensors.iter().for_each(|t| types.entry(t.kind.to_string()).or_default().add(t));
    types
}

fn types_table(gguf: &Gguf) -> Table {
    let mut table = Table::new(&["type", ">tensors", ">parameters", ">bytes", ">bits/weight"]);
    for (kind, sum) in by_type(gguf) {
        table.row([
            kind,
            sum.tensors.to_string(),
            human_count(sum.parameters),
            human_bytes(sum.bytes),
            format!("{:.3}", sum.bits()),
        ]);
    }
    table
}

/// A value on one short line.
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

fn number(n: &crate::convert::gguf::value::Number) -> Value {
    match (n.as_bool(), n.as_integer()) {
        (Some(flag), _) => json!(flag),
        (None, Some(whole)) => i64::try_from(whole).map_or_else(|_| json!(whole as u64), |n| json!(n)),
        (None, None) => json!(n.as_f64()),
    }
}
