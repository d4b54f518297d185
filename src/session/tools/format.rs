//! The table of formats in which models write calls.

use super::row::Row;
use super::{harmony, hermes, llama3, mistral};
use crate::runtime::text::{ChatTemplate, Tokenizer};
use std::fmt;

/// All formats, in the order in which they are tried.
pub(super) const FORMATS: &[Row] = &[harmony::ROW, mistral::ROW, hermes::ROW, llama3::ROW];

/// Format in which a model writes calls: a row of the table of formats.
#[derive(Clone, Copy)]
pub struct Format(&'static Row);

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Format").field(&self.0.name).finish()
    }
}

/// Formats are equal if their names are.
impl PartialEq for Format {
    fn eq(&self, other: &Format) -> bool {
        self.0.name == other.0.name
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
        FORMATS.iter().find(|row| (row.detect)(template.tool_source(), tokenizer)).map(Format)
    }

    /// Returns all formats.
    pub fn all() -> impl Iterator<Item = Format> {
        FORMATS.iter().map(Format)
    }

    /// Returns the name of the format: `harmony`, `hermes`, `llama3` or `mistral`.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    pub(super) fn row(self) -> &'static Row {
        self.0
    }
}
