//! Reads a call that is a JSON object with a name and arguments, such as `{"name": "f", "arguments": {}}`.

use super::events::Sink;
use super::object::{ObjectScanner, Step};
use super::tool::is_name;

/// Largest number of bytes of a call before its name and the beginning of its arguments are known.
const HELD: usize = 64 << 10;

/// State after the first characters of a call.
#[derive(Debug)]
pub(super) struct CallScanner {
    /// True if the object may be ordinary text: it must name an offered function and have arguments.
    doubtful: bool,
    at: CallPlace,
    /// Text of the call as long as it may still be something else.
    raw: String,
    name: Option<String>,
    /// Arguments that were written before the name.
    early: Option<String>,
    /// True once the call was given to the sink.
    begun: bool,
}

#[derive(Debug)]
enum CallPlace {
    Open,
    KeyOrEnd,
    Key,
    InKey(PartialText),
    Colon(Member),
    Value(Member),
    InText(Member, PartialText),
    /// Within `null` in place of arguments, with the letters that are missing.
    Null(&'static str),
    InObject(ObjectScanner),
    CommaOrEnd,
}

/// Members that a call may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Member {
    Name,
    Arguments,
    /// `type` and ids, which are ignored.
    Other,
}

/// A JSON string that is not complete.
#[derive(Debug, Default)]
struct PartialText {
    raw: String,
    escaped: bool,
}

impl PartialText {
    /// Reads a character; returns true if the string ends with it.
    fn push(&mut self, c: char) -> bool {
        let ends = c == '"' && !self.escaped;
        if !ends {
            self.raw.push(c);
        }
        self.escaped = c == '\\' && !self.escaped;
        ends
    }

    fn value(&self) -> Option<String> {
        serde_json::from_str(&format!("\"{}\"", self.raw)).ok()
    }
}

impl CallScanner {
    /// Begins a call before its opening brace.
    pub(super) fn new(doubtful: bool) -> CallScanner {
        CallScanner { doubtful, at: CallPlace::Open, raw: String::new(), name: None, early: None, begun: false }
    }

    /// Returns true if the call was given to the sink.
    pub(super) fn begun(&self) -> bool {
        self.begun
    }

    /// Completes the arguments of a call whose text ends here, or whose rest cannot be read.
    pub(super) fn complete(&mut self, sink: &mut Sink<'_>) {
        if let CallPlace::InObject(scanner) = &self.at
            && self.begun
        {
            sink.arguments(&scanner.missing());
        }
    }

    /// Returns the text of a call that was not given to the sink.
    pub(super) fn into_raw(self) -> String {
        self.raw
    }

    /// Reads a character. After a [`Step::Fault`] the character is not part of the call.
    pub(super) fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        if self.raw.len() >= HELD {
            return Step::Fault;
        }
        let at = std::mem::replace(&mut self.at, CallPlace::Open);
        match self.next(at, c, sink) {
            None => Step::Fault,
            Some(CallPlace::Open) if c == '}' => self.end(sink),
            Some(at) => {
                self.at = at;
                if !self.begun {
                    self.raw.push(c);
                }
                Step::More
            }
        }
    }

    /// Returns the place behind a character; [`CallPlace::Open`] behind the closing brace.
    fn next(&mut self, at: CallPlace, c: char, sink: &mut Sink<'_>) -> Option<CallPlace> {
        match at {
            CallPlace::InKey(mut text) => match text.push(c) {
                true => Some(CallPlace::Colon(self.member(&text.value()?)?)),
                false => Some(CallPlace::InKey(text)),
            },
            CallPlace::InText(member, mut text) => match text.push(c) {
                true => self.text(member, &text.value()?, sink),
                false => Some(CallPlace::InText(member, text)),
            },
            CallPlace::InObject(scanner) => self.arguments(scanner, c, sink),
            CallPlace::Null(rest) => match rest.strip_prefix(c)? {
                "" => self.text(Member::Arguments, "{}", sink),
                rest => Some(CallPlace::Null(rest)),
            },
            at if matches!(c, ' ' | '\n' | '\r' | '\t') => Some(at),
            CallPlace::Open => (c == '{').then_some(CallPlace::KeyOrEnd),
            CallPlace::KeyOrEnd | CallPlace::Key => (c == '"').then(|| CallPlace::InKey(PartialText::default())),
            CallPlace::Colon(member) => (c == ':').then_some(CallPlace::Value(member)),
            CallPlace::Value(Member::Arguments) if c == '{' => self.arguments(ObjectScanner::new(), c, sink),
            CallPlace::Value(Member::Arguments) if c == 'n' => Some(CallPlace::Null("ull")),
            CallPlace::Value(member) => (c == '"').then(|| CallPlace::InText(member, PartialText::default())),
            CallPlace::CommaOrEnd if c == ',' => Some(CallPlace::Key),
            CallPlace::CommaOrEnd => (c == '}').then_some(CallPlace::Open),
        }
    }

    fn member(&self, key: &str) -> Option<Member> {
        match key {
            "name" | "tool_name" if self.name.is_none() => Some(Member::Name),
            "arguments" | "parameters" if !self.begun && self.early.is_none() => Some(Member::Arguments),
            "type" | "id" | "tool_call_id" => Some(Member::Other),
            _ => None,
        }
    }

    fn text(&mut self, member: Member, value: &str, sink: &mut Sink<'_>) -> Option<CallPlace> {
        match member {
            Member::Name => {
                if !is_name(value) || self.doubtful && !sink.offers(value) {
                    return None;
                }
                self.name = Some(value.into());
                if let Some(early) = self.early.take() {
                    self.begin(sink);
                    sink.arguments(&early);
                }
            }
            // Some models write the object as a text.
            Member::Arguments => {
                let value = if value.trim().is_empty() { "{}" } else { value };
                serde_json::from_str::<serde_json::Map<_, _>>(value).ok()?;
                match self.name {
                    Some(_) => {
                        self.begin(sink);
                        sink.arguments(value.trim());
                    }
                    None => self.early = Some(value.trim().into()),
                }
            }
            Member::Other => {}
        }
        Some(CallPlace::CommaOrEnd)
    }

    /// Ends the object: without arguments, it is the call of a function that has none.
    fn end(&mut self, sink: &mut Sink<'_>) -> Step {
        if !self.begun {
            if self.name.is_none() || self.doubtful {
                return Step::Fault;
            }
            self.begin(sink);
            sink.arguments("{}");
        }
        Step::End
    }

    fn arguments(&mut self, mut scanner: ObjectScanner, c: char, sink: &mut Sink<'_>) -> Option<CallPlace> {
        let step = scanner.push(c);
        if step == Step::Fault {
            // The caller completes what was begun.
            self.at = CallPlace::InObject(scanner);
            return None;
        }
        match self.name {
            Some(_) => {
                self.begin(sink);
                sink.arguments(c.encode_utf8(&mut [0; 4]));
            }
            None => self.early.get_or_insert_default().push(c),
        }
        Some(if step == Step::End { CallPlace::CommaOrEnd } else { CallPlace::InObject(scanner) })
    }

    fn begin(&mut self, sink: &mut Sink<'_>) {
        if !std::mem::replace(&mut self.begun, true) {
            sink.begin(self.name.as_deref().unwrap_or_default());
            self.raw.clear();
        }
    }
}
