//! Models whose greedy text is known, so that everything on the wire is expected.
//!
//! A [`KnownModel`] is a checkpoint of one layer that has learned some texts by heart. Each text begins behind a trigger,
//! a special token that the chat template writes: `<|g1|>` before the first text, `<|g2|>` before the second, and so on.
//! A request chooses a text by `chat_template_kwargs: {"go": "<|g2|>"}`; a template may also choose one itself, such as
//! another text behind the result of a tool. Everything behind an unknown context is the end token.
//!
//! The model works as follows. Each token has a random code of 64 signs, and `SLOTS` slots of the hidden state hold the
//! codes of the last tokens. The embedding writes the first slot. Each head of the attention looks at a fixed distance (its
//! query is its key turned back by so many positions) and copies the code from there to a slot of its own. The
//! multiplication layer has a neuron for each step of a text: it fires if the slots hold the last tokens, and writes the
//! code of the next token to the last slot, which the output matrix reads.

use super::client::Server;
use half::bf16;
use iec::rng::Rng;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Place of the trigger in a chat template.
pub const GO: &str = "{{ go if go is defined else '<|g1|>' }}";
/// Separates the tokens of a text whose division matters.
pub const CUT: char = '¦';
/// The end token.
pub const END: &str = "<|im_end|>";

/// Number of last tokens on which the next one depends.
const SLOTS: usize = 6;
/// Length of a code, and of a head.
const CODE: usize = 64;
/// The hidden state: a constant with padding, the codes of the last tokens, and the code of the next token.
const HIDDEN: usize = CODE * (SLOTS + 2);
const OUT: usize = CODE * (SLOTS + 1);
/// Largest product of the codes of two tokens; that of a code with itself is 64.
const OVERLAP: i32 = 30;

/// A model with known texts.
pub struct KnownModel {
    template: String,
    config: Value,
    special: Vec<String>,
    plain: Vec<String>,
    /// Text between the trigger and the answer, at the end of the prompt.
    opening: String,
    texts: Vec<String>,
}

impl KnownModel {
    /// Creates a model with this chat template, which has [`GO`] at its end.
    pub fn new(template: &str) -> KnownModel {
        KnownModel {
            template: template.into(),
            config: json!({}),
            special: vec!["<|im_start|>".into(), END.into()],
            plain: Vec::new(),
            opening: String::new(),
            texts: Vec::new(),
        }
    }

    /// Adds special tokens, which answers do not show.
    pub fn special(mut self, tokens: &[&str]) -> KnownModel {
        self.special.extend(tokens.iter().map(ToString::to_string));
        self
    }

    /// Adds tokens that are text.
    pub fn plain(mut self, tokens: &[&str]) -> KnownModel {
        self.plain.extend(tokens.iter().map(ToString::to_string));
        self
    }

    /// Sets what the template writes behind the trigger, such as `<think>\n`: a few tokens of the model or single bytes.
    pub fn opening(mut self, text: &str) -> KnownModel {
        self.opening = text.into();
        self
    }

    /// Sets a field of `tokenizer_config.json`.
    pub fn config(mut self, name: &str, value: Value) -> KnownModel {
        self.config[name] = value;
        self
    }

    /// Adds a text. Its tokens are those of the model and random pieces; a text that has a [`CUT`] is divided there only.
    pub fn text(mut self, text: &str) -> KnownModel {
        self.texts.push(text.into());
        self
    }

    /// Returns the text of the request that makes the model write the text of this number, from 1.
    pub fn go(number: usize) -> Value {
        json!({"go": trigger(number)})
    }

    /// Writes the checkpoint into a new directory.
    pub fn write(&self, dir: &Path) {
        std::fs::create_dir_all(dir).unwrap();
        let mut vocabulary = Vocabulary::new(self);
        let steps = vocabulary.steps(self);
        let write = |name: &str, value: &Value| std::fs::write(dir.join(name), value.to_string()).unwrap();
        write("tokenizer.json", &vocabulary.to_json());
        let mut config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END,
                                "clean_up_tokenization_spaces": false, "chat_template": self.template});
        self.config.as_object().unwrap().iter().for_each(|(name, value)| config[name] = value.clone());
        write("tokenizer_config.json", &config);
        let model = Weights::new(&vocabulary, &steps);
        write("config.json", &model.config(vocabulary.id(END)));
        model.write(&dir.join("model.safetensors"));
    }
}

/// Starts one server with several known models, each with its name.
pub fn serve(home: &Path, models: &[(&str, KnownModel)], options: &[&str]) -> Server {
    let mut arguments: Vec<String> = vec!["--precision".into(), "bf16".into()];
    for (name, model) in models {
        let dir = home.join(name);
        model.write(&dir);
        arguments.extend(["--model".into(), format!("{name}={}", dir.display())]);
    }
    let all: Vec<&str> = arguments.iter().map(String::as_str).chain(options.iter().copied()).collect();
    let server = Server::spawn(&all, &[("IEC_CACHE", &home.join("cache").display().to_string())]);
    server.wait_until_ready();
    server
}

fn trigger(number: usize) -> String {
    format!("<|g{number}|>")
}

/// Tokens, in the order of their ids: single bytes, pieces of texts, added tokens.
struct Vocabulary {
    bytes: Vec<String>,
    pieces: Vec<String>,
    added: Vec<(String, bool)>,
    rng: Rng,
}

/// Names a token before its id is known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Token {
    Text(String),
    Added(String),
}

/// The token that follows the last ones.
type Steps = BTreeMap<Vec<Token>, Token>;

impl Vocabulary {
    fn new(model: &KnownModel) -> Vocabulary {
        // The letters by which tokenizers of bytes spell a byte.
        let printed = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let mut others = 256..;
        let letter = |byte: u8| match printed(byte) {
            true => char::from(byte),
            false => char::from_u32(others.next().unwrap()).unwrap(),
        };
        let bytes = (0..=255).map(letter).map(String::from).collect();
        let triggers = (1..=model.texts.len()).map(|number| (trigger(number), true));
        let special = model.special.iter().map(|token| (token.clone(), true));
        let added = special.chain(model.plain.iter().map(|token| (token.clone(), false))).chain(triggers).collect();
        Vocabulary { bytes, pieces: Vec::new(), added, rng: Rng::new(9) }
    }

    /// Returns the text as tokenizers of bytes spell it.
    fn spelled(&self, text: &str) -> String {
        text.bytes().map(|byte| self.bytes[usize::from(byte)].as_str()).collect()
    }

    /// Divides a text into tokens; without `random`, text that is no added token is divided into bytes or at cuts.
    fn divided(&mut self, text: &str, random: bool) -> Vec<Token> {
        let (mut tokens, mut rest) = (Vec::new(), text);
        let has_cuts = text.contains(CUT);
        while let Some(first) = rest.chars().next() {
            let starts = |text: &str| self.added.iter().map(|(token, _)| token).find(|token| text.starts_with(*token));
            if let Some(token) = starts(rest).cloned() {
                rest = &rest[token.len()..];
                tokens.push(Token::Added(token));
            } else if first == CUT {
                rest = &rest[CUT.len_utf8()..];
            } else {
                let ends = rest.char_indices().map(|(at, _)| at).chain([rest.len()]).skip(1);
                let end = ends.clone().find(|at| starts(&rest[*at..]).is_some() || rest[*at..].starts_with(CUT));
                let end = end.unwrap_or(rest.len());
                let size = match (has_cuts, random) {
                    (true, _) => usize::MAX,
                    (false, true) => 1 + (self.rng.next_u64() % 5) as usize,
                    (false, false) => 1,
                };
                let last = ends.clone().take(size).take_while(|at| *at <= end).last().unwrap();
                tokens.push(Token::Text(rest[..last].into()));
                rest = &rest[last..];
            }
        }
        tokens
    }

    /// Returns the steps of all texts, and adds their pieces to the vocabulary.
    fn steps(&mut self, model: &KnownModel) -> Steps {
        let mut known = BTreeMap::new();
        for (i, text) in model.texts.iter().enumerate() {
            let opening = self.divided(&model.opening, false);
            assert!(opening.len() < SLOTS, "the opening {:?} has too many tokens", model.opening);
            let prompt = [vec![Token::Added(trigger(i + 1))], opening].concat();
            let tries = if text.contains(CUT) { 1 } else { 200 };
            let found = (0..tries).find_map(|_| {
                let mut all = prompt.clone();
                all.extend(self.divided(text, true));
                all.push(Token::Added(END.into()));
                let mut own: Steps = known.clone();
                let fits = (prompt.len()..all.len()).all(|at| {
                    let old = own.insert(all[at.saturating_sub(SLOTS)..at].to_vec(), all[at].clone());
                    old.is_none_or(|old| old == all[at])
                });
                fits.then_some((own, all))
            });
            let (own, all) =
                found.unwrap_or_else(|| panic!("{text:?}: the same {SLOTS} tokens are followed by others"));
            known = own;
            for token in all {
                if let Token::Text(text) = token
                    && text.len() > 1
                    && !self.pieces.contains(&text)
                {
                    self.pieces.push(text);
                }
            }
        }
        known
    }

    fn size(&self) -> usize {
        self.bytes.len() + self.pieces.len() + self.added.len()
    }

    /// Returns the id of an added token.
    fn id(&self, token: &str) -> usize {
        self.id_of(&Token::Added(token.into()))
    }

    fn id_of(&self, token: &Token) -> usize {
        let first = self.bytes.len() + self.pieces.len();
        match token {
            Token::Added(text) => first + self.added.iter().position(|(added, _)| added == text).unwrap(),
            Token::Text(text) if text.len() == 1 => text.as_bytes()[0].into(),
            Token::Text(text) => self.bytes.len() + self.pieces.iter().position(|piece| piece == text).unwrap(),
        }
    }

    fn to_json(&self) -> Value {
        let texts = self.bytes.iter().cloned().chain(self.pieces.iter().map(|piece| self.spelled(piece)));
        let vocab: serde_json::Map<String, Value> = texts.enumerate().map(|(id, text)| (text, json!(id))).collect();
        let first = vocab.len();
        let added = self.added.iter().enumerate().map(|(i, (content, special))| {
            json!({"id": first + i, "content": content, "special": special, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false})
        });
        let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
               "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
               "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                         "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                         "ignore_merges": false, "vocab": vocab, "merges": []}})
    }
}

/// Tensors of a model.
struct Weights {
    tokens: usize,
    neurons: usize,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Weights {
    fn new(vocabulary: &Vocabulary, steps: &Steps) -> Weights {
        let (tokens, neurons) = (vocabulary.size().next_multiple_of(32), steps.len().next_multiple_of(32));
        let mut weights = Weights { tokens, neurons, tensors: BTreeMap::new() };
        let codes = codes(tokens);
        weights.embedding(&codes, vocabulary.id(END));
        weights.attention();
        let prefix = "model.layers.0.mlp";
        let mut gate = Matrix::new(neurons, HIDDEN);
        let (mut up, mut down) = (Matrix::new(neurons, HIDDEN), Matrix::new(HIDDEN, neurons));
        for (neuron, (last, next)) in steps.iter().enumerate() {
            for (slot, token) in last.iter().rev().enumerate() {
                gate.put_row(neuron, CODE * (slot + 1), &codes[vocabulary.id_of(token)], 1.0);
            }
            // Half of what one wrong token takes away.
            let least = CODE as i32 * last.len() as i32 - (CODE as i32 - OVERLAP) / 2;
            gate.put(neuron, 0, -least as f32);
            up.put(neuron, 0, 1.0);
            for (i, sign) in codes[vocabulary.id_of(next)].iter().enumerate() {
                down.put(OUT + i, neuron, f32::from(*sign));
            }
        }
        weights.add(&format!("{prefix}.gate_proj"), gate);
        weights.add(&format!("{prefix}.up_proj"), up);
        weights.add(&format!("{prefix}.down_proj"), down);
        weights
    }

    /// The code of each token, a constant, and weakly the code of the end token, which follows what is unknown.
    fn embedding(&mut self, codes: &[[i8; CODE]], end: usize) {
        let (mut embedding, mut head) = (Matrix::new(self.tokens, HIDDEN), Matrix::new(self.tokens, HIDDEN));
        for (token, code) in codes.iter().enumerate() {
            embedding.put(token, 0, 1.0);
            embedding.put_row(token, CODE, code, 1.0);
            embedding.put_row(token, OUT, &codes[end], 0.25);
            head.put_row(token, OUT, code, 1.0);
        }
        self.add("model.embed_tokens", embedding);
        self.add("lm_head", head);
        for norm in ["layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"] {
            self.tensors.insert(format!("model.{norm}.weight"), (vec![HIDDEN], vec![1.0; HIDDEN]));
        }
    }

    /// Heads that copy the codes of the tokens before.
    fn attention(&mut self) {
        let heads = SLOTS - 1;
        let (mut query, mut key) = (Matrix::new(heads * CODE, HIDDEN), Matrix::new(heads * CODE, HIDDEN));
        let (mut value, mut output) = (Matrix::new(heads * CODE, HIDDEN), Matrix::new(HIDDEN, heads * CODE));
        let half = CODE / 2;
        for head in 0..heads {
            let distance = (head + 1) as f64;
            for i in 0..half {
                let angle = -distance * 10000f64.powf(-(i as f64) / half as f64);
                let row = head * CODE + i;
                query.put(row, 0, 6.0 * angle.cos() as f32);
                query.put(row + half, 0, 6.0 * angle.sin() as f32);
                key.put(row, 0, 6.0);
            }
            // The norm divides by the root of the mean of the squares of a row of the embedding.
            let squares = 1.0 + CODE as f32 * (1.0 + 0.25 * 0.25);
            for i in 0..CODE {
                value.put(head * CODE + i, CODE + i, (squares / HIDDEN as f32).sqrt());
                output.put(CODE * (head + 2) + i, head * CODE + i, 1.0);
            }
        }
        for (name, matrix) in [("q", query), ("k", key), ("v", value), ("o", output)] {
            self.add(&format!("model.layers.0.self_attn.{name}_proj"), matrix);
        }
    }

    fn add(&mut self, name: &str, matrix: Matrix) {
        let shape = vec![matrix.values.len() / matrix.columns, matrix.columns];
        self.tensors.insert(format!("{name}.weight"), (shape, matrix.values));
    }

    fn config(&self, end: usize) -> Value {
        json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
               "intermediate_size": self.neurons, "num_hidden_layers": 1, "num_attention_heads": SLOTS - 1,
               "num_key_value_heads": SLOTS - 1, "head_dim": CODE, "vocab_size": self.tokens, "rms_norm_eps": 1e-6,
               "rope_theta": 10000.0, "max_position_embeddings": 4096, "hidden_act": "silu",
               "tie_word_embeddings": false, "torch_dtype": "bfloat16", "eos_token_id": end, "bos_token_id": null})
    }

    fn write(&self, path: &Path) {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
        let data: Vec<(&String, &Vec<usize>, Vec<u8>)> =
            self.tensors.iter().map(|(name, (shape, values))| (name, shape, bytes(values))).collect();
        let view = |shape: &Vec<usize>, bytes| TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap();
        serialize_to_file(data.iter().map(|(name, shape, bytes)| (*name, view(shape, bytes))), None, path).unwrap();
    }
}

/// Codes of which no two are similar.
fn codes(tokens: usize) -> Vec<[i8; CODE]> {
    let mut rng = Rng::new(4);
    let mut codes: Vec<[i8; CODE]> = Vec::new();
    while codes.len() < tokens {
        let bits = rng.next_u64();
        let code: [i8; CODE] = std::array::from_fn(|i| if bits >> i & 1 == 1 { 1 } else { -1 });
        let product = |other: &[i8; CODE]| -> i32 { code.iter().zip(other).map(|(a, b)| i32::from(a * b)).sum() };
        if codes.iter().all(|other| product(other) <= OVERLAP) {
            codes.push(code);
        }
    }
    codes
}

/// A matrix of zeros, in rows.
struct Matrix {
    columns: usize,
    values: Vec<f32>,
}

impl Matrix {
    fn new(rows: usize, columns: usize) -> Matrix {
        Matrix { columns, values: vec![0.0; rows * columns] }
    }

    fn put(&mut self, row: usize, column: usize, value: f32) {
        self.values[row * self.columns + column] = value;
    }

    fn put_row(&mut self, row: usize, column: usize, code: &[i8], scale: f32) {
        for (i, sign) in code.iter().enumerate() {
            self.put(row, column + i, scale * f32::from(*sign));
        }
    }
}
