//! The table of formats in which models write calls.

use super::row::FormatRow;
use super::{functionary, harmony, hermes, lists, literals, llama3, mistral, sections, tagged};
use crate::generate::text::{ChatTemplate, Tokenizer};
use std::fmt;

/// All formats, in the order in which they are tried: those with the more peculiar marks come first.
pub(super) const FORMATS: &[FormatRow] = &[
    harmony::ROW,
    literals::GEMMA_4,
    literals::FUNCTIONGEMMA,
    mistral::ROW,
    sections::DEEPSEEK_V3,
    sections::DEEPSEEK_V3_1,
    sections::KIMI,
    lists::GRANITE,
    lists::COMMAND,
    tagged::MINIMAX_M2,
    tagged::GLM4,
    tagged::SEED_OSS,
    tagged::QWEN3_CODER,
    literals::LFM,
    literals::OLMO3,
    functionary::FUNCTIONARY_3_1,
    functionary::FUNCTIONARY_3_2,
    hermes::ROW,
    literals::LLAMA_4,
    llama3::ROW,
];

/// Format in which a model writes calls: a row of the table of formats.
#[derive(Clone, Copy)]
pub struct Format {
    row: &'static FormatRow,
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Format").field(&self.row.name).finish()
    }
}

/// Formats are equal if their names are.
impl PartialEq for Format {
    fn eq(&self, other: &Format) -> bool {
        self.row.name == other.row.name
    }
}

impl Eq for Format {}

impl Format {
    /// Returns the format of a model, by the chat template and the tokenizer; `None` if the template has no place for
    /// tools or describes none of the known formats.
    pub fn of(template: &ChatTemplate, tokenizer: &Tokenizer) -> Option<Format> {
        if !template.reads_tools() {
            return None;
        }
        let source = template.tool_source();
        FORMATS.iter().find(|row| (row.detect)(source, tokenizer)).map(|row| Format { row })
    }

    /// Returns all formats.
    pub fn all() -> impl Iterator<Item = Format> {
        FORMATS.iter().map(|row| Format { row })
    }

    /// Returns the name of the format, such as `hermes`.
    pub fn name(self) -> &'static str {
        self.row.name
    }

    pub(super) fn row(self) -> &'static FormatRow {
        self.row
    }
}
