//! Row of the table of formats.

use super::events::IdForm;
use super::reader::Notation;
use super::rules::CallRules;
use crate::generate::constraint::Phases;
use crate::generate::text::Tokenizer;

/// A format of calls.
pub(super) struct FormatRow {
    /// Name of the format.
    pub(super) name: &'static str,
    /// Tells from the source of a chat template and the tokenizer whether a model uses the format.
    pub(super) detect: fn(&str, &Tokenizer) -> bool,
    /// Notation of calls in text; `None` for messages between control tokens.
    pub(super) notation: Option<Notation>,
    /// Form of the ids of calls.
    pub(super) ids: IdForm,
    /// Phases of an output whose calls follow the schemas of their functions.
    pub(super) phases: fn(&CallRules<'_>) -> Phases,
}
