//! Rules for an output with calls, with an answer that follows a constraint, or with both, from which the formats make
//! their grammars.

use super::reasoning::{Begins, KnownTags, Tags, token_of};
use super::tool::Tool;
use crate::generate::constraint::{ConstraintSource, Marker, MarkerPlace, Phase, Phases};
use crate::generate::text::Tokenizer;
use serde_json::Value;
use std::fmt::Write;

/// White space between the parts of a call, as a part of a grammar.
pub(super) const SPACE: &str = r"(/[ \n\r\t]{1,16}/)?";

/// Rules for an output.
pub(super) struct CallRules<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    /// Prompt before the output.
    pub(super) prompt: &'a [u32],
    /// Tags of the model.
    pub(super) tags: &'a KnownTags,
    /// Tools that may be called; none if the output has no calls.
    pub(super) tools: Vec<&'a Tool>,
    /// Schema of the arguments of each tool, as a part of a grammar.
    pub(super) schemas: Vec<String>,
    /// True if there must be a call.
    pub(super) forced: bool,
    /// True if there may be several calls.
    pub(super) parallel: bool,
    /// Constraint of the answer, if there is one.
    pub(super) answer: Option<&'a ConstraintSource>,
}

/// Calls of a format that writes them in text.
#[derive(Default)]
pub(super) struct TextCalls {
    /// Markers of a call at the beginning of an output, each with the number of the body that follows.
    pub(super) first: Vec<(Marker, usize)>,
    /// Markers of a call behind other text.
    pub(super) later: Vec<(Marker, usize)>,
    /// True if the markers may also begin an answer.
    pub(super) ordinary: bool,
    /// Beginning of a call as a part of a grammar; empty if the first body has it.
    pub(super) open: String,
    /// Grammars of what follows the beginning of a call. The first one follows `open`.
    pub(super) bodies: Vec<String>,
    /// True if no other call may follow.
    pub(super) body_is_last: bool,
    /// Marker behind which a call begins with `open`.
    pub(super) tag: Option<Marker>,
}

/// Numbers of the first phases of [`CallRules::text_phases`]. The bodies follow, then the kinds of reasoning.
const START: usize = 0;
const BEHIND: usize = 1;
const LATER: usize = 2;
const TAGGED: usize = 3;
const BODIES: usize = 4;

impl CallRules<'_> {
    /// Returns the rule `call` of a grammar: for each tool what `call` returns for its number, name and the part of a
    /// grammar that describes its arguments.
    pub(super) fn calls(&self, call: impl Fn(usize, &str, &str) -> String) -> String {
        let names = (0..self.tools.len()).map(|i| format!("call_{i}")).collect::<Vec<_>>();
        let mut rules = format!("call: {}\n", names.join(" | "));
        for (i, (tool, schema)) in self.tools.iter().zip(&self.schemas).enumerate() {
            // Writing to a text cannot fail.
            let _ = writeln!(
                rules,
                "call_{i}: {}\narguments_{i}: {schema}",
                call(i, &tool.name, &format!("arguments_{i}"))
            );
        }
        rules
    }

    /// Returns the rule `call` of a grammar: the arguments of each tool behind the part of a grammar that `before`
    /// returns for its name.
    pub(super) fn calls_behind(&self, before: impl Fn(&str) -> String) -> String {
        self.calls(|_, name, arguments| format!("{} {arguments}", before(name)))
    }

    /// Returns the rule `call` of a grammar for objects with a name and arguments, in any order and with any
    /// spaces; a call that must come has the name first and nothing else.
    pub(super) fn objects(&self, name_key: &str, arguments_keys: &[&str], id_key: &str) -> String {
        let space = self.space();
        let member =
            |key: &str, value: &str| format!("{} {space} \":\" {space} {value}", quoted(&format!("\"{key}\"")));
        let keys = |value: &str| {
            let members: Vec<String> = arguments_keys.iter().map(|key| member(key, value)).collect();
            format!("({})", members.join(" | "))
        };
        let comma = format!("{space} \",\" {space}");
        let other = format!(
            "({} {comma})? ({} {comma})?",
            member("type", &quoted("\"function\"")),
            member(id_key, r#"/"[A-Za-z0-9_:.\-]{0,64}"/"#)
        );
        self.calls(|_, name, arguments| {
            let (name, arguments) = (member(name_key, &quoted(&format!("\"{name}\""))), keys(arguments));
            match self.forced {
                true => format!("\"{{\" {space} {name} {comma} {arguments} {space} \"}}\""),
                false => {
                    let members = format!("{name} {comma} {arguments} | {arguments} {comma} {name}");
                    format!("\"{{\" {space} {other} ({members}) {space} \"}}\"")
                }
            }
        })
    }

    /// Returns the white space between the parts of a call, as a part of a grammar: what models write if they decide on
    /// the call, and little if they must write it, because a model that would not call writes blanks without end.
    pub(super) fn space(&self) -> &'static str {
        if self.forced { r"(/[ \n]/)?" } else { SPACE }
    }

    /// Returns where the output begins.
    pub(super) fn begins(&self) -> Begins {
        self.tags.begins(self.tokenizer, self.prompt)
    }

    /// Returns the phases of an output with calls in text.
    pub(super) fn text_phases(&self, calls: TextCalls) -> Phases {
        let begins = self.begins();
        let tags: Vec<&Tags> = match begins {
            Begins::Inside(tags) => vec![tags],
            Begins::Behind => Vec::new(),
            Begins::Anywhere => self.tags.reasoning().to_vec(),
        };
        let to_bodies = |markers: &[(Marker, usize)]| {
            let bodies = markers.iter().map(|(marker, body)| (marker.clone(), BODIES + body));
            bodies.chain(calls.tag.clone().map(|tag| (tag, TAGGED))).collect::<Vec<_>>()
        };
        let thinking = BODIES + calls.bodies.len();
        let thinking: Vec<(Marker, usize)> =
            (thinking..).zip(&tags).map(|(i, tags)| (self.tag(tags.opening, MarkerPlace::Start), i)).collect();
        let free = |markers: Vec<(Marker, usize)>| Phase::Free { ends: true, markers };
        let is_last = calls.body_is_last || !self.parallel;
        let again = BODIES + calls.bodies.len() + tags.len();
        let behind_body = self.behind_call(is_last, again);
        // A call that must come, behind something.
        let open = |before: &str| match (calls.open.as_str(), calls.bodies.first()) {
            ("", Some(body)) => Phase::Grammar {
                lark: body.replacen("start:", &format!("start: {before}"), 1),
                exits: behind_body.clone(),
            },
            (open, _) => Phase::Grammar { lark: format!("start: {before} {open}"), exits: vec![(None, BODIES)] },
        };
        let in_answer = || if calls.ordinary { to_bodies(&[]) } else { to_bodies(&calls.first) };
        let later = free(to_bodies(&calls.later));
        let behind = match (self.forced, self.answer) {
            (true, _) => open(SPACE),
            (false, Some(answer)) => self.answer(answer, SPACE, in_answer()),
            (false, None) => later.clone(),
        };
        let start = match (begins, self.forced, self.answer) {
            (Begins::Inside(tags), ..) => self.reasoning(tags),
            (_, true, _) => {
                let tags: Vec<String> =
                    tags.iter().map(|tags| format!("{} |", spelled(self.tokenizer, self.part(tags.opening)))).collect();
                let mut phase = open(&tags.concat());
                if let Phase::Grammar { exits, .. } = &mut phase {
                    exits.splice(0..0, thinking.into_iter().map(|(marker, i)| (Some(marker), i)));
                }
                phase
            }
            (_, false, Some(answer)) => self.answer(answer, "", in_answer().into_iter().chain(thinking).collect()),
            (_, false, None) => free(to_bodies(&calls.first).into_iter().chain(thinking).collect()),
        };
        let tagged = if calls.tag.is_some() { open("") } else { later.clone() };
        let mut phases = vec![start, behind, later, tagged];
        debug_assert_eq!([START, BEHIND, LATER, TAGGED, BODIES], [0, 1, 2, 3, phases.len()]);
        phases
            .extend(calls.bodies.iter().map(|lark| Phase::Grammar { lark: lark.clone(), exits: behind_body.clone() }));
        phases.extend(tags.iter().map(|tags| self.reasoning(tags)));
        if self.forced && !is_last {
            // Behind a call that was required, the output ends, or another call follows.
            let lark = format!("start: {SPACE} ({})?", calls.open);
            phases.push(Phase::Grammar { lark, exits: vec![(None, BODIES)] });
        }
        Phases(phases)
    }

    /// Returns the phases that may follow a call; none if it is the last one.
    fn behind_call(&self, is_last: bool, again: usize) -> Vec<(Option<Marker>, usize)> {
        match (is_last, self.forced) {
            (true, _) => Vec::new(),
            (false, true) => vec![(None, again)],
            (false, false) => vec![(None, LATER)],
        }
    }

    /// Returns the phase of reasoning, which ends with its closing tag.
    fn reasoning(&self, tags: &Tags) -> Phase {
        let closing = self.tag(tags.closing, MarkerPlace::Anywhere);
        Phase::Free { ends: !self.forced && self.answer.is_none(), markers: vec![(closing, BEHIND)] }
    }

    /// Returns the phase of an answer, which may begin with a tag of its own; `openings` lead to other phases.
    fn answer(&self, answer: &ConstraintSource, before: &str, openings: Vec<(Marker, usize)>) -> Phase {
        let tags: Vec<String> = self.tags.answers().map(|tag| spelled(self.tokenizer, tag)).collect();
        let before = match tags.is_empty() {
            true => before.to_string(),
            false => format!("{before} (({}) {SPACE})?", tags.join(" | ")),
        };
        Phase::Answer { source: Box::new(answer.clone()), before, openings }
    }

    /// Returns the marker of a tag of reasoning: its special token, if it begins with one.
    fn tag(&self, tag: &str, place: MarkerPlace) -> Marker {
        marker(self.tokenizer, self.part(tag), place)
    }

    fn part<'a>(&self, tag: &'a str) -> &'a str {
        let token = token_of(tag);
        let is_special = self.tokenizer.id(token).is_some_and(|id| self.tokenizer.is_special(id));
        if is_special { token } else { tag }
    }
}

/// Returns the marker of a text, which may be a special token.
pub(super) fn marker(tokenizer: &Tokenizer, text: &str, place: MarkerPlace) -> Marker {
    let token = tokenizer.id(text).filter(|id| tokenizer.is_special(*id));
    Marker { text: text.into(), token, place }
}

/// Returns a text as a part of a grammar; special tokens in it by their ids.
pub(super) fn spelled(tokenizer: &Tokenizer, text: &str) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut plain = 0;
    let mut at = 0;
    while at < text.len() {
        let ends = text[at..].char_indices().map(|(i, c)| at + i + c.len_utf8()).take(64);
        let special = ends.filter_map(|end| Some((end, tokenizer.id(&text[at..end])?)));
        match special.filter(|(_, id)| tokenizer.is_special(*id)).last() {
            Some((end, id)) => {
                parts.extend((plain < at).then(|| quoted(&text[plain..at])));
                parts.push(token(id));
                (at, plain) = (end, end);
            }
            None => at += text[at..].chars().next().map_or(1, char::len_utf8),
        }
    }
    parts.extend((plain < text.len()).then(|| quoted(&text[plain..])));
    parts.join(" ")
}

/// Returns a text as a part of a grammar.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns a token as a part of a grammar.
pub(super) fn token(id: u32) -> String {
    format!("<[{id}]>")
}
