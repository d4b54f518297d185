//! `iec verify --tokenizer-only`: the tokens of the pack's tokenizer against those of the checkpoint's.

use super::Args;
use super::report::Report;
use iec::error::{Error, Result};
use iec::runtime::text::Tokenizer;
use iec::runtime::text::tokenizer::FILE_NAME;
use std::path::Path;

/// Texts that tokenizers disagree about when their pipelines differ.
const AWKWARD: [&str; 12] = [
    " leading space",
    "two  spaces and a\ttab",
    "line\n\nbreaks\r\n",
    "trailing space ",
    "don't, I'll, we've",
    "1234567 + 3.14159 = 0x1F",
    "naïve café über ſtraße",
    "e\u{301} vs é",
    "日本語のテキスト",
    "Привет, мир!",
    "🙂👩‍👩‍👧‍👦 emoji",
    "fn main() { println!(\"{}\", x); }",
];

/// Opens the tokenizer of a checkpoint.
pub fn open(hf_dir: &Path) -> Result<Tokenizer> {
    Tokenizer::open(&hf_dir.join(FILE_NAME))
        .map_err(|e| e.help("the checkpoint has no tokenizer.json; save one with AutoTokenizer(...).save_pretrained"))
}

/// Compares vocabularies, and the ids of prompts and of awkward texts.
pub fn run(args: &Args, report: &mut Report) -> Result<()> {
    let Some(hf_dir) = &args.hf_dir else { return Err(Error::usage("--tokenizer-only needs --hf-dir")) };
    let ours = args.model.open_tokenizer()?;
    let theirs = open(hf_dir)?;
    report.same_vocabulary(ours.has_tokens_of(&theirs));
    let prompts = args.prompts()?;
    for (index, text) in prompts.iter().map(String::as_str).chain(AWKWARD).enumerate() {
        let (ids, expected) = (ours.encode(text)?, theirs.encode(text)?);
        report.prompt(index, text, ids, expected);
    }
    report.spell(&ours);
    Ok(())
}
