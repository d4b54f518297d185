//! Builds the parts of a tokenizer.json in the format of the `tokenizers` library, for checkpoints without one, for the
//! import of GGUF files and for synthetic checkpoints.

use serde::Serialize;
use serde_json::{Map, Value, json};

/// Limits of the numbers of tokens, of added tokens, and of merges per token. They bound the memory for untrusted
/// files: the JSON tree of a tokenizer.json takes many times the memory of the lists it is made of. The largest
/// vocabularies have 250,000 tokens, a few thousand of them added, and two merges per token.
pub(super) const MOST_TOKENS: usize = 1 << 20;
pub(super) const MOST_ADDED: usize = 1 << 16;
pub(super) const MERGES_PER_TOKEN: usize = 4;

/// A special token by its number and text.
pub(super) type Special<'a> = (usize, &'a str);

/// Returns the content of a tokenizer.json with these parts.
pub(super) fn file(
    added_tokens: Vec<Value>,
    [normalizer, pre_tokenizer, post_processor, decoder]: [Value; 4],
    model: Value,
) -> Vec<u8> {
    let mut tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added_tokens, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": decoder, "model": null,
    });
    // Moved, not copied: the vocabulary is large.
    tokenizer["model"] = model;
    serde_json::to_vec(&tokenizer).expect("JSON values serialize")
}

/// Returns an added token, which is found in a text before pre-tokenization.
pub(super) fn added_token((id, content): Special, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
           "special": special})
}

/// Returns the byte-level step, which maps bytes to printable characters, or back.
pub(super) fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex})
}

/// Returns the pre-tokenizer that makes each match of `pattern` a word and maps its bytes to printable characters.
pub(super) fn words(pattern: &str, add_prefix_space: bool) -> Value {
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    json!({"type": "Sequence", "pretokenizers": [split, byte_level(add_prefix_space, false)]})
}

/// Returns a model of byte-pair encoding in which every byte is a token.
pub(super) fn bpe(vocab: Map<String, Value>, merges: impl Serialize) -> Value {
    let mut model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": null, "merges": merges,
    });
    model["vocab"] = Value::Object(vocab);
    model
}

/// Returns the post-processor that puts special tokens before and after a text, and each text of a pair.
pub(super) fn template(before: Option<Special>, after: Option<Special>) -> Value {
    let special = |(_, token): Special, text: usize| json!({"SpecialToken": {"id": token, "type_id": text}});
    let framed = |text: usize| -> Vec<Value> {
        let name = json!({"Sequence": {"id": (["A", "B"][text]), "type_id": text}});
        let (before, after) = (before.map(|token| special(token, text)), after.map(|token| special(token, text)));
        before.into_iter().chain([name]).chain(after).collect()
    };
    let specials: Map<String, Value> = [before, after]
        .into_iter()
        .flatten()
        .map(|(id, token)| (token.to_string(), json!({"id": token, "ids": [id], "tokens": [token]})))
        .collect();
    let pair = [framed(0), framed(1)].concat();
    json!({"type": "TemplateProcessing", "single": framed(0), "pair": pair, "special_tokens": specials})
}

/// Returns the decoder for a vocabulary of SentencePiece. `prefix` is true when a space is put before each text.
pub(super) fn sentence_piece_decoder(prefix: bool) -> Value {
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": decoders})
}

/// Returns the printable character of each byte in byte-level BPE: the byte itself if it is printable, otherwise
/// U+0100 and up.
pub(super) fn byte_alphabet() -> Vec<char> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100;
    (0..=255u8)
        .map(|b| {
            if printable(b) {
                return char::from(b);
            }
            next += 1;
            char::from_u32(next - 1).expect("U+0100..U+0144 are characters")
        })
        .collect()
}
