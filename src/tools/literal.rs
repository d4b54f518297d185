//! Reads a call whose arguments are literals of a language other than JSON, and writes them as JSON.
//!
//! Python: `f(a=1, b="x", c=[True, None])`. Gemma: `call:f{a:1,b:<|"|>x<|"|>,c:[true,null]}`. A [`Dialect`] has what
//! distinguishes them. The arguments are written as soon as they are read, so that they can be streamed.

use super::events::Sink;
use super::object::Step;
use super::quoted::{Quoted, escaped};
use super::tool::is_name;

/// Largest number of bytes before the arguments.
const NAME_BYTES: usize = 160;
/// Largest nesting of lists and objects.
const NESTING: usize = 256;
/// Largest number of bytes of a word or key.
const WORD_BYTES: usize = 4096;

/// Notation of calls with literals.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Dialect {
    /// Text before the name.
    pub(super) prefix: &'static str,
    /// Brackets around the arguments.
    pub(super) brackets: (char, char),
    /// Character between the name and the value of an argument.
    pub(super) assign: char,
    /// Mark around texts that have no escapes; empty if there is none. Other texts stand between quotation marks.
    pub(super) mark: &'static str,
}

/// Python's notation.
pub(super) const PYTHON: Dialect = Dialect { prefix: "", brackets: ('(', ')'), assign: '=', mark: "" };

/// State after the first characters of a call.
#[derive(Debug)]
pub(super) struct LiteralScanner {
    dialect: &'static Dialect,
    /// True if the call may be ordinary text: it must name an offered function, and begin with a named argument or have
    /// none.
    doubtful: bool,
    at: LiteralPlace,
    frames: Vec<Frame>,
    /// Text of the call as long as it may still be something else.
    raw: String,
    /// JSON that was not given to the sink.
    json: String,
    name: String,
    begun: bool,
    /// True behind a key whose value has not begun.
    awaits_value: bool,
}

#[derive(Debug)]
enum LiteralPlace {
    Name(String),
    /// Before the key of an argument or of a member.
    Key,
    InKey(String),
    /// Behind a key, before the character that assigns a value.
    Assign(String),
    Value,
    /// In the mark before a text.
    Mark(String),
    Text(Quoted),
    /// In a number, a constant, or a text without quotation marks.
    Word(String),
    CommaOrEnd,
    /// Behind a doubtful call without arguments.
    Behind,
}

/// An open bracket.
#[derive(Debug)]
struct Frame {
    kind: LiteralKind,
    items: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LiteralKind {
    Call,
    Object,
    /// A list, with its closing bracket.
    List(char),
}

impl LiteralScanner {
    /// Begins a call before its name.
    pub(super) fn new(dialect: &'static Dialect, doubtful: bool) -> LiteralScanner {
        LiteralScanner {
            dialect,
            doubtful,
            at: LiteralPlace::Name(String::new()),
            frames: Vec::new(),
            raw: String::new(),
            json: String::new(),
            name: String::new(),
            begun: false,
            awaits_value: false,
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
        let at = std::mem::replace(&mut self.at, LiteralPlace::Key);
        let next = if self.raw.len() < (64 << 10) { self.next(at, c, sink) } else { None };
        if self.begun && !self.json.is_empty() {
            sink.arguments(&std::mem::take(&mut self.json));
        }
        let Some(at) = next else { return Step::Fault };
        self.at = at;
        if !self.begun {
            self.raw.push(c);
        }
        if self.begun && self.frames.is_empty() { Step::End } else { Step::More }
    }

    /// Completes a call whose text ends here, or whose rest cannot be read.
    pub(super) fn complete(&mut self, sink: &mut Sink<'_>) {
        if !self.begun {
            return;
        }
        match std::mem::replace(&mut self.at, LiteralPlace::CommaOrEnd) {
            LiteralPlace::Word(word) => self.json += &json_of(&word),
            LiteralPlace::Text(text) if !text.is_key => self.json += &text.complete(),
            _ if self.awaits_value => self.json += "null",
            _ => {}
        }
        while let Some(frame) = self.frames.pop() {
            self.json.push(if matches!(frame.kind, LiteralKind::List(_)) { ']' } else { '}' });
        }
        sink.arguments(&std::mem::take(&mut self.json));
    }

    /// Returns the place behind a character; `None` if the character cannot follow.
    fn next(&mut self, at: LiteralPlace, c: char, sink: &mut Sink<'_>) -> Option<LiteralPlace> {
        match at {
            LiteralPlace::Name(name) => self.name(name, c, sink),
            LiteralPlace::InKey(key) if is_word(c) && key.len() < WORD_BYTES => {
                Some(LiteralPlace::InKey(key + c.encode_utf8(&mut [0; 4])))
            }
            LiteralPlace::InKey(key) => self.assign(key, c, sink),
            LiteralPlace::Text(mut text) => match text.push(c) {
                None => {
                    if !text.is_key {
                        self.json += &text.take();
                    }
                    Some(LiteralPlace::Text(text))
                }
                Some(rest) => {
                    let behind = match text.is_key {
                        true => LiteralPlace::Assign(text.take()),
                        false => {
                            self.json += &text.take();
                            self.json.push('"');
                            LiteralPlace::CommaOrEnd
                        }
                    };
                    rest.chars().try_fold(behind, |at, c| self.next(at, c, sink))
                }
            },
            LiteralPlace::Word(word) => self.word(word, c, sink),
            LiteralPlace::Mark(mark) => {
                let mark = mark + c.encode_utf8(&mut [0; 4]);
                match (mark == self.dialect.mark, self.dialect.mark.starts_with(&mark)) {
                    (true, _) => Some(self.text(Quoted::marked(self.dialect.mark))),
                    (false, true) => Some(LiteralPlace::Mark(mark)),
                    _ => None,
                }
            }
            LiteralPlace::Behind if matches!(c, ',' | ']') => {
                self.begin(sink);
                Some(LiteralPlace::Behind)
            }
            at if c.is_whitespace() => Some(at),
            LiteralPlace::Key if c == self.closing()? => self.close(sink),
            LiteralPlace::Key if is_word(c) => Some(LiteralPlace::InKey(c.into())),
            LiteralPlace::Key | LiteralPlace::Value if matches!(c, '"' | '\'') => {
                Some(self.text(Quoted::new(c, false)))
            }
            LiteralPlace::Key | LiteralPlace::Value if self.dialect.mark.starts_with(c) => {
                Some(LiteralPlace::Mark(c.into()))
            }
            LiteralPlace::Assign(key) => self.assign(key, c, sink),
            LiteralPlace::Value => self.value(c, sink),
            LiteralPlace::CommaOrEnd if c == ',' => Some(match self.frames.last()?.kind {
                LiteralKind::List(_) => LiteralPlace::Value,
                LiteralKind::Call | LiteralKind::Object => LiteralPlace::Key,
            }),
            LiteralPlace::CommaOrEnd if c == self.closing()? => self.close(sink),
            LiteralPlace::Key | LiteralPlace::CommaOrEnd | LiteralPlace::Behind => None,
        }
    }

    fn name(&mut self, mut name: String, c: char, sink: &mut Sink<'_>) -> Option<LiteralPlace> {
        let prefix = self.dialect.prefix;
        if c == self.dialect.brackets.0 {
            let name = name.trim();
            let name = name.strip_prefix(prefix).unwrap_or(name).trim();
            if !is_name(name) || self.doubtful && !sink.offers(name) {
                return None;
            }
            self.name = name.into();
            self.open(LiteralKind::Call);
            if !self.doubtful {
                self.begin(sink);
            }
            return Some(LiteralPlace::Key);
        }
        let fits = is_word(c)
            || prefix.contains(c)
            || c.is_whitespace() && (name.is_empty() || !prefix.is_empty() && name.starts_with(prefix));
        if !fits || name.len() >= NAME_BYTES {
            return None;
        }
        if !c.is_whitespace() {
            name.push(c);
        } else if name.is_empty() {
            return Some(LiteralPlace::Name(name));
        }
        Some(LiteralPlace::Name(name))
    }

    fn begin(&mut self, sink: &mut Sink<'_>) {
        if !std::mem::replace(&mut self.begun, true) {
            sink.begin(&self.name);
            self.raw.clear();
        }
    }

    /// Returns the bracket that closes the innermost value.
    fn closing(&self) -> Option<char> {
        Some(match self.frames.last()?.kind {
            LiteralKind::Call => self.dialect.brackets.1,
            LiteralKind::Object => '}',
            LiteralKind::List(closing) => closing,
        })
    }

    fn open(&mut self, kind: LiteralKind) -> LiteralPlace {
        self.json.push(if matches!(kind, LiteralKind::List(_)) { '[' } else { '{' });
        self.frames.push(Frame { kind, items: 0 });
        if matches!(kind, LiteralKind::List(_)) { LiteralPlace::Value } else { LiteralPlace::Key }
    }

    fn close(&mut self, sink: &mut Sink<'_>) -> Option<LiteralPlace> {
        let frame = self.frames.pop()?;
        self.json.push(if matches!(frame.kind, LiteralKind::List(_)) { ']' } else { '}' });
        if !self.frames.is_empty() {
            return Some(LiteralPlace::CommaOrEnd);
        }
        // A function in a sentence may be followed by empty brackets.
        if self.doubtful && frame.items == 0 {
            return Some(LiteralPlace::Behind);
        }
        self.begin(sink);
        Some(LiteralPlace::CommaOrEnd)
    }

    /// Begins a text.
    fn text(&mut self, text: Quoted) -> LiteralPlace {
        let in_list = self.frames.last().is_some_and(|frame| matches!(frame.kind, LiteralKind::List(_)));
        let is_key = !in_list && !self.awaits_value;
        if !is_key {
            self.item();
            self.json.push('"');
        }
        LiteralPlace::Text(text.keyed(is_key))
    }

    /// Begins a value: items of a list are separated.
    fn item(&mut self) {
        self.awaits_value = false;
        let Some(frame) = self.frames.last_mut() else { return };
        if matches!(frame.kind, LiteralKind::List(_)) {
            if frame.items > 0 {
                self.json += ", ";
            }
            frame.items += 1;
        }
    }

    fn assign(&mut self, key: String, c: char, sink: &mut Sink<'_>) -> Option<LiteralPlace> {
        if c.is_whitespace() {
            return Some(LiteralPlace::Assign(key));
        }
        let kind = self.frames.last()?.kind;
        let assign = if kind == LiteralKind::Call { self.dialect.assign } else { ':' };
        if c != assign {
            return None;
        }
        let frame = self.frames.last_mut()?;
        if frame.items > 0 {
            self.json += ", ";
        }
        frame.items += 1;
        self.json += &format!("\"{}\": ", escaped(&key));
        self.awaits_value = true;
        self.begin(sink);
        Some(LiteralPlace::Value)
    }

    fn value(&mut self, c: char, sink: &mut Sink<'_>) -> Option<LiteralPlace> {
        let kind = match c {
            '[' => LiteralKind::List(']'),
            '(' => LiteralKind::List(')'),
            '{' => LiteralKind::Object,
            c if self.frames.last()?.kind == LiteralKind::List(c) => return self.close(sink),
            c if is_word(c) || c == '+' => {
                self.item();
                return Some(LiteralPlace::Word(c.into()));
            }
            _ => return None,
        };
        if self.frames.len() >= NESTING {
            return None;
        }
        self.item();
        Some(self.open(kind))
    }

    fn word(&mut self, word: String, c: char, sink: &mut Sink<'_>) -> Option<LiteralPlace> {
        let is_python = self.dialect.mark.is_empty();
        let ends = matches!(c, ',' | ']' | '}') || is_python && (c == ')' || c.is_whitespace());
        if is_python && matches!(c, '"' | '\'') && word.len() <= 2 && word.chars().all(|c| "rRbBuUfF".contains(c)) {
            self.json.push('"');
            return Some(LiteralPlace::Text(Quoted::new(c, word.contains(['r', 'R']))));
        }
        if !ends {
            if word.len() < WORD_BYTES && (!is_python || is_word(c) || c == '+') {
                return Some(LiteralPlace::Word(word + c.encode_utf8(&mut [0; 4])));
            }
            self.json += &json_of(word.trim());
            return None;
        }
        self.json += &json_of(word.trim());
        self.next(LiteralPlace::CommaOrEnd, c, sink)
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.')
}

/// Returns a word as JSON: a number, a constant, or else a text.
fn json_of(word: &str) -> String {
    match word {
        "True" | "true" => return "true".into(),
        "False" | "false" => return "false".into(),
        "None" | "none" | "null" => return "null".into(),
        _ => {}
    }
    let is_number = |text: &str| serde_json::from_str::<serde_json::Number>(text).is_ok();
    if is_number(word) {
        return word.into();
    }
    // Python also writes `+1`, `1_000`, `.5` and `5.`.
    let digits: String = word.strip_prefix('+').unwrap_or(word).chars().filter(|c| *c != '_').collect();
    let plain = digits.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '.'))
        && digits.chars().all(|c| c.is_ascii_digit() || matches!(c, '-' | '+' | '.' | 'e' | 'E'));
    match digits.parse::<f64>() {
        Ok(_) if plain && is_number(&digits) => digits,
        Ok(number) if plain && number.is_finite() => format!("{number:?}"),
        _ => format!("\"{}\"", escaped(word)),
    }
}
