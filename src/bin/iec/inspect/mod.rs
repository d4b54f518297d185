//! `iec inspect`: what a checkpoint, pack, weight file or manifest holds.

mod dedup;
mod gguf;
pub mod manifest;
mod stats;
mod subject;

use crate::global::Global;
use dedup::Deduplicated;
use iec::convert::gguf::Gguf;
use iec::error::{Error, Result};
use iec::manifest::Manifest;
use iec::model_config::{Mlp, ModelConfig, RopeScaling};
use iec::report::table::Table;
use iec::role::Role;
use iec::runtime::cpu::place::allowed_processors;
use iec::runtime::cpu::topology::{SYSTEM_ROOT, Topology};
use iec::units::{human_bytes, human_count};
use rayon::prelude::*;
use serde_json::{Value, json};
use stats::Stats;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use subject::{Subject, Tensor};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    iec inspect model\n  \
    iec inspect --tensors hf/model-00001-of-00002.safetensors\n  \
    iec inspect tinyllama-q4_k_m.gguf\n  \
    iec inspect --stats --json model | jq '.tensors[] | select(.stats.nan > 0)'")]
pub struct Args {
    /// A pack or checkpoint directory, model.ie.json, a .safetensors or GGUF file, or a quantization manifest
    path: PathBuf,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Read all weights: minimum, maximum, mean, deviation, zeros and NaN of every tensor
    #[arg(long)]
    stats: bool,
    /// Machine output on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, _global: &Global) -> Result<()> {
    if Gguf::is_at(&args.path) {
        return inspect_gguf(&args);
    }
    let text = match Subject::open(&args.path)? {
        Some(subject) => inspect(&args, &subject)?,
        None if args.stats => {
            return Err(Error::usage("a manifest holds no weights").at(&args.path).help("leave out --stats"));
        }
        None => {
            let document = Manifest::load(&args.path)?;
            match args.json {
                true => format!("{}\n", manifest::as_json(&args.path, &document, args.tensors)),
                false => manifest::text(&args.path, &document, args.tensors),
            }
        }
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

fn inspect_gguf(args: &Args) -> Result<()> {
    if args.stats {
        return Err(Error::usage("statistics of GGUF tensors are not computed")
            .at(&args.path)
            .help("import it with `iec import-gguf`, then inspect the pack"));
    }
    let model = Gguf::open(&args.path)?;
    let text = match args.json {
        true => format!("{}\n", gguf::as_json(&args.path, &model, args.tensors)),
        false => gguf::text(&args.path, &model, args.tensors),
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

fn inspect(args: &Args, subject: &Subject) -> Result<String> {
    let deduplicated = Deduplicated::at(&args.path)?;
    let stats: Vec<Option<Stats>> = match args.stats {
        true => subject.tensors.par_iter().map(|t| Stats::of(&t.payload)).collect::<Result<_>>()?,
        false => vec![None; subject.tensors.len()],
    };
    let totals = Totals::of(subject);
    if args.json {
        let listed = (args.tensors || args.stats).then_some(&stats[..]);
        let mut object = as_json(args, subject, &totals, listed);
        if let Some(deduplicated) = deduplicated {
            deduplicated.add_to(&mut object);
        }
        return Ok(format!("{object}\n"));
    }
    let mut text = summary(args, subject, &totals);
    let _ = write!(text, "\n{}", totals.table());
    text.extend(deduplicated.map(|deduplicated| deduplicated.text()));
    if args.tensors || args.stats {
        let _ = write!(text, "\n{}", tensor_table(subject, args.stats.then_some(&stats[..])));
    }
    Ok(text)
}

/// Sums over the tensors of a role, or over all.
#[derive(Debug, Default, Clone)]
struct Sum {
    tensors: usize,
    parameters: u64,
    bytes: u64,
    dtypes: BTreeMap<String, u64>, // parameters per dtype
}

impl Sum {
    fn add(&mut self, tensor: &Tensor) {
        self.tensors += 1;
        self.parameters += tensor.parameters;
        self.bytes += tensor.nbytes();
        *self.dtypes.entry(tensor.dtype.clone()).or_default() += tensor.parameters;
    }

    fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.parameters.max(1) as f64
    }

    fn dtypes(&self) -> String {
        self.dtypes.keys().cloned().collect::<Vec<_>>().join(", ")
    }

    fn json(&self) -> Value {
        json!({"tensors": self.tensors, "parameters": self.parameters, "bytes": self.bytes,
               "bits_per_weight": self.bits_per_weight(), "parameters_by_dtype": self.dtypes})
    }
}

/// The sums of every role that occurs, and of everything.
struct Totals {
    roles: BTreeMap<Role, Sum>,
    all: Sum,
}

impl Totals {
    fn of(subject: &Subject) -> Totals {
        let mut totals = Totals { roles: BTreeMap::new(), all: Sum::default() };
        for tensor in &subject.tensors {
            totals.roles.entry(tensor.role).or_default().add(tensor);
            totals.all.add(tensor);
        }
        totals
    }

    fn table(&self) -> Table {
        let mut table =
            Table::new(&["part", ">tensors", ">parameters", ">bytes", ">share", ">bits/weight", "stored as"]);
        let named = self.roles.iter().map(|(role, sum)| (role.name(), sum));
        for (name, sum) in named.chain([("total", &self.all)]) {
            table.row([
                name.to_string(),
                sum.tensors.to_string(),
                human_count(sum.parameters),
                human_bytes(sum.bytes),
                format!("{:.1} %", sum.bytes as f64 * 100.0 / self.all.bytes.max(1) as f64),
                format!("{:.3}", sum.bits_per_weight()),
                sum.dtypes(),
            ]);
        }
        table
    }
}

fn summary(args: &Args, subject: &Subject, totals: &Totals) -> String {
    let mut text = format!("{}: {}\n", args.path.display(), subject.kind);
    let mut line = |key: &str, value: String| {
        let _ = writeln!(text, "  {key:<14}{value}");
    };
    if let Some(architecture) = &subject.architecture {
        line("architecture", architecture.clone());
    }
    if let Some(model) = &subject.model {
        line("model", describe_model(model));
        line("positions", describe_positions(model));
    }
    if let Some(why) = &subject.not_supported {
        line("model", why.clone());
    }
    if let Some(maker) = subject.pack.as_ref().and_then(|p| p.created_by.as_ref()) {
        line("made by", maker.clone());
    }
    for file in subject.pack.iter().filter_map(|p| p.source.as_ref()).flat_map(|s| &s.files) {
        line("made from", format!("{}, {}, sha256 {}", file.name, human_bytes(file.bytes), short_hash(&file.sha256)));
    }
    for (key, value) in subject.pack.iter().filter_map(|p| p.quality.as_ref()).flat_map(manifest::quality_lines) {
        line(key, value);
    }
    for (path, bytes) in &subject.files {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        line("weights in", format!("{name}, {}", human_bytes(*bytes)));
    }
    line("parameters", format!("{} at {:.3} bits", human_count(totals.all.parameters), totals.all.bits_per_weight()));
    text
}

fn describe_model(model: &ModelConfig) -> String {
    let mlp = match model.mlp {
        Mlp::Dense { intermediate, .. } => format!("MLP {intermediate}"),
        Mlp::Moe { experts, top_k, intermediate, .. } => format!("{experts} experts (top {top_k}) of {intermediate}"),
    };
    let tied = if model.tied_embeddings { " (tied)" } else { "" };
    format!(
        "{} layers, hidden {}, {} heads ({} key/value) of {}, {mlp}, vocabulary {}{tied}",
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

fn short_hash(hash: &str) -> String {
    hash.chars().take(12).collect()
}

fn tensor_table(subject: &Subject, stats: Option<&[Option<Stats>]>) -> Table {
    let head = ["tensor", "dtype", "shape", ">bytes"];
    let tail: &[&str] = match stats {
        Some(_) => &[">min", ">max", ">mean", ">std", ">zeros", ">NaN", ">inf"],
        None => &["sha256"],
    };
    let mut table = Table::new(&[&head, tail].concat());
    for (i, tensor) in subject.tensors.iter().enumerate() {
        let shape = tensor.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        let mut cells = vec![tensor.name.clone(), tensor.dtype.clone(), shape, human_bytes(tensor.nbytes())];
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

/// Processors we may use and memory nodes: what `--threads`, `--affinity` and `--numa` of `run` can choose from.
fn machine() -> Value {
    let (topology, allowed) = (Topology::probe(Path::new(SYSTEM_ROOT)), allowed_processors());
    json!({"processors": allowed, "cores": topology.cores(&allowed), "nodes": topology.nodes})
}

fn as_json(args: &Args, subject: &Subject, totals: &Totals, listed: Option<&[Option<Stats>]>) -> Value {
    let files: Vec<Value> = subject.files.iter().map(|(path, bytes)| json!({"path": path, "bytes": bytes})).collect();
    let roles: serde_json::Map<String, Value> =
        totals.roles.iter().map(|(role, sum)| (role.name().into(), sum.json())).collect();
    let mut object = json!({
        "path": args.path,
        "kind": subject.kind,
        "architecture": subject.architecture,
        "model": subject.model,
        "source": subject.pack.as_ref().and_then(|p| p.source.as_ref()),
        "created_by": subject.pack.as_ref().and_then(|p| p.created_by.as_ref()),
        "quality": subject.pack.as_ref().and_then(|p| p.quality.as_ref()),
        "files": files,
        "total": totals.all.json(),
        "roles": roles,
        "machine": machine(),
    });
    if let Some(stats) = listed {
        let tensors = subject.tensors.iter().zip(stats).map(|(tensor, stats)| {
            let mut entry = json!({
                "name": tensor.name, "role": tensor.role.name(), "dtype": tensor.dtype, "shape": tensor.shape,
                "parameters": tensor.parameters, "bytes": tensor.nbytes(), "sha256": tensor.sha256,
            });
            if args.stats {
                entry["stats"] = stats.as_ref().map_or(Value::Null, Stats::json);
            }
            entry
        });
        object["tensors"] = tensors.collect();
    }
    object
}
