//! Shows answers: text on stdout, reasoning and notes on stderr.

use crate::console;
use iec::error::Result;
use iec::session::chat::Part;
use iec::session::chat::settings::Think;

/// Shows one answer while it is generated.
#[derive(Debug)]
pub struct AnswerView {
    think: Think,
    colors: bool,
    quiet: bool,
    part: Option<Part>,
    words: usize,
    ends_line: bool,
}

impl AnswerView {
    /// Creates the view of an answer. Without `colors`, reasoning is put in parentheses instead of being dimmed.
    pub fn new(think: Think, colors: bool, quiet: bool) -> AnswerView {
        AnswerView { think, colors, quiet, part: None, words: 0, ends_line: true }
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
                console::print_data(text)
            }
            Part::Reasoning => {
                self.words += text.split_whitespace().count();
                if self.think == Think::On && !self.quiet {
                    console::note_part(text);
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

    fn change_to(&mut self, part: Part) {
        if self.part == Some(Part::Reasoning) {
            self.end_reasoning();
        }
        self.part = Some(part);
        if part == Part::Reasoning && !self.quiet {
            match self.think {
                Think::On if self.colors => console::note_style(console::DIM),
                Think::On => console::note_part("(reasoning: "),
                Think::Fold => console::note_part("(reasoning"),
                Think::Off => {}
            }
        }
    }

    fn end_reasoning(&mut self) {
        match self.think {
            _ if self.quiet => {}
            Think::On if self.colors => console::note_style(console::PLAIN_LINE),
            Think::On => console::note(")"),
            Think::Fold => console::note(format_args!(": {} words; /set think on shows it)", self.words)),
            Think::Off => {}
        }
    }
}
