//! Shows answers: text on stdout, reasoning and notes on stderr. On a terminal, control characters of the model's text
//! are replaced, so that they cannot move the cursor, change the title or answer queries.

use crate::console;
use iec::error::Result;
use iec::session::chat::Part;
use iec::session::chat::settings::Think;
use std::io::IsTerminal;

/// Replaces control characters except line breaks and tabs by visible ones.
#[derive(Debug, Default)]
pub struct Harmless {
    /// A carriage return came last; it is dropped if a line feed follows.
    returned: bool,
}

impl Harmless {
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
    Harmless::default().push(text)
}

/// Shows one answer while it is generated.
#[derive(Debug)]
pub struct AnswerView {
    think: Think,
    colors: bool,
    quiet: bool,
    /// Filters of stdout and stderr, where they are terminals.
    filters: [Option<Harmless>; 2],
    part: Option<Part>,
    words: usize,
    ends_line: bool,
}

impl AnswerView {
    /// Creates the view of an answer. Without `colors`, reasoning is put in parentheses instead of being dimmed.
    pub fn new(think: Think, colors: bool, quiet: bool) -> AnswerView {
        let terminals = [std::io::stdout().is_terminal(), std::io::stderr().is_terminal()];
        let filters = terminals.map(|terminal| terminal.then(Harmless::default));
        AnswerView { think, colors, quiet, filters, part: None, words: 0, ends_line: true }
    }

    /// Shows a piece of the answer.
    ///
    /// # Errors
    /// Stdout cannot be written.
    pub fn show(&mut self, part: Part, text: &str) -> Result<()> {
        if self.part != Some(part) {
            self.change_to(part);
        }
        match part {
            Part::Answer => {
                self.ends_line = text.ends_with('\n');
                console::print(self.filtered(0, text))
            }
            Part::Reasoning => {
                self.words += text.split_whitespace().count();
                if self.think == Think::On && !self.quiet {
                    console::note_part(self.filtered(1, text));
                }
                Ok(())
            }
        }
    }

    /// Returns true if something was shown.
    pub fn has_begun(&self) -> bool {
        self.part.is_some()
    }

    /// Ends the line of the answer.
    ///
    /// # Errors
    /// Stdout cannot be written.
    pub fn finish(&mut self) -> Result<()> {
        if self.part == Some(Part::Reasoning) {
            self.end_reasoning();
        }
        if self.ends_line && self.part == Some(Part::Answer) { Ok(()) } else { console::print_line("") }
    }

    fn filtered(&mut self, stream: usize, text: &str) -> String {
        self.filters[stream].as_mut().map_or_else(|| text.to_string(), |filter| filter.push(text))
    }

    fn change_to(&mut self, part: Part) {
        if self.part == Some(Part::Reasoning) {
            self.end_reasoning();
        }
        self.part = Some(part);
        if part == Part::Reasoning && !self.quiet {
            match self.think {
                Think::On => console::note_part(if self.colors { "\x1b[2m" } else { "(reasoning: " }),
                Think::Fold => console::note_part("(reasoning"),
                Think::Off => {}
            }
        }
    }

    fn end_reasoning(&mut self) {
        match self.think {
            _ if self.quiet => {}
            Think::On => console::note(if self.colors { "\x1b[0m" } else { ")" }),
            Think::Fold => console::note(format_args!(": {} words; /set think on shows it)", self.words)),
            Think::Off => {}
        }
    }
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
