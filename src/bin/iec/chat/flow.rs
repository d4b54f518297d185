//! Flow of a text that arrives piece by piece: lines break between words, and light Markdown becomes bold and color.
//!
//! A word is held back until the next one begins, so that it never breaks in the middle. Between wide characters, as
//! those of Chinese and Japanese, a line may break anywhere. Of Markdown, bold text, code and headings are shown; lines
//! of a code block are not broken, so that they can be copied.

use crate::console::{Style, Styled};
use crate::harmless::Harmless;
use unicode_width::UnicodeWidthChar;

/// Joins emoji to one sign.
const JOINER: char = '\u{200d}';
/// Distance of tab stops.
const TAB: usize = 8;

/// Text on a terminal of a fixed number of columns.
#[derive(Debug, Default)]
pub struct Flow {
    /// Replaces the control characters of the text.
    harmless: Harmless,
    /// Columns of the terminal.
    columns: usize,
    /// True to show Markdown.
    markdown: bool,
    /// Column of the next character.
    column: usize,
    /// Spaces before the word.
    spaces: String,
    /// Word that may still grow, with its styles.
    word: Styled,
    /// Columns of the word.
    width: usize,
    /// True if the word goes on where the printed text ends: it is longer than a line, and the terminal breaks it.
    continues: bool,
    /// Last visible character of the word or before it.
    last: Option<char>,
    /// Marks of Markdown that were read and not yet understood.
    marks: String,
    /// True until something of the line was read.
    begins: bool,
    bold: bool,
    code: bool,
    heading: bool,
    fence: Fence,
}

/// Place in relation to a code block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Fence {
    /// Outside.
    #[default]
    Outside,
    /// In the line that opens it.
    Opening,
    /// Inside.
    Inside,
    /// In the line that closes it.
    Closing,
}

impl Flow {
    /// Creates the flow of a text that begins at `column`.
    pub fn new(columns: usize, column: usize, markdown: bool) -> Flow {
        Flow { columns, column, markdown, begins: true, ..Flow::default() }
    }

    /// Returns what is to be printed for the next piece.
    pub fn push(&mut self, text: &str) -> Styled {
        let (text, mut out) = (self.harmless.push(text), Styled::default());
        text.chars().for_each(|c| self.char(c, &mut out));
        out
    }

    /// Returns what was held back, and ends all styles.
    pub fn finish(mut self) -> Styled {
        let mut out = Styled::default();
        self.understand(None, &mut out);
        self.place(&mut out);
        self.spaces.chars().for_each(|c| out.push(c));
        self.plain(&mut out);
        out
    }

    fn char(&mut self, c: char, out: &mut Styled) {
        if self.markdown && self.is_mark(c) {
            self.marks.push(c);
            return;
        }
        self.understand(Some(c), out);
        match c {
            '\n' => self.end_line(out),
            ' ' | '\t' => {
                self.place(out);
                self.spaces.push(c);
                self.last = Some(c);
            }
            _ => {
                self.begins = false;
                self.visible(c, out);
            }
        }
    }

    /// Returns true if `c` is, or continues, a mark of Markdown.
    fn is_mark(&self, c: char) -> bool {
        let first = self.marks.chars().next();
        let starts = match c {
            '`' => true,
            '*' => self.fence == Fence::Outside && !self.code,
            '#' => self.fence == Fence::Outside && self.begins && self.spaces.is_empty(),
            _ => false,
        };
        starts && first.is_none_or(|first| first == c)
    }

    /// Turns the marks that were read into styles or text; `next` is the character after them.
    fn understand(&mut self, next: Option<char>, out: &mut Styled) {
        let marks = std::mem::take(&mut self.marks);
        let begins = self.begins;
        match marks.chars().next() {
            None => return,
            Some('`') if marks.len() >= 3 && begins => {
                self.fence = match self.fence {
                    Fence::Outside => Fence::Opening,
                    _ => Fence::Closing,
                };
                self.text(&marks, out);
            }
            Some('`') if self.fence == Fence::Outside && marks.len() < 3 => {
                self.code = !self.code;
                self.word.style(if self.code { Style::Code } else { Style::CodeEnd });
            }
            Some('#') if marks.len() <= 6 && next == Some(' ') => {
                self.heading = true;
                self.word.style(Style::Bold);
                self.text(&marks, out);
            }
            Some('*') if marks.len() == 2 && self.toggles_bold(next) => {
                self.bold = !self.bold;
                self.word.style(if self.bold { Style::Bold } else { Style::BoldEnd });
            }
            Some(_) => self.text(&marks, out),
        }
        self.begins = false;
    }

    /// Returns true if two stars before `next` begin or end bold text: `2**3` has none.
    fn toggles_bold(&self, next: Option<char>) -> bool {
        match self.bold {
            true => self.last.is_some_and(|c| !c.is_whitespace()),
            false => next.is_some_and(|c| !c.is_whitespace()) && self.last.is_none_or(|c| !c.is_alphanumeric()),
        }
    }

    fn text(&mut self, text: &str, out: &mut Styled) {
        text.chars().for_each(|c| self.visible(c, out));
    }

    /// Adds a character to the word, which ends before if a line may break there.
    fn visible(&mut self, c: char, out: &mut Styled) {
        let width = c.width().unwrap_or(0);
        let is_wide = |c: char| c.width().is_some_and(|width| width > 1);
        let breaks = self.last.is_some_and(|last| last != JOINER && (is_wide(last) || is_wide(c)));
        if width > 0 && breaks {
            self.place(out);
        } else if self.width + width > self.columns {
            self.place(out);
            self.continues = true;
        }
        self.word.push(c);
        self.width += width;
        self.last = Some(c);
    }

    /// Prints the spaces and the word, on a new line if this one has no room.
    fn place(&mut self, out: &mut Styled) {
        if self.word.is_empty() {
            return;
        }
        let spaces = std::mem::take(&mut self.spaces);
        let width = std::mem::take(&mut self.width);
        let before =
            spaces.chars().fold(self.column, |column, c| if c == '\t' { (column / TAB + 1) * TAB } else { column + 1 });
        let continues = std::mem::take(&mut self.continues);
        let may_break = self.fence == Fence::Outside && width > 0 && !continues;
        let column = before + width;
        if may_break && self.column > 0 && column > self.columns {
            out.push('\n');
            self.column = width;
        } else {
            spaces.chars().for_each(|c| out.push(c));
            // Beyond the last column, the terminal goes on in the next line.
            self.column = if column > 0 { (column - 1) % self.columns + 1 } else { 0 };
        }
        out.append(&mut self.word);
    }

    fn end_line(&mut self, out: &mut Styled) {
        self.place(out);
        self.spaces.clear();
        // A style that is not ended ends with its paragraph.
        if self.heading || self.begins {
            self.plain(out);
        }
        self.fence = match self.fence {
            Fence::Opening => Fence::Inside,
            Fence::Closing => Fence::Outside,
            other => other,
        };
        out.push('\n');
        (self.column, self.begins, self.last) = (0, true, None);
    }

    fn plain(&mut self, out: &mut Styled) {
        if self.bold || self.heading {
            out.style(Style::BoldEnd);
        }
        if self.code {
            out.style(Style::CodeEnd);
        }
        (self.bold, self.heading, self.code) = (false, false, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what a text becomes, in pieces of one character and as a whole.
    fn shown(columns: usize, markdown: bool, text: &str) -> String {
        let whole = |pieces: Vec<String>| {
            let mut flow = Flow::new(columns, 0, markdown);
            let mut shown = Styled::default();
            pieces.iter().for_each(|piece| shown.append(&mut flow.push(piece)));
            shown.append(&mut flow.finish());
            let marks =
                [(Style::Bold, "<b>"), (Style::BoldEnd, "</b>"), (Style::Code, "<c>"), (Style::CodeEnd, "</c>")];
            marks.iter().fold(shown.as_str().to_string(), |text, (style, mark)| text.replace(style.sequence(), mark))
        };
        let (one, many) = (whole(vec![text.into()]), whole(text.chars().map(String::from).collect()));
        assert_eq!(one, many, "{text:?}");
        one
    }

    #[test]
    fn lines_break_between_words() {
        struct Case {
            columns: usize,
            text: &'static str,
            expected: &'static str,
        }
        let cases = [
            Case { columns: 10, text: "one two three four", expected: "one two\nthree four" },
            Case { columns: 7, text: "one two three", expected: "one two\nthree" },
            Case { columns: 10, text: "one\n\n  two  three four", expected: "one\n\n  two\nthree four" },
            Case { columns: 5, text: "abcdefghijkl m", expected: "abcdefghijkl m" },
            Case { columns: 8, text: "ab abcdefghijkl", expected: "ab\nabcdefghijkl" },
            // A wide character takes two columns, and a line may break between two of them.
            Case { columns: 6, text: "猫と犬が走る", expected: "猫と犬\nが走る" },
            Case { columns: 7, text: "ab 猫と犬", expected: "ab 猫と\n犬" },
            Case { columns: 4, text: "e\u{301}e\u{301} a\u{308}b", expected: "e\u{301}e\u{301}\na\u{308}b" },
            Case { columns: 5, text: "ab 👩\u{200d}👧", expected: "ab\n👩\u{200d}👧" },
            Case { columns: 12, text: "a\tb\tc", expected: "a\tb\nc" },
            Case { columns: 1, text: "ab c", expected: "ab\nc" },
            Case { columns: 10, text: "ends here \n", expected: "ends here\n" },
        ];
        for Case { columns, text, expected } in cases {
            assert_eq!(shown(columns, false, text), expected, "{text:?} in {columns} columns");
        }
        let mut flow = Flow::new(10, 8, false);
        let (first, rest) = (flow.push("one two "), flow.finish());
        assert_eq!([first.as_str(), rest.as_str()].concat(), "\none two ", "a text that begins in the line");
    }

    #[test]
    fn bold_text_code_and_headings_are_styled() {
        let cases = [
            ("a **bold word**, b", "a <b>bold word</b>, b"),
            ("call `f(x)`.", "call <c>f(x)</c>."),
            ("# Head\ntext", "<b># Head</b>\ntext"),
            ("2**3 * 4 ** 5 and *this*", "2**3 * 4 ** 5 and *this*"),
            ("a #1 and\n#include", "a #1 and\n#include"),
            ("- item\n* item", "- item\n* item"),
            ("**never ended\n\nnext", "<b>never ended\n</b>\nnext"),
            ("`never ended", "<c>never ended</c>"),
            ("```\n**not** # bold `x`\n```\n**b**", "```\n**not** # bold `x`\n```\n<b>b</b>"),
        ];
        for (text, expected) in cases {
            assert_eq!(shown(80, true, text), expected, "{text:?}");
            assert_eq!(shown(80, false, text), text, "without Markdown");
        }
        // Marks take no columns, and lines of code do not break.
        assert_eq!(shown(8, true, "**one two** x"), "<b>one two</b>\nx");
        assert_eq!(
            shown(8, true, "```\nlet a = b + c;\n```\none two three"),
            "```\nlet a = b + c;\n```\none two\nthree"
        );
        // A long word inside changes nothing behind the block.
        assert_eq!(shown(8, true, "```\n123456789\n```\none two three"), "```\n123456789\n```\none two\nthree");
    }
}
