//! Rules for the calls of an output, from which the formats make their grammars.

use super::reasoning;
use super::tool::Tool;
use crate::runtime::constraint::{Marker, Phase, Phases, Place};
use crate::runtime::text::Tokenizer;
use serde_json::Value;
use std::fmt::Write;

/// Rules for the calls of an output.
pub(super) struct CallRules<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) tools: Vec<&'a Tool>,
    /// Schema of the arguments of each tool, as a part of a grammar.
    pub(super) schemas: Vec<String>,
    /// True if there must be a call.
    pub(super) forced: bool,
    /// True if there may be several calls.
    pub(super) parallel: bool,
    /// True if the prompt ends within reasoning.
    pub(super) in_reasoning: bool,
    /// Whether the output begins behind reasoning, so that a forced call begins at once.
    pub(super) reasoned: bool,
}

/// Calls of a format that writes them in text.
pub(super) struct TextCalls {
    /// Markers of a call at the beginning of an output.
    pub(super) first: Vec<Marker>,
    /// Markers of a call behind other text.
    pub(super) later: Vec<Marker>,
    /// Beginning of a call as a part of a grammar.
    pub(super) open: String,
    /// Grammar of what follows the beginning of a call.
    pub(super) body: String,
    /// True if no other call may follow.
    pub(super) body_is_last: bool,
    /// Marker behind which a call begins with `open`.
    pub(super) tag: Option<Marker>,
}

/// Numbers of the phases of [`CallRules::text_phases`].
const START: usize = 0;
const REASONING: usize = 1;
const BODY: usize = 2;
const LATER: usize = 3;
const OPEN: usize = 4;
const TAGGED: usize = 5;
const AGAIN: usize = 6;

impl CallRules<'_> {
    /// Returns the rule `call` of a grammar: the arguments of each tool behind the text that `before` returns for its
    /// name, and before `after`, which is a part of a grammar.
    pub(super) fn calls(&self, before: impl Fn(&str) -> String, after: &str) -> String {
        self.calls_behind(|name| Value::from(before(name)).to_string(), after)
    }

    /// Returns the rule `call` of a grammar as [`CallRules::calls`] does; `before` returns a part of a grammar.
    pub(super) fn calls_behind(&self, before: impl Fn(&str) -> String, after: &str) -> String {
        let names = (0..self.tools.len()).map(|i| format!("call_{i}")).collect::<Vec<_>>();
        let mut rules = format!("call: {}\n", names.join(" | "));
        for ((tool, schema), rule) in self.tools.iter().zip(&self.schemas).zip(names) {
            // Writing to a text cannot fail.
            let _ = writeln!(rules, "{rule}: {} {schema} {after}", before(&tool.name));
        }
        rules
    }

    /// Returns the phases of an output with calls in text.
    pub(super) fn text_phases(&self, calls: TextCalls) -> Phases {
        let ends = !self.forced;
        let think = spelled(self.tokenizer, reasoning::OPENING);
        let to =
            |markers: &[Marker], next| markers.iter().map(move |marker| (marker.clone(), next)).collect::<Vec<_>>();
        let thinking = (marker(self.tokenizer, reasoning::OPENING, Place::Start), REASONING);
        let behind = if self.forced { OPEN } else { LATER };
        let end_of_reasoning = (marker(self.tokenizer, reasoning::CLOSING, Place::Anywhere), behind);
        let in_reasoning = Phase::Free { ends, markers: vec![end_of_reasoning] };
        let tag = calls.tag.clone().map(|marker| (marker, TAGGED));
        let free = |markers: &[Marker], more: Option<(Marker, usize)>| {
            let markers = to(markers, BODY).into_iter().chain(tag.clone()).chain(more).collect();
            Phase::Free { ends: true, markers }
        };
        let open = |before: &str| Phase::Grammar {
            lark: format!("start: {before} {}", calls.open),
            exits: vec![(None, BODY)],
        };
        let start = match (self.in_reasoning, self.forced) {
            (true, _) => in_reasoning.clone(),
            (false, false) => free(&calls.first, Some(thinking)),
            (false, true) if self.reasoned => open(""),
            (false, true) => Phase::Grammar {
                lark: format!("start: {think} | {}", calls.open),
                exits: vec![(Some(thinking.0), REASONING), (None, BODY)],
            },
        };
        let is_last = calls.body_is_last || !self.parallel;
        let phases = vec![
            (START, start),
            (REASONING, in_reasoning),
            (
                BODY,
                Phase::Grammar {
                    lark: calls.body.clone(),
                    exits: match (is_last, self.forced) {
                        (true, _) => Vec::new(),
                        (false, true) => vec![(None, AGAIN)],
                        (false, false) => vec![(None, LATER)],
                    },
                },
            ),
            (LATER, free(&calls.later, None)),
            (OPEN, open("/[ \\n]{1,4}/?")),
            (TAGGED, open("")),
            // Behind a call that was required, the output ends, or another call follows.
            (
                AGAIN,
                Phase::Grammar {
                    lark: format!("start: /[ \\n]{{1,4}}/? ({})?", calls.open),
                    exits: vec![(None, BODY)],
                },
            ),
        ];
        debug_assert!(phases.iter().enumerate().all(|(i, (number, _))| i == *number));
        Phases(phases.into_iter().map(|(_, phase)| phase).collect())
    }
}

/// Returns the marker of a text, which may be a special token.
pub(super) fn marker(tokenizer: &Tokenizer, text: &str, place: Place) -> Marker {
    let token = tokenizer.id(text).filter(|id| tokenizer.is_special(*id));
    Marker { text: text.into(), token, place }
}

/// Returns a text as a part of a grammar, by its token if it is a special one.
pub(super) fn spelled(tokenizer: &Tokenizer, text: &str) -> String {
    match tokenizer.id(text).filter(|id| tokenizer.is_special(*id)) {
        Some(id) => token(id),
        None => Value::from(text).to_string(),
    }
}

/// Returns a token as a part of a grammar.
pub(super) fn token(id: u32) -> String {
    format!("<[{id}]>")
}
