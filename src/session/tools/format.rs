//! The table of formats in which models write calls.

use super::row::Row;
use super::{harmony, hermes, llama3, mistral, reasoning};
use crate::runtime::text::{ChatTemplate, Tokenizer};
use std::fmt;

/// All formats, in the order in which they are tried.
pub(super) const FORMATS: &[Row] = &[harmony::ROW, mistral::ROW, hermes::ROW, llama3::ROW];

/// Format in which a model writes calls: a row of the table of formats.
#[derive(Clone, Copy)]
pub struct Format {
    row: &'static Row,
    /// Whether the template knows the tags between which a model reasons.
    reasons: bool,
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
        let reasons = source.contains(reasoning::OPENING) || source.contains(reasoning::CLOSING);
        FORMATS.iter().find(|row| (row.detect)(source, tokenizer)).map(|row| Format { row, reasons })
    }

    /// Returns all formats.
    pub fn all() -> impl Iterator<Item = Format> {
        FORMATS.iter().map(|row| Format { row, reasons: true })
    }

    /// Returns the name of the format: `harmony`, `hermes`, `llama3` or `mistral`.
    pub fn name(self) -> &'static str {
        self.row.name
    }

    pub(super) fn row(self) -> &'static Row {
        self.row
    }

    /// Returns whether a model may reason before a call that it must make.
    pub(super) fn reasons(self) -> bool {
        self.reasons
    }
}
