//! Reads a call whose name stands before its arguments, such as `f[ARGS]{…}`.

use super::events::Sink;
use super::object::{ObjectScanner, Step};
use super::tool::is_name;

/// Largest number of bytes before the arguments.
const NAME_BYTES: usize = 160;

/// Notation of the name.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named {
    /// Text directly before the name, which need not be there.
    pub(super) prefix: &'static str,
    /// Character behind the name that begins a number or an id; a space if there is none.
    pub(super) numbered: char,
    /// Texts that may stand between the name and the arguments, or before the name.
    pub(super) around: &'static [&'static str],
    /// Text that ends a call; without arguments before it, the function has none.
    pub(super) end: &'static str,
}

/// State after the first characters of a call.
#[derive(Debug)]
pub(super) struct NamedScanner {
    named: &'static Named,
    /// True if the call may be ordinary text: it must name an offered function.
    doubtful: bool,
    /// Text before the arguments.
    held: String,
    arguments: Option<ObjectScanner>,
}

impl NamedScanner {
    /// Begins a call before its name.
    pub(super) fn new(named: &'static Named, doubtful: bool) -> NamedScanner {
        NamedScanner { named, doubtful, held: String::new(), arguments: None }
    }

    /// Returns the text of a call that was not given to the sink.
    pub(super) fn into_raw(self) -> String {
        self.held
    }

    /// Returns true if the call was given to the sink.
    pub(super) fn begun(&self) -> bool {
        self.arguments.is_some()
    }

    /// Completes a call whose text ends here, or whose rest cannot be read.
    pub(super) fn complete(&mut self, sink: &mut Sink<'_>) {
        if let Some(scanner) = &self.arguments {
            sink.arguments(&scanner.missing());
        }
    }

    /// Reads a character. After a [`Step::Fault`] the character is not part of the call.
    pub(super) fn push(&mut self, c: char, sink: &mut Sink<'_>) -> Step {
        if self.arguments.is_none() && c == '{' {
            let Some(name) = self.name(&self.held, sink) else { return Step::Fault };
            sink.begin(&name);
            self.arguments = Some(ObjectScanner::new());
            self.held.clear();
        }
        if let Some(scanner) = &mut self.arguments {
            let step = scanner.push(c);
            if step != Step::Fault {
                sink.arguments(c.encode_utf8(&mut [0; 4]));
            }
            return step;
        }
        let most = NAME_BYTES + self.named.around.iter().map(|text| text.len()).sum::<usize>();
        if self.held.len() >= most || self.doubtful && !self.may_begin(c, sink) {
            return Step::Fault;
        }
        self.held.push(c);
        let before = self.held.strip_suffix(self.named.end).filter(|_| !self.named.end.is_empty());
        if let Some(name) = before.and_then(|before| self.name(before, sink)) {
            sink.begin(&name);
            sink.arguments("{}");
            self.held.clear();
            self.arguments = Some(ObjectScanner::new());
            return Step::End;
        }
        Step::More
    }

    /// Returns false if a text with this next character is certainly no call.
    fn may_begin(&self, c: char, sink: &Sink<'_>) -> bool {
        let name = self.held.trim_end();
        match c.is_whitespace() {
            true => sink.offers(name),
            false => name.len() == self.held.len() && sink.offers_beginning(name, c),
        }
    }

    /// Returns the name of the function in the text before its arguments.
    fn name(&self, text: &str, sink: &Sink<'_>) -> Option<String> {
        let mut text = text.to_string();
        for around in self.named.around {
            text = text.replace(around, "\n");
        }
        let mut words = text.split_whitespace();
        let word = words.next()?;
        let word = word.strip_prefix(self.named.prefix).unwrap_or(word);
        let numbered = word.split_once(self.named.numbered);
        let name = numbered.map_or(word, |(name, _)| name);
        // An id may be a word of its own, but prose has more words.
        let is_call = is_name(name) && words.next().is_none() && (!self.doubtful || sink.offers(name));
        is_call.then(|| name.into())
    }
}
