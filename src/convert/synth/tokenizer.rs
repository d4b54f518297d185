//! Creates a working tokenizer for a vocabulary of any size: byte-level BPE over generated merges, with the model's
//! special ids.
//!
//! Ids that the model reserves are special tokens; the others are, in order, the 256 bytes and then letter strings of
//! growing length, each the merge of a shorter string and one letter. Any UTF-8 text survives encoding and decoding.

use crate::convert::tokenizer_json::{added_token, bpe, byte_alphabet, byte_level, file, template};
use crate::error::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Largest vocabulary that is generated, several times the largest published one; bounds memory and file size.
const VOCAB_LIMIT: usize = 1 << 21;

/// Letters in order of frequency in English, so that frequent letters are merged first.
const LETTERS: &str = "etaoinshrdlucmfwypvbgkjqxz";

/// Returns the tokenizer files of a checkpoint: `(name, content)`.
///
/// # Errors
/// The vocabulary is larger than the limit or too small for 256 bytes and the special tokens, or a special id lies
/// outside it.
pub fn files(config: &Value) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let vocab = config["vocab_size"].as_u64().unwrap_or(0) as usize;
    if vocab > VOCAB_LIMIT {
        return Err(Error::unsupported(format!("found {vocab}, expected at most {VOCAB_LIMIT}")).tensor("vocab_size"));
    }
    let specials = Specials::of(config);
    let pretty = |value: &Value| serde_json::to_vec_pretty(value).expect("JSON values serialize");
    Ok(vec![
        ("tokenizer.json", tokenizer_json(vocab, &specials)?),
        ("tokenizer_config.json", pretty(&tokenizer_config(config, &specials))),
        ("generation_config.json", pretty(&generation_config(config, &specials))),
    ])
}

/// Special tokens of a model and its chat template.
struct Specials {
    tokens: BTreeMap<u32, String>,
    bos: Option<u32>,
    eos: Vec<u32>,
    pad: Option<u32>,
    adds_bos: bool,
    chat_template: String,
}

impl Specials {
    fn of(config: &Value) -> Specials {
        match (config["model_type"].as_str(), config["vocab_size"].as_u64()) {
            (Some("gpt_oss"), Some(vocab)) if vocab > 200_018 => Specials::harmony(vocab as u32),
            (Some("llama"), Some(128_256)) => Specials::llama3(),
            _ => Specials::generic(config),
        }
    }

    /// Returns the o200k_harmony ids of gpt-oss.
    fn harmony(vocab: u32) -> Specials {
        let named = [
            (199_998, "startoftext"),
            (199_999, "endoftext"),
            (200_002, "return"),
            (200_003, "constrain"),
            (200_005, "channel"),
            (200_006, "start"),
            (200_007, "end"),
            (200_008, "message"),
            (200_012, "call"),
            (200_018, "endofprompt"),
        ];
        Specials {
            tokens: reserved(199_998..vocab, &named, |i| format!("<|reserved_{i}|>")),
            bos: Some(199_998),
            eos: vec![200_002, 199_999, 200_012],
            pad: Some(199_999),
            adds_bos: false,
            chat_template: "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}\
                            {% if add_generation_prompt %}<|start|>assistant{% endif %}"
                .into(),
        }
    }

    /// Returns the special ids of Llama 3.
    fn llama3() -> Specials {
        let named = [
            (128_000, "begin_of_text"),
            (128_001, "end_of_text"),
            (128_004, "finetune_right_pad_id"),
            (128_006, "start_header_id"),
            (128_007, "end_header_id"),
            (128_008, "eom_id"),
            (128_009, "eot_id"),
            (128_010, "python_tag"),
        ];
        Specials {
            tokens: reserved(128_000..128_256, &named, |i| format!("<|reserved_special_token_{}|>", i - 128_000)),
            bos: Some(128_000),
            eos: vec![128_001, 128_008, 128_009],
            pad: Some(128_004),
            adds_bos: true,
            chat_template: "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n\
                            {{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}\
                            <|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
                .into(),
        }
    }

    /// Returns the special ids that the configuration names, with the token names of Llama 2.
    fn generic(config: &Value) -> Specials {
        let ids = |field: &str| -> Vec<u32> {
            let value = &config[field];
            let list = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
            list.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()).collect()
        };
        let (bos, eos, pad) = (ids("bos_token_id").first().copied(), ids("eos_token_id"), ids("pad_token_id"));
        let mut tokens = BTreeMap::new();
        let ends = eos.iter().enumerate().map(|(i, id)| (*id, if i == 0 { "</s>".into() } else { format!("</s{i}>") }));
        let unknown = (bos, eos.first()) == (Some(1), Some(&2));
        let named = bos.map(|id| (id, "<s>".to_string())).into_iter().chain(ends);
        let named =
            named.chain(pad.first().map(|id| (*id, "<pad>".into()))).chain(unknown.then(|| (0, "<unk>".into())));
        for (id, content) in named {
            tokens.entry(id).or_insert(content);
        }
        Specials {
            tokens,
            bos,
            eos,
            pad: pad.first().copied(),
            adds_bos: bos.is_some(),
            chat_template: "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}\
                            {% if add_generation_prompt %}<|assistant|>\n{% endif %}"
                .into(),
        }
    }

    fn content(&self, id: Option<u32>) -> Value {
        id.and_then(|id| self.tokens.get(&id)).map_or(Value::Null, |content| content.as_str().into())
    }
}

fn reserved(ids: std::ops::Range<u32>, named: &[(u32, &str)], filler: impl Fn(u32) -> String) -> BTreeMap<u32, String> {
    let mut tokens: BTreeMap<u32, String> = ids.map(|id| (id, filler(id))).collect();
    tokens.extend(named.iter().map(|(id, name)| (*id, format!("<|{name}|>"))));
    tokens
}

fn tokenizer_json(vocab: usize, specials: &Specials) -> Result<Vec<u8>> {
    let ordinary = vocab.checked_sub(specials.tokens.len()).filter(|n| *n >= 256).ok_or_else(|| {
        let needed = 256 + specials.tokens.len();
        Error::unsupported(format!("found {vocab}, expected at least {needed} for 256 bytes and the special tokens"))
            .tensor("vocab_size")
    })?;
    if let Some((id, _)) = specials.tokens.last_key_value().filter(|(id, _)| **id as usize >= vocab) {
        return Err(Error::corrupt(format!("found the special token {id}, expected ids below the vocab_size {vocab}")));
    }
    let (strings, merges) = generate(ordinary);
    let mut ordinary = strings.into_iter();
    let mut table = serde_json::Map::with_capacity(vocab);
    for id in 0..vocab as u32 {
        let content = specials.tokens.get(&id).cloned().or_else(|| ordinary.next());
        table.insert(content.expect("as many strings as ids"), id.into());
    }
    let special = |(id, content): (&u32, &String)| added_token((*id as usize, content), true);
    let added = specials.tokens.iter().map(special).collect();
    let bos = specials.bos.filter(|_| specials.adds_bos).map(|id| (id as usize, specials.tokens[&id].as_str()));
    let bytes = byte_level(false, true);
    let post_processor = if bos.is_some() { template(bos, None) } else { bytes.clone() };
    Ok(file(added, [Value::Null, bytes.clone(), post_processor, bytes], bpe(table, merges)))
}

/// Returns `count` token strings in the alphabet of ByteLevel (the 256 bytes first) and the merges that make the
/// other strings.
fn generate(count: usize) -> (Vec<String>, Vec<[String; 2]>) {
    let mut strings: Vec<String> = byte_alphabet().iter().map(char::to_string).collect();
    let mut merges = Vec::new();
    let capitals = LETTERS.to_uppercase();
    // Every generated string, shortest first, is extended by each letter in turn; a space (Ġ) or a capital may begin
    // one.
    let mut stems: std::collections::VecDeque<String> =
        std::iter::once('Ġ').chain(LETTERS.chars()).chain(capitals.chars()).map(String::from).collect();
    while strings.len() < count {
        let stem = stems.pop_front().expect("strings grow without end");
        for letter in LETTERS.chars().take(count - strings.len()) {
            let longer = format!("{stem}{letter}");
            merges.push([stem.clone(), letter.to_string()]);
            strings.push(longer.clone());
            stems.push_back(longer);
        }
    }
    (strings, merges)
}

fn tokenizer_config(config: &Value, specials: &Specials) -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "model_max_length": config["max_position_embeddings"],
        "bos_token": specials.content(specials.bos),
        "eos_token": specials.content(specials.eos.first().copied()),
        "pad_token": specials.content(specials.pad),
        "chat_template": specials.chat_template,
    })
}

fn generation_config(config: &Value, specials: &Specials) -> Value {
    let eos = match specials.eos[..] {
        [one] => json!(one),
        _ => json!(specials.eos),
    };
    let fields = [
        ("bos_token_id", json!(specials.bos)),
        ("eos_token_id", eos),
        ("pad_token_id", json!(specials.pad)),
        ("transformers_version", config["transformers_version"].clone()),
    ];
    let given = fields.into_iter().filter(|(_, value)| !value.is_null() && *value != json!([]));
    given.map(|(name, value)| (name.to_string(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::presets;
    use super::*;
    use tokenizers::Tokenizer;

    fn tokenizer(config: &Value) -> Tokenizer {
        let files = files(config).unwrap();
        Tokenizer::from_bytes(&files[0].1).unwrap()
    }

    #[test]
    fn every_preset_gets_a_tokenizer_of_exactly_its_vocabulary_that_keeps_any_text() {
        for name in ["tinyllama-1.1b", "llama-3.2-1b", "gpt-oss-20b"] {
            let config = presets::config(name).unwrap();
            let tokenizer = tokenizer(&config);
            assert_eq!(tokenizer.get_vocab_size(true) as u64, config["vocab_size"].as_u64().unwrap(), "{name}");
            for text in
                ["Once upon a time, there was a Tiger.", "  x\n\n\ty\r\n", "äß 漢字 👩‍👧 \u{0}\u{7f}", "don't 1234"]
            {
                let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
                assert_eq!(tokenizer.decode(&ids, false).unwrap(), text, "{name}");
            }
            let words = "Once upon a time there was a little girl who liked to play outside";
            let ids = tokenizer.encode(words, false).unwrap();
            assert!(ids.len() * 2 < words.len(), "{name}: {} tokens for {} bytes", ids.len(), words.len());
        }
    }

    #[test]
    fn special_tokens_have_the_ids_of_the_real_models() {
        for (name, content, id) in [
            ("tinyllama-1.1b", "<s>", 1),
            ("tinyllama-1.1b", "</s>", 2),
            ("llama-3.2-1b", "<|eot_id|>", 128_009),
            ("gpt-oss-20b", "<|return|>", 200_002),
            ("gpt-oss-20b", "<|start|>", 200_006),
            ("gpt-oss-20b", "<|endofprompt|>", 200_018),
        ] {
            let tokenizer = tokenizer(&presets::config(name).unwrap());
            assert_eq!(tokenizer.token_to_id(content), Some(id), "{name}");
            assert_eq!(tokenizer.encode(content, false).unwrap().get_ids(), [id], "{name}");
        }
    }

    #[test]
    fn a_model_that_begins_with_bos_gets_it_from_the_post_processor() {
        let tokenizer = tokenizer(&presets::config("tinyllama-1.1b").unwrap());
        assert_eq!(tokenizer.encode("a", true).unwrap().get_ids()[0], 1);
        assert_ne!(tokenizer.encode("a", false).unwrap().get_ids()[0], 1);
    }

    #[test]
    fn a_vocabulary_without_room_for_bytes_is_refused() {
        let error = files(&json!({"model_type": "llama", "vocab_size": 200, "bos_token_id": 1})).unwrap_err();
        assert!(error.to_string().contains("256 bytes"), "{error}");
        let outside = json!({"model_type": "llama", "vocab_size": 512, "eos_token_id": 900});
        assert!(files(&outside).is_err());
    }
}
