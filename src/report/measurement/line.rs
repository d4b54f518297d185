//! JSON line of a measured run, with fixed names in a fixed order; see docs/guide/measuring.md.

use super::stages::StageTimes;
use crate::generate::{Completion, Outcome};
use crate::mapped;
use crate::runtime::cpu::topology::{SYSTEM_ROOT, Topology};
use crate::runtime::{AttentionKernel, Engine, Stage, Stages};
use crate::session::adapters::AdapterUse;
use crate::session::metrics::rate;
use crate::session::{Generation, Metrics, Session};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::Duration;

/// Version of the line's fields.
const SCHEMA_VERSION: u32 = 1;

/// Inputs from which a line is computed.
pub struct Measured<'a> {
    /// Session that generated the texts.
    pub session: &'a Session,
    /// Texts of the prompts.
    pub prompts: &'a [String],
    /// Passes over the prompts; at least one.
    pub rounds: &'a [Generation],
    /// Number of the run, from 1.
    pub run: usize,
    /// Bytes of weights that the work-touch covered.
    pub bytes_touched: u64,
    /// Bytes of weights that the work-touch covers per token.
    pub bytes_per_token: u64,
    /// Name in reports of the work that follows each token: `touch` in `bench`, `output` in `run`.
    pub sink: &'static str,
    /// Time spent to encode the prompts, before the timed window.
    pub encoding: Duration,
    /// Expected tokens of each prompt, where given.
    pub expected: &'a [Option<Vec<u32>>],
    /// True to include the generated text.
    pub with_text: bool,
    /// Probabilities of the tokens of each prompt, if requested.
    pub logprobs: &'a [Option<Value>],
}

/// JSON line of a run.
#[derive(Debug, Serialize)]
pub struct MeasurementLine {
    schema_version: u32,
    model: String,
    architecture: String,
    precision: &'static str,
    device: String,
    threads: usize,
    isa: &'static str,
    /// Implementation of attention, if it is not the usual one.
    #[serde(skip_serializing_if = "Option::is_none")]
    attention: Option<&'static str>,
    run: usize,
    tokens_generated: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// Times, rates, latencies, memory and counters.
    #[serde(flatten)]
    pub metrics: Metrics,
    bytes_touched: u64,
    bytes_per_token: u64,
    weights_bytes_per_token: u64,
    effective_bandwidth_gbps: f64,
    /// Share of the loaded bytes of mapped files that lies in huge pages.
    weights_in_huge_pages: Option<f64>,
    prompts_count: usize,
    rounds: usize,
    /// Seconds per stage of prefill and decode, with `--profile`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stages: Option<StageTimes>,
    /// Measurements of each prompt.
    pub prompts: Vec<PromptLine>,
    /// Affinity and NUMA options, the processors of each thread, and the NUMA nodes of the machine.
    placement: Value,
    /// GPUs of the run, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<Value>,
    /// Adapters that were used.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    adapters: Vec<AdapterLine>,
}

/// Entry of an adapter in the line.
#[derive(Debug, Serialize)]
struct AdapterLine {
    name: String,
    scale: f32,
    /// SHA-256 digest of its files.
    sha256: Option<String>,
    /// Bytes of its factors in memory; 0 if it has left.
    bytes: u64,
    /// Number of requests that found it in memory.
    hits: u64,
    /// Number of times that it was loaded.
    loads: u64,
}

/// Returns the adapters of a session that were used.
fn adapters(session: &Session) -> Vec<AdapterLine> {
    let line = |AdapterUse { name, scale, bytes, hits, loads, sha256 }| AdapterLine {
        name,
        scale,
        sha256,
        bytes,
        hits,
        loads,
    };
    session.adapters.used().into_iter().map(line).collect()
}

/// Entry of a prompt in the line.
#[derive(Debug, Serialize)]
pub struct PromptLine {
    prompt_index: usize,
    prompt: String,
    prompt_id: String,
    prompt_tokens: usize,
    #[serde(flatten)]
    times: Times,
    expected_present: bool,
    /// True when the generated tokens are the expected ones; `None` when no tokens are expected.
    pub expected_ok: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mismatch_index: Option<usize>,
    rounds: Vec<RoundLine>,
    finish: &'static str,
    /// Reason why the prompt was not continued.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Value>,
}

#[derive(Debug, Serialize)]
struct RoundLine {
    round: usize,
    #[serde(flatten)]
    times: Times,
}

#[derive(Debug, Default, Serialize)]
struct Times {
    tokens_generated: usize,
    window_time_s: f64,
    prefill_time_s: f64,
    decode_time_s: f64,
    tps_true: f64,
}

impl Times {
    fn of<'a>(completions: impl Iterator<Item = &'a Completion>) -> Times {
        let mut times = Times::default();
        for done in completions {
            times.tokens_generated += done.ids.len();
            times.prefill_time_s += done.prefill_time().as_secs_f64();
            times.decode_time_s += done.decode_time().as_secs_f64();
        }
        times.window_time_s = times.prefill_time_s + times.decode_time_s;
        times.tps_true = rate(times.tokens_generated, times.window_time_s);
        times
    }
}

impl MeasurementLine {
    /// Returns the line without its prompts.
    pub fn summary(&self) -> Map<String, Value> {
        let Ok(Value::Object(mut fields)) = serde_json::to_value(self) else { unreachable!("a struct of plain data") };
        fields.shift_remove("prompts");
        fields
    }
}

impl Measured<'_> {
    /// Samples the peak memory and computes the line; to be called after the timed window.
    pub fn line(&self) -> MeasurementLine {
        let metrics = Metrics::new(self.session, self.rounds);
        let engine = &self.session.engine;
        let last = self.rounds.iter().flat_map(|round| &round.outcome.completions).next_back();
        let only = |wanted: bool| last.filter(|_| wanted && self.prompts.len() == 1);
        MeasurementLine {
            schema_version: SCHEMA_VERSION,
            model: self.session.name.clone(),
            architecture: engine.config().architecture.clone(),
            precision: engine.precision().name(),
            device: engine.device(),
            threads: engine.threads(),
            isa: engine.isa(),
            attention: (engine.attention() != AttentionKernel::default()).then(|| engine.attention().name()),
            run: self.run,
            tokens_generated: metrics.tokens_generated,
            tokens: only(true).map(|done| done.ids.clone()),
            text: only(self.with_text).map(|done| done.text.clone()),
            bytes_touched: self.bytes_touched,
            bytes_per_token: self.bytes_per_token,
            weights_bytes_per_token: metrics.weights_bytes_per_token,
            effective_bandwidth_gbps: metrics.effective_bandwidth_gbps,
            weights_in_huge_pages: mapped::huge_share(),
            metrics,
            prompts_count: self.prompts.len(),
            rounds: self.rounds.len(),
            stages: engine.profiles().then(|| self.stages()),
            prompts: (0..self.prompts.len()).map(|index| self.prompt_line(index)).collect(),
            placement: json!({
                "affinity": self.session.engine_options.affinity.name(),
                "numa": self.session.engine_options.numa.to_string(),
                // The processors of each thread; empty if the system chooses.
                "threads": engine.placement().threads(),
                // Empty if the system does not report them.
                "nodes": Topology::probe(Path::new(SYSTEM_ROOT)).nodes,
            }),
            gpu: gpu_line(engine, self.rounds.iter().map(|round| round.gpu).sum::<Duration>().as_secs_f64()),
            adapters: adapters(self.session),
        }
    }

    /// Computes the stage times of all rounds together. The time to encode the prompts counts as prefill, although it
    /// lies before the timed window.
    fn stages(&self) -> StageTimes {
        let sum = |stages: fn(&Outcome) -> &Stages| {
            let mut sum = Stages::default();
            self.rounds.iter().for_each(|round| sum.merge(stages(&round.outcome)));
            sum
        };
        let mut prefill = sum(|outcome| &outcome.prefill_stages);
        prefill.add(Stage::Tokenizer, self.encoding);
        StageTimes::new(&prefill, &sum(|outcome| &outcome.decode_stages), self.sink)
    }

    fn prompt_line(&self, index: usize) -> PromptLine {
        let completions: Vec<&Completion> = self.rounds.iter().map(|round| &round.outcome.completions[index]).collect();
        let last = completions[completions.len() - 1];
        let expected = self.expected.get(index).and_then(Option::as_ref);
        let mismatch_index =
            expected.and_then(|ids| completions.iter().find_map(|done| first_difference(&done.ids, ids)));
        let round_line =
            |(i, done): (usize, &&Completion)| RoundLine { round: i + 1, times: Times::of([*done].into_iter()) };
        PromptLine {
            prompt_index: index,
            prompt: self.prompts[index].clone(),
            prompt_id: prompt_id(&self.prompts[index]),
            prompt_tokens: last.prompt_tokens,
            times: Times::of(completions.iter().copied()),
            expected_present: expected.is_some(),
            expected_ok: expected.map(|_| mismatch_index.is_none()),
            mismatch_index,
            rounds: completions.iter().enumerate().map(round_line).collect(),
            finish: last.finish.name(),
            error: last.error.as_ref().map(ToString::to_string),
            text: (self.with_text && self.prompts.len() > 1).then(|| last.text.clone()),
            logprobs: self.logprobs.get(index).cloned().flatten(),
        }
    }
}

/// Returns the first position where two texts differ, within the length of the shorter: generated text may be cut by
/// `--max-new`, expected text by EOS.
pub fn first_difference(generated: &[u32], expected: &[u32]) -> Option<usize> {
    generated.iter().zip(expected).position(|(a, b)| a != b)
}

/// Returns the FNV-1a hash (64 bits, standard offset basis) of the UTF-8 bytes in hexadecimal.
pub fn prompt_id(prompt: &str) -> String {
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    format!("{:016x}", prompt.bytes().fold(0xcbf2_9ce4_8422_2325, fold))
}

/// Describes the GPUs in use, if any: for each GPU its range of layers (start, end exclusive), its memory, and the
/// memory taken by this program and others. The kernel time is the sum over steps from the first launch of a step to
/// the end of its last.
fn gpu_line(engine: &Engine, kernel_time_s: f64) -> Option<Value> {
    let (mut cuda, mut devices) = (None, Vec::new());
    for part in engine.parts() {
        let Some(gpu) = part.device else { continue };
        devices.push(json!({
            "number": gpu.ordinal,
            "name": gpu.name,
            "capability": format!("{}.{}", gpu.capability.0, gpu.capability.1),
            "layers": [part.layers.start, part.layers.end],
            "memory_bytes": gpu.memory,
            "memory_taken_bytes": part.memory_taken,
        }));
        cuda = Some(gpu.driver);
    }
    cuda.map(|cuda| json!({"cuda": cuda, "kernel_time_s": kernel_time_s, "devices": devices}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_ids_are_fnv_1a() {
        assert_eq!(prompt_id(""), "cbf29ce484222325");
        assert_eq!(prompt_id("a"), "af63dc4c8601ec8c");
        assert_eq!(prompt_id("foobar"), "85944171f73967e8");
    }

    #[test]
    fn texts_are_compared_over_their_common_length() {
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2]), None);
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 5, 3], &[1, 2, 3]), Some(1));
    }
}
