//! Finds calls in text, for formats whose calls stand behind a marker.

use super::call::CallScanner;
use super::events::Sink;
use super::literal::{Dialect, LiteralScanner};
use super::named::{Named, NamedScanner};
use super::object::Step;
use super::reasoning::begun;
use super::xml::{Xml, XmlScanner};

/// Notation of calls in text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Notation {
    /// Markers before a call.
    pub(super) openings: &'static [&'static str],
    /// Further markers, which have no meaning outside of a call.
    pub(super) others: &'static [&'static str],
    /// True if a call may stand at the beginning of an output without a marker. Such a call must be complete up to its
    /// arguments and name an offered function before it counts, because the same text may be an answer.
    pub(super) bare: bool,
    /// True if the markers may be ordinary text, so that the same holds for all calls.
    pub(super) ordinary: bool,
    /// Characters besides white space that may stand between a marker and a call, and between calls.
    pub(super) between: &'static str,
    /// True if several calls may follow one marker.
    pub(super) several: bool,
    /// Text in place of a name with which the answer for the user begins.
    pub(super) user: &'static str,
    pub(super) style: Style,
}

/// Form of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// An object with a name and arguments.
    Object,
    /// Such an object, or a name before its arguments.
    Named(&'static Named),
    /// Arguments between tags.
    Xml(&'static Xml),
    /// Arguments as literals of another language.
    Literal(&'static Dialect),
}

/// A notation of objects behind markers; the rows of the table of formats change what differs.
pub(super) const OBJECTS: Notation = Notation {
    openings: &[],
    others: &[],
    bare: false,
    ordinary: false,
    between: "",
    several: false,
    user: "",
    style: Style::Object,
};

/// Reads an output without its reasoning.
#[derive(Debug)]
pub(super) struct Reader {
    notation: Notation,
    at: ReaderPlace,
    /// White space that becomes content unless a call follows.
    space: String,
    /// True if nothing but white space has followed a call.
    after_call: bool,
    /// Text before the call that is read, which becomes content if it is none.
    before: String,
    /// True if the call that is read may be ordinary text.
    doubtful: bool,
}

#[derive(Debug)]
enum ReaderPlace {
    /// In content, with text that may be the beginning of a marker.
    Text(String),
    /// Behind a call, where another one may begin, with the text since then.
    Open(String),
    /// Behind a marker or at the beginning of an output, where a call may begin, with the text since then.
    Marked(String),
    Call(Box<Scanner>),
}

/// State of a call.
#[derive(Debug)]
enum Scanner {
    Object(CallScanner),
    Named(NamedScanner),
    Xml(XmlScanner),
    Literal(LiteralScanner),
}

impl Scanner {
    fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        match self {
            Scanner::Object(scanner) => scanner.push(c, sink),
            Scanner::Named(scanner) => scanner.push(c, sink),
            Scanner::Xml(scanner) => scanner.push(c, sink),
            Scanner::Literal(scanner) => scanner.push(c, sink),
        }
    }

    fn begun(&self) -> bool {
        match self {
            Scanner::Object(scanner) => scanner.begun(),
            Scanner::Named(scanner) => scanner.begun(),
            Scanner::Xml(scanner) => scanner.begun(),
            Scanner::Literal(scanner) => scanner.begun(),
        }
    }

    fn complete(&mut self, sink: &mut Sink<'_>) {
        match self {
            Scanner::Object(scanner) => scanner.complete(sink),
            Scanner::Named(scanner) => scanner.complete(sink),
            Scanner::Xml(scanner) => scanner.complete(sink),
            Scanner::Literal(scanner) => scanner.complete(sink),
        }
    }

    fn into_raw(self: Box<Scanner>) -> String {
        match *self {
            Scanner::Object(scanner) => scanner.into_raw(),
            Scanner::Named(scanner) => scanner.into_raw(),
            Scanner::Xml(scanner) => scanner.into_raw(),
            Scanner::Literal(scanner) => scanner.into_raw(),
        }
    }
}

impl Reader {
    /// Begins an output.
    pub(super) fn new(notation: Notation) -> Reader {
        let at = if notation.bare { ReaderPlace::Marked(String::new()) } else { ReaderPlace::Text(String::new()) };
        let (space, before) = (String::new(), String::new());
        Reader { notation, at, space, after_call: false, before, doubtful: notation.bare || notation.ordinary }
    }

    /// Reads a piece of text.
    pub(super) fn push(&mut self, text: &str, sink: &mut Sink<'_>) {
        let mut rest = text.to_string();
        while !rest.is_empty() {
            rest = self.step(rest, sink);
        }
    }

    /// Ends the output: text that was held back becomes content. Calls are completed unless the output `is_cut`.
    pub(super) fn finish(&mut self, is_cut: bool, sink: &mut Sink<'_>) {
        loop {
            match std::mem::replace(&mut self.at, ReaderPlace::Text(String::new())) {
                ReaderPlace::Text(held) => {
                    self.content(&held, sink);
                    break;
                }
                ReaderPlace::Marked(held) => {
                    let before = std::mem::take(&mut self.before);
                    self.push_text(before, held, sink);
                }
                ReaderPlace::Call(mut scanner) => {
                    if !is_cut {
                        scanner.complete(sink);
                    }
                    let before = std::mem::take(&mut self.before);
                    match scanner.begun() {
                        true => self.after_call = true,
                        false => self.push_text(before, scanner.into_raw(), sink),
                    }
                }
                ReaderPlace::Open(_) => {}
            }
        }
        let space = std::mem::take(&mut self.space);
        if !self.after_call {
            sink.content(&space);
        }
    }

    /// Reads text after a call turned out to be none. `before` may have a marker that means nothing.
    fn push_text(&mut self, before: String, text: String, sink: &mut Sink<'_>) {
        self.content(&before, sink);
        self.at = ReaderPlace::Text(String::new());
        let rest = self.text(String::new(), text, sink);
        self.push(&rest, sink);
    }

    /// Reads some of the text and returns the rest.
    fn step(&mut self, text: String, sink: &mut Sink<'_>) -> String {
        match std::mem::replace(&mut self.at, ReaderPlace::Text(String::new())) {
            ReaderPlace::Text(held) => self.text(held, text, sink),
            ReaderPlace::Open(held) => self.open(held, text, false, sink),
            ReaderPlace::Marked(held) => self.open(held, text, true, sink),
            ReaderPlace::Call(scanner) => self.call(scanner, text, sink),
        }
    }

    /// Writes content up to a marker.
    fn text(&mut self, held: String, text: String, sink: &mut Sink<'_>) -> String {
        let text = held + &text;
        let found = self.markers().filter_map(|(marker, opens)| Some((text.find(marker)?, marker, opens)));
        if let Some((at, marker, opens)) = found.min_by_key(|(at, marker, _)| (*at, usize::MAX - marker.len())) {
            self.content(&text[..at], sink);
            if opens {
                self.doubtful = self.notation.ordinary;
                match self.doubtful {
                    true => self.before = std::mem::take(&mut self.space) + marker,
                    false => self.space.clear(),
                }
                self.at = ReaderPlace::Marked(String::new());
            }
            return text[at + marker.len()..].to_string();
        }
        let kept = self.markers().map(|(marker, _)| begun(&text, marker)).max().unwrap_or(0);
        let (shown, held) = text.split_at(text.len() - kept);
        self.content(shown, sink);
        self.at = ReaderPlace::Text(held.to_string());
        String::new()
    }

    fn markers(&self) -> impl Iterator<Item = (&'static str, bool)> + use<> {
        let Notation { openings, others, .. } = self.notation;
        openings.iter().map(|marker| (*marker, true)).chain(others.iter().map(|marker| (*marker, false)))
    }

    /// Skips what may stand before a call. `is_marked` unless only another call is before it.
    fn open(&mut self, mut held: String, text: String, is_marked: bool, sink: &mut Sink<'_>) -> String {
        let skipped = text.find(|c: char| !c.is_whitespace() && !self.notation.between.contains(c));
        let (before, rest) = text.split_at(skipped.unwrap_or(text.len()));
        held += before;
        let (user, mut rest) = (self.notation.user, rest.to_string());
        if is_marked && !user.is_empty() {
            // A beginning of the text in place of a name is held, too.
            let begun = held.split_off(held.len() - held.trim_start().len());
            rest.insert_str(0, &begun);
            if let Some(answer) = rest.strip_prefix(user) {
                self.before.clear();
                return answer.to_string();
            }
            if user.starts_with(&rest) {
                self.at = ReaderPlace::Marked(held + &rest);
                return String::new();
            }
        }
        let Some(first) = rest.chars().next() else {
            self.at = if is_marked { ReaderPlace::Marked(held) } else { ReaderPlace::Open(held) };
            return String::new();
        };
        if let Some(scanner) = self.scanner(first, is_marked, &held) {
            if is_marked {
                self.before += &held;
            }
            self.at = ReaderPlace::Call(Box::new(scanner));
            return rest;
        }
        if is_marked {
            let before = std::mem::take(&mut self.before);
            self.content(&before, sink);
            return held + &rest;
        }
        let text = held.clone() + &rest;
        let seen = held.len() + first.len_utf8();
        match held.rfind(|c| self.notation.between.contains(c)) {
            // The last character that may stand between calls may also begin a marker. Only the next character decides:
            // the result must not depend on how much text has come.
            Some(last) if self.markers().any(|(marker, _)| marker.starts_with(&text[last..seen])) => {
                text[last..].to_string()
            }
            Some(last) => text[last + 1..].to_string(),
            None => text,
        }
    }

    /// Begins a call with this character, if one can begin so.
    fn scanner(&self, first: char, is_marked: bool, held: &str) -> Option<Scanner> {
        let doubtful = self.doubtful;
        let names = first.is_ascii_alphanumeric() || "_-.".contains(first);
        match self.notation.style {
            Style::Object | Style::Named(_) if first == '{' => Some(Scanner::Object(CallScanner::new(doubtful))),
            Style::Named(named) if names && is_marked && held.trim().is_empty() => {
                Some(Scanner::Named(NamedScanner::new(named, doubtful)))
            }
            // Without a marker, calls stand between brackets.
            Style::Literal(dialect) if names && (!doubtful || !is_marked || held.contains('[')) => {
                Some(Scanner::Literal(LiteralScanner::new(dialect, doubtful)))
            }
            Style::Xml(xml) if is_marked && first != '<' => Some(Scanner::Xml(XmlScanner::new(xml))),
            _ => None,
        }
    }

    fn call(&mut self, mut scanner: Box<Scanner>, text: String, sink: &mut Sink<'_>) -> String {
        for (at, c) in text.char_indices() {
            match scanner.push(c, sink) {
                Step::More => {}
                Step::End => {
                    self.ended();
                    return text[at + c.len_utf8()..].to_string();
                }
                Step::Fault if scanner.begun() => {
                    scanner.complete(sink);
                    self.ended();
                    self.at = ReaderPlace::Text(String::new());
                    return text[at..].to_string();
                }
                Step::Fault => {
                    let before = std::mem::take(&mut self.before);
                    self.content(&before, sink);
                    let rest = scanner.into_raw() + &text[at..];
                    return self.text(String::new(), rest, sink);
                }
            }
        }
        self.at = ReaderPlace::Call(scanner);
        String::new()
    }

    fn ended(&mut self) {
        self.after_call = true;
        self.before.clear();
        self.space.clear();
        self.at =
            if self.notation.several { ReaderPlace::Open(String::new()) } else { ReaderPlace::Text(String::new()) };
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
