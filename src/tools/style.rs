//! The style in which a model writes its output: the tags around its reasoning, and the format of its calls.

use super::format::Format;
use super::reasoning::KnownTags;
use crate::generate::text::{ChatTemplate, Tokenizer};

/// Style of the output of a model, as far as its chat template and its vocabulary show it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutputStyle {
    pub(super) format: Option<Format>,
    pub(super) tags: KnownTags,
}

impl OutputStyle {
    /// Returns the style of a model.
    pub fn of(template: &ChatTemplate, tokenizer: &Tokenizer) -> OutputStyle {
        let source = [template.source(), template.tool_source()].concat();
        OutputStyle { format: Format::of(template, tokenizer), tags: KnownTags::of(&source, tokenizer) }
    }

    /// Returns the style of a model of which no chat template is known.
    pub fn without_template(tokenizer: &Tokenizer) -> OutputStyle {
        OutputStyle { format: None, tags: KnownTags::of("", tokenizer) }
    }

    /// Returns the format of calls, if the template describes a known one.
    pub fn format(&self) -> Option<Format> {
        self.format
    }

    /// Returns the style with this format of calls.
    #[must_use]
    pub fn with(self, format: Option<Format>) -> OutputStyle {
        OutputStyle { format, ..self }
    }
}
