//! Reads a JSON object character by character, to find its end and the first character that is not JSON.

/// Largest nesting of objects and arrays.
const NESTING: usize = 512;

/// State after the first characters of an object.
#[derive(Debug, Clone)]
pub(super) struct ObjectScanner {
    /// Open objects (true) and arrays (false).
    open: Vec<bool>,
    at: ObjectPlace,
}

/// Place in the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ObjectPlace {
    /// Before the opening brace.
    Begin,
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    String {
        is_key: bool,
        escape: Escape,
    },
    Number(Number),
    /// Within `true`, `false` or `null`, with the letters that are missing.
    Word(&'static str),
    End,
}

/// Place in an escape sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Escape {
    No,
    Begin,
    /// Number of hexadecimal digits that are missing.
    Hex(u8),
}

/// Place in a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

/// Effect of a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The object goes on.
    More,
    /// The character is the last one.
    End,
    /// The character cannot follow.
    Fault,
}

impl ObjectScanner {
    pub(super) fn new() -> ObjectScanner {
        ObjectScanner { open: Vec::new(), at: ObjectPlace::Begin }
    }

    /// Reads a character.
    pub(super) fn push(&mut self, c: char) -> Step {
        match self.next(c) {
            Some(ObjectPlace::End) => {
                self.at = ObjectPlace::End;
                Step::End
            }
            Some(at) => {
                self.at = at;
                Step::More
            }
            None => Step::Fault,
        }
    }

    /// Returns the brackets that are missing, if the object can end here.
    pub(super) fn missing(&self) -> String {
        let ends = match self.at {
            ObjectPlace::CommaOrEnd | ObjectPlace::KeyOrEnd | ObjectPlace::ValueOrEnd => true,
            ObjectPlace::Number(number) => number.may_end(),
            _ => false,
        };
        let brackets = self.open.iter().rev().map(|is_object| if *is_object { '}' } else { ']' });
        brackets.filter(|_| ends).collect()
    }

    fn next(&mut self, c: char) -> Option<ObjectPlace> {
        let is_space = matches!(c, ' ' | '\n' | '\r' | '\t');
        match self.at {
            ObjectPlace::String { is_key, escape } => string(c, is_key, escape),
            ObjectPlace::Word(rest) => {
                let rest = rest.strip_prefix(c)?;
                Some(if rest.is_empty() { ObjectPlace::CommaOrEnd } else { ObjectPlace::Word(rest) })
            }
            ObjectPlace::Number(number) => match number_goes_on(number, c) {
                Some(number) => Some(ObjectPlace::Number(number)),
                None if !number.may_end() => None,
                None => {
                    self.at = ObjectPlace::CommaOrEnd;
                    self.next(c)
                }
            },
            ObjectPlace::Begin if c == '{' => self.open(true),
            ObjectPlace::End | ObjectPlace::Begin => None,
            at if is_space => Some(at),
            ObjectPlace::Colon => (c == ':').then_some(ObjectPlace::Value),
            ObjectPlace::ValueOrEnd if c == ']' => self.close(false),
            ObjectPlace::KeyOrEnd if c == '}' => self.close(true),
            ObjectPlace::Value | ObjectPlace::ValueOrEnd => self.value(c),
            ObjectPlace::Key | ObjectPlace::KeyOrEnd => {
                (c == '"').then_some(ObjectPlace::String { is_key: true, escape: Escape::No })
            }
            ObjectPlace::CommaOrEnd => match c {
                ',' => Some(if *self.open.last()? { ObjectPlace::Key } else { ObjectPlace::Value }),
                '}' => self.close(true),
                ']' => self.close(false),
                _ => None,
            },
        }
    }

    fn value(&mut self, c: char) -> Option<ObjectPlace> {
        Some(match c {
            '{' => return self.open(true),
            '[' => return self.open(false),
            '"' => ObjectPlace::String { is_key: false, escape: Escape::No },
            't' => ObjectPlace::Word("rue"),
            'f' => ObjectPlace::Word("alse"),
            'n' => ObjectPlace::Word("ull"),
            '-' => ObjectPlace::Number(Number::Minus),
            '0' => ObjectPlace::Number(Number::Zero),
            '1'..='9' => ObjectPlace::Number(Number::Digits),
            _ => return None,
        })
    }

    fn open(&mut self, is_object: bool) -> Option<ObjectPlace> {
        self.open.push(is_object);
        let inside = if is_object { ObjectPlace::KeyOrEnd } else { ObjectPlace::ValueOrEnd };
        (self.open.len() <= NESTING).then_some(inside)
    }

    fn close(&mut self, is_object: bool) -> Option<ObjectPlace> {
        if self.open.pop()? != is_object {
            return None;
        }
        Some(if self.open.is_empty() { ObjectPlace::End } else { ObjectPlace::CommaOrEnd })
    }
}

fn string(c: char, is_key: bool, escape: Escape) -> Option<ObjectPlace> {
    let escape = match (escape, c) {
        (Escape::No, '"') => return Some(if is_key { ObjectPlace::Colon } else { ObjectPlace::CommaOrEnd }),
        (Escape::No, '\\') => Escape::Begin,
        (Escape::No, c) if c >= ' ' => Escape::No,
        (Escape::Begin, 'u') => Escape::Hex(4),
        (Escape::Begin, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => Escape::No,
        (Escape::Hex(missing), c) if c.is_ascii_hexdigit() => match missing {
            1 => Escape::No,
            missing => Escape::Hex(missing - 1),
        },
        _ => return None,
    };
    Some(ObjectPlace::String { is_key, escape })
}

fn number_goes_on(number: Number, c: char) -> Option<Number> {
    use Number::{Digits, E, Exponent, Fraction, Minus, Point, Sign, Zero};
    match (number, c) {
        (Minus, '0') => Some(Zero),
        (Minus, '1'..='9') | (Digits, '0'..='9') => Some(Digits),
        (Zero | Digits, '.') => Some(Point),
        (Point | Fraction, '0'..='9') => Some(Fraction),
        (Zero | Digits | Fraction, 'e' | 'E') => Some(E),
        (E, '+' | '-') => Some(Sign),
        (E | Sign | Exponent, '0'..='9') => Some(Exponent),
        _ => None,
    }
}

impl Number {
    fn may_end(self) -> bool {
        matches!(self, Number::Zero | Number::Digits | Number::Fraction | Number::Exponent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    /// Returns the length of the object at the beginning of a text; `None` if there is none.
    fn end(text: &str) -> Option<usize> {
        let mut scanner = ObjectScanner::new();
        for (at, c) in text.char_indices() {
            match scanner.push(c) {
                Step::More => {}
                Step::End => return Some(at + c.len_utf8()),
                Step::Fault => return None,
            }
        }
        None
    }

    fn is_object(text: &str) -> bool {
        serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object())
    }

    #[test]
    fn objects_end_where_they_end() {
        for text in [
            "{}",
            r#"{ "a" : [ ] , "b":{"c":[1,-2.5e+3,0,true,false,null]}}"#,
            r#"{"é\u00e9\n\"}":"}]"}"#,
            "{\"a\":0,\n\t\"b\":[[{}]]}",
        ] {
            assert!(is_object(text), "{text}");
            assert_eq!(end(&format!("{text}}}")), Some(text.len()), "{text}");
        }
        for text in ["", "[]", "{,}", "{\"a\":01}", "{\"a\":1,}", "{\"a\":[1}]", "{\"a\":-}", "{\"\n\":1}", "{a:1}"] {
            assert_eq!(end(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_text_is_read_to_its_end_exactly_if_it_is_an_object(text in r#"\{[{}\[\],:"\\a01.eE+\- ntu]{0,12}\}"#) {
            prop_assert_eq!(end(&text) == Some(text.len()), is_object(&text), "{}", text);
        }

        #[test]
        fn objects_are_accepted(keys in proptest::collection::vec(any::<String>(), 0..5), n in any::<f64>()) {
            let object: Value = keys.into_iter().map(|key| (key.clone(), serde_json::json!([key, n]))).collect();
            let text = serde_json::to_string(&object).unwrap();
            prop_assert_eq!(end(&text), Some(text.len()));
        }
    }
}
