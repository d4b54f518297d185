//! Compares the runtime with Hugging Face: ids, logits and perplexities of every fixture.

use crate::common::{FAMILIES, FIXTURES, all_logits, fixture, packed_as};
use iec::generate::score::{Score, score_text, score_window};
use iec::iebin::IebinReader;
use iec::model_config::Mlp;
use iec::runtime::{Engine, EngineOptions, Feed, KvType, Precision, Want};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Fixtures outside the repository, used when `IEC_EXTRA_FIXTURES` names their directory.
const EXTRA: [&str; 2] = ["llama-trained", "stories656k"];

/// Checkpoint with the golden values that Hugging Face computed from it.
pub struct Case {
    pub name: &'static str,
    pub hf_dir: PathBuf,
    golden: Value,
}

impl Case {
    fn new(name: &'static str, hf_dir: PathBuf) -> Case {
        let golden = serde_json::from_slice(&std::fs::read(hf_dir.join("golden.json")).unwrap()).unwrap();
        Case { name, hf_dir, golden }
    }

    pub fn fixture(name: &'static str) -> Case {
        Case::new(name, fixture(name))
    }

    pub fn all() -> Vec<Case> {
        let mut cases: Vec<Case> = FIXTURES.into_iter().chain(FAMILIES).map(Case::fixture).collect();
        if let Some(dir) = extra_fixtures() {
            cases.extend(EXTRA.map(|name| Case::new(name, dir.join(name))));
        }
        cases
    }

    pub fn engine(&self, options: EngineOptions) -> Engine {
        open(&packed(self.name, &self.hf_dir), options)
    }

    pub fn prompts(&self) -> &[Value] {
        self.golden["prompts"].as_array().unwrap()
    }
}

fn extra_fixtures() -> Option<PathBuf> {
    std::env::var_os("IEC_EXTRA_FIXTURES").map(PathBuf::from)
}

pub fn packed(name: &str, hf_dir: &Path) -> PathBuf {
    packed_as(name, hf_dir, &[])
}

pub fn open(pack: &Path, options: EngineOptions) -> Engine {
    Engine::open(&IebinReader::open(pack).unwrap(), &options).unwrap()
}

pub fn fp32() -> EngineOptions {
    EngineOptions { precision: Some(Precision::Fp32), threads: 2, ..EngineOptions::default() }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u32
}

/// Returns the `(id, logit)` pairs that golden.json lists for the position after a prompt: all of them, or the 32
/// largest and a sample.
fn listed_logits(golden: &Value) -> Vec<(usize, f32)> {
    if golden["full"].is_array() {
        return floats(&golden["full"]).into_iter().enumerate().collect();
    }
    let list = |at: &str, values: &str| ids(&golden[at]).into_iter().zip(floats(&golden[values])).collect::<Vec<_>>();
    let listed = [list("top32_ids", "top32"), list("sample_pos", "sample")].concat();
    listed.into_iter().map(|(id, logit)| (id as usize, logit)).collect()
}

fn pairs(value: &Value) -> Vec<(usize, f32)> {
    let pair = |p: &Value| (p[0].as_u64().unwrap() as usize, p[1].as_f64().unwrap() as f32);
    value.as_array().unwrap().iter().map(pair).collect()
}

/// Difference between an engine and the golden continuation of one prompt, which is fed token by token.
#[derive(Default)]
pub struct Difference {
    /// Largest difference of a listed logit.
    pub logit: f32,
    /// Steps whose best id differs although golden's two best logits are further apart than `noise`.
    pub wrong_ids: Vec<usize>,
    /// Number of steps whose two best logits were far enough apart to be compared.
    pub compared: usize,
}

pub fn compare(engine: &mut Engine, prompt: &Value, noise: f32) -> Difference {
    let (mut sequence, mut logits) = (engine.new_sequence().unwrap(), Vec::new());
    let greedy = ids(&prompt["greedy_ids"]);
    let mut difference = Difference::default();
    let mut feed = ids(&prompt["ids"]);
    for (step, (id, golden)) in greedy.iter().zip(prompt["steps"].as_array().unwrap()).enumerate() {
        engine.forward(&mut [Feed { sequence: &mut sequence, tokens: &feed, want: Want::Last }], &mut logits).unwrap();
        let mut listed = pairs(&golden["top5"]);
        if listed[0].1 - listed[1].1 > noise {
            difference.compared += 1;
            if argmax(&logits) != *id {
                difference.wrong_ids.push(step);
            }
        }
        if step == 0 {
            listed.extend(listed_logits(&prompt["prompt_last_logits"]));
        }
        let worst = listed.iter().map(|(id, golden)| (logits[*id] - golden).abs()).fold(0.0, f32::max);
        difference.logit = difference.logit.max(worst);
        feed = vec![*id];
    }
    difference
}

#[test]
fn fp32_gives_the_ids_and_logits_of_hugging_face() {
    let mut failures = Vec::new();
    for case in Case::all() {
        let mut engine = case.engine(fp32());
        for (i, prompt) in case.prompts().iter().enumerate() {
            let found = compare(&mut engine, prompt, 0.0);
            if found.logit > 1e-3 || !found.wrong_ids.is_empty() || found.compared == 0 {
                let Difference { logit, wrong_ids, .. } = found;
                failures.push(format!("{} prompt {i}: logits off by {logit}, ids differ at {wrong_ids:?}", case.name));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Returns the tolerance of logits when weights, activations or the KV cache are rounded to a type with this unit
/// roundoff: 128 times that roundoff.
///
/// Measured on the fixtures (logits up to about 10, up to 5 layers): 80 at most for weights and cache in f16 or bf16,
/// 116 with activations in bf16. A router selects experts discontinuously, so a mixture of experts may deviate more
/// when two experts have nearly equal scores: in f16 `gptoss-mxfp4` (random weights) does so in two of nine prompts,
/// by up to 0.6; in bf16 all of them do, by up to 2.3.
pub fn noise(precision: Precision) -> f32 {
    let unit_roundoff = if precision == Precision::Bf16 { 2f32.powi(-9) } else { 2f32.powi(-12) };
    128.0 * unit_roundoff
}

#[test]
fn half_precisions_give_the_same_ids_wherever_the_choice_is_clearer_than_rounding() {
    let mut failures = Vec::new();
    for case in Case::all() {
        for precision in [Precision::Bf16, Precision::Fp16] {
            let mut engine = case.engine(EngineOptions { precision: Some(precision), ..fp32() });
            let experts = matches!(engine.config().mlp, Mlp::Moe { .. });
            // Where two experts are almost equally likely, rounding exchanges them, which changes logits by more.
            let (noise, limit) = match experts {
                true => (noise(Precision::Bf16), f32::INFINITY),
                false => (noise(precision), noise(precision)),
            };
            // Delta nets carry errors from position to position: with bf16, logits of the fixtures differ by up to 0.8,
            // and those of the reference of `iec verify`, which also rounds between operations, by up to 3.4.
            let carries = case.name.starts_with("qwen35") || case.name == "qwen3next";
            let (noise, limit) = if carries { (4.0 * noise, 4.0 * limit) } else { (noise, limit) };
            for (i, prompt) in case.prompts().iter().enumerate() {
                let found = compare(&mut engine, prompt, noise);
                if found.logit > limit || !found.wrong_ids.is_empty() || found.compared == 0 {
                    let Difference { logit, wrong_ids, .. } = found;
                    let what = format!("logits off by {logit}, ids differ at {wrong_ids:?}");
                    failures.push(format!("{} {precision} prompt {i}: {what}", case.name));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn fp32_perplexity_is_that_of_hugging_face() {
    for case in Case::all() {
        let mut engine = case.engine(fp32());
        let golden = &case.golden["perplexity"];
        assert_close(case.name, score_window(&mut engine, &ids(&golden["ids"])).unwrap(), golden, 1e-3);
    }
}

#[test]
fn fp32_perplexity_over_a_long_text_is_that_of_hugging_face() {
    for case in Case::all() {
        let mut engine = case.engine(fp32());
        if let Some(score) = score_long(&case, &mut engine) {
            assert_close(case.name, score, &case.golden["perplexity_long"], 1e-3);
        }
    }
}

/// Scores the long text of a trained fixture by the rule in golden.json. Returns `None` where golden.json has no such
/// number or the text is not available.
fn score_long(case: &Case, engine: &mut Engine) -> Option<Score> {
    let golden = &case.golden["perplexity_long"];
    let file = Path::new(golden["text_file"].as_str()?).file_name()?;
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/text").join(file);
    let path = if own.exists() { own } else { extra_fixtures()?.join("text").join(file) };
    let tokenizer = tokenizers::Tokenizer::from_file(case.hf_dir.join("tokenizer.json")).unwrap();
    let encoding = tokenizer.encode(std::fs::read_to_string(path).unwrap(), false).unwrap();
    let rule = golden["rule"].as_str().unwrap();
    let number_after = |word: &str| {
        let digits = |c: char| !c.is_ascii_digit();
        let tail = rule.split(word).nth(1).unwrap().trim_start_matches(['[', ' ']);
        tail.split(digits).next().unwrap().parse::<u32>().ok()
    };
    let prefix: Vec<u32> = number_after("prepend").into_iter().collect();
    // The golden value covers only the first windows of the text.
    let window = number_after("each window of").unwrap() as usize;
    let limit = golden["windows"].as_u64().unwrap() as usize * (window - prefix.len());
    let ids = encoding.get_ids();
    let score = score_text(engine, &ids[..limit.min(ids.len())], &prefix, window).unwrap();
    assert_eq!(score.scored as u64, golden["n"].as_u64().unwrap(), "{}: ids scored", case.name);
    Some(score)
}

fn assert_close(name: &str, score: Score, golden: &Value, tolerance: f64) {
    let (ours, theirs) = (score.perplexity(), golden["ppl"].as_f64().unwrap());
    assert!((ours / theirs - 1.0).abs() < tolerance, "{name}: perplexity {ours}, Hugging Face {theirs}");
}

#[test]
fn quantized_weights_give_the_perplexity_of_their_round_trip() {
    let schemes = [
        ("q4_0 ggml (block 32, d=max/-8, fp16 scale)", r#""scheme":"q4_0","method":"rtn""#, Precision::Int4w),
        (
            "int8 per row (absmax/127, fp16 scale)",
            r#""scheme":"int8","group_size":"row","method":"rtn""#,
            Precision::Int8w,
        ),
        (
            "int4 per row (absmax/7, fp16 scale, codes -8..7)",
            r#""scheme":"int4","group_size":"row","method":"rtn""#,
            Precision::Int4w,
        ),
    ];
    for case in Case::all() {
        for (i, (scheme, fields, precision)) in schemes.into_iter().enumerate() {
            let golden = &case.golden["quantized_reference"]["schemes"][scheme];
            if golden.is_null() {
                continue;
            }
            let name = format!("{}-{precision}-{i}", case.name);
            let rules = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.json"));
            let text = format!(r#"{{"version":1,"rules":[{{"include":"layers.*proj(.weight)?$",{fields}}}]}}"#);
            std::fs::write(&rules, text).unwrap();
            let pack = packed_as(&name, &case.hf_dir, &["--q4-map", rules.to_str().unwrap()]);
            let options = EngineOptions { precision: Some(precision), kv: Some(KvType::F32), ..fp32() };
            if let Some(score) = score_long(&case, &mut open(&pack, options)) {
                assert_close(&name, score, golden, 1e-4);
            }
        }
    }
}

#[test]
fn int8_activations_cost_little_beside_4_bit_weights() {
    for name in ["gptoss-mxfp4", "gptoss-trained"] {
        let case = Case::fixture(name);
        let text = ids(&case.golden["perplexity"]["ids"]);
        let [float, int8] = [Precision::Int4w, Precision::Int4].map(|precision| {
            let mut engine = case.engine(EngineOptions { precision: Some(precision), ..fp32() });
            score_window(&mut engine, &text).unwrap().perplexity()
        });
        assert!((int8 / float - 1.0).abs() < 0.02 && int8 != float, "{name}: W4A8 {int8}, weights only {float}");
    }
}

#[test]
fn packs_of_8_bit_weights_round_activations_too_at_little_cost_unless_told_otherwise() {
    let case = Case::fixture("stories260k");
    let rules = Path::new(env!("CARGO_TARGET_TMPDIR")).join("w8a8.json");
    let text = r#"{"version":1,"rules":[{"include":"layers.*proj(.weight)?$","scheme":"int8","group_size":"row"}]}"#;
    std::fs::write(&rules, text).unwrap();
    let pack = packed_as("w8a8", &case.hf_dir, &["--q4-map", rules.to_str().unwrap()]);
    let text = ids(&case.golden["perplexity"]["ids"]);
    let [(int8, chosen), (float, _)] = [None, Some(Precision::Int8w)].map(|precision| {
        let mut engine = open(&pack, EngineOptions { precision, ..fp32() });
        (score_window(&mut engine, &text).unwrap().perplexity(), engine.precision())
    });
    assert_eq!(chosen, Precision::Int8);
    assert!((int8 / float - 1.0).abs() < 0.01 && int8 != float, "W8A8 {int8}, weights only {float}");
}

#[test]
fn narrow_caches_cost_little() {
    // Per cache type: tolerance of logits in units of 2^-12 as in `noise` (measured: 150, 1400 and 6900 on
    // stories260k, at most half of that on the others) and of the relative increase of perplexity (measured: 0.012 %,
    // 0.11 % and 0.37 %).
    let caches = [(KvType::F16, 256.0, 0.001), (KvType::Bf16, 2048.0, 0.005), (KvType::Int8, 8192.0, 0.01)];
    let mut failures = Vec::new();
    for name in ["stories260k", "llama-gqa", "gemma2", "gemma3", "qwen3", "phi3"] {
        let case = Case::fixture(name);
        let text = ids(&case.golden["perplexity"]["ids"]);
        let measured = |kind| {
            let mut engine = case.engine(EngineOptions { kv: Some(kind), ..fp32() });
            let logits = all_logits(&mut engine, &text);
            let score = score_long(&case, &mut engine).unwrap_or_else(|| score_window(&mut engine, &text).unwrap());
            (logits, score.perplexity())
        };
        let (exact, perplexity) = measured(KvType::F32);
        for (kind, units, cost) in caches {
            let (logits, found) = measured(kind);
            let apart = logits.iter().zip(&exact).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            let ratio = found / perplexity - 1.0;
            if apart > units / 4096.0 || apart == 0.0 || ratio.abs() > cost {
                failures
                    .push(format!("{name} {kind}: logits {apart} apart, perplexity {found}, {perplexity} with f32"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn fp8_and_int4_caches_keep_clear_choices_and_cost_little() {
    // Per model and cache type: bound of the relative change of perplexity.
    let cases = [
        ("stories260k", KvType::Fp8, 0.03),
        ("gptoss-trained", KvType::Fp8, 0.02),
        ("gptoss-trained", KvType::Int4, 0.03),
    ];
    let mut failures = Vec::new();
    for (name, kind, cost) in cases {
        let case = Case::fixture(name);
        let text = ids(&case.golden["perplexity"]["ids"]);
        let measured = |kind| {
            let mut engine = case.engine(EngineOptions { kv: Some(kind), ..fp32() });
            let score = score_long(&case, &mut engine).unwrap_or_else(|| score_window(&mut engine, &text).unwrap());
            let differences = case.prompts().iter().map(|prompt| compare(&mut engine, prompt, 2.0)).collect::<Vec<_>>();
            (score.perplexity(), differences)
        };
        let (exact, (found, differences)) = (measured(KvType::F32).0, measured(kind));
        let ratio = found / exact - 1.0;
        let wrong = differences.iter().map(|d| d.wrong_ids.len()).sum::<usize>();
        let compared = differences.iter().map(|d| d.compared).sum::<usize>();
        if ratio.abs() > cost || ratio == 0.0 || wrong > 0 || compared == 0 {
            failures.push(format!("{name} {kind}: perplexity {ratio:+.4}, {wrong} of {compared} ids differ"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn what_cannot_be_read_is_refused_and_leaves_the_sequences_as_they_were() {
    let case = Case::fixture("llama-gqa");
    let mut engine = case.engine(EngineOptions { context: Some(8), ..EngineOptions::default() });
    let (mut a, mut b) = (engine.new_sequence().unwrap(), engine.new_sequence().unwrap());
    let mut logits = Vec::new();
    for (tokens, complaint) in [(vec![], "no tokens"), (vec![512], "vocabulary of 512"), (vec![1; 9], "context of 8")] {
        let mut feeds = [
            Feed { sequence: &mut a, tokens: &[1, 2], want: Want::Last },
            Feed { sequence: &mut b, tokens: &tokens, want: Want::Last },
        ];
        let error = engine.forward(&mut feeds, &mut logits).unwrap_err();
        assert!(error.to_string().contains(complaint), "{error}");
        assert_eq!((a.len(), b.len(), error.cause().exit_code()), (0, 0, 2));
    }
}

#[test]
fn a_precision_the_pack_cannot_serve_is_refused_with_the_way_to_such_a_pack() {
    let case = Case::fixture("llama-gqa");
    let reader = IebinReader::open(&packed(case.name, &case.hf_dir)).unwrap();
    for (precision, help) in [Precision::Int8w, Precision::Int8]
        .map(|p| (p, "--bits 8"))
        .into_iter()
        .chain([Precision::Int4w, Precision::Int4].map(|p| (p, "--bits 4")))
    {
        let options = EngineOptions { precision: Some(precision), ..EngineOptions::default() };
        let error = Engine::open(&reader, &options).unwrap_err();
        assert_eq!(error.cause().exit_code(), 5, "{error}");
        assert!(error.help_text().unwrap().contains(help));
    }
    let auto = Engine::open(&reader, &EngineOptions::default()).unwrap();
    assert_eq!(auto.precision(), Precision::Bf16);
}

#[test]
fn weight_bytes_per_token_leave_out_idle_experts_and_unread_embedding_rows() {
    for name in ["stories260k", "llama-gqa", "gptoss-mxfp4", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral"] {
        let case = Case::fixture(name);
        let engine = case.engine(EngineOptions::default());
        let config = engine.config();
        let reader = IebinReader::open(&packed(case.name, &case.hf_dir)).unwrap();
        let read = |entry: &iec::iebin::Entry| match (entry.name.as_str(), &config.mlp) {
            ("model.embed_tokens.weight", _) if config.tied_embeddings => entry.nbytes + entry.nbytes / config.vocab,
            ("model.embed_tokens.weight", _) => entry.nbytes / config.vocab,
            (name, Mlp::Moe { experts, top_k, .. }) if name.contains(".experts.") && entry.shape.len() == 3 => {
                entry.nbytes / experts * top_k
            }
            // The runtime stores vectors as f32.
            (name, Mlp::Moe { experts, top_k, .. }) if name.contains(".experts.") => {
                4 * entry.elements() / experts * top_k
            }
            _ if entry.shape.len() == 1 => 4 * entry.elements(),
            _ => entry.nbytes,
        };
        let expected: usize = reader.entries().iter().map(read).sum();
        assert_eq!(engine.weight_bytes_per_token(), expected as u64, "{name}");
    }
}
