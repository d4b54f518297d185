//! Data of a measurement as the lines of its JSON Lines file: one `meta`, a `record` per generated text, a `summary`
//! per run. docs/FORMAT.md lists the fields.

use super::line::{Measured, first_difference, prompt_id};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::generate::Completion;
use crate::generate::text::strftime_now;
use crate::session::Session;
use crate::session::metrics::{Latencies, latencies_ms, rate};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// Current version of the fields.
const SCHEMA_VERSION: u32 = 1;

/// Line of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum RecordEntry {
    /// First line: model, settings and machine.
    Meta(Meta),
    /// Generated text.
    Record(Record),
    /// JSON line of a run without its prompts.
    Summary(Map<String, Value>),
}

/// Model, settings and machine of a measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Meta {
    /// Version of the fields.
    pub schema_version: u32,
    /// Time when the measurement began, in UTC.
    pub created: String,
    /// Name and version of the program.
    pub program: String,
    /// Command that made the measurement: `bench` or `run`.
    pub command: String,
    /// Name of the model.
    pub model: String,
    /// Architecture of the model.
    pub architecture: String,
    /// Precision in which the model ran.
    pub precision: String,
    /// Device that computed: the CPU or GPUs.
    pub device: String,
    /// Instruction set of the CPU.
    pub isa: String,
    /// Worker threads.
    pub threads: usize,
    /// Bytes of weights that are read per token.
    pub weights_bytes_per_token: u64,
    /// Options of the command.
    pub settings: Map<String, Value>,
    /// Properties of the machine, as far as known.
    pub machine: Map<String, Value>,
}

impl Meta {
    /// Describes a measurement of `command` that starts now.
    pub fn new(command: &str, session: &Session, mut settings: Map<String, Value>) -> Meta {
        let (engine, options) = (&session.engine, &session.engine_options);
        settings.insert("kv".into(), engine.kv_type().to_string().into());
        settings.insert("attention".into(), engine.attention().name().into());
        settings.insert("affinity".into(), options.affinity.name().into());
        settings.insert("numa".into(), options.numa.to_string().into());
        Meta {
            schema_version: SCHEMA_VERSION,
            created: strftime_now("%FT%TZ").expect("all directives are known"),
            program: format!("iec {}", env!("CARGO_PKG_VERSION")),
            command: command.to_string(),
            model: session.name.clone(),
            architecture: engine.config().architecture.clone(),
            precision: engine.precision().name().to_string(),
            device: engine.device(),
            isa: engine.isa().to_string(),
            threads: engine.threads(),
            weights_bytes_per_token: engine.weight_bytes_per_token(),
            settings,
            machine: machine(),
        }
    }
}

/// Generated text and its measurements.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Number of the run, from 1.
    pub run: usize,
    /// Number of the pass over all prompts, from 1.
    pub round: usize,
    /// Number of the prompt, from 0.
    pub prompt_index: usize,
    /// Text of the prompt.
    pub prompt: String,
    /// Hash of the text, see [`prompt_id`].
    pub prompt_id: String,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of tokens of the prompt whose keys and values were reused from the KV cache.
    pub reused_tokens: usize,
    /// Number of generated tokens.
    pub tokens_generated: usize,
    /// Generated tokens; [`super::Measurement::save`] may truncate them.
    pub tokens: Vec<u32>,
    /// Generated text, if the command records it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Reason why the text ended.
    pub finish: String,
    /// Seconds from the start of the request in the batch to the first token.
    pub prefill_time_s: f64,
    /// Seconds from the first token to the last.
    pub decode_time_s: f64,
    /// Prompt tokens that were computed, per second of prefill time.
    pub tps_prefill: f64,
    /// Generated tokens, except the first, per second of decode time.
    pub tps_decode: f64,
    /// Generated tokens per second of prefill and decode time together.
    pub tps_true: f64,
    /// Times between tokens in milliseconds, in order.
    pub latencies_ms: Vec<f64>,
    /// True when expected tokens were given for the prompt.
    pub expected_present: bool,
    /// True when the generated tokens are the expected ones; `None` when none were given.
    pub expected_ok: Option<bool>,
    /// Position of the first token that differs from the expected one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mismatch_index: Option<usize>,
}

/// Names of the columns of [`Record::csv`].
pub const CSV_HEADER: &str = "run,round,prompt_index,prompt_id,prompt_tokens,reused_tokens,tokens_generated,finish,prefill_time_s,\
decode_time_s,tps_prefill,tps_decode,tps_true,latency_p50_ms,latency_p95_ms,latency_p99_ms,expected_ok";

impl Record {
    /// Creates the records of a measured run.
    pub fn all(measured: &Measured<'_>) -> Vec<Record> {
        let rounds = (1..).zip(measured.rounds);
        let texts =
            rounds.flat_map(|(round, done)| done.outcome.completions.iter().enumerate().map(move |c| (round, c)));
        texts.map(|(round, (index, done))| Record::new(measured, round, index, done)).collect()
    }

    fn new(measured: &Measured<'_>, round: usize, index: usize, done: &Completion) -> Record {
        let (prefill, decode) = (done.prefill_time().as_secs_f64(), done.decode_time().as_secs_f64());
        let expected = measured.expected.get(index).and_then(Option::as_ref);
        let mismatch_index = expected.and_then(|ids| first_difference(&done.ids, ids));
        Record {
            run: measured.run,
            round,
            prompt_index: index,
            prompt: measured.prompts[index].clone(),
            prompt_id: prompt_id(&measured.prompts[index]),
            prompt_tokens: done.prompt_tokens,
            reused_tokens: done.reused_tokens,
            tokens_generated: done.ids.len(),
            tokens: done.ids.clone(),
            text: measured.with_text.then(|| done.text.clone()),
            finish: done.finish.name().to_string(),
            prefill_time_s: prefill,
            decode_time_s: decode,
            tps_prefill: rate(done.prompt_tokens - done.reused_tokens, prefill),
            tps_decode: rate(done.ids.len().saturating_sub(1), decode),
            tps_true: rate(done.ids.len(), prefill + decode),
            latencies_ms: latencies_ms(done).collect(),
            expected_present: expected.is_some(),
            expected_ok: expected.map(|_| mismatch_index.is_none()),
            mismatch_index,
        }
    }

    /// Returns the CSV row of the record.
    pub fn csv(&self) -> String {
        let latencies = Latencies::new(self.latencies_ms.clone());
        let percentile = |percent| latencies.percentile(percent).map_or(String::new(), |ms| ms.to_string());
        let cells = [
            self.run.to_string(),
            self.round.to_string(),
            self.prompt_index.to_string(),
            self.prompt_id.clone(),
            self.prompt_tokens.to_string(),
            self.reused_tokens.to_string(),
            self.tokens_generated.to_string(),
            self.finish.clone(),
            self.prefill_time_s.to_string(),
            self.decode_time_s.to_string(),
            self.tps_prefill.to_string(),
            self.tps_decode.to_string(),
            self.tps_true.to_string(),
            percentile(50),
            percentile(95),
            percentile(99),
            self.expected_ok.map_or(String::new(), |ok| ok.to_string()),
        ];
        cells.join(",")
    }
}

/// Reads the lines of one or several measurements.
///
/// # Errors
/// The file cannot be read, or a line does not belong to a measurement.
pub fn read(path: &Path) -> Result<Vec<RecordEntry>> {
    let text = files::read_to_string(path)?;
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    let entry = |(number, line): (usize, &str)| {
        serde_json::from_str(line)
            .map_err(|e| Error::corrupt(format!("not a line of a measurement: {e}")))
            .tensor(&format!("line {number}"))
    };
    lines
        .map(entry)
        .collect::<Result<_>>()
        .help("name the .jsonl file that `iec bench --report-root DIR` wrote")
        .at(path)
}

/// Reads processor, number of logical CPUs, memory, NUMA nodes, kernel and mode of huge pages, as far as the system
/// reports them.
fn machine() -> Map<String, Value> {
    let file = |path: &str| files::read_to_string(Path::new(path)).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
        value.map(|value| value.trim().to_string())
    };
    let memory = field(&file("/proc/meminfo"), "MemTotal");
    let memory = memory.and_then(|kb| kb.strip_suffix("kB")?.trim().parse::<u64>().ok());
    let huge = file("/sys/kernel/mm/transparent_hugepage/enabled");
    let huge = huge.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(mode, _)| mode.to_string());
    let line = |text: String| Some(text.trim().to_string()).filter(|text| !text.is_empty());
    let known: [(&str, Option<Value>); 7] = [
        ("cpu", field(&file("/proc/cpuinfo"), "model name").map(Value::from)),
        ("logical_cpus", std::thread::available_parallelism().ok().map(|n| n.get().into())),
        ("memory_mb", memory.map(|kib| Value::from(kib * 1024 / 1_000_000))),
        ("numa_nodes", line(file("/sys/devices/system/node/online")).map(Value::from)),
        ("kernel", line(file("/proc/sys/kernel/osrelease")).map(Value::from)),
        ("huge_pages", huge.map(Value::from)),
        ("os", Some(std::env::consts::OS.into())),
    ];
    known.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?))).collect()
}
