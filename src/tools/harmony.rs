//! The format of gpt-oss: messages with a header, between control tokens.
//!
//! `<|start|>assistant<|channel|>analysis<|message|>…<|end|>` is reasoning, and the channel `final` is for the user. A
//! call is a message to a function, `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`.
//! Models also write calls in other channels, the recipient before the channel, or another type of content. Other
//! messages of the channel `commentary` are content. The output of a model begins behind `<|start|>assistant`.

use super::events::{Calls, LONG_IDS, Sink};
use super::object::{ObjectScanner, Step};
use super::row::FormatRow;
use super::rules::{CallRules, token};
use super::tool::is_name;
use crate::generate::constraint::{ConstraintSource, Marker, MarkerPlace, Phase, Phases};
use crate::generate::text::Tokenizer;

/// The row of the table of formats.
pub(super) const ROW: FormatRow = FormatRow {
    name: "harmony",
    detect: |source, tokenizer| source.contains("<|channel|>") && Tokens::of(tokenizer).is_some(),
    notation: None,
    ids: LONG_IDS,
    phases,
};

/// Recipient of a call, without the name of the function.
const FUNCTIONS: &str = "functions.";
/// Largest number of bytes of a header.
const HEADER: usize = 1024;
/// Number of tokens at the end of a prompt that are searched for the beginning of a message.
const TAIL: usize = 64;

/// Control tokens.
#[derive(Debug, Clone, Copy)]
struct Tokens {
    start: u32,
    channel: u32,
    message: u32,
    end: u32,
    /// `<|call|>` and `<|return|>`, which end the output.
    stops: [Option<u32>; 2],
    constrain: Option<u32>,
}

impl Tokens {
    fn of(tokenizer: &Tokenizer) -> Option<Tokens> {
        let id = |token| tokenizer.id(token);
        Some(Tokens {
            start: id("<|start|>")?,
            channel: id("<|channel|>")?,
            message: id("<|message|>")?,
            end: id("<|end|>")?,
            stops: ["<|call|>", "<|return|>"].map(id),
            constrain: id("<|constrain|>"),
        })
    }

    /// Returns the spelling of a control token.
    fn spelling(&self, id: u32) -> Option<&'static str> {
        let some = |known: Option<u32>, spelling| (known == Some(id)).then_some(spelling);
        some(Some(self.start), "<|start|>")
            .or(some(Some(self.channel), "<|channel|>"))
            .or(some(Some(self.message), "<|message|>"))
            .or(some(Some(self.end), "<|end|>"))
            .or(some(self.stops[0], "<|call|>"))
            .or(some(self.stops[1], "<|return|>"))
            .or(some(self.constrain, "<|constrain|>"))
    }
}

/// State of an output.
#[derive(Debug)]
pub(super) struct Harmony {
    tokens: Tokens,
    calls: bool,
    at: HarmonyPlace,
}

#[derive(Debug)]
enum HarmonyPlace {
    /// Behind `<|start|>` and the role: a recipient, or content of a model that writes no header.
    Role(String),
    /// Behind `<|channel|>`.
    Header(String),
    Content,
    Reasoning,
    /// Before the arguments of a call to this function.
    Call(String),
    Arguments(ObjectScanner),
    /// Behind arguments, where white space may follow.
    Behind,
    /// Between messages, or behind `<|start|>` with the role that follows.
    Between(String),
}

impl Harmony {
    /// Begins the output that follows a prompt; `None` if the tokenizer has no such control tokens.
    pub(super) fn new(tokenizer: &Tokenizer, prompt: &[u32], calls: bool) -> Option<Harmony> {
        let tokens = Tokens::of(tokenizer)?;
        let mut harmony = Harmony { tokens, calls, at: HarmonyPlace::Content };
        let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
        let last = |token: u32| tail.iter().rposition(|id| *id == token);
        // A prompt may end within a header, or within a message that the model continues.
        let Some(first) = last(tokens.start).or(last(tokens.channel)) else { return Some(harmony) };
        let (mut dropped, mut calls) = (Vec::new(), Calls::new(0, LONG_IDS, 0, &[]));
        for id in &tail[first..] {
            let text = tokenizer.decode(&[*id], false).unwrap_or_default();
            harmony.push(*id, &text, &mut Sink::new(&mut dropped, &mut calls));
        }
        if matches!(harmony.at, HarmonyPlace::Arguments(_) | HarmonyPlace::Call(_)) {
            harmony.at = HarmonyPlace::Content;
        }
        Some(harmony)
    }

    /// Reads a token with its text. The spelling of control tokens is dropped; any other text of theirs was held back
    /// before them.
    pub(super) fn push(&mut self, id: u32, text: &str, sink: &mut Sink<'_>) {
        let Some(spelling) = self.tokens.spelling(id) else { return self.text(text, sink) };
        let held = text.strip_suffix(spelling).unwrap_or(text);
        if !held.is_empty() {
            self.text(held, sink);
        }
        let tokens = self.tokens;
        if id == tokens.channel {
            let header = match std::mem::replace(&mut self.at, HarmonyPlace::Content) {
                HarmonyPlace::Role(held) | HarmonyPlace::Between(held) | HarmonyPlace::Header(held) => held + " ",
                _ => String::new(),
            };
            self.at = HarmonyPlace::Header(header);
        } else if id == tokens.message {
            self.at = match std::mem::replace(&mut self.at, HarmonyPlace::Content) {
                HarmonyPlace::Header(header) | HarmonyPlace::Role(header) | HarmonyPlace::Between(header) => {
                    self.message(&header)
                }
                at => at,
            };
        } else if Some(id) != tokens.constrain {
            if let HarmonyPlace::Call(name) = &self.at
                && Some(id) == tokens.stops[0]
            {
                // A call of a function that has no arguments.
                sink.begin(name);
                sink.arguments("{}");
            }
            self.end(sink);
            self.at = HarmonyPlace::Between(String::new());
        } else if let HarmonyPlace::Header(header) = &mut self.at {
            // The type of the content follows, which is no part of the recipient.
            header.push(' ');
        }
    }

    /// Ends the output.
    pub(super) fn finish(&mut self, sink: &mut Sink<'_>) {
        self.end(sink);
    }

    fn text(&mut self, text: &str, sink: &mut Sink<'_>) {
        match &mut self.at {
            HarmonyPlace::Content => sink.content(text),
            HarmonyPlace::Behind => {
                // White space is dropped before other text, too: the result must not depend on how much text has come.
                let text = text.trim_start();
                if !text.is_empty() {
                    self.at = HarmonyPlace::Content;
                    sink.content(text);
                }
            }
            HarmonyPlace::Reasoning => sink.reasoning(text),
            HarmonyPlace::Header(header) => {
                // Letter by letter: where a header is cut must not depend on how much text has come.
                for c in text.chars() {
                    if header.len() < HEADER {
                        header.push(c);
                    }
                }
            }
            HarmonyPlace::Role(held) => {
                held.push_str(text);
                self.role(sink);
            }
            HarmonyPlace::Between(held) => {
                held.push_str(text);
                // The role of the messages that a model writes.
                if held.trim_start().starts_with("assistant") {
                    let rest = held.trim_start()["assistant".len()..].to_string();
                    self.at = HarmonyPlace::Role(rest);
                    self.role(sink);
                } else if !"assistant".starts_with(held.trim_start()) {
                    let held = std::mem::take(held);
                    sink.content(&held);
                    self.at = HarmonyPlace::Content;
                }
            }
            HarmonyPlace::Call(name) => {
                let text = text.trim_start();
                if text.starts_with('{') {
                    sink.begin(name);
                    self.at = HarmonyPlace::Arguments(ObjectScanner::new());
                    self.arguments(text, sink);
                } else if !text.is_empty() {
                    self.at = HarmonyPlace::Content;
                    sink.content(text);
                }
            }
            HarmonyPlace::Arguments(_) => self.arguments(text, sink),
        }
    }

    /// Continues as content if the text behind the role cannot be a recipient.
    fn role(&mut self, sink: &mut Sink<'_>) {
        let HarmonyPlace::Role(held) = &self.at else { return };
        let text = held.trim_start();
        if !(text.starts_with("to=") || "to=".starts_with(text)) || held.len() > HEADER {
            sink.content(held);
            self.at = HarmonyPlace::Content;
        }
    }

    fn arguments(&mut self, text: &str, sink: &mut Sink<'_>) {
        let HarmonyPlace::Arguments(scanner) = &mut self.at else { return };
        for (at, c) in text.char_indices() {
            let step = scanner.push(c);
            if step != Step::Fault {
                sink.arguments(c.encode_utf8(&mut [0; 4]));
            }
            if step != Step::More {
                let end = at + if step == Step::End { c.len_utf8() } else { 0 };
                self.at = HarmonyPlace::Behind;
                return self.text(&text[end..], sink);
            }
        }
    }

    /// Returns the state in a message with this header.
    fn message(&self, header: &str) -> HarmonyPlace {
        let mut words = header.split_whitespace();
        let recipient = words.clone().find_map(|word| word.split_once("to=").map(|(_, recipient)| recipient));
        let name = recipient.and_then(|recipient| recipient.strip_prefix(FUNCTIONS)).filter(|name| is_name(name));
        match name {
            Some(name) if self.calls => HarmonyPlace::Call(name.into()),
            _ if words.any(|word| word.starts_with("analysis")) => HarmonyPlace::Reasoning,
            _ => HarmonyPlace::Content,
        }
    }

    /// Ends a message: text that turned out to be no header becomes content.
    fn end(&mut self, sink: &mut Sink<'_>) {
        if let HarmonyPlace::Role(held) = &self.at
            && !held.trim_start().starts_with("to=")
        {
            sink.content(held);
        }
        self.at = HarmonyPlace::Content;
    }
}

/// Numbers of the phases.
const ROLE: usize = 0;
const BODY: usize = 1;
const ENDED: usize = 2;
const STARTED: usize = 3;
const CHANNEL: usize = 4;
const FINAL: usize = 5;

/// Returns the phases of an output whose calls are those of the tools, with arguments that follow their schemas. A call
/// ends the output, as the model was trained.
fn phases(rules: &CallRules<'_>) -> Phases {
    let answered = rules.answer.and_then(|answer| answer_phases(rules.tokenizer, rules.prompt, answer, Some(rules)));
    answered.unwrap_or_else(|| {
        let tokens = Tokens::of(rules.tokenizer).expect("a format that was detected");
        Messages { tokens, rules: Some(rules) }.phases(ROLE, None)
    })
}

/// Returns the phases of an output in whose channel `final` an answer follows a constraint; `None` if the tokenizer has
/// no such control tokens, or the prompt ends within the answer. With `rules`, the output may have a call instead.
pub(super) fn answer_phases(
    tokenizer: &Tokenizer,
    prompt: &[u32],
    answer: &ConstraintSource,
    rules: Option<&CallRules<'_>>,
) -> Option<Phases> {
    let tokens = Tokens::of(tokenizer)?;
    let begin = match Harmony::new(tokenizer, prompt, false)?.at {
        HarmonyPlace::Reasoning => BODY,
        HarmonyPlace::Header(header) if header.is_empty() => CHANNEL,
        HarmonyPlace::Role(_) => ROLE,
        _ => return None,
    };
    Some(Messages { tokens, rules }.phases(begin, Some(answer)))
}

/// Rules for the headers of messages.
struct Messages<'a> {
    tokens: Tokens,
    /// Tools with their schemas, if calls are allowed.
    rules: Option<&'a CallRules<'a>>,
}

impl Messages<'_> {
    /// Returns the phases of an output that begins with one of them. The answer follows a constraint, if there is one.
    fn phases(&self, begin: usize, answer: Option<&ConstraintSource>) -> Phases {
        let tokens = self.tokens;
        let marker = |id: u32| Marker { text: String::new(), token: Some(id), place: MarkerPlace::Anywhere };
        let forced = self.rules.is_some_and(|rules| rules.forced);
        let must_go_on = forced || answer.is_some();
        let [start, channel] = [tokens.start, tokens.channel].map(token);
        let next = if must_go_on { "" } else { "?" };
        let grammar = |lark: String, exits| Phase::Grammar { lark, exits };
        let free = |ends| Phase::Free {
            ends,
            markers: vec![
                (marker(tokens.end), ENDED),
                (marker(tokens.start), STARTED),
                (marker(tokens.channel), CHANNEL),
            ],
        };
        let mut in_channel = vec![(Some(marker(tokens.message)), BODY)];
        let mut phases = vec![
            grammar(self.role(&channel), vec![(Some(marker(tokens.channel)), CHANNEL)]),
            free(!must_go_on),
            grammar(format!("start: {start}{next}"), vec![(Some(marker(tokens.start)), STARTED)]),
            grammar("start: \"assistant\"".into(), vec![(None, ROLE)]),
        ];
        if answer.is_some() {
            // The name of the channel shows which phase follows; the rest of the header is read there.
            in_channel
                .insert(0, (Some(Marker { text: "final".into(), token: None, place: MarkerPlace::Anywhere }), FINAL));
        }
        phases.push(grammar(self.channel(forced, answer.is_some()), in_channel));
        if let Some(answer) = answer {
            let source = Box::new(answer.clone());
            phases.push(Phase::Answer { source, before: self.end_of_header(), openings: Vec::new() });
        }
        if begin != ROLE {
            // A text begins with phase 0. What only the first phase leads to is needed no more.
            let last = phases.len();
            phases.push(phases[ROLE].clone());
            phases[ROLE] = phases[begin].clone();
            for phase in &mut phases {
                phase.redirect(ROLE, last);
            }
        }
        Phases(phases)
    }

    /// Returns the part of a header behind its channel and recipient: the type of the content.
    fn end_of_header(&self) -> String {
        // Without its token, only a space divides the type from the name before it.
        let constrained =
            self.tokens.constrain.map_or_else(String::new, |id| format!("\" \"? {} /[a-z]+/ | ", token(id)));
        format!("({constrained}\" \" /[a-z]+/)? \" \"? {}", token(self.tokens.message))
    }

    /// Returns the grammar of a header behind the role: a recipient may stand before the channel.
    fn role(&self, channel: &str) -> String {
        let end = self.end_of_header();
        let call = |name: &str| format!("\" to={FUNCTIONS}{name}\" \" \"? {channel} channel {end}");
        self.with_calls(channel, true, call)
    }

    /// Returns the grammar of a header behind the token of the channel.
    fn channel(&self, forced: bool, answers: bool) -> String {
        let end = self.end_of_header();
        let last = match (forced, answers) {
            (true, _) => String::new(),
            (false, true) => " | \"final\"".into(),
            (false, false) => format!(" | \"final\" {end}"),
        };
        // Models address tools of their own, too, such as `python`.
        let other = "(\" to=\" /(python|browser|container|assistant|user|all)(\\.[a-z_]+)?/)?";
        let free = format!("(\"analysis\" | \"commentary\") {other} {end}{last}");
        self.with_calls(&free, !answers && !forced, |name| format!("channel \" to={FUNCTIONS}{name}\" {end}"))
    }

    /// Returns a grammar of a header, or of a header of a call with the call. With `in_final`, the call may stand in
    /// the channel for the user.
    fn with_calls(&self, header: &str, in_final: bool, call: impl Fn(&str) -> String) -> String {
        match self.rules {
            Some(rules) => {
                let last = if in_final { " | \"final\"" } else { "" };
                let channel = format!("channel: \"analysis\" | \"commentary\"{last}\n");
                format!("start: {header} | call\n{}{channel}", rules.calls_behind(call))
            }
            None => format!("start: {header}\n"),
        }
    }
}
