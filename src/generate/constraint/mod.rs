//! Constraints on generated text: a JSON schema, a grammar, a regular expression, or a list of texts to choose from.
//!
//! A [`Vocabulary`] holds the bytes of all tokens and is built once per model. [`Constraint::compile`] compiles a
//! [`ConstraintSource`] for it; each text then has a [`ConstraintState`], which gives before every token the
//! [`TokenMask`] of tokens that can continue the text. The crate `llguidance` compiles and matches: it runs an Earley
//! parser over lexemes that are recognized by derivatives of regular expressions
//! (<https://github.com/guidance-ai/llguidance>).
//!
//! A constraint may concern only some parts of a text: [`Phases`] alternate between free text and grammars.
//!
//! Sources are untrusted. `json` and `grammar` refuse what is too large or would be ignored, the parser has
//! limits for its states and its work per token, and compilation runs on a thread with a deep stack.

mod grammar;
mod json;
mod pattern;
mod phases;
mod vocabulary;

use crate::error::{Error, Result};
use crate::resources;
pub use json::{ReadOptions as SchemaOptions, SchemaRules, rules as schema_rules};
use llguidance::Matcher;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use phases::{Compiled, Free, Progress};
pub use phases::{Marker, MarkerPlace, Phase, Phases};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
pub use vocabulary::Vocabulary;

/// Bytes of stack of the thread that compiles: references of a schema and rules of a grammar are followed recursively,
/// some thousand deep within the limits of [`json`] and [`grammar`].
const STACK: usize = 256 << 20;

/// Description of the texts that may be generated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConstraintSource {
    /// JSON that is valid against this JSON schema.
    JsonSchema(String),
    /// JSON that is valid against this JSON schema, whose objects have no properties but those that it lists, unless it
    /// says so.
    ClosedJsonSchema(String),
    /// JSON that is valid against this JSON schema, as far as it can be enforced; [`Constraint::ignored`] names the
    /// rest.
    JsonSchemaHint(String),
    /// A text of this context-free grammar, in the dialect of Lark that `llguidance` reads.
    Grammar(String),
    /// A text that this regular expression (syntax of the crate `regex`) matches from its beginning to its end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Free text and texts of grammars.
    Phases(Phases),
}

impl ConstraintSource {
    /// Returns the name of the kind, as used in messages.
    fn kind(&self) -> &'static str {
        match self {
            ConstraintSource::JsonSchema(_)
            | ConstraintSource::ClosedJsonSchema(_)
            | ConstraintSource::JsonSchemaHint(_) => "JSON schema",
            ConstraintSource::Grammar(_) => "grammar",
            ConstraintSource::Regex(_) => "regular expression",
            ConstraintSource::Choice(_) => "list of choices",
            ConstraintSource::Phases(_) => "calls of functions",
        }
    }

    /// Returns how a schema is applied.
    fn schema_options(&self) -> SchemaOptions {
        let (lenient, closed) = match self {
            ConstraintSource::ClosedJsonSchema(_) => (false, true),
            ConstraintSource::JsonSchemaHint(_) => (true, false),
            _ => (false, false),
        };
        SchemaOptions { depth: json::DEPTH, lenient, closed }
    }

    /// Checks the source against the limits and returns its grammar, and the places of what it does not enforce; `None`
    /// for phases, which have several grammars.
    fn grammar(&self) -> Result<Option<(TopLevelGrammar, Vec<String>)>> {
        let whole = match self {
            ConstraintSource::JsonSchema(text) | ConstraintSource::ClosedJsonSchema(text) => {
                TopLevelGrammar::from_lark(schema_rules(&json::parsed(text)?, self.schema_options())?.lark)
            }
            ConstraintSource::JsonSchemaHint(text) => {
                let Ok(rules) = schema_rules(&json::parsed(text)?, self.schema_options()) else {
                    return self.any_json().map(Some);
                };
                return Ok(Some((TopLevelGrammar::from_lark(rules.lark), rules.ignored)));
            }
            ConstraintSource::Grammar(text) => TopLevelGrammar::from_lark(grammar::checked(text)?),
            ConstraintSource::Regex(text) => {
                pattern::check(text)?;
                TopLevelGrammar::from_regex(text)
            }
            ConstraintSource::Choice(texts) => TopLevelGrammar::from_regex(&pattern::of_choices(texts)?),
            ConstraintSource::Phases(_) => return Ok(None),
        };
        Ok(Some((whole, Vec::new())))
    }

    /// Returns the grammar in place of a hint of which nothing can be used.
    fn any_json(&self) -> Result<(TopLevelGrammar, Vec<String>)> {
        let any = schema_rules(&true.into(), self.schema_options())?.lark;
        Ok((TopLevelGrammar::from_lark(any), vec!["#".to_string()]))
    }

    /// Returns the matcher at the beginning of a text of the source, behind what the grammar `before` allows, and the
    /// places of what it does not enforce.
    fn initial(&self, before: &str, vocabulary: &Vocabulary) -> Result<(Box<Mutex<Matcher>>, Vec<String>)> {
        let Some((whole, ignored)) = self.grammar()? else {
            return Err(refused(self.kind(), "found phases within a phase"));
        };
        match (self.matcher(behind(before, whole), vocabulary), self) {
            (Err(_), ConstraintSource::JsonSchemaHint(_)) => {
                let (any, ignored) = self.any_json()?;
                Ok((self.matcher(behind(before, any), vocabulary)?, ignored))
            }
            (initial, _) => Ok((initial?, ignored)),
        }
    }

    /// Returns the phases of the source, and the places of what they do not enforce.
    fn compiled(&self, vocabulary: &Vocabulary) -> Result<(Vec<Compiled>, Vec<String>)> {
        let ConstraintSource::Phases(Phases(phases)) = self else {
            let (initial, ignored) = self.initial("", vocabulary)?;
            return Ok((vec![Compiled::Grammar { initial, openings: Free::default(), exits: Vec::new() }], ignored));
        };
        let (mut compiled, mut ignored) = (Vec::with_capacity(phases.len()), Vec::new());
        for phase in phases {
            compiled.push(match phase {
                Phase::Free { ends, markers } => Compiled::Free(Free::new(*ends, markers, vocabulary)),
                Phase::Grammar { lark, exits } => {
                    let initial = self.matcher(TopLevelGrammar::from_lark(lark.clone()), vocabulary)?;
                    Compiled::Grammar { initial, openings: Free::default(), exits: exits.clone() }
                }
                Phase::Answer { source, before, openings } => {
                    let openings = Free::new(false, openings, vocabulary);
                    let (initial, places) = source.initial(before, vocabulary)?;
                    ignored = places;
                    Compiled::Grammar { initial, openings, exits: Vec::new() }
                }
            });
        }
        Ok((compiled, ignored))
    }

    /// Returns the matcher at the beginning of a text of a grammar.
    fn matcher(&self, grammar: TopLevelGrammar, vocabulary: &Vocabulary) -> Result<Box<Mutex<Matcher>>> {
        let mut matcher = Matcher::new(vocabulary.factory().create_parser(grammar));
        // The first mask fails if no token can begin a text; the parser state that it computes is shared by all texts.
        matcher.compute_mask().map_err(|e| refused(self.kind(), &reason(&e.to_string())))?;
        Ok(Box::new(Mutex::new(matcher)))
    }
}

/// Returns a grammar with a part before its texts.
fn behind(before: &str, mut whole: TopLevelGrammar) -> TopLevelGrammar {
    if !before.is_empty() {
        let outer = GrammarWithLexer::from_lark(format!("start: {before} @answer"));
        let mut inner = std::mem::replace(&mut whole.grammars[0], outer);
        inner.name = Some("answer".into());
        whole.grammars.push(inner);
    }
    whole
}

/// A compiled constraint. It is compiled once and used for any number of texts.
pub struct Constraint {
    /// Parts of a text; a text begins with the first one.
    phases: Arc<[Compiled]>,
    vocabulary: Arc<Vocabulary>,
    ignored: Vec<String>,
    /// Whether a mask of one of its texts was slow.
    slow: Arc<AtomicBool>,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl Constraint {
    /// Compiles a constraint for a vocabulary, on a thread with a deep stack.
    ///
    /// # Errors
    /// The source is not valid, contains something that is not supported, or exceeds a limit.
    pub fn compile(source: &ConstraintSource, vocabulary: &Arc<Vocabulary>) -> Result<Constraint> {
        let (source, vocabulary) = (source.clone(), Arc::clone(vocabulary));
        let compiler =
            resources::spawn_deep("constraint", STACK, move || Constraint::compile_here(&source, &vocabulary))?;
        compiler.join().unwrap_or_else(|_| Err(refused("constraint", "the compiler failed")))
    }

    /// Compiles a constraint as [`Constraint::compile`] does, on this thread. Its stack must hold the recursion of the
    /// source; sources of a few kilobytes fit any stack.
    ///
    /// # Errors
    /// The same as those of [`Constraint::compile`].
    pub fn compile_here(source: &ConstraintSource, vocabulary: &Arc<Vocabulary>) -> Result<Constraint> {
        let (phases, ignored) = source.compiled(vocabulary)?;
        Ok(Constraint { phases: phases.into(), vocabulary: Arc::clone(vocabulary), ignored, slow: Arc::default() })
    }

    /// Returns JSON pointers to what a [`ConstraintSource::JsonSchemaHint`] says and the constraint does not enforce.
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// Returns the state at the beginning of a text.
    pub fn start(&self) -> ConstraintState {
        let (phases, vocabulary) = (Arc::clone(&self.phases), Arc::clone(&self.vocabulary));
        let slow = Arc::clone(&self.slow);
        let mut state = ConstraintState { at: At::Complete, phases, vocabulary, at_start: true, slow };
        state.enter(0);
        state
    }
}

/// State of a constraint after the first tokens of a text.
pub struct ConstraintState {
    at: At,
    phases: Arc<[Compiled]>,
    vocabulary: Arc<Vocabulary>,
    /// True before the first token.
    at_start: bool,
    /// Whether a mask of a text with this constraint was slow.
    slow: Arc<AtomicBool>,
}

/// Place in a text.
enum At {
    /// In a free phase, with the progress of its markers.
    Free(usize, Vec<Progress>),
    /// In a phase with a grammar.
    Grammar {
        phase: usize,
        /// State of the grammar; `None` once the text can only be a marker of another phase. It is boxed, because a
        /// state moves between threads for every token.
        matcher: Option<Box<Matcher>>,
        /// Progress of the markers that may stand at the beginning instead.
        openings: Vec<Progress>,
        /// Last bytes of the text.
        tail: Vec<u8>,
    },
    /// At the end.
    Complete,
}

impl fmt::Debug for ConstraintState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConstraintState").field("at_start", &self.at_start).finish_non_exhaustive()
    }
}

impl ConstraintState {
    /// Begins a phase.
    fn enter(&mut self, phase: usize) {
        self.at = match self.phases.get(phase) {
            Some(Compiled::Free(free)) => At::Free(phase, free.start()),
            Some(Compiled::Grammar { initial, openings, .. }) => {
                let initial = initial.lock().unwrap_or_else(PoisonError::into_inner);
                let matcher = Some(Box::new(initial.deep_clone()));
                At::Grammar { phase, matcher, openings: openings.start(), tail: Vec::new() }
            }
            None => At::Complete,
        };
    }

    /// Returns true if a mask of a text with this constraint was slow.
    pub fn is_slow(&self) -> bool {
        self.slow.load(Ordering::Relaxed)
    }

    /// Notes for all texts with this constraint that a mask was slow.
    pub fn set_slow(&self) {
        self.slow.store(true, Ordering::Relaxed);
    }

    /// Returns true if every token is allowed and the text may end, so that no mask is needed for the next token.
    pub fn is_free(&self) -> bool {
        match (&self.at, self.phase()) {
            (At::Free(_, progress), Some(Compiled::Free(free))) => {
                free.ends() && free.forbidden(progress, &self.vocabulary).is_empty()
            }
            _ => false,
        }
    }

    fn phase(&self) -> Option<&Compiled> {
        match &self.at {
            At::Free(phase, _) | At::Grammar { phase, .. } => self.phases.get(*phase),
            At::Complete => None,
        }
    }

    /// Computes which tokens can continue the text. This takes some ten microseconds, and a few milliseconds where
    /// many lexemes are possible.
    ///
    /// # Errors
    /// No token can continue the text, or the work for this token exceeds its limit.
    pub fn mask(&mut self) -> Result<TokenMask> {
        let phases = Arc::clone(&self.phases);
        let (matcher, others) = match &mut self.at {
            At::Free(phase, progress) => {
                let Some(Compiled::Free(free)) = phases.get(*phase) else { return Err(failed("it has no phase")) };
                return Ok(self.vocabulary.all_but(free.forbidden(progress, &self.vocabulary), free.ends()));
            }
            At::Grammar { phase, matcher, openings: progress, .. } => {
                let Some(Compiled::Grammar { openings, .. }) = phases.get(*phase) else {
                    return Err(failed("it has no phase"));
                };
                (matcher, openings.continuing(progress, &self.vocabulary))
            }
            At::Complete => return Ok(self.vocabulary.only_end()),
        };
        let Some(matcher) = matcher else {
            let mut mask = self.vocabulary.only_end();
            self.vocabulary.allow(&mut mask.words, others);
            return Ok(TokenMask { ends: false, ..mask });
        };
        let set = matcher.compute_mask_or_eos().map_err(|e| failed(&reason(&e.to_string())))?;
        let mut words = set.as_slice().to_vec();
        let ends = set.is_allowed(self.vocabulary.end());
        self.vocabulary.clear_end(&mut words);
        if self.at_start {
            self.vocabulary.allow_spaced(&mut words);
        }
        self.vocabulary.allow(&mut words, others);
        if !ends && words.iter().all(|word| *word == 0) {
            return Err(failed("no token of the vocabulary continues the text"));
        }
        Ok(TokenMask { words, ends })
    }

    /// Adds a token that the mask allows.
    ///
    /// # Errors
    /// The token cannot continue the text.
    pub fn accept(&mut self, id: u32) -> Result<()> {
        let phases = Arc::clone(&self.phases);
        let is_first = std::mem::replace(&mut self.at_start, false);
        match &mut self.at {
            At::Free(phase, progress) => {
                let Some(Compiled::Free(free)) = phases.get(*phase) else { return Err(failed("it has no phase")) };
                if let Some(next) = free.read(progress, id, self.vocabulary.bytes(id)) {
                    self.enter(next);
                }
            }
            At::Grammar { phase, matcher, openings: progress, tail } => {
                let Some(Compiled::Grammar { openings, exits, .. }) = phases.get(*phase) else {
                    return Err(failed("it has no phase"));
                };
                let shown = if is_first { self.vocabulary.unspaced(id) } else { id };
                if let Some(next) = openings.read(progress, shown, self.vocabulary.bytes(shown)) {
                    self.enter(next);
                    return Ok(());
                }
                let fits = matcher.as_mut().map(|matcher| matcher.consume_token(shown));
                match fits {
                    Some(Err(e)) if progress.iter().all(|written| matches!(written, None | Some(0))) => {
                        return Err(failed(&reason(&e.to_string())));
                    }
                    Some(Err(_)) | None => *matcher = None,
                    Some(Ok(())) => {}
                }
                let Some(matcher) = matcher else { return Ok(()) };
                let kept = phases::exit_bytes(exits);
                tail.extend_from_slice(self.vocabulary.bytes(shown));
                tail.drain(..tail.len().saturating_sub(kept));
                if matcher.is_stopped() {
                    let next = phases::exit(exits, id, tail).unwrap_or(usize::MAX);
                    self.enter(next);
                }
            }
            At::Complete => return Err(failed("it is complete")),
        }
        Ok(())
    }

    /// Returns true when the text is complete and no token can follow.
    pub fn is_complete(&self) -> bool {
        match &self.at {
            At::Complete => true,
            At::Grammar { matcher, .. } => matcher.as_ref().is_some_and(|matcher| matcher.is_stopped()),
            At::Free(..) => false,
        }
    }
}

/// Set of tokens that can continue a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    /// One bit per token, 32 tokens per word.
    words: Vec<u32>,
    ends: bool,
}

impl TokenMask {
    /// Returns true if the token can continue the text.
    pub fn allows(&self, id: u32) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Returns true if the text may end here.
    pub fn ends(&self) -> bool {
        self.ends
    }

    /// Writes `logits` to `masked`, with negative infinity for tokens that are not allowed. The tokens `eos`, which end
    /// a text, are allowed exactly where the text may end.
    pub fn apply(&self, logits: &[f32], eos: &[u32], masked: &mut Vec<f32>) {
        masked.clear();
        for (chunk, word) in logits.chunks(32).zip(&self.words) {
            match *word {
                0 => masked.extend(std::iter::repeat_n(f32::NEG_INFINITY, chunk.len())),
                u32::MAX => masked.extend_from_slice(chunk),
                word => masked.extend((0..).zip(chunk).map(|(bit, logit)| allowed(word >> bit & 1 == 1, *logit))),
            }
        }
        masked.resize(logits.len(), f32::NEG_INFINITY);
        for id in eos {
            if let (Some(value), Some(logit)) = (masked.get_mut(*id as usize), logits.get(*id as usize)) {
                *value = allowed(self.ends, *logit);
            }
        }
    }
}

fn allowed(is_allowed: bool, logit: f32) -> f32 {
    if is_allowed { logit } else { f32::NEG_INFINITY }
}

/// Returns the first line of a message of `llguidance`; further lines show its state.
fn reason(message: &str) -> String {
    let line = message.lines().next().unwrap_or_default();
    match line.strip_prefix("panic: ") {
        Some(_) => "the compiler failed".into(),
        None if line.contains("NoExtensionBias") => "a schema refers to itself without any content".into(),
        None => line.to_string(),
    }
}

/// Returns the error for a source that cannot be compiled.
fn refused(kind: &str, why: &str) -> Error {
    Error::unsupported(format!("{kind}: {why}")).help("docs/guide/structured-output.md lists what is supported")
}

/// Returns the error for a constraint that fails while a text is generated.
fn failed(why: &str) -> Error {
    Error::unsupported(format!("constraint: the text cannot be continued: {why}"))
        .help("use a simpler schema, grammar or pattern")
}

#[cfg(test)]
mod tests;
