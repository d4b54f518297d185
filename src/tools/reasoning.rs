//! Separates reasoning between tags from the text behind it. Thinking models begin their output with
//! `<think>…</think>` or with other tags of [`TAGS`]; some templates write the opening tag at the end of the prompt,
//! and
//! some models leave it out.

use super::events::Sink;
use crate::generate::text::Tokenizer;

/// Tags around reasoning.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tags {
    pub(super) opening: &'static str,
    pub(super) closing: &'static str,
    /// True if a line break behind the opening tag belongs to the tag.
    line: bool,
}

const fn tags(opening: &'static str, closing: &'static str) -> Tags {
    Tags { opening, closing, line: false }
}

/// Tags of current models. All models may use the first ones; the others count for models whose template or vocabulary
/// has them.
const TAGS: &[Tags] = &[
    tags("<think>", "</think>"),
    // Mistral
    tags("[THINK]", "[/THINK]"),
    // Seed
    tags("<seed:think>", "</seed:think>"),
    tags("<|begin_of_thought|>", "<|end_of_thought|>"),
    // Command
    tags("<|START_THINKING|>", "<|END_THINKING|>"),
    // Gemma 4
    Tags { opening: "<|channel>thought", closing: "<channel|>", line: true },
    // EXAONE
    tags("<thought>", "</thought>"),
    // LongCat
    tags("<longcat_think>", "</longcat_think>"),
    // Kimi-VL
    tags("◁think▷", "◁/think▷"),
    // Apertus
    tags("<|inner_prefix|>", "<|inner_suffix|>"),
    // MiniMax M3
    tags("<mm:think>", "</mm:think>"),
    tags("<thinking>", "</thinking>"),
    tags("<reasoning>", "</reasoning>"),
    // Granite 3.2
    tags("Here is my thought process:", "Here is my response:"),
];

/// Tags that some models write around their answer.
const ANSWERS: &[(&str, &str)] = &[
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
    ("<|begin_of_solution|>", "<|end_of_solution|>"),
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
];

/// Number of tokens at the end of a prompt that are searched for a tag. Small vocabularies spell a tag in single bytes.
const TAIL: usize = 32;

/// Tags that a model knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct KnownTags {
    reasoning: Vec<&'static Tags>,
    /// Tags that are special tokens. They never belong to the text, so reasoning may also come later.
    special: Vec<&'static Tags>,
    answers: Vec<(&'static str, &'static str)>,
}

/// Beginning of an output, by the end of its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begins {
    /// Reasoning may come first.
    Anywhere,
    /// The prompt ends within reasoning.
    Inside(&'static Tags),
    /// The prompt ends behind reasoning, so that the answer follows at once. Templates write empty reasoning where a
    /// request switches it off.
    Behind,
}

impl KnownTags {
    /// Returns the tags that the source of a chat template or the vocabulary has.
    pub(super) fn of(source: &str, tokenizer: &Tokenizer) -> KnownTags {
        let both = |opening: &str, closing: &str| {
            source.contains(opening) && source.contains(closing)
                || [token_of(opening), closing].iter().all(|tag| tokenizer.id(tag).is_some())
        };
        let knows = |tags: &&Tags| {
            // Some templates write one of the tags only.
            let is_usual = tags.opening == TAGS[0].opening;
            both(tags.opening, tags.closing)
                || is_usual && (source.contains(tags.opening) || source.contains(tags.closing))
        };
        let is_special = |tag: &str| tokenizer.id(tag).is_some_and(|id| tokenizer.is_special(id));
        let special = |tags: &&Tags| is_special(token_of(tags.opening)) && is_special(tags.closing);
        KnownTags {
            reasoning: TAGS.iter().filter(knows).collect(),
            special: TAGS.iter().filter(special).collect(),
            answers: ANSWERS.iter().filter(|(opening, closing)| both(opening, closing)).copied().collect(),
        }
    }

    /// Returns true if the model reasons, as far as its template and vocabulary show that.
    pub(super) fn reasons(&self) -> bool {
        !self.reasoning.is_empty()
    }

    /// Returns the tags around reasoning.
    pub(super) fn reasoning(&self) -> &[&'static Tags] {
        &self.reasoning
    }

    /// Returns the tags that may stand before an answer.
    pub(super) fn answers(&self) -> impl Iterator<Item = &'static str> {
        self.answers.iter().map(|(opening, _)| *opening)
    }

    /// Returns the tags that an output may begin with.
    fn openings(&self) -> impl Iterator<Item = &'static Tags> {
        self.reasoning.iter().copied().chain(TAGS.first())
    }

    /// Returns where the output begins that follows a prompt.
    pub(super) fn begins(&self, tokenizer: &Tokenizer, prompt: &[u32]) -> Begins {
        let tail = tokenizer.decode(&prompt[prompt.len().saturating_sub(TAIL)..], false).unwrap_or_default();
        let tail = tail.trim_end();
        if let Some(tags) = self.openings().find(|tags| tail.ends_with(tags.opening)) {
            return Begins::Inside(tags);
        }
        match self.openings().any(|tags| tail.ends_with(tags.closing)) {
            true => Begins::Behind,
            false => Begins::Anywhere,
        }
    }

    /// Returns the tags around reasoning as text.
    pub(super) fn texts(&self) -> impl Iterator<Item = &'static str> {
        self.openings().flat_map(|tags| [tags.opening, tags.closing])
    }
}

/// Returns the token with which a tag begins: some consist of a token and a word.
pub(super) fn token_of(opening: &str) -> &str {
    opening.find('>').map_or(opening, |end| &opening[..=end])
}

/// State of the search for tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TagSearch {
    /// Nothing but white space was generated.
    Start,
    /// Between the tags.
    Inside(&'static Tags),
    /// Behind the closing tag, before the first character of the content.
    Behind,
    /// In a text that had no opening tag, but may have a closing one.
    Unopened,
    /// In the content.
    Content,
}

/// Divides a text into reasoning and content.
#[derive(Debug)]
pub(super) struct Reasoning {
    known: KnownTags,
    at: TagSearch,
    /// Text that may be the beginning of a tag.
    held: String,
    /// True if a closing tag without an opening one divides the output.
    may_be_unopened: bool,
    /// True if the output is not streamed, so that text before a closing tag can still become reasoning.
    is_whole: bool,
    /// True until the character behind an opening tag was read.
    at_line: bool,
    /// Tag that ends the content.
    closing: Option<&'static str>,
}

impl Reasoning {
    /// Begins an output.
    pub(super) fn new(known: KnownTags, begins: Begins) -> Reasoning {
        let at = match begins {
            Begins::Inside(tags) => TagSearch::Inside(tags),
            Begins::Anywhere | Begins::Behind => TagSearch::Start,
        };
        let may_be_unopened = begins == Begins::Anywhere && known.reasons();
        let at_line = matches!(begins, Begins::Inside(tags) if tags.line);
        Reasoning { known, at, held: String::new(), may_be_unopened, is_whole: false, at_line, closing: None }
    }

    /// Holds text back until it is known whether it is reasoning.
    pub(super) fn hold(&mut self) {
        self.is_whole = true;
    }

    /// Reads a piece of text, writes its reasoning to `sink` and returns its content.
    pub(super) fn push(&mut self, text: &str, sink: &mut Sink<'_>) -> String {
        self.held += text;
        let mut content = String::new();
        loop {
            let before = self.at;
            content += &self.step(sink);
            if self.at == before {
                return content;
            }
        }
    }

    /// Reads as much of the text as one state can.
    fn step(&mut self, sink: &mut Sink<'_>) -> String {
        match self.at {
            TagSearch::Start => self.start(),
            TagSearch::Inside(tags) => self.inside(tags, sink),
            TagSearch::Behind => self.behind(),
            TagSearch::Unopened => self.unopened(sink),
            TagSearch::Content => self.content(),
        }
    }

    fn start(&mut self) -> String {
        let text = self.held.trim_start();
        let opened = self.known.openings().find(|tags| text.starts_with(tags.opening));
        if let Some(tags) = opened {
            (self.at, self.at_line, self.held) =
                (TagSearch::Inside(tags), tags.line, text[tags.opening.len()..].to_string());
        } else if self.known.answers().any(|opening| text.starts_with(opening)) {
            self.at = TagSearch::Behind;
        } else {
            let mut openings = self.known.openings().map(|tags| tags.opening).chain(self.known.answers());
            if !openings.any(|opening| opening.starts_with(text)) {
                self.at = if self.may_be_unopened { TagSearch::Unopened } else { TagSearch::Content };
            }
        }
        String::new()
    }

    fn inside(&mut self, tags: &'static Tags, sink: &mut Sink<'_>) -> String {
        if !self.held.is_empty() && std::mem::replace(&mut self.at_line, false) && self.held.starts_with('\n') {
            self.held.remove(0);
        }
        let closed = self.held.find(tags.closing);
        let end = closed.unwrap_or(self.held.len() - begun(&self.held, tags.closing));
        let rest = self.held[closed.map_or(end, |at| at + tags.closing.len())..].to_string();
        self.held.truncate(end);
        sink.reasoning(&std::mem::replace(&mut self.held, rest));
        if closed.is_some() {
            self.at = TagSearch::Behind;
        }
        String::new()
    }

    /// Skips white space, and the tag that may stand before the answer.
    fn behind(&mut self) -> String {
        loop {
            let text = self.held.trim_start();
            let opened = self.known.answers.iter().find(|(opening, _)| text.starts_with(opening));
            let Some((opening, closing)) = opened.filter(|_| self.closing.is_none()) else {
                let may_open = self.closing.is_none() && self.known.answers().any(|opening| opening.starts_with(text));
                if !text.is_empty() && !may_open {
                    self.at = TagSearch::Content;
                }
                self.held = text.to_string();
                return String::new();
            };
            self.closing = Some(*closing);
            self.held = text[opening.len()..].to_string();
        }
    }

    /// Reads a text without an opening tag up to a closing one. What was streamed as content stays content.
    fn unopened(&mut self, sink: &mut Sink<'_>) -> String {
        let opened = self.known.openings().filter_map(|tags| self.held.find(tags.opening)).min();
        let closings = self.known.reasoning.iter().map(|tags| tags.closing);
        let closed = closings.clone().filter_map(|tag| Some((self.held.find(tag)?, tag.len()))).min();
        if let Some((at, length)) = closed.filter(|(at, _)| opened.is_none_or(|opened| *at < opened)) {
            let rest = self.held.split_off(at + length);
            self.held.truncate(at);
            let text = std::mem::replace(&mut self.held, rest);
            self.at = TagSearch::Behind;
            if self.is_whole {
                sink.reasoning(&text);
                return String::new();
            }
            return text;
        }
        if opened.is_some() {
            // The tags belong to the text.
            self.at = TagSearch::Content;
            return String::new();
        }
        if self.is_whole {
            return String::new();
        }
        let tags = closings.chain(self.known.openings().map(|tags| tags.opening));
        let kept = tags.map(|tag| begun(&self.held, tag)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - kept);
        std::mem::replace(&mut self.held, held)
    }

    /// Reads content up to a tag that is a special token, or up to the one that ends the content.
    fn content(&mut self) -> String {
        let opened = self.known.special.iter().filter_map(|tags| Some((self.held.find(tags.opening)?, *tags)));
        if let Some((at, tags)) = opened.min_by_key(|(at, _)| *at) {
            let rest = self.held.split_off(at)[tags.opening.len()..].to_string();
            let content = std::mem::replace(&mut self.held, rest);
            (self.at, self.at_line) = (TagSearch::Inside(tags), tags.line);
            return self.plain(content);
        }
        let openings = self.known.special.iter().map(|tags| tags.opening);
        let kept = openings.chain(self.closing).map(|tag| begun(&self.held, tag)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - kept);
        let content = std::mem::replace(&mut self.held, held);
        self.plain(content)
    }

    /// Removes the tags from content that never belong to it.
    fn plain(&mut self, mut content: String) -> String {
        if let Some((closing, at)) = self.closing.and_then(|closing| Some((closing, content.find(closing)?))) {
            self.closing = None;
            content.replace_range(at..at + closing.len(), "");
        }
        for tags in &self.known.special {
            if content.contains(tags.closing) {
                content = content.replace(tags.closing, "");
            }
        }
        content
    }

    /// Ends the output: writes the rest of the reasoning to `sink`, or returns the rest of the content.
    pub(super) fn finish(&mut self, sink: &mut Sink<'_>) -> String {
        let held = std::mem::take(&mut self.held);
        if !matches!(self.at, TagSearch::Inside(_)) {
            return self.plain(held);
        }
        sink.reasoning(&held);
        String::new()
    }
}

/// Returns the length of the longest end of `text` that is a proper beginning of `mark`.
pub(super) fn begun(text: &str, mark: &str) -> usize {
    let most = mark.len().min(text.len() + 1);
    (1..most).rev().find(|n| mark.is_char_boundary(*n) && text.ends_with(&mark[..*n])).unwrap_or(0)
}
