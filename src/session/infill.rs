//! Fill-in-the-middle: prompts that ask a model for the text between two others, such as the code at a cursor.
//!
//! A model that was trained for it has special tokens which mark the text before the gap, the text behind it, and the
//! place where the answer begins. The table below has the tokens of published families; a tokenizer that has the tokens
//! of a row is taken to belong to such a model.

use crate::generate::text::Tokenizer;

/// A gap with the texts around it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gap {
    /// Text before the gap.
    pub prefix: String,
    /// Text behind the gap.
    pub suffix: String,
    /// Other texts that the answer may refer to, with their names.
    pub context: Vec<(String, String)>,
    /// Beginning of the answer.
    pub begun: String,
}

/// Order of the texts in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Text before the gap, text behind it, mark of the answer.
    PrefixFirst(&'static str),
    /// Text behind the gap, then the text before it, which the answer continues.
    SuffixFirst,
}

/// Tokens of a family.
#[derive(Debug)]
struct InfillRow {
    prefix: &'static str,
    suffix: &'static str,
    order: Order,
    /// Token before the name of a file.
    file: Option<&'static str>,
    /// Tokens that end an answer besides those of the model.
    ends: &'static [&'static str],
}

/// Tokens of published families.
const ROWS: [InfillRow; 7] = [
    // Qwen2.5-Coder, CodeGemma.
    InfillRow {
        prefix: "<|fim_prefix|>",
        suffix: "<|fim_suffix|>",
        order: Order::PrefixFirst("<|fim_middle|>"),
        file: Some("<|file_sep|>"),
        ends: &["<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"],
    },
    // StarCoder, Granite Code.
    InfillRow {
        prefix: "<fim_prefix>",
        suffix: "<fim_suffix>",
        order: Order::PrefixFirst("<fim_middle>"),
        file: Some("<file_sep>"),
        ends: &["<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>"],
    },
    // SantaCoder.
    InfillRow {
        prefix: "<fim-prefix>",
        suffix: "<fim-suffix>",
        order: Order::PrefixFirst("<fim-middle>"),
        file: None,
        ends: &["<|endoftext|>", "<fim-pad>"],
    },
    // DeepSeek-Coder.
    InfillRow {
        prefix: "<｜fim▁begin｜>",
        suffix: "<｜fim▁hole｜>",
        order: Order::PrefixFirst("<｜fim▁end｜>"),
        file: None,
        ends: &["<｜end▁of▁sentence｜>", "<|EOT|>"],
    },
    // CodeLlama.
    InfillRow {
        prefix: "▁<PRE>",
        suffix: "▁<SUF>",
        order: Order::PrefixFirst("▁<MID>"),
        file: None,
        ends: &["▁<EOT>"],
    },
    // GLM-4.
    InfillRow {
        prefix: "<|code_prefix|>",
        suffix: "<|code_suffix|>",
        order: Order::PrefixFirst("<|code_middle|>"),
        file: None,
        ends: &["<|endoftext|>"],
    },
    // Codestral.
    InfillRow { prefix: "[PREFIX]", suffix: "[SUFFIX]", order: Order::SuffixFirst, file: None, ends: &[] },
];

/// Form of the prompts of a model that fills gaps.
#[derive(Debug, Clone)]
pub struct Infill {
    row: &'static InfillRow,
    /// Whether the tokenizer has the token before the name of a file.
    names_files: bool,
    /// Tokens that end an answer besides those of the model.
    pub ends: Vec<u32>,
}

impl Infill {
    /// Returns the form for the model of a tokenizer; `None` if it has no tokens for gaps.
    pub fn of(tokenizer: &Tokenizer) -> Option<Infill> {
        let has = |token: &str| tokenizer.id(token).is_some();
        let middle = |row: &InfillRow| match row.order {
            Order::PrefixFirst(middle) => has(middle),
            Order::SuffixFirst => true,
        };
        let row = ROWS.iter().find(|row| has(row.prefix) && has(row.suffix) && middle(row))?;
        let ends = row.ends.iter().filter_map(|end| tokenizer.id(end)).collect();
        Some(Infill { row, names_files: row.file.is_some_and(has), ends })
    }

    /// Returns the prompt for a gap.
    pub fn prompt(&self, gap: &Gap) -> String {
        let InfillRow { prefix, suffix, order, file, .. } = self.row;
        let Gap { prefix: before, suffix: behind, context, begun } = gap;
        let mut text = String::new();
        let file = file.filter(|_| self.names_files && !context.is_empty());
        for (name, content) in context {
            match file {
                Some(file) => text += &format!("{file}{name}\n{content}"),
                None => text += &format!("{content}\n\n"),
            }
        }
        text += &file.map_or(String::new(), |file| format!("{file}\n"));
        match order {
            Order::PrefixFirst(middle) => text + &format!("{prefix}{before}{suffix}{behind}{middle}{begun}"),
            // The answer continues the text before the gap, to which other texts belong as well.
            Order::SuffixFirst => format!("{suffix}{behind}{prefix}{text}{before}{begun}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::path::Path;

    /// Returns a tokenizer of bytes with special tokens.
    fn tokenizer(special: &[&str]) -> Tokenizer {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories260k/tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let tokens = json["added_tokens"].as_array_mut().unwrap();
        for (i, content) in special.iter().enumerate() {
            tokens.push(json!({
                "id": 600 + i, "content": content, "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            }));
        }
        Tokenizer::parse(json.to_string().as_bytes(), &path).unwrap()
    }

    #[test]
    fn each_family_has_its_prompt() {
        struct Case(&'static [&'static str], &'static str);
        let cases = [
            Case(
                &["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
                "x\n\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c",
            ),
            Case(
                &["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"],
                "<|file_sep|>f\nx<|file_sep|>\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c",
            ),
            Case(&["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "x\n\n<fim_prefix>a<fim_suffix>b<fim_middle>c"),
            Case(&["<fim-prefix>", "<fim-suffix>", "<fim-middle>"], "x\n\n<fim-prefix>a<fim-suffix>b<fim-middle>c"),
            Case(
                &["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
                "x\n\n<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>c",
            ),
            Case(&["▁<PRE>", "▁<SUF>", "▁<MID>"], "x\n\n▁<PRE>a▁<SUF>b▁<MID>c"),
            Case(
                &["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
                "x\n\n<|code_prefix|>a<|code_suffix|>b<|code_middle|>c",
            ),
            Case(&["[PREFIX]", "[SUFFIX]"], "[SUFFIX]b[PREFIX]x\n\nac"),
        ];
        let context = vec![("f".to_string(), "x".to_string())];
        let gap = Gap { prefix: "a".into(), suffix: "b".into(), context, begun: "c".into() };
        for Case(tokens, expected) in cases {
            let tokenizer = tokenizer(tokens);
            let infill = Infill::of(&tokenizer).unwrap_or_else(|| panic!("{tokens:?}"));
            assert_eq!(infill.prompt(&gap), expected);
            let ids = tokenizer.encode_plain(&infill.prompt(&gap)).unwrap();
            for token in &tokens[..tokens.len().min(3)] {
                assert!(ids.contains(&tokenizer.id(token).unwrap()), "{token} is one token");
            }
        }
    }

    #[test]
    fn a_tokenizer_without_all_tokens_of_a_family_fills_no_gaps() {
        for tokens in [&[][..], &["<fim_prefix>", "<fim_suffix>"], &["[SUFFIX]"], &["<fim_prefix>", "<|fim_suffix|>"]] {
            assert!(Infill::of(&tokenizer(tokens)).is_none(), "{tokens:?}");
        }
        let with_end = tokenizer(&["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"]);
        assert_eq!(Infill::of(&with_end).unwrap().ends, [with_end.id("<|endoftext|>").unwrap()]);
    }
}
