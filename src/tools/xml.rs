//! Reads a call whose arguments stand between tags, each with its name, and writes them as JSON.
//!
//! Such as `<function=f>\n<parameter=a>\n1\n</parameter>\n</function>`. Between the tags of a text stands the text
//! itself without escapes, between those of other values JSON; the schema of the function tells which. Closing tags may
//! be missing: the next tag of the notation ends a value, too. Texts are written as they are read, other values when
//! they are complete.

use super::events::Sink;
use super::object::Step;
use super::quoted::escaped;
use super::reasoning::begun;
use super::tool::is_name;
use super::types::Types;
use serde_json::Value;

/// Largest number of bytes of a name.
const NAME_BYTES: usize = 256;

/// Tags of a notation.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Xml {
    /// Before the name of the function, if it does not follow the marker of the call.
    pub(super) function: &'static str,
    /// Behind the name of the function; empty if a line break or the next tag ends it.
    pub(super) named: &'static str,
    /// Before the name of a parameter.
    pub(super) key: &'static str,
    /// Behind the name of a parameter.
    pub(super) keyed: &'static str,
    /// Before a value, if it does not follow the name directly.
    pub(super) value: &'static str,
    /// Behind a value.
    pub(super) valued: &'static str,
    /// Behind the parameters; empty if only the end of the call stands there.
    pub(super) called: &'static str,
    /// Tag before all calls, or before each.
    pub(super) opening: &'static str,
    /// Tag behind all calls, or behind each.
    pub(super) closing: &'static str,
    /// True if values may stand between line breaks that do not belong to them.
    pub(super) lines: bool,
}

/// State after the first characters of a call, behind its marker.
#[derive(Debug)]
pub(super) struct XmlScanner {
    xml: &'static Xml,
    at: XmlPlace,
    name: String,
    /// Text of the call as long as it may still be something else.
    raw: String,
    /// Number of arguments so far.
    arguments: usize,
    begun: bool,
    /// True once the arguments are complete.
    ended: bool,
}

#[derive(Debug)]
enum XmlPlace {
    Name(String),
    /// Between arguments.
    Between(String),
    Key(String),
    /// Before the tag of a value.
    Tag(String, String),
    Text(PartialText),
    Json {
        key: String,
        held: String,
    },
    /// Behind the call.
    End,
}

/// A text that is not complete.
#[derive(Debug)]
struct PartialText {
    /// Characters that may be the beginning of a tag.
    held: String,
    /// True before the first character.
    is_first: bool,
    /// True if a line break stood before the text, which is then followed by another one.
    in_lines: bool,
}

/// End of a value.
enum Ended {
    Value,
    /// The next parameter begins.
    Key,
    Call,
}

impl XmlScanner {
    /// Begins a call before the name of its function.
    pub(super) fn new(xml: &'static Xml) -> XmlScanner {
        XmlScanner {
            xml,
            at: XmlPlace::Name(String::new()),
            name: String::new(),
            raw: String::new(),
            arguments: 0,
            begun: false,
            ended: false,
        }
    }

    /// Returns the text of a call that was not given to the sink.
    pub(super) fn into_raw(self) -> String {
        self.raw
    }

    /// Returns true if the call was given to the sink.
    pub(super) fn begun(&self) -> bool {
        self.begun
    }

    /// Reads a character. After a [`Step::Fault`] the character is not part of the call.
    pub(super) fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        let at = std::mem::replace(&mut self.at, XmlPlace::End);
        match self.next(at, c, sink) {
            Some(XmlPlace::End) => Step::End,
            Some(at) => {
                self.at = at;
                if !self.begun {
                    self.raw.push(c);
                }
                Step::More
            }
            None => Step::Fault,
        }
    }

    /// Completes a call whose text ends here, or whose rest cannot be read.
    pub(super) fn complete(&mut self, sink: &mut Sink<'_>) {
        match std::mem::replace(&mut self.at, XmlPlace::End) {
            XmlPlace::Name(name) if self.xml.named.is_empty() && is_name(name.trim()) => self.begin(name.trim(), sink),
            XmlPlace::Text(text) => {
                let held = text.held.strip_suffix('\n').filter(|_| text.in_lines).unwrap_or(&text.held);
                sink.arguments(&(escaped(held) + "\""));
            }
            XmlPlace::Json { key, held } => self.json(&key, &held, sink),
            _ => {}
        }
        if self.begun && !self.ended {
            self.end(sink);
        }
    }

    fn next(&mut self, at: XmlPlace, c: char, sink: &mut Sink<'_>) -> Option<XmlPlace> {
        match at {
            XmlPlace::Name(name) => self.named(name, c, sink),
            XmlPlace::Between(held) => self.between(held, c, sink),
            XmlPlace::Key(mut key) => {
                key.push(c);
                match key.strip_suffix(self.xml.keyed) {
                    Some(name) if self.xml.value.is_empty() => Some(self.value(name.trim(), sink)),
                    Some(name) => Some(XmlPlace::Tag(name.trim().into(), String::new())),
                    None => (key.len() < NAME_BYTES).then_some(XmlPlace::Key(key)),
                }
            }
            XmlPlace::Tag(key, mut held) => {
                held.push(c);
                let tag = held.trim_start();
                match (tag == self.xml.value, self.xml.value.starts_with(tag)) {
                    (true, _) => Some(self.value(&key, sink)),
                    (false, true) if held.len() < NAME_BYTES => Some(XmlPlace::Tag(key, held)),
                    _ => None,
                }
            }
            XmlPlace::Text(text) => Some(self.text(text, c, sink)),
            XmlPlace::Json { key, mut held } => {
                held.push(c);
                match self.ended(&held, true) {
                    None => Some(XmlPlace::Json { key, held }),
                    Some((length, ended)) => {
                        self.json(&key, &held[..held.len() - length], sink);
                        Some(self.behind(ended, sink))
                    }
                }
            }
            XmlPlace::End => None,
        }
    }

    fn named(&mut self, mut name: String, c: char, sink: &mut Sink<'_>) -> Option<XmlPlace> {
        if self.xml.named.is_empty() {
            if name.is_empty() && c.is_whitespace() {
                return Some(XmlPlace::Name(name));
            }
            if c == '\n' || c == '<' {
                if !is_name(name.trim()) {
                    return None;
                }
                self.begin(name.trim(), sink);
                return if c == '<' {
                    self.between(String::new(), c, sink)
                } else {
                    Some(XmlPlace::Between(String::new()))
                };
            }
        }
        name.push(c);
        if !self.xml.named.is_empty()
            && let Some(whole) = name.strip_suffix(self.xml.named)
        {
            // Some models write quotation marks around the name.
            let whole = whole.trim().trim_matches('"').to_string();
            if !is_name(&whole) {
                return None;
            }
            self.begin(&whole, sink);
            return Some(XmlPlace::Between(String::new()));
        }
        (name.len() < NAME_BYTES && c != '\n' && c != '{').then_some(XmlPlace::Name(name))
    }

    fn begin(&mut self, name: &str, sink: &mut Sink<'_>) {
        sink.begin(name);
        self.name = name.into();
        self.begun = true;
        self.raw.clear();
    }

    /// Reads tags between arguments; closing tags that belong to none are skipped.
    fn between(&mut self, mut held: String, c: char, sink: &mut Sink<'_>) -> Option<XmlPlace> {
        if held.is_empty() && c.is_whitespace() {
            return Some(XmlPlace::Between(held));
        }
        held.push(c);
        let Xml { key, valued, called, closing, .. } = *self.xml;
        if held == key {
            return Some(XmlPlace::Key(String::new()));
        }
        if held == called || held == closing {
            return Some(self.behind(Ended::Call, sink));
        }
        if held == valued {
            return Some(XmlPlace::Between(String::new()));
        }
        [key, valued, called, closing].iter().any(|tag| tag.starts_with(&held)).then_some(XmlPlace::Between(held))
    }

    /// Begins the value of a parameter.
    fn value(&mut self, key: &str, sink: &mut Sink<'_>) -> XmlPlace {
        match sink.types(&self.name, key) {
            types if types.is_text() => {
                self.key(key, sink);
                sink.arguments("\"");
                XmlPlace::Text(PartialText { held: String::new(), is_first: true, in_lines: false })
            }
            _ => XmlPlace::Json { key: key.into(), held: String::new() },
        }
    }

    fn key(&mut self, key: &str, sink: &mut Sink<'_>) {
        let before = if self.arguments == 0 { "{" } else { ", " };
        self.arguments += 1;
        sink.arguments(&format!("{before}\"{}\": ", escaped(key)));
    }

    fn text(&mut self, mut text: PartialText, c: char, sink: &mut Sink<'_>) -> XmlPlace {
        if std::mem::replace(&mut text.is_first, false) && c == '\n' && self.xml.lines {
            text.in_lines = true;
            return XmlPlace::Text(text);
        }
        text.held.push(c);
        if let Some((length, ended)) = self.ended(&text.held, text.in_lines) {
            sink.arguments(&(escaped(&text.held[..text.held.len() - length]) + "\""));
            return self.behind(ended, sink);
        }
        let kept = self.ends(text.in_lines).map(|(tag, _)| begun(&text.held, &tag)).max().unwrap_or(0);
        let shown: String = text.held.drain(..text.held.len() - kept).collect();
        if !shown.is_empty() {
            sink.arguments(&escaped(&shown));
        }
        XmlPlace::Text(text)
    }

    /// Returns the tags that end a value. Those of the next parameter and of the end of the call count only at the
    /// beginning of a line, because texts may be of such a language.
    fn ends(&self, in_lines: bool) -> impl Iterator<Item = (String, fn() -> Ended)> + use<> {
        let Xml { key, valued, called, closing, .. } = *self.xml;
        let line = if in_lines { "\n" } else { "" };
        let tag = |line: &str, tag: &str| if tag.is_empty() { String::new() } else { format!("{line}{tag}") };
        let all: [(String, fn() -> Ended); 6] = [
            (tag(line, valued), || Ended::Value),
            (tag("", valued), || Ended::Value),
            (tag("\n", key), || Ended::Key),
            (tag("\n", called), || Ended::Call),
            (tag("\n", closing), || Ended::Call),
            (tag("", closing), || Ended::Call),
        ];
        all.into_iter().filter(|(tag, _)| !tag.is_empty())
    }

    /// Returns the length of the tag with which a text ends.
    fn ended(&self, held: &str, in_lines: bool) -> Option<(usize, Ended)> {
        let found = self.ends(in_lines).filter(|(tag, _)| held.ends_with(tag.as_str()));
        found.max_by_key(|(tag, _)| tag.len()).map(|(tag, ended)| (tag.len(), ended()))
    }

    fn behind(&mut self, ended: Ended, sink: &mut Sink<'_>) -> XmlPlace {
        match ended {
            Ended::Value => XmlPlace::Between(String::new()),
            Ended::Key => XmlPlace::Key(String::new()),
            Ended::Call => {
                self.end(sink);
                XmlPlace::End
            }
        }
    }

    /// Writes a value that is complete.
    fn json(&mut self, key: &str, text: &str, sink: &mut Sink<'_>) {
        self.key(key, sink);
        let value = sink.types(&self.name, key).value(text);
        sink.arguments(&value);
    }

    fn end(&mut self, sink: &mut Sink<'_>) {
        sink.arguments(if self.arguments == 0 { "{}" } else { "}" });
        self.ended = true;
    }
}

/// Returns what a parameter may be, by the schema of the function.
pub(super) fn types_of(parameters: Option<&Value>, key: &str) -> Types {
    let Some(root) = parameters else { return Types::ANY };
    match root.get("properties").and_then(|properties| properties.get(key)) {
        Some(schema) => Types::of(schema, root),
        None => Types::ANY,
    }
}
