//! Reads a text between quotation marks or other marks, and writes its characters as those of a JSON string.

/// A text that is not complete.
#[derive(Debug)]
pub(super) struct Quoted {
    /// True for the name of a member or argument, which is written unescaped.
    pub(super) is_key: bool,
    end: End,
    /// Whether `\` begins an escape.
    escapes: bool,
    escape: Escape,
    /// Characters that may be the beginning of the end.
    held: String,
    /// Characters that were read and not yet taken.
    ready: String,
    /// First half of a pair of escapes for one character.
    high: Option<u16>,
}

/// End of a text.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// A quotation mark was read; more of them make a text over several lines, or an empty one.
    Unknown(char),
    /// Two quotation marks were read.
    Two(char),
    Text(String),
}

#[derive(Debug)]
enum Escape {
    No,
    Begin,
    /// Digits of a number, the base, and how many there may be.
    Digits(String, u32, usize),
}

impl Quoted {
    /// Begins a text behind a quotation mark; `raw` if it has no escapes.
    pub(super) fn new(quote: char, raw: bool) -> Quoted {
        let end = End::Unknown(quote);
        let (held, ready) = (String::new(), String::new());
        Quoted { is_key: false, end, escapes: !raw, escape: Escape::No, held, ready, high: None }
    }

    /// Returns the text as a key or a value.
    pub(super) fn keyed(self, is_key: bool) -> Quoted {
        Quoted { is_key, ..self }
    }

    /// Begins a text without escapes behind a mark, which also ends it.
    pub(super) fn marked(mark: &str) -> Quoted {
        Quoted { end: End::Text(mark.into()), ..Quoted::new('"', true) }
    }

    /// Returns what was read since the last call, without what may be the end.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.ready)
    }

    /// Completes a text that ends here, and returns its rest with the quotation mark.
    pub(super) fn complete(mut self) -> String {
        let held = std::mem::take(&mut self.held);
        held.chars().for_each(|c| self.add(c));
        self.ready + "\""
    }

    /// Reads a character; returns the characters behind the text when it has ended.
    pub(super) fn push(&mut self, c: char) -> Option<String> {
        match (&self.end, c) {
            (End::Unknown(quote), c) if c == *quote => {
                self.end = End::Two(c);
                return None;
            }
            (End::Unknown(quote), _) => self.end = End::Text(quote.to_string()),
            (End::Two(quote), c) if c == *quote => {
                self.end = End::Text(quote.to_string().repeat(3));
                return None;
            }
            (End::Two(_), c) => return Some(c.into()),
            (End::Text(_), _) => {}
        }
        if self.escapes && self.in_escape(c) {
            return None;
        }
        let End::Text(end) = &self.end else { return None };
        self.held.push(c);
        if self.held.ends_with(end.as_str()) {
            let text = self.held[..self.held.len() - end.len()].to_string();
            text.chars().for_each(|c| self.add(c));
            self.held.clear();
            return Some(String::new());
        }
        let kept = super::reasoning::begun(&self.held, end);
        let text: String = self.held.drain(..self.held.len() - kept).collect();
        text.chars().for_each(|c| self.add(c));
        None
    }

    /// Reads a character if it belongs to an escape.
    fn in_escape(&mut self, c: char) -> bool {
        match std::mem::replace(&mut self.escape, Escape::No) {
            Escape::No if c != '\\' => return false,
            Escape::No => {
                let held = std::mem::take(&mut self.held);
                held.chars().for_each(|c| self.add(c));
                self.escape = Escape::Begin;
            }
            Escape::Begin => match c {
                'n' => self.add('\n'),
                't' => self.add('\t'),
                'r' => self.add('\r'),
                'b' => self.add('\u{8}'),
                'f' => self.add('\u{c}'),
                'v' => self.add('\u{b}'),
                'a' => self.add('\u{7}'),
                '\\' | '\'' | '"' | '/' => self.add(c),
                '\n' => {}
                'x' => self.escape = Escape::Digits(String::new(), 16, 2),
                'u' => self.escape = Escape::Digits(String::new(), 16, 4),
                'U' => self.escape = Escape::Digits(String::new(), 16, 8),
                '0'..='7' => self.escape = Escape::Digits(c.into(), 8, 3),
                // As in Python, other escapes are two characters.
                c => {
                    self.add('\\');
                    self.add(c);
                }
            },
            Escape::Digits(digits, base, most) => {
                if !c.is_digit(base) {
                    self.number(&digits, base);
                    return self.in_escape(c);
                }
                let digits = digits + c.encode_utf8(&mut [0; 4]);
                match digits.len() == most {
                    true => self.number(&digits, base),
                    false => self.escape = Escape::Digits(digits, base, most),
                }
            }
        }
        true
    }

    /// Adds the character of a number; halves of pairs are joined.
    fn number(&mut self, digits: &str, base: u32) {
        let Ok(number) = u32::from_str_radix(digits, base) else { return };
        match (self.high.take(), number) {
            (Some(high), 0xdc00..=0xdfff) => {
                let joined = char::decode_utf16([high, number as u16]).next();
                self.add(joined.and_then(Result::ok).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            (None, 0xd800..=0xdbff) => self.high = Some(number as u16),
            (high, _) => {
                if high.is_some() {
                    self.write(char::REPLACEMENT_CHARACTER);
                }
                self.add(char::from_u32(number).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
        }
    }

    fn add(&mut self, c: char) {
        if self.high.take().is_some() {
            self.write(char::REPLACEMENT_CHARACTER);
        }
        self.write(c);
    }

    fn write(&mut self, c: char) {
        match self.is_key {
            true => self.ready.push(c),
            false => self.ready += &escaped(c.encode_utf8(&mut [0; 4])),
        }
    }
}

/// Returns a text as it stands between the quotation marks of JSON.
pub(super) fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_string()
}
