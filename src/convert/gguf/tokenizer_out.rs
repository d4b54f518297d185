//! Converts `tokenizer.json` and `tokenizer_config.json` to the tokenizer metadata of a GGUF file.

use super::config::EOS_KEY;
use super::pre::Pre;
use super::tokenizer_in::{HF_JSON, kind};
use crate::convert::source::gguf::value::{Scalar, Value as Meta};
use crate::error::{Error, Result};
use crate::model_config::ModelConfig;
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Tokenizer files and settings of a pack.
#[derive(Debug)]
pub struct TokenizerSource<'a> {
    /// Contents of `tokenizer.json`.
    pub tokenizer: &'a Value,
    /// Contents of `tokenizer_config.json`, or null.
    pub config: &'a Value,
    /// Contents of `chat_template.jinja`, if the pack has that file.
    pub template: Option<&'a str>,
    /// Contents of the template for conversations with tools, if the pack has that file.
    pub tool_template: Option<&'a str>,
    /// Description of the model, which gives the vocabulary size and the special tokens.
    pub model: &'a ModelConfig,
    /// Name of the pre-tokenizer, instead of the name found from its rules.
    pub pre: Option<&'a str>,
}

/// Tokenizer metadata and notes for the user.
#[derive(Debug, Default)]
pub struct Keys {
    /// Keys and values in the order in which they are written.
    pub entries: Vec<(String, Meta)>,
    /// Notes about texts that llama.cpp may tokenize differently.
    pub notes: Vec<String>,
}

impl Keys {
    fn put(&mut self, leaf: &str, value: Meta) {
        self.entries.push((format!("tokenizer.ggml.{leaf}"), value));
    }
}

/// Converts the tokenizer to metadata keys.
///
/// # Errors
/// GGUF cannot represent the tokenizer, or this program cannot convert it.
pub fn tokenizer_keys(source: &TokenizerSource<'_>) -> Result<Keys> {
    let model = &source.tokenizer["model"];
    if model["type"] != "BPE" {
        let found = model["type"].as_str().unwrap_or("none");
        let found = format!("found tokenizer model `{found:.40}`, expected BPE");
        return Err(Error::unsupported(found).tensor("model.type"));
    }
    let tokens = Tokens::read(source)?;
    let mut keys = Keys::default();
    match model["byte_fallback"].as_bool() {
        Some(true) => sentence_piece(source, &tokens, &mut keys)?,
        _ => byte_level(source, &tokens, &mut keys)?,
    }
    special_tokens(source, &tokens, &mut keys)?;
    if let Some(template) = source.template.or_else(|| template_of(source.config, "default")) {
        keys.entries.push(("tokenizer.chat_template".into(), Meta::String(template.into())));
    }
    let of_list = || template_of(source.config, "tool_use").filter(|_| source.template.is_none());
    if let Some(template) = source.tool_template.or_else(of_list) {
        let names = Meta::Strings(vec!["tool_use".into()]);
        keys.entries.push(("tokenizer.chat_templates".into(), names));
        keys.entries.push(("tokenizer.chat_template.tool_use".into(), Meta::String(template.into())));
    }
    Ok(keys)
}

fn byte_level(source: &TokenizerSource, tokens: &Tokens, keys: &mut Keys) -> Result<()> {
    let pre = source.pre.map_or_else(|| Pre::of_json(source.tokenizer).map(|pre| pre.name), Ok)?;
    let merges = merges(source.tokenizer)?.into_iter().map(|(left, right)| format!("{left} {right}")).collect();
    keys.put("model", Meta::String("gpt2".into()));
    keys.put("pre", Meta::String(pre.into()));
    tokens.put(keys);
    keys.put("merges", Meta::Strings(merges));
    Ok(())
}

fn sentence_piece(source: &TokenizerSource, tokens: &Tokens, keys: &mut Keys) -> Result<()> {
    let prefix = space_prefix(source.tokenizer)?;
    let merges = merges(source.tokenizer)?;
    let (scores, unordered) = tokens.scores(&merges);
    keys.put("model", Meta::String("llama".into()));
    keys.put("pre", Meta::String(source.pre.unwrap_or("default").into()));
    tokens.put(keys);
    keys.put("scores", Meta::Numbers(Scalar::F32, scores.iter().flat_map(|s| s.to_le_bytes()).collect()));
    keys.put("add_space_prefix", Meta::bool(prefix));
    if unordered > 0 {
        keys.notes.push(format!(
            "the tokenizer merges only the pairs of its list, but llama.cpp merges any two tokens that form a token: \
             {unordered} such pairs are not in the list, so llama.cpp may split some words differently"
        ));
        // Scores cannot express every list of merges, so the whole tokenizer.json is stored, too, under GGUF's key
        // for it.
        let text = source.tokenizer.to_string();
        keys.entries.push((HF_JSON.into(), Meta::String(text)));
    }
    Ok(())
}

/// Returns true when the tokenizer puts a space before the text. Recognizes the three forms in which a tokenizer.json
/// describes a SentencePiece tokenizer.
fn space_prefix(tokenizer: &Value) -> Result<bool> {
    let (normalizer, pre) = (&tokenizer["normalizer"], &tokenizer["pre_tokenizer"]);
    let replaces =
        |step: &Value| step["type"] == "Replace" && step["pattern"]["String"] == " " && step["content"] == "▁";
    let prepends = |step: &Value| step["type"] == "Prepend" && step["prepend"] == "▁";
    // The normalizer has already replaced all spaces, so this split never finds one.
    let no_split = pre.is_null() || pre["type"] == "Split" && pre["pattern"]["String"] == " ";
    let metaspace = normalizer.is_null() && pre["type"] == "Metaspace" && pre["replacement"] == "▁";
    match (normalizer["normalizers"].as_array().map(Vec::as_slice), pre["prepend_scheme"].as_str()) {
        (Some([prepend, replace]), _) if prepends(prepend) && replaces(replace) && no_split => return Ok(true),
        (None, _) if replaces(normalizer) && no_split => return Ok(false),
        (None, Some("first" | "always") | None) if metaspace => return Ok(true),
        (None, Some("never")) if metaspace => return Ok(false),
        _ => {}
    }
    let (normalizer, pre) = (normalizer.to_string(), pre.to_string());
    let found = format!("found normalizer {normalizer:.300}, pre_tokenizer {pre:.300}, which GGUF cannot represent");
    Err(Error::unsupported(found).tensor("normalizer"))
}

fn merges<'a>(tokenizer: &'a Value) -> Result<Vec<(&'a str, &'a str)>> {
    let wrong = || Error::corrupt("found another form, expected a list of pairs").tensor("model.merges");
    let list = tokenizer["model"]["merges"].as_array().ok_or_else(wrong)?;
    let pair = |merge: &'a Value| match merge {
        Value::String(text) => text.split_once(' '),
        Value::Array(pair) => match pair.as_slice() {
            [Value::String(left), Value::String(right)] => Some((left.as_str(), right.as_str())),
            _ => None,
        },
        _ => None,
    };
    list.iter().map(pair).collect::<Option<_>>().ok_or_else(wrong)
}

/// Text and type of the token of each row of the embedding, and the ids of the texts.
struct Tokens<'a> {
    texts: Vec<String>,
    kinds: Vec<i32>,
    ids: HashMap<&'a str, u32>,
}

impl<'a> Tokens<'a> {
    fn read(source: &TokenizerSource<'a>) -> Result<Tokens<'a>> {
        let vocab = source.model.vocab;
        let wrong = |what: &str| Error::corrupt(format!("found an invalid `{what}` in tokenizer.json"));
        let id_of = |value: &Value, token: &str| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab);
            id.ok_or_else(|| {
                let found = format!("found id {value} of token `{token:.60}`");
                Error::corrupt(format!("{found}, expected one below {vocab}, the number of rows of the embedding"))
            })
        };
        let mut tokens = Tokens {
            texts: (0..vocab).map(|id| format!("[PAD{id}]")).collect(),
            kinds: vec![kind::UNUSED as i32; vocab],
            ids: HashMap::new(),
        };
        let model = &source.tokenizer["model"];
        let unknown = model["unk_token"].as_str();
        let bytes = model["byte_fallback"] == true;
        for (token, id) in model["vocab"].as_object().ok_or_else(|| wrong("model.vocab"))? {
            let id = id_of(id, token)?;
            let kind = match token {
                _ if Some(token.as_str()) == unknown => kind::UNKNOWN,
                _ if bytes && is_byte(token) => kind::BYTE,
                _ => kind::NORMAL,
            };
            tokens.set(id, token, kind);
        }
        for added in source.tokenizer["added_tokens"].as_array().into_iter().flatten() {
            let token = added["content"].as_str().ok_or_else(|| wrong("added_tokens"))?;
            let kind = match added["special"] == true {
                true if Some(token) == unknown => kind::UNKNOWN,
                true => kind::CONTROL,
                false => kind::USER_DEFINED,
            };
            tokens.set(id_of(&added["id"], token)?, token, kind);
        }
        Ok(tokens)
    }

    fn set(&mut self, id: u32, token: &'a str, kind: i64) {
        self.texts[id as usize] = token.to_string();
        self.kinds[id as usize] = kind as i32;
        self.ids.insert(token, id);
    }

    fn put(&self, keys: &mut Keys) {
        keys.put("tokens", Meta::Strings(self.texts.clone()));
        let kinds = self.kinds.iter().flat_map(|k| k.to_le_bytes()).collect();
        keys.put("token_type", Meta::Numbers(Scalar::I32, kinds));
    }

    /// Returns scores that make llama.cpp merge in the order of `merges`, and the number of pairs that llama.cpp may
    /// merge although they are not in `merges`.
    fn scores(&self, merges: &[(&str, &str)]) -> (Vec<f32>, usize) {
        let mut first: HashMap<String, usize> = HashMap::new();
        let pairs = merges.iter().collect::<HashSet<_>>().len();
        for (rank, (left, right)) in merges.iter().enumerate() {
            first.entry(format!("{left}{right}")).or_insert(rank);
        }
        let never = -(merges.len() as f32) - 1.0;
        let scores = self.texts.iter().map(|text| first.get(text).map_or(never, |rank| -(*rank as f32))).collect();
        let mergeable = |text: &str| {
            self.ids
                .get(text)
                .is_some_and(|id| matches!(i64::from(self.kinds[*id as usize]), kind::NORMAL | kind::USER_DEFINED))
        };
        let possible: usize = (self.ids.keys().filter(|text| mergeable(text)))
            .map(|text| {
                let splits = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
                splits.filter(|(left, right)| mergeable(left) && mergeable(right)).count()
            })
            .sum();
        (scores, possible.saturating_sub(pairs))
    }
}

fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|d| d.len() == 2 && d.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Returns the ids of the special tokens that the post-processor adds before and after a text.
fn frame(post: &Value) -> Result<(Vec<u32>, Vec<u32>)> {
    let none = || Ok((Vec::new(), Vec::new()));
    match post["type"].as_str() {
        None | Some("ByteLevel") => none(),
        Some("Sequence") => {
            let steps = post["processors"].as_array().map(Vec::as_slice).unwrap_or_default();
            let frames = steps.iter().map(frame).collect::<Result<Vec<_>>>()?;
            frames.into_iter().find(|(before, after)| !before.is_empty() || !after.is_empty()).map_or_else(none, Ok)
        }
        Some("TemplateProcessing") => {
            let wrong = || {
                Error::corrupt(
                    "found a template that is not supported, expected special tokens before and after one text",
                )
                .tensor("post_processor")
            };
            let (mut before, mut after, mut text) = (Vec::new(), Vec::new(), false);
            for step in post["single"].as_array().ok_or_else(wrong)? {
                if step["Sequence"].is_object() {
                    text = true;
                    continue;
                }
                let name = step["SpecialToken"]["id"].as_str().ok_or_else(wrong)?;
                let ids = post["special_tokens"][name]["ids"].as_array().ok_or_else(wrong)?;
                let ids = ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
                let ids = ids.collect::<Option<Vec<_>>>().ok_or_else(wrong)?;
                if text { after.extend(ids) } else { before.extend(ids) }
            }
            Ok((before, after))
        }
        Some(other) => {
            Err(Error::unsupported(format!("found `{other:.40}`, which GGUF cannot represent"))
                .tensor("post_processor"))
        }
    }
}

fn special_tokens(source: &TokenizerSource, tokens: &Tokens, keys: &mut Keys) -> Result<()> {
    let (before, after) = frame(&source.tokenizer["post_processor"])?;
    if after.len() > 1 {
        let found = format!("found {} tokens added after a text", after.len());
        return Err(Error::unsupported(format!("{found}, expected at most one, because GGUF stores one"))
            .tensor("post_processor"));
    }
    let is_long = before.len() > 1;
    if is_long {
        let texts: Vec<&str> = before.iter().filter_map(|id| Some(tokens.texts.get(*id as usize)?.as_str())).collect();
        keys.notes.push(format!(
            "the tokenizer puts {} before every text, but llama.cpp adds at most one token and therefore none: write \
             them at the start of a prompt; the chat template of such models contains them",
            texts.join(" and ")
        ));
        if !keys.entries.iter().any(|(key, _)| key == HF_JSON) {
            keys.entries.push((HF_JSON.into(), Meta::String(source.tokenizer.to_string())));
        }
    }
    let eos = &source.model.eos;
    let named = |name: &str| {
        // The value is the text of the token, or an object that holds the text.
        let value = &source.config[name];
        value.as_str().or_else(|| value["content"].as_str()).and_then(|text| tokens.ids.get(text)).copied()
    };
    let unknown = source.tokenizer["model"]["unk_token"].as_str().and_then(|text| tokens.ids.get(text)).copied();
    for (leaf, id) in [
        ("bos", before.first().copied().or(source.model.bos)),
        ("eos", after.first().copied().or(eos.first().copied())),
        ("eot", eos.get(1).copied()),
        ("eom", eos.get(2).copied()),
        ("unknown", unknown),
        ("padding", named("pad_token")),
    ] {
        if let Some(id) = id {
            if id as usize >= tokens.texts.len() {
                let found = format!("found token {id}, expected one below {}", tokens.texts.len());
                return Err(Error::corrupt(found).tensor(format!("{leaf}_token")));
            }
            keys.put(&format!("{leaf}_token_id"), Meta::u32(id));
        }
    }
    keys.put("add_bos_token", Meta::bool(!before.is_empty() && !is_long));
    keys.put("add_eos_token", Meta::bool(!after.is_empty()));
    let list = Meta::Numbers(Scalar::U32, eos.iter().flat_map(|id| id.to_le_bytes()).collect());
    keys.entries.push((EOS_KEY.into(), list));
    Ok(())
}

/// Returns the chat template of this name of a tokenizer_config.json; a single template is the one named `default`.
fn template_of<'a>(config: &'a Value, name: &str) -> Option<&'a str> {
    match &config["chat_template"] {
        Value::String(text) => Some(text.as_str()).filter(|_| name == "default"),
        Value::Array(list) => list.iter().find(|t| t["name"] == name).and_then(|t| t["template"].as_str()),
        _ => None,
    }
}
