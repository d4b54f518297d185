//! Converts the tokenizer metadata of a GGUF file to `tokenizer.json` and `tokenizer_config.json`.
//!
//! The model `gpt2` is byte-level BPE with tokens, merges and the name of a pre-tokenizer (`pre`). The model `llama`
//! is SentencePiece BPE: its tokens have scores, the pair that gives the token of the highest score is merged first,
//! and text that is not in the vocabulary is split into bytes. Its merges are derived from the scores as Hugging
//! Face's converter does.

use super::pre::Pre;
use crate::convert::companions::{self, TOKENIZER};
use crate::convert::merges::{self, Piece};
use crate::convert::source::gguf::value::{Metadata, required};
use crate::convert::tokenizer_json::{
    self, MOST_ADDED, MOST_TOKENS, Special, added_token, bpe, byte_level, sentence_piece_decoder, template,
};
use crate::error::{Context, Error, Result};
use serde_json::{Map, Value, json};

/// Kinds of tokens (`llama_token_type`).
pub(super) mod kind {
    pub const NORMAL: i64 = 1;
    pub const UNKNOWN: i64 = 2;
    pub const CONTROL: i64 = 3;
    pub const USER_DEFINED: i64 = 4;
    pub const UNUSED: i64 = 5;
    pub const BYTE: i64 = 6;
}

/// Key of a complete tokenizer.json, which a file may contain.
pub(super) const HF_JSON: &str = "tokenizer.huggingface.json";
/// Names of tokens that end a turn or a text, as llama.cpp recognizes them.
const ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
];

/// Tokenizer files of a pack.
#[derive(Debug)]
pub struct TokenizerFiles {
    /// Text of `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// Contents of `tokenizer_config.json`.
    pub config: Value,
}

const TAKE_JSON: &str = "give the model's tokenizer.json with --tokenizer FILE";

/// Tokens of a file and their kinds.
struct Vocabulary<'a> {
    meta: &'a Metadata,
    tokens: &'a [String],
    kinds: Vec<i64>,
}

/// Converts the tokenizer of a model whose embedding has `rows` rows.
///
/// # Errors
/// The tokenizer is of an unknown kind, or its lists contradict each other.
pub fn tokenizer_files(meta: &Metadata, rows: usize) -> Result<TokenizerFiles> {
    let vocabulary = Vocabulary::read(meta, rows)?;
    if let Some(text) = meta.text_opt(HF_JSON)? {
        companions::check(TOKENIZER, text.as_bytes(), rows).tensor(HF_JSON)?;
        return Ok(TokenizerFiles { tokenizer: text.into(), config: vocabulary.config()? });
    }
    let (model, adds_bos, rules) = match meta.text("tokenizer.ggml.model")? {
        "gpt2" => {
            let pre = Pre::of_name(meta.text_opt("tokenizer.ggml.pre")?.unwrap_or("default"))?;
            let (normalizer, pre_tokenizer) = pre.json();
            (vocabulary.byte_level(pre)?, pre.adds_bos, [normalizer, pre_tokenizer, byte_level(true, true)])
        }
        "llama" => {
            let prefix = meta.flag_opt("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
            let (normalizer, decoder) = sentence_piece_rules(prefix);
            (vocabulary.sentence_piece()?, true, [normalizer, Value::Null, decoder])
        }
        other => {
            return Err(Error::unsupported(format!("found `{other}`, expected gpt2 or llama"))
                .tensor("tokenizer.ggml.model")
                .help(TAKE_JSON));
        }
    };
    let adds_bos = meta.flag_opt("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    let adds_eos = meta.flag_opt("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let [normalizer, pre_tokenizer, decoder] = rules;
    let post_processor = vocabulary.post_processor(adds_bos, adds_eos)?;
    let parts = [normalizer, pre_tokenizer, post_processor, decoder];
    let tokenizer = tokenizer_json::file(vocabulary.added_tokens(), parts, model);
    Ok(TokenizerFiles { tokenizer, config: vocabulary.config()? })
}

/// Returns only `tokenizer_config.json`, for a tokenizer.json from another source.
///
/// # Errors
/// A key names a token that does not exist.
pub fn tokenizer_config(meta: &Metadata) -> Result<Value> {
    let tokens = meta.texts_opt("tokenizer.ggml.tokens")?.unwrap_or_default();
    Vocabulary { meta, tokens, kinds: Vec::new() }.config()
}

/// Returns the ids of control tokens whose names mark the end of a text.
pub(super) fn ends_by_name(meta: &Metadata) -> Result<impl Iterator<Item = i64>> {
    let tokens = meta.texts_opt("tokenizer.ggml.tokens")?.unwrap_or_default();
    let kinds = meta.integers_opt("tokenizer.ggml.token_type")?.unwrap_or_default();
    let ends = tokens.iter().zip(kinds).enumerate();
    Ok(ends.filter(|(_, (t, k))| *k == kind::CONTROL && ENDS.contains(&t.as_str())).map(|(i, _)| i as i64))
}

fn is_added(kind: i64) -> bool {
    matches!(kind, kind::CONTROL | kind::USER_DEFINED | kind::UNKNOWN)
}

fn sentence_piece_rules(prefix: bool) -> (Value, Value) {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let normalizer = match prefix {
        true => json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}),
        false => replace,
    };
    (normalizer, sentence_piece_decoder(prefix))
}

impl<'a> Vocabulary<'a> {
    fn read(meta: &'a Metadata, rows: usize) -> Result<Vocabulary<'a>> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let tokens = required(TOKENS, meta.texts_opt(TOKENS)?)?;
        let kinds = match meta.integers_opt("tokenizer.ggml.token_type")? {
            Some(kinds) => kinds,
            None => vec![kind::NORMAL; tokens.len()],
        };
        let wrong = |what: &str, n: usize| {
            Err(Error::corrupt(format!("found {n} {what}, expected one for each of {} tokens", tokens.len()))
                .tensor(TOKENS))
        };
        if kinds.len() != tokens.len() {
            return wrong("types", kinds.len());
        }
        if tokens.len() > rows {
            return wrong("rows of the embedding", rows);
        }
        let added = kinds.iter().filter(|kind| is_added(**kind)).count();
        if tokens.len() > MOST_TOKENS || added > MOST_ADDED {
            let found = format!("found {} tokens, {added} of them special", tokens.len());
            return Err(Error::unsupported(format!("{found}, expected at most {MOST_TOKENS} and {MOST_ADDED}"))
                .tensor(TOKENS)
                .help(TAKE_JSON));
        }
        Ok(Vocabulary { meta, tokens, kinds })
    }

    /// Returns id, text and kind of the tokens that exist. Converters give rows of the embedding without a token the
    /// name `[PAD<id>]`; these are left out.
    fn existing(&self) -> impl Iterator<Item = (usize, &'a str, i64)> {
        let all = self.tokens.iter().zip(&self.kinds).enumerate();
        all.filter(|(i, (token, kind))| **kind != kind::UNUSED || **token != format!("[PAD{i}]"))
            .map(|(i, (token, kind))| (i, token.as_str(), *kind))
    }

    /// Returns the ids of all tokens by text. Special tokens are included so that each keeps its id.
    fn vocab(&self) -> Result<Map<String, Value>> {
        let mut vocab = Map::new();
        for (id, token, _) in self.existing() {
            if vocab.insert(token.to_string(), json!(id)).is_some() {
                return Err(Error::corrupt(format!("found `{token:.60}` twice"))
                    .tensor("tokenizer.ggml.tokens")
                    .help(TAKE_JSON));
            }
        }
        Ok(vocab)
    }

    fn byte_level(&self, pre: &Pre) -> Result<Value> {
        const MERGES: &str = "tokenizer.ggml.merges";
        let merges = required(MERGES, self.meta.texts_opt(MERGES)?)?;
        if merges.iter().any(|merge| merge.matches(' ').count() != 1) {
            return Err(Error::corrupt("found an invalid merge, expected two tokens separated by a space")
                .tensor(MERGES)
                .help(TAKE_JSON));
        }
        let mut model = bpe(self.vocab()?, merges);
        model["ignore_merges"] = json!(pre.ignore_merges);
        Ok(model)
    }

    fn sentence_piece(&self) -> Result<Value> {
        let unknown = self.existing().find(|(_, _, kind)| *kind == kind::UNKNOWN).map(|(_, token, _)| token);
        let mut model = bpe(self.vocab()?, self.merges_of_scores()?);
        model["unk_token"] = json!(unknown);
        model["fuse_unk"] = json!(true);
        model["byte_fallback"] = json!(true);
        Ok(model)
    }

    fn merges_of_scores(&self) -> Result<Vec<String>> {
        const SCORES: &str = "tokenizer.ggml.scores";
        let scores = required(SCORES, self.meta.floats_opt(SCORES)?)?;
        if scores.len() != self.tokens.len() {
            let found = format!("found {} scores, expected one for each of {} tokens", scores.len(), self.tokens.len());
            return Err(Error::corrupt(found).tensor(SCORES));
        }
        let pieces = self.existing().filter(|(_, _, kind)| matches!(*kind, kind::NORMAL | kind::USER_DEFINED));
        let pieces = pieces.map(|(id, text, _)| Piece { id, text, score: scores[id] });
        merges::by_score(pieces).tensor("tokenizer.ggml.tokens").help(TAKE_JSON)
    }

    fn added_tokens(&self) -> Vec<Value> {
        let added = self.existing().filter(|(_, _, kind)| is_added(*kind));
        added.map(|(id, token, kind)| added_token((id, token), kind != kind::USER_DEFINED)).collect()
    }

    /// Returns the token whose id the key `tokenizer.ggml.<name>_token_id` holds.
    fn named(&self, name: &str) -> Result<Option<Special<'a>>> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = self.meta.count_opt(&key)? else { return Ok(None) };
        match self.tokens.get(id) {
            Some(token) => Ok(Some((id, token))),
            None => {
                Err(Error::corrupt(format!("found token {id}, expected one below {}", self.tokens.len())).tensor(key))
            }
        }
    }

    fn post_processor(&self, adds_bos: bool, adds_eos: bool) -> Result<Value> {
        let bos = if adds_bos { self.named("bos")? } else { None };
        let eos = if adds_eos { self.named("eos")? } else { None };
        Ok(if bos.or(eos).is_some() { template(bos, eos) } else { Value::Null })
    }

    fn config(&self) -> Result<Value> {
        let mut config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false});
        for (name, field) in
            [("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")]
        {
            if let Some((_, token)) = self.named(name)? {
                config[field] = json!(token);
            }
        }
        if let Some(template) = self.meta.text_opt("tokenizer.chat_template")? {
            config["chat_template"] = match self.meta.text_opt("tokenizer.chat_template.tool_use")? {
                None => json!(template),
                Some(for_tools) => json!([
                    {"name": "default", "template": template},
                    {"name": "tool_use", "template": for_tools},
                ]),
            };
        }
        Ok(config)
    }
}
