//! Tests that results do not depend on execution details: logits have the same bits for any number of threads, any
//! other sequences in the batch, any chunking of the prompt, any instruction set and any draft tokens, in every
//! precision.

use crate::common::{RECURRENT, all_logits, fixture, golden, iec, packed_as};
use iec::generate::sampler::Sampling;
use iec::generate::speculate::Speculator;
use iec::generate::{Options, Request, generate};
use iec::iebin::IebinReader;
use iec::runtime::cpu::Cpu;
use iec::runtime::{Engine, EngineOptions, Feed, KvType, Precision, PrefixActivations, Want};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Fixtures with precision and type of KV cache: every precision, every cache type, dense models and mixtures of
/// experts, every kind of tile, and every feature that some family adds.
const COMPANY: [(&str, Precision, KvType); 44] = [
    ("llama-gqa", Precision::Fp32, KvType::F32),
    ("llama-gqa", Precision::Fp32, KvType::Int8),
    ("llama-gqa", Precision::Int4w, KvType::Int4),
    ("llama-gqa", Precision::Bf16, KvType::F16),
    ("llama-gqa", Precision::Int8w, KvType::F16),
    ("llama-gqa", Precision::Int8, KvType::F16),
    ("llama-gqa", Precision::Int4w, KvType::F16),
    ("llama-gqa", Precision::Int4, KvType::F16),
    ("gemma2", Precision::Fp32, KvType::F32),
    ("gemma2", Precision::Fp16, KvType::Int8),
    ("gemma2", Precision::Int4, KvType::Int8),
    ("gemma2", Precision::Fp32, KvType::Fp8),
    ("gemma3", Precision::Bf16, KvType::Bf16),
    ("phi3", Precision::Fp16, KvType::F16),
    ("qwen3moe", Precision::Fp32, KvType::Bf16),
    ("qwen3moe", Precision::Int8w, KvType::F16),
    ("qwen3moe", Precision::Int8, KvType::Bf16),
    ("gptoss-mxfp4", Precision::Bf16, KvType::F16),
    ("gptoss-mxfp4", Precision::Int4, KvType::Bf16),
    ("gptoss-mxfp4", Precision::Int4, KvType::Int4),
    ("cohere2", Precision::Int4, KvType::F16),
    ("olmo3", Precision::Bf16, KvType::F16),
    ("ministral3", Precision::Int8, KvType::F16),
    ("glm4moe", Precision::Int8w, KvType::F16),
    ("minimaxm2", Precision::Int8, KvType::F16),
    ("qwen3vlmoe", Precision::Fp16, KvType::F16),
    ("museglimmer", Precision::Fp16, KvType::F16),
    ("deepseek3", Precision::Fp32, KvType::Int8),
    ("glm4flash", Precision::Bf16, KvType::Bf16),
    ("deepseek2", Precision::Int4, KvType::Fp8),
    ("mistral4", Precision::Int8w, KvType::F16),
    ("gemma4-moe", Precision::Int8, KvType::F16),
    ("gemma4-e", Precision::Bf16, KvType::F16),
    ("lfm2", Precision::Fp32, KvType::F32),
    ("lfm2", Precision::Int4, KvType::F16),
    ("lfm2moe", Precision::Bf16, KvType::Int8),
    ("lfm3", Precision::Fp16, KvType::F16),
    ("qwen35", Precision::Fp32, KvType::F32),
    ("qwen35-text", Precision::Int4, KvType::F16),
    ("qwen3next", Precision::Bf16, KvType::F16),
    ("granite4h", Precision::Fp32, KvType::F16),
    ("granite4h", Precision::Int8, KvType::F16),
    ("nemotronh", Precision::Fp32, KvType::F16),
    ("nemotronh", Precision::Int4, KvType::Int8),
];

/// Packs the fixture so that it can run in the precision and returns the directory.
fn pack(name: &str, precision: Precision) -> PathBuf {
    let fields = match precision {
        Precision::Int8w | Precision::Int8 => r#""scheme":"int8","group_size":"row","method":"rtn""#,
        // The experts of `gptoss-mxfp4` already have four bits.
        Precision::Int4w | Precision::Int4 if name != "gptoss-mxfp4" => r#""scheme":"q4_0","method":"rtn""#,
        _ => return packed_as(name, &fixture(name), &[]),
    };
    let rules = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("company-{name}-{precision}.json"));
    let text = format!(r#"{{"version":1,"rules":[{{"include":"layers.*proj(.weight)?$",{fields}}}]}}"#);
    std::fs::write(&rules, text).unwrap();
    packed_as(&format!("company-{name}-{precision}"), &fixture(name), &["--q4-map", rules.to_str().unwrap()])
}

fn open(name: &str, (precision, kv): (Precision, KvType), threads: usize, prefill_chunk: usize) -> Engine {
    let options =
        EngineOptions { precision: Some(precision), kv: Some(kv), threads, prefill_chunk, ..EngineOptions::default() };
    Engine::open(&IebinReader::open(&pack(name, precision)).unwrap(), &options).unwrap()
}

fn text(name: &str) -> Vec<u32> {
    let ids = |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    ids(&golden(name)["perplexity"]["ids"])
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn logits_are_the_same_bits_for_any_number_of_threads_and_any_chunking() {
    for (name, precision, kv) in COMPANY {
        let tokens = text(name);
        let expected = bits(&all_logits(&mut open(name, (precision, kv), 1, 512), &tokens));
        // Recurrent layers fold their rows at positions divisible by 64.
        let borders = [(1, 63), (2, 64), (1, 65), (2, 256)].into_iter().filter(|_| RECURRENT.contains(&name));
        for (threads, prefill_chunk) in [(2, 512), (5, 512), (1, 1), (2, 7), (5, 100)].into_iter().chain(borders) {
            let same = bits(&all_logits(&mut open(name, (precision, kv), threads, prefill_chunk), &tokens)) == expected;
            assert!(same, "{name} {precision} {kv}: {threads} threads, chunks of {prefill_chunk}");
        }
    }
}

#[test]
fn logits_are_the_same_bits_alone_and_in_a_batch() {
    for (name, precision, kv) in COMPANY {
        let mut engine = open(name, (precision, kv), 2, 50);
        let text = text(name);
        // Texts of different lengths: one crosses page borders of the KV cache, one joins late.
        let texts = [&text[..5], &text[3..203], &text[100..103], &text[7..47]];
        let rounds = [
            [Some(0..3), Some(0..197), None, Some(0..38)],
            [Some(3..4), Some(197..198), Some(0..1), Some(38..39)],
            [Some(4..5), Some(198..200), Some(1..3), Some(39..40)],
        ];
        let vocab = engine.config().vocab;
        let alone = texts.map(|tokens| bits(&all_logits(&mut engine, tokens)));
        let mut sequences = texts.map(|_| engine.new_sequence().unwrap());
        let mut logits = Vec::new();
        for round in rounds {
            let (mut feeds, mut fed) = (Vec::new(), Vec::new());
            for (i, (sequence, range)) in sequences.iter_mut().zip(round).enumerate() {
                let Some(range) = range else { continue };
                fed.push((i, range.end));
                feeds.push(Feed { sequence, tokens: &texts[i][range], want: Want::Last });
            }
            engine.forward(&mut feeds, &mut logits).unwrap();
            for ((i, end), row) in fed.into_iter().zip(logits.chunks_exact(vocab)) {
                let same = bits(row) == alone[i][(end - 1) * vocab..end * vocab];
                assert!(same, "{name} {precision} {kv}: text {i} after {end} tokens");
            }
        }
    }
}

#[test]
fn logits_are_the_same_bits_when_models_share_the_activations_of_their_first_layers() {
    for (name, precision, kv) in COMPANY {
        let (mut engine, tokens) = (open(name, (precision, kv), 2, 50), &text(name)[..60]);
        let (vocab, layers) = (engine.config().vocab, engine.config().n_layers);
        let expected = bits(&all_logits(&mut engine, tokens)[23 * vocab..]);
        let mut prefix = PrefixActivations::default();
        // The first call (layer 0) keeps only the input of layer 0, so the second starts at the embedding again; all
        // later calls start from kept activations.
        for layer in [0].into_iter().chain((0..=layers).rev()) {
            let same = bits(&engine.logits_reusing(tokens, 23, layer, &mut prefix).unwrap()) == expected;
            assert!(same, "{name} {precision} {kv}: from layer {layer}");
        }
    }
}

#[test]
fn every_instruction_set_of_this_machine_gives_the_same_logits() {
    let dir = tempfile::tempdir().unwrap();
    for (name, precision, kv) in COMPANY {
        let traces = Cpu::isas().into_iter().map(|isa| {
            let trace = dir.path().join(format!("{name}-{precision}-{kv}-{isa}.jsonl"));
            let mut command = iec();
            command.env("IEC_ISA", isa).args(["run", "--greedy", "--max-new", "24", "--prompt", "The quick brown fox"]);
            command
                .args(["--precision", precision.name(), "--kv", &kv.to_string(), "--model-dir"])
                .arg(pack(name, precision));
            command.arg("--trace-ids").arg(&trace).assert().success();
            (isa, std::fs::read_to_string(trace).unwrap())
        });
        let traces: Vec<_> = traces.collect();
        assert!(traces[0].1.contains("topk_logits"), "{}", traces[0].1);
        for (isa, trace) in &traces[1..] {
            assert!(*trace == traces[0].1, "{name} {precision} {kv}: {isa} differs from {}", traces[0].0);
        }
    }
}

#[test]
fn a_prefix_can_be_shared_and_taken_back() {
    let mut engine = open("gptoss-mxfp4", (Precision::Int4, KvType::F16), 1, 512);
    let text = text("gptoss-mxfp4");
    let vocab = engine.config().vocab;
    let expected = bits(&all_logits(&mut engine, &text[..150]));
    let (mut first, mut logits) = (engine.new_sequence().unwrap(), Vec::new());
    engine.forward(&mut [Feed { sequence: &mut first, tokens: &text[..140], want: Want::Last }], &mut logits).unwrap();
    let mut second = first.clone();
    // `first` reads other tokens, which must not affect `second`. Then `first` is truncated and reads the same
    // tokens.
    engine.forward(&mut [Feed { sequence: &mut first, tokens: &text[..30], want: Want::Last }], &mut logits).unwrap();
    first.truncate(140);
    for sequence in [&mut second, &mut first] {
        engine.forward(&mut [Feed { sequence, tokens: &text[140..150], want: Want::Last }], &mut logits).unwrap();
        assert_eq!(bits(&logits), expected[149 * vocab..]);
    }
}

/// Runs the prompts and returns, for each, the ids and logit bits of the most probable tokens at each step, and the
/// number of accepted draft tokens.
fn said(engine: &mut Engine, mut speculator: Speculator, batch: usize, sampling: &Sampling) -> (Vec<Vec<u64>>, usize) {
    // Prompts repeat short patterns, so that the n-gram lookup finds matches.
    let prompts: Vec<Vec<u32>> = (2..7).map(|n| (0..24).map(|i| 5 + 7 * (i % n) + n).collect()).collect();
    let request = |ids: &Vec<u32>| Request {
        ids: ids.clone(),
        max_new: 20,
        sampling: sampling.clone(),
        logprobs: Some(3),
        ..Request::default()
    };
    let options = Options { tokenizer: None, batch, eos: &[], ..Options::default() };
    let mut said = vec![Vec::new(); prompts.len()];
    let outcome = generate(engine, None, &mut speculator, prompts.iter().map(request).collect(), &options, |event| {
        let (own, others) = event.likely.unwrap();
        let bits = std::iter::once(own).chain(others).map(|c| u64::from(c.logit.to_bits()) << 32 | u64::from(c.id));
        said[event.request].extend(bits);
        Ok(())
    });
    let completions = outcome.unwrap().completions;
    (said, completions.iter().map(|done| done.drafts.total().accepted).sum())
}

#[test]
fn guesses_change_neither_tokens_nor_logits_alone_or_in_a_batch_greedy_or_drawn() {
    let drawn = Sampling { temperature: 0.7, top_p: 0.9, repeat_penalty: 1.1, seed: 5, ..Sampling::default() };
    for (name, precision, kv) in COMPANY {
        let mut engine = open(name, (precision, kv), 2, 512);
        for sampling in &[Sampling::default(), drawn.clone()] {
            let (plain, _) = said(&mut engine, Speculator::off(), 1, sampling);
            let mut accepted = 0;
            for (batch, ahead) in [(1, 1), (1, 7), (3, 4), (5, 12)] {
                // The draft model is the model itself, so its draft tokens are right whenever the most probable token
                // is taken.
                let small = Speculator::draft(open(name, (precision, kv), 1, 512), &engine);
                for (source, speculator) in [("ngram", Speculator::ngram()), ("draft", small)] {
                    let (guessed, right) = said(&mut engine, speculator.always(ahead), batch, sampling);
                    accepted += right;
                    assert!(
                        guessed == plain,
                        "{name} {precision} {kv}: {source}, batch {batch}, {ahead} ahead, {sampling:?}"
                    );
                }
            }
            assert!(accepted > 0, "{name} {precision} {kv}: no guess came true");
        }
    }
}
