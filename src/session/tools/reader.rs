//! Finds calls in text, for formats whose calls are JSON behind a marker.

use super::call::CallScanner;
use super::events::Sink;
use super::object::{ObjectScanner, Step};
use super::reasoning::begun;
use super::tool::is_name;

/// Notation of calls in text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Notation {
    /// Markers before a call.
    pub(super) openings: &'static [&'static str],
    /// Further markers, which have no meaning outside of a call.
    pub(super) others: &'static [&'static str],
    /// True if a call may stand at the beginning of an output without a marker.
    pub(super) bare: bool,
    /// Characters besides white space that may stand between a marker and a call, and between calls; empty if each call
    /// has its own marker.
    pub(super) between: &'static str,
    /// True if the name of a function may stand before its arguments, instead of an object with both.
    pub(super) named: bool,
}

/// Largest number of bytes between a marker and the arguments of a named call.
const NAME_BYTES: usize = 160;

/// Reads an output without its reasoning.
#[derive(Debug)]
pub(super) struct Reader {
    notation: Notation,
    at: At,
    /// White space that becomes content unless a call follows.
    space: String,
    /// True if nothing but white space has followed a call.
    after_call: bool,
}

#[derive(Debug)]
enum At {
    /// In content, with text that may be the beginning of a marker.
    Text(String),
    /// Behind a call, where another one may begin, with the text since then.
    Open(String),
    /// Behind a marker or at the beginning of an output, where a call may begin, with the text since then.
    Marked(String),
    Call(CallScanner),
    /// In the name of a function before its arguments.
    Name(String),
    Arguments(ObjectScanner),
}

impl Reader {
    /// Begins an output.
    pub(super) fn new(notation: Notation) -> Reader {
        let at = if notation.bare { At::Marked(String::new()) } else { At::Text(String::new()) };
        Reader { notation, at, space: String::new(), after_call: false }
    }

    /// Reads a piece of text.
    pub(super) fn push(&mut self, text: &str, sink: &mut Sink<'_>) {
        let mut rest = text.to_string();
        while !rest.is_empty() {
            rest = self.step(rest, sink);
        }
    }

    /// Ends the output: text that was held back becomes content.
    pub(super) fn finish(&mut self, sink: &mut Sink<'_>) {
        loop {
            match std::mem::replace(&mut self.at, At::Text(String::new())) {
                At::Text(held) => {
                    self.content(&held, sink);
                    break;
                }
                At::Marked(held) | At::Name(held) => self.push_text(held, sink),
                At::Call(scanner) => self.push_text(scanner.into_raw(), sink),
                At::Open(_) | At::Arguments(_) => {}
            }
        }
        let space = std::mem::take(&mut self.space);
        if !self.after_call {
            sink.content(&space);
        }
    }

    /// Reads text after a call turned out to be none.
    fn push_text(&mut self, text: String, sink: &mut Sink<'_>) {
        self.at = At::Text(String::new());
        let rest = self.text(String::new(), text, sink);
        self.push(&rest, sink);
    }

    /// Reads some of the text and returns the rest.
    fn step(&mut self, text: String, sink: &mut Sink<'_>) -> String {
        match std::mem::replace(&mut self.at, At::Text(String::new())) {
            At::Text(held) => self.text(held, text, sink),
            At::Open(held) => self.open(held, text, false),
            At::Marked(held) => self.open(held, text, true),
            At::Call(scanner) => self.call(scanner, text, sink),
            At::Name(held) => self.name(held, text, sink),
            At::Arguments(scanner) => self.arguments(scanner, text, sink),
        }
    }

    /// Writes content up to a marker.
    fn text(&mut self, held: String, text: String, sink: &mut Sink<'_>) -> String {
        let text = held + &text;
        let found = self.markers().filter_map(|(marker, opens)| Some((text.find(marker)?, marker, opens)));
        if let Some((at, marker, opens)) = found.min_by_key(|(at, marker, _)| (*at, usize::MAX - marker.len())) {
            self.content(&text[..at], sink);
            if opens {
                self.space.clear();
                self.at = At::Marked(String::new());
            }
            return text[at + marker.len()..].to_string();
        }
        let kept = self.markers().map(|(marker, _)| begun(&text, marker)).max().unwrap_or(0);
        let (shown, held) = text.split_at(text.len() - kept);
        self.content(shown, sink);
        self.at = At::Text(held.to_string());
        String::new()
    }

    fn markers(&self) -> impl Iterator<Item = (&'static str, bool)> + use<> {
        let Notation { openings, others, .. } = self.notation;
        openings.iter().map(|marker| (*marker, true)).chain(others.iter().map(|marker| (*marker, false)))
    }

    /// Skips what may stand before a call. `is_marked` unless only another call is before it.
    fn open(&mut self, mut held: String, text: String, is_marked: bool) -> String {
        let skipped = text.find(|c: char| !c.is_whitespace() && !self.notation.between.contains(c));
        let (before, rest) = text.split_at(skipped.unwrap_or(text.len()));
        held += before;
        let Some(first) = rest.chars().next() else {
            self.at = if is_marked { At::Marked(held) } else { At::Open(held) };
            return String::new();
        };
        if first == '{' {
            self.at = At::Call(CallScanner::new());
            return rest.to_string();
        }
        let is_empty = held.trim().is_empty();
        if self.notation.named && is_marked && is_empty && (first.is_ascii_alphanumeric() || "_-.".contains(first)) {
            self.at = At::Name(String::new());
            return rest.to_string();
        }
        let text = held.clone() + rest;
        let seen = held.len() + first.len_utf8();
        match held.rfind(|c| self.notation.between.contains(c)).filter(|_| !is_marked) {
            // The last character that may stand between calls may also begin a marker. Only the next character decides:
            // the result must not depend on how much text has come.
            Some(last) if self.markers().any(|(marker, _)| marker.starts_with(&text[last..seen])) => {
                text[last..].to_string()
            }
            Some(last) => text[last + 1..].to_string(),
            None => text,
        }
    }

    fn call(&mut self, mut scanner: CallScanner, text: String, sink: &mut Sink<'_>) -> String {
        for (at, c) in text.char_indices() {
            match scanner.push(c, sink) {
                Step::More => {}
                Step::End => {
                    self.ended();
                    return text[at + c.len_utf8()..].to_string();
                }
                Step::Fault => {
                    let rest = scanner.into_raw() + &text[at..];
                    return self.text(String::new(), rest, sink);
                }
            }
        }
        self.at = At::Call(scanner);
        String::new()
    }

    /// Reads a name up to its arguments. The markers of ids and arguments that may stand behind it are dropped.
    fn name(&mut self, mut held: String, text: String, sink: &mut Sink<'_>) -> String {
        let end = text.find(|c: char| !c.is_ascii_graphic() || c == '{').unwrap_or(text.len());
        held += &text[..end];
        let rest = &text[end..];
        if held.len() <= NAME_BYTES && rest.is_empty() {
            self.at = At::Name(held);
            return String::new();
        }
        let first = self.notation.others.iter().filter_map(|marker| held.find(marker)).min();
        let name = &held[..first.unwrap_or(held.len())];
        if rest.starts_with('{') && is_name(name) && held.len() <= NAME_BYTES {
            sink.begin(name);
            self.at = At::Arguments(ObjectScanner::new());
            return rest.to_string();
        }
        self.text(String::new(), held + rest, sink)
    }

    fn arguments(&mut self, mut scanner: ObjectScanner, text: String, sink: &mut Sink<'_>) -> String {
        for (at, c) in text.char_indices() {
            let step = scanner.push(c);
            if step == Step::Fault {
                return self.text(String::new(), text[at..].to_string(), sink);
            }
            sink.arguments(c.encode_utf8(&mut [0; 4]));
            if step == Step::End {
                self.ended();
                return text[at + c.len_utf8()..].to_string();
            }
        }
        self.at = At::Arguments(scanner);
        String::new()
    }

    fn ended(&mut self) {
        self.after_call = true;
        let several = !self.notation.between.is_empty();
        self.at = if several { At::Open(String::new()) } else { At::Text(String::new()) };
    }

    /// Writes content; white space at its end is held back.
    fn content(&mut self, text: &str, sink: &mut Sink<'_>) {
        let end = text.trim_end().len();
        if end > 0 {
            sink.content(&std::mem::take(&mut self.space));
            sink.content(&text[..end]);
            self.after_call = false;
        }
        self.space += &text[end..];
    }
}
