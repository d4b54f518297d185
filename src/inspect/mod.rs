//! Describes the contents of a checkpoint, pack, weight file, GGUF file or manifest (`iec inspect`).
//!
//! [`describe`] detects the format at a path. Checkpoints, packs and single weight files become one `Container`,
//! which is described by sums over its tensors for each role; GGUF files and manifests have descriptions of their own.

mod adapter;
mod container;
mod dedup;
mod gguf;
mod manifest;
mod measurement;
mod stats;

use crate::catalogue::Role;
use crate::convert::LeftOutPart;
use crate::convert::assess::{Assessment, Obstacle, Quantization};
use crate::convert::published::MatrixForm;
use crate::convert::source::gguf::Gguf;
use crate::error::{Error, Result, printable};
use crate::iebin::PublishedJson;
use crate::manifest::Manifest;
use crate::model_config::{
    GatedDeltaNet, Mamba2, Mlp, ModelConfig, Recurrent, RecurrentLayers, RopeScaling, ShortConv,
};
use crate::report::quality::{quality_lines, short_hash};
use crate::report::table::{Column, Table};
use crate::runtime::cpu::place::allowed_processors;
use crate::runtime::cpu::topology::{SYSTEM_ROOT, Topology};
use crate::units::{human_bytes, human_count};
use container::Container;
use dedup::Deduplicated;
use measurement::Report;
use rayon::prelude::*;
use serde_json::{Value, json};
use stats::Stats;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Path to describe, and the level of detail.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Pack or checkpoint directory, model.ie.json, .safetensors or GGUF file, or quantization manifest.
    pub path: PathBuf,
    /// True to list every tensor.
    pub tensors: bool,
    /// True to read all weights and compute statistics of the values of every tensor; this lists the tensors, too.
    pub stats: bool,
    /// True to check the figures of a measurement that `iec bench` or `iec run` stored with `--report-root`.
    pub strict: bool,
    /// True for one line of JSON instead of text.
    pub json: bool,
}

/// Describes the file or directory at a path: the sizes, roles and types of its tensors, their source, and the bytes
/// that deduplication saves.
///
/// # Errors
/// The path has no known format, the file breaks the rules of its format, or statistics are requested for a format
/// that does not support them.
pub fn describe(options: &Options) -> Result<String> {
    if Report::is_at(&options.path)? {
        return describe_measurement(options);
    }
    if options.strict {
        return Err(Error::usage("--strict: found no report, expected a .jsonl file of `iec bench --report-root`")
            .at(&options.path)
            .help("check a pack with `iec verify --hashes --model-dir DIR`"));
    }
    if Gguf::is_at(&options.path) {
        return describe_gguf(options);
    }
    if adapter::is_at(&options.path)? || !(options.stats || options.tensors) && adapter::is_packed(&options.path)? {
        return adapter::describe(options);
    }
    match Container::open(&options.path)? {
        Some(container) => describe_container(options, &container),
        None if options.stats => Err(Error::usage("--stats: found a manifest, which has no weights")
            .at(&options.path)
            .help("leave out --stats")),
        None => {
            let document = Manifest::load(&options.path)?;
            Ok(match options.json {
                true => format!("{}\n", manifest::as_json(&options.path, &document, options.tensors)),
                false => manifest::text(&options.path, &document, options.tensors),
            })
        }
    }
}

fn describe_measurement(options: &Options) -> Result<String> {
    let report = Report::open(&options.path)?;
    if options.strict {
        report.check(&options.path)?;
    }
    Ok(match options.json {
        true => format!("{}\n", report.as_json(&options.path)),
        false => report.text(&options.path),
    })
}

fn describe_gguf(options: &Options) -> Result<String> {
    if options.stats {
        return Err(Error::usage("--stats: found a GGUF file, for which statistics are not supported")
            .at(&options.path)
            .help("import it with `iec import-gguf`, then inspect the pack"));
    }
    let model = Gguf::open(&options.path)?;
    Ok(match options.json {
        true => format!("{}\n", gguf::as_json(&options.path, &model, options.tensors)),
        false => gguf::text(&options.path, &model, options.tensors),
    })
}

fn describe_container(options: &Options, container: &Container) -> Result<String> {
    let deduplicated = Deduplicated::at(&options.path)?;
    let stats: Vec<Option<Stats>> = match options.stats {
        true => container.tensors.par_iter().map(|t| Stats::of(&t.payload)).collect::<Result<_>>()?,
        false => vec![None; container.tensors.len()],
    };
    let tensors = container.tensors.iter();
    let totals = Totals::of(tensors.map(|t| (t.role, &*t.dtype, t.parameters, t.nbytes())));
    if options.json {
        let listed = (options.tensors || options.stats).then_some(&stats[..]);
        let mut object = as_json(options, container, &totals, listed);
        if let Some(deduplicated) = deduplicated {
            deduplicated.add_to(&mut object);
        }
        return Ok(format!("{object}\n"));
    }
    let mut text = summary(options, container, &totals);
    let _ = write!(text, "\n{}", table_of_roles(&totals));
    text.extend(deduplicated.map(|deduplicated| deduplicated.text()));
    if options.tensors || options.stats {
        let _ = write!(text, "\n{}", tensor_table(container, options.stats.then_some(&stats[..])));
    }
    Ok(text)
}

/// Sums over a group of tensors.
#[derive(Debug, Default, Clone)]
struct Sum {
    tensors: usize,
    parameters: u64,
    bytes: u64,
    dtypes: BTreeMap<String, u64>, // number of parameters per dtype
}

impl Sum {
    fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.parameters.max(1) as f64
    }

    fn json(&self) -> Value {
        json!({"tensors": self.tensors, "weights": self.parameters, "bytes": self.bytes,
               "bits_per_weight": self.bits_per_weight()})
    }
}

/// Sums per group, by role or by type, and over all tensors.
struct Totals<K> {
    parts: BTreeMap<K, Sum>,
    all: Sum,
}

impl<K: Ord> Totals<K> {
    /// Computes the sums of tensors, given as group, dtype, number of parameters and bytes.
    fn of<'a>(tensors: impl Iterator<Item = (K, &'a str, u64, u64)>) -> Totals<K> {
        let mut totals = Totals { parts: BTreeMap::new(), all: Sum::default() };
        for (part, dtype, parameters, bytes) in tensors {
            for sum in [totals.parts.entry(part).or_default(), &mut totals.all] {
                sum.tensors += 1;
                sum.parameters += parameters;
                sum.bytes += bytes;
                *sum.dtypes.entry(dtype.to_string()).or_default() += parameters;
            }
        }
        totals
    }
}

fn table_of_roles(totals: &Totals<Role>) -> Table {
    let share = |sum: &Sum| sum.bytes as f64 * 100.0 / totals.all.bytes.max(1) as f64;
    let columns: [Column<'_, (&str, &Sum)>; 7] = [
        ("part", &|(name, _)| name.to_string()),
        (">tensors", &|(_, sum)| sum.tensors.to_string()),
        (">parameters", &|(_, sum)| human_count(sum.parameters)),
        (">bytes", &|(_, sum)| human_bytes(sum.bytes)),
        (">share", &|(_, sum)| format!("{:.1} %", share(sum))),
        (">bits/weight", &|(_, sum)| format!("{:.3}", sum.bits_per_weight())),
        ("stored as", &|(_, sum)| sum.dtypes.keys().cloned().collect::<Vec<_>>().join(", ")),
    ];
    let named = totals.parts.iter().map(|(role, sum)| (role.name(), sum));
    Table::of(named.chain([("total", &totals.all)]), &columns)
}

/// Formats a shape as `4096 x 128`.
fn shape(dimensions: &[usize]) -> String {
    dimensions.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ")
}

fn summary(options: &Options, container: &Container, totals: &Totals<Role>) -> String {
    let mut text = format!("{}: {}\n", options.path.display(), container.kind);
    let mut line = |key: &str, value: String| {
        let _ = writeln!(text, "  {key:<14}{}", printable(&value, LONGEST_LINE));
    };
    if let Some(architecture) = &container.architecture {
        line("architecture", architecture.clone());
    }
    if let Some(model) = &container.model {
        line("model", describe_model(model));
        line("positions", describe_positions(model));
    }
    for (key, value) in container.assessment.iter().flat_map(assessment_lines) {
        line(key, value);
    }
    if let Some(maker) = container.pack.as_ref().and_then(|p| p.created_by.as_ref()) {
        line("made by", maker.clone());
    }
    if let Some(digest) = container.pack.as_ref().and_then(|p| p.sha256.as_ref()) {
        line("sha256", digest.clone());
    }
    for file in container.pack.iter().filter_map(|p| p.source.as_ref()).flat_map(|s| &s.files) {
        line("made from", format!("{}, {}, sha256 {}", file.name, human_bytes(file.bytes), short_hash(&file.sha256)));
    }
    for PublishedJson { format, activation_scales } in container.pack.iter().filter_map(|p| p.published.as_ref()) {
        let scales = if *activation_scales { ", with scales of activations, which are not used" } else { "" };
        line("quantized as", format!("{format}{scales}"));
    }
    for pack in container.pack.iter().filter(|p| !p.tokenizer_from.is_empty()) {
        line("tokenizer", format!("made from {}", pack.tokenizer_from.join(", ")));
    }
    for (key, value) in container.pack.iter().filter_map(|p| p.quality.as_ref()).flat_map(quality_lines) {
        line(key, value);
    }
    for (path, bytes) in &container.files {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        line("weights in", format!("{name}, {}", human_bytes(*bytes)));
    }
    line("parameters", format!("{} at {:.3} bits", human_count(totals.all.parameters), totals.all.bits_per_weight()));
    text
}

/// Longest value of a line in bytes; many come from untrusted files.
const LONGEST_LINE: usize = 1000;

/// Returns lines that say whether a checkpoint runs, and what it holds besides the language model.
fn assessment_lines(assessment: &Assessment) -> Vec<(&'static str, String)> {
    let mut lines = vec![("runs", if assessment.runs { "yes" } else { "no" }.to_string())];
    for Obstacle { file, field, message, help } in &assessment.obstacles {
        let name = file.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        let place = [name.as_ref(), field.as_ref()].into_iter().flatten();
        let words: Vec<&str> = place.map(String::as_str).chain([message.as_str()]).collect();
        lines.push(("because", words.join(": ")));
        lines.push(("what to do", help.clone()));
    }
    if let Some(Quantization { method, settings }) = &assessment.quantization {
        let given = settings.iter().map(|(key, value)| match value.as_str() {
            Some(text) => format!("{key} {text}"),
            None => format!("{key} {value}"),
        });
        let given = given.collect::<Vec<_>>().join(", ");
        lines.push(("quantization", if given.is_empty() { method.clone() } else { format!("{method} ({given})") }));
    }
    for (form, tensors) in of_each_form(&assessment.published) {
        lines.push(("in a pack", format!("{} matrices: {form}", tensors)));
    }
    if assessment.activation_scales {
        lines.push(("not used", "scales of activations: products are computed with the weights' scales alone".into()));
    }
    let part = |LeftOutPart { part, kind, tensors, bytes }: &LeftOutPart| {
        ("not used", format!("{part}: {}, {tensors} tensors, {}", kind.words(), human_bytes(*bytes)))
    };
    lines.extend(assessment.left_out.iter().map(part));
    lines
}

/// Returns what packs hold of quantized matrices in words, with the number of matrices.
fn of_each_form(matrices: &[MatrixForm]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for MatrixForm { format, kept_as, because, .. } in matrices {
        let form = match (kept_as, because) {
            (Some(scheme), _) => format!("{format} keeps its codes as {scheme}"),
            (None, Some(why)) => format!("{format} becomes floats: {why}"),
            (None, None) => format!("{format} becomes floats"),
        };
        *counts.entry(form).or_default() += 1;
    }
    counts
}

fn describe_model(model: &ModelConfig) -> String {
    let mlp = |mlp| match mlp {
        Mlp::Dense { intermediate, .. } => format!("MLP {intermediate}"),
        Mlp::Moe { experts, top_k, intermediate, .. } => format!("{experts} experts (top {top_k}) of {intermediate}"),
    };
    let mut mlp = model.mlps().map(mlp).collect::<Vec<_>>().join(", ");
    if let Some(dense) = &model.dense_layers {
        mlp += &format!(" in {} of {} layers", dense.layers.len(), model.n_layers);
    }
    let tied = if model.tied_embeddings { " (tied)" } else { "" };
    let recurrent = model.recurrent.as_ref().map_or(String::new(), |RecurrentLayers { layers, mixer }| {
        let mixers = match mixer {
            Recurrent::ShortConv(ShortConv { width, .. }) => format!("convolutions of {width} positions"),
            Recurrent::Mamba2(Mamba2 { heads, groups, state, head_dim, .. }) => {
                format!("Mamba-2 of {heads} heads ({groups} groups) of {state} x {head_dim}")
            }
            Recurrent::GatedDeltaNet(GatedDeltaNet { key_heads, value_heads, key_dim, value_dim, .. }) => {
                format!("delta nets of {value_heads} heads ({key_heads} key) of {key_dim} x {value_dim}")
            }
        };
        format!("{mixers} in {} layers, ", layers.len())
    });
    format!(
        "{} layers, hidden {}, {} heads ({} key/value) of {}, {recurrent}{mlp}, vocabulary {}{tied}",
        model.n_layers, model.hidden, model.n_heads, model.n_kv_heads, model.head_dim, model.vocab
    )
}

fn describe_positions(model: &ModelConfig) -> String {
    let scaling = match &model.rope.scaling {
        RopeScaling::None => String::new(),
        RopeScaling::Linear { factor } => format!(", linear x{factor}"),
        RopeScaling::Llama3 { factor, .. } => format!(", llama3 x{factor}"),
        RopeScaling::Yarn { factor, .. } => format!(", yarn x{factor}"),
        RopeScaling::LongRope { original_max_position, .. } => format!(", longrope beyond {original_max_position}"),
    };
    let local = match &model.local_rope {
        Some(rope) => format!(" ({} in windows)", rope.theta),
        None => String::new(),
    };
    let windows: Vec<usize> = model.attention.windows.iter().flatten().copied().collect();
    let window = match windows.first() {
        Some(width) => format!(", window {width} in {} of {} layers", windows.len(), model.n_layers),
        None => String::new(),
    };
    format!("context {}, rope theta {}{local}{scaling}{window}", model.max_context, model.rope.theta)
}

fn tensor_table(container: &Container, stats: Option<&[Option<Stats>]>) -> Table {
    let head = ["tensor", "dtype", "shape", ">bytes"];
    let tail: &[&str] = match stats {
        Some(_) => &[">min", ">max", ">mean", ">std", ">zeros", ">NaN", ">inf"],
        None => &["sha256"],
    };
    let mut table = Table::new(&[&head, tail].concat());
    for (i, tensor) in container.tensors.iter().enumerate() {
        let mut cells =
            vec![tensor.name.clone(), tensor.dtype.clone(), shape(&tensor.shape), human_bytes(tensor.nbytes())];
        match stats.map(|s| &s[i]) {
            None => cells.push(tensor.sha256.as_deref().map_or("-".into(), short_hash)),
            Some(None) => cells.extend(std::iter::repeat_n("-".to_string(), tail.len())),
            Some(Some(s)) => cells.extend([
                format!("{:.4}", s.min),
                format!("{:.4}", s.max),
                format!("{:.5}", s.mean()),
                format!("{:.5}", s.std()),
                format!("{:.2} %", s.zero_share() * 100.0),
                s.nan.to_string(),
                s.infinite.to_string(),
            ]),
        }
        table.row(cells);
    }
    table
}

/// Describes the processors that this process may use and the memory nodes: the choices for `--threads`, `--affinity`
/// and `--numa` of `iec run`.
fn machine() -> Value {
    let (topology, allowed) = (Topology::probe(Path::new(SYSTEM_ROOT)), allowed_processors());
    json!({"processors": allowed, "cores": topology.cores(&allowed), "nodes": topology.nodes})
}

fn as_json(options: &Options, container: &Container, totals: &Totals<Role>, listed: Option<&[Option<Stats>]>) -> Value {
    let files: Vec<Value> = container.files.iter().map(|(path, bytes)| json!({"path": path, "bytes": bytes})).collect();
    let with_dtypes = |sum: &Sum| {
        let mut json = sum.json();
        json["weights_by_dtype"] = json!(sum.dtypes);
        json
    };
    let roles: serde_json::Map<String, Value> =
        totals.parts.iter().map(|(role, sum)| (role.name().into(), with_dtypes(sum))).collect();
    let mut object = json!({
        "schema_version": 1,
        "path": options.path,
        "kind": container.kind,
        "architecture": container.architecture,
        "model": container.model,
        "source": container.pack.as_ref().and_then(|p| p.source.as_ref()),
        "published": container.pack.as_ref().and_then(|p| p.published.as_ref()),
        "tokenizer_from": container.pack.as_ref().map(|p| &p.tokenizer_from),
        "created_by": container.pack.as_ref().and_then(|p| p.created_by.as_ref()),
        "sha256": container.pack.as_ref().and_then(|p| p.sha256.as_ref()),
        "quality": container.pack.as_ref().and_then(|p| p.quality.as_ref()),
        "files": files,
        "total": with_dtypes(&totals.all),
        "roles": roles,
        "machine": machine(),
    });
    if let Some(assessment) = &container.assessment
        && let Ok(Value::Object(fields)) = serde_json::to_value(assessment)
    {
        object.as_object_mut().into_iter().for_each(|object| object.extend(fields.clone()));
    }
    if let Some(stats) = listed {
        let tensors = container.tensors.iter().zip(stats).map(|(tensor, stats)| {
            let mut entry = json!({
                "name": tensor.name, "role": tensor.role.name(), "dtype": tensor.dtype, "shape": tensor.shape,
                "weights": tensor.parameters, "bytes": tensor.nbytes(), "sha256": tensor.sha256,
            });
            if options.stats {
                entry["stats"] = stats.as_ref().map_or(Value::Null, Stats::json);
            }
            entry
        });
        object["tensors"] = tensors.collect();
    }
    object
}
