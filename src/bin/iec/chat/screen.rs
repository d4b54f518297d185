//! Shows answers: text on stdout, reasoning and notes on stderr.

use super::flow::Flow;
use crate::console;
use iec::chat::AnswerPart;
use iec::chat::settings::Think;
use iec::error::Result;

/// Beginning of reasoning on a terminal without colors.
const REASONING: &str = "(reasoning: ";

/// Shows one answer while it is generated.
#[derive(Debug)]
pub struct AnswerView {
    think: Think,
    colors: bool,
    quiet: bool,
    part: Option<AnswerPart>,
    /// Flow of the part that is shown, if it goes to a terminal.
    flow: Option<Flow>,
    words: usize,
    ends_line: bool,
}

impl AnswerView {
    /// Creates the view of an answer. Without `colors`, reasoning is put in parentheses instead of being dimmed.
    pub fn new(think: Think, colors: bool, quiet: bool) -> AnswerView {
        AnswerView { think, colors, quiet, part: None, flow: None, words: 0, ends_line: true }
    }

    /// Shows a piece of the answer.
    ///
    /// # Errors
    /// Stdout cannot be written.
    pub fn show(&mut self, part: AnswerPart, text: &str) -> Result<()> {
        if self.part != Some(part) {
            self.end_part()?;
            self.begin(part);
        }
        match part {
            AnswerPart::Answer => {
                self.ends_line = text.ends_with('\n');
                match &mut self.flow {
                    Some(flow) => console::print_styled(&flow.push(text)),
                    None => console::print_data(text),
                }
            }
            AnswerPart::Reasoning => {
                self.words += text.split_whitespace().count();
                if self.think == Think::On && !self.quiet {
                    match &mut self.flow {
                        Some(flow) => console::note_styled(&flow.push(text)),
                        None => console::note_part(text),
                    }
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
        self.end_part()?;
        if self.ends_line && self.part == Some(AnswerPart::Answer) { Ok(()) } else { console::print_line("") }
    }

    /// Prints what was held back of the current part, and ends reasoning.
    fn end_part(&mut self) -> Result<()> {
        let rest = self.flow.take().map(Flow::finish).unwrap_or_default();
        match self.part {
            Some(AnswerPart::Answer) => console::print_styled(&rest)?,
            Some(AnswerPart::Reasoning) => {
                console::note_styled(&rest);
                self.end_reasoning();
            }
            None => {}
        }
        Ok(())
    }

    fn begin(&mut self, part: AnswerPart) {
        self.part = Some(part);
        self.flow = match part {
            AnswerPart::Answer => {
                console::columns_of(std::io::stdout()).map(|columns| Flow::new(columns, 0, self.colors))
            }
            AnswerPart::Reasoning => {
                let before = if self.colors { 0 } else { REASONING.len() };
                console::columns_of(std::io::stderr()).map(|columns| Flow::new(columns, before, false))
            }
        };
        if part == AnswerPart::Reasoning && !self.quiet {
            match self.think {
                Think::On if self.colors => console::note_style(console::DIM),
                Think::On => console::note_part(REASONING),
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
