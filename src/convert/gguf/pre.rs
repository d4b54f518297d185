//! Pre-tokenizers, which split text before byte-pair merges, by their name in GGUF (`tokenizer.ggml.pre`) and by their
//! rules in tokenizer.json (`pre_tokenizer`).
//!
//! The names are those of llama.cpp (`src/llama-vocab.cpp`); the rules are those of the tokenizers that the names
//! stand for. A pipeline that is not in the table is refused.

use crate::convert::tokenizer_json::byte_level;
use crate::error::{Error, Result};
use serde_json::{Value, json};

/// A pre-tokenizer that llama.cpp has a name for.
#[derive(Debug)]
pub(super) struct Pre {
    /// Name that is written on export.
    pub(super) name: &'static str,
    /// Other names of the same pre-tokenizer, accepted on import.
    pub(super) also: &'static [&'static str],
    /// Split rules in order of application. After them, each byte is mapped to a printable character (the byte-level
    /// step).
    cuts: &'static [Cut<'static>],
    /// True when the text is first brought to Unicode normalization form C (NFC). llama.cpp omits this step, but
    /// splits text that is already in NFC identically.
    nfc: bool,
    /// True when a word that is a token as a whole is used as it is, without merges.
    pub(super) ignore_merges: bool,
    /// True when the beginning-of-sequence token is added if the file has no key `add_bos_token`.
    pub(super) adds_bos: bool,
}

/// A split rule.
#[derive(Debug, PartialEq)]
enum Cut<'a> {
    /// Each match of the regular expression is a piece.
    Matches(&'a str),
    /// Each digit is a piece.
    Digits,
    /// The regular expression of GPT-2, which is built into the byte-level step.
    Gpt2,
}

pub(in crate::convert) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(in crate::convert) const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The three patterns of DeepSeek-V3.
const NUMBERS: &str = r"\p{N}{1,3}";
const CJK: &str = "[一-龥\u{3040}-ゟ゠-ヿ]+";
const DEEPSEEK: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// All known pre-tokenizers.
const PRES: &[Pre] = &[
    Pre {
        also: &["llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"],
        ignore_merges: true,
        adds_bos: true,
        ..pre("llama-bpe", &[Cut::Matches(LLAMA3)])
    },
    Pre { also: &["smaug-bpe"], ..pre("dbrx", &[Cut::Matches(LLAMA3)]) },
    Pre { also: &["glm5"], ignore_merges: true, ..pre("glm4", &[Cut::Matches(LLAMA3)]) },
    Pre { also: &["deepseek-r1-qwen"], nfc: true, ..pre("qwen2", &[Cut::Matches(QWEN2)]) },
    Pre { nfc: true, ..pre("qwen35", &[Cut::Matches(QWEN35)]) },
    pre("deepseek-v3", &[Cut::Matches(NUMBERS), Cut::Matches(CJK), Cut::Matches(DEEPSEEK)]),
    Pre { also: &["llama4", "kanana2", "minimax-m2"], ..pre("gpt-4o", &[Cut::Matches(O200K)]) },
    Pre { ignore_merges: true, adds_bos: true, ..pre("tekken", &[Cut::Matches(TEKKEN)]) },
    Pre { also: &["phi-2"], ..pre("gpt-2", &[Cut::Gpt2]) },
    Pre { also: &["starcoder", "refact"], ..pre("smollm", &[Cut::Digits, Cut::Gpt2]) },
    Pre { nfc: true, ..pre("command-r", &[Cut::Digits, Cut::Gpt2]) },
];

const fn pre(name: &'static str, cuts: &'static [Cut<'static>]) -> Pre {
    Pre { name, also: &[], cuts, nfc: false, ignore_merges: false, adds_bos: false }
}

impl Pre {
    /// Returns the pre-tokenizer of the name in a GGUF file.
    pub(super) fn of_name(name: &str) -> Result<&'static Pre> {
        PRES.iter().find(|p| p.name == name || p.also.contains(&name)).ok_or_else(|| {
            let known = PRES.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
            Error::unsupported(format!("found `{name}`, expected one of {known}"))
                .tensor("tokenizer.ggml.pre")
                .help("give the model's tokenizer.json with --tokenizer FILE")
        })
    }

    /// Returns the pre-tokenizer that a tokenizer.json of byte-level BPE describes.
    pub(super) fn of_json(tokenizer: &Value) -> Result<&'static Pre> {
        let normalizer = &tokenizer["normalizer"];
        let ignore_merges = tokenizer["model"]["ignore_merges"].as_bool().unwrap_or(false);
        let rules = same_form(&tokenizer["pre_tokenizer"]);
        let cuts = cuts_of(&rules);
        let fits = |p: &&Pre| {
            let normal = normalizer.is_null() || p.nfc && normalizer["type"] == "NFC";
            normal && p.ignore_merges == ignore_merges && cuts.as_deref() == Some(p.cuts)
        };
        PRES.iter().find(fits).ok_or_else(|| {
            let (normalizer, pre) = (normalizer.to_string(), tokenizer["pre_tokenizer"].to_string());
            let found =
                format!("normalizer {normalizer:.300}, pre_tokenizer {pre:.300}, ignore_merges {ignore_merges}");
            Error::unsupported(format!("found {found}; expected the rules of a supported pre-tokenizer of llama.cpp"))
                .tensor("pre_tokenizer")
                .help("if llama.cpp has a pre-tokenizer with these rules, give its name, for example --pre gpt-2")
        })
    }

    /// Returns `normalizer` and `pre_tokenizer` for a tokenizer.json.
    pub(super) fn json(&self) -> (Value, Value) {
        let mut steps = Vec::new();
        for cut in self.cuts {
            match cut {
                Cut::Matches(regex) => steps.push(
                    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}),
                ),
                Cut::Digits => steps.push(json!({"type": "Digits", "individual_digits": true})),
                Cut::Gpt2 => {}
            }
        }
        let gpt2 = self.cuts.contains(&Cut::Gpt2);
        steps.push(byte_level(false, gpt2));
        let normalizer = if self.nfc { json!({"type": "NFC"}) } else { Value::Null };
        (normalizer, json!({"type": "Sequence", "pretokenizers": steps}))
    }
}

/// Reads the split rules of a `pre_tokenizer` that ends with the byte-level step; returns `None`
/// when it has any other step.
fn cuts_of(pre_tokenizer: &Value) -> Option<Vec<Cut<'_>>> {
    let steps = match pre_tokenizer["type"].as_str()? {
        "Sequence" => pre_tokenizer["pretokenizers"].as_array()?.as_slice(),
        _ => std::slice::from_ref(pre_tokenizer),
    };
    let (last, rest) = steps.split_last()?;
    if last["type"] != "ByteLevel" || last["add_prefix_space"] == true {
        return None;
    }
    let mut cuts = rest.iter().map(cut_of).collect::<Option<Vec<_>>>()?;
    if last["use_regex"] != false {
        cuts.push(Cut::Gpt2);
    }
    Some(cuts)
}

fn cut_of(step: &Value) -> Option<Cut<'_>> {
    match step["type"].as_str()? {
        "Digits" if step["individual_digits"] == true => Some(Cut::Digits),
        "Split" => {
            // Both settings make each match a piece: `Isolated`, or `Removed` with `invert`, because the patterns
            // match every character.
            let isolated = step["behavior"] == "Isolated" && step["invert"] != true;
            let removed = step["behavior"] == "Removed" && step["invert"] == true;
            step["pattern"]["Regex"].as_str().filter(|_| isolated || removed).map(Cut::Matches)
        }
        _ => None,
    }
}

/// Returns split rules whose regular expressions have escapes for line ends and no needless ones, in which files
/// differ.
fn same_form(rules: &Value) -> Value {
    match rules {
        Value::String(text) => Value::String(text.replace('\r', r"\r").replace('\n', r"\n").replace("\\\"", "\"")),
        Value::Array(list) => list.iter().map(same_form).collect(),
        Value::Object(map) => Value::Object(map.iter().map(|(key, value)| (key.clone(), same_form(value))).collect()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_found_again_from_its_own_rules() {
        for pre in PRES {
            let (normalizer, pre_tokenizer) = pre.json();
            let tokenizer = json!({"normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
                                   "model": {"ignore_merges": pre.ignore_merges}});
            // Several names may stand for the same rules.
            let found = Pre::of_json(&tokenizer).unwrap();
            assert_eq!((found.json(), found.ignore_merges), (pre.json(), pre.ignore_merges), "{}", pre.name);
            assert!(pre.also.iter().all(|name| Pre::of_name(name).unwrap().name == pre.name));
        }
    }

    #[test]
    fn the_form_of_escapes_does_not_matter() {
        assert_eq!(same_form(&json!(["[!\\\"#]|[^\r\n]"])), json!([r##"[!"#]|[^\r\n]"##]));
    }

    #[test]
    fn an_unknown_pipeline_is_named_in_the_refusal() {
        let tokenizer =
            json!({"normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}, "model": {}});
        let refused = Pre::of_json(&tokenizer).unwrap_err();
        assert!(
            refused.to_string().contains("Lowercase") && refused.help_text().unwrap().contains("--pre"),
            "{refused}"
        );
        assert!(Pre::of_name("kimi-k2").unwrap_err().help_text().unwrap().contains("--tokenizer"));
    }
}
