//! Makes text from outside harmless for a terminal: replaces control characters, so that they cannot move the cursor,
//! change the title or answer queries.

/// Replaces control characters except line breaks and tabs by visible ones.
#[derive(Debug, Default)]
pub struct Harmless {
    /// A carriage return came last; it is dropped if a line feed follows.
    returned: bool,
}

impl Harmless {
    /// Creates a filter at the beginning of a text.
    pub const fn new() -> Harmless {
        Harmless { returned: false }
    }

    /// Returns the text to print for the next piece of a text.
    pub fn push(&mut self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            if std::mem::take(&mut self.returned) && c != '\n' {
                out.push('\u{240d}');
            }
            match c {
                '\r' => self.returned = true,
                '\n' | '\t' => out.push(c),
                '\0'..='\u{1f}' => out.extend(char::from_u32(0x2400 + u32::from(c))),
                '\u{7f}' => out.push('\u{2421}'),
                '\u{80}'..='\u{9f}' => out.push(char::REPLACEMENT_CHARACTER),
                _ => out.push(c),
            }
        }
        out
    }
}

/// Returns a whole text without control characters.
pub fn harmless(text: &str) -> String {
    Harmless::new().push(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_become_visible_ones() {
        for (text, expected) in [
            ("a\tb\nc é 猫", "a\tb\nc é 猫"),
            ("\x1b[2J\x1b]0;t\x07", "␛[2J␛]0;t␇"),
            ("a\r\nb\rc", "a\nb␍c"),
            ("\u{9b}31m\u{7f}\0", "\u{fffd}31m␡␀"),
        ] {
            assert_eq!(harmless(text), expected, "{text:?}");
        }
        let mut pieces = Harmless::default();
        assert_eq!([pieces.push("a\r"), pieces.push("\n"), pieces.push("\r"), pieces.push("b")].concat(), "a\n␍b");
    }
}
