//! Sampling options that name texts: resolves logit biases, banned texts and DRY's sequence breakers to tokens.

use crate::error::{Error, Result};
use crate::generate::sampler::{Breakers, Sampling};
use crate::generate::text::Tokenizer;
use std::collections::HashMap;
use std::sync::Arc;

/// Sequence breakers of DRY unless others are given, those of llama.cpp.
pub const DRY_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];
/// Longest sequence breaker in bytes, that of llama.cpp.
const LONGEST_BREAKER: usize = 40;
/// Option that errors about logit biases name.
const LOGIT_BIAS: &str = "--logit-bias";

/// Texts of sampling options, which have tokens only in the vocabulary of a model.
#[derive(Debug, Clone, Default)]
pub struct SamplingTexts {
    /// Logit biases in the form `TOKEN+BIAS`, `TOKEN-BIAS` or `TOKEN=BIAS`. TOKEN is an id, or a text of one token.
    pub logit_bias: Vec<String>,
    /// Texts that must not be generated.
    pub banned: Vec<String>,
    /// Sequence breakers of DRY; `None` = [`DRY_BREAKERS`].
    pub dry_breakers: Option<Vec<String>>,
}

impl SamplingTexts {
    /// Checks the texts as far as this is possible without a tokenizer.
    ///
    /// # Errors
    /// A logit bias has another form, or a text is empty or too long.
    pub fn check(&self) -> Result<()> {
        self.logit_bias.iter().try_for_each(|bias| parse_bias(bias).map(drop))?;
        if self.banned.iter().any(String::is_empty) {
            return Err(Error::usage("found an empty text, expected at least one character").setting("--ban"));
        }
        match self.dry_breakers.iter().flatten().find(|text| !(1..=LONGEST_BREAKER).contains(&text.len())) {
            Some(text) => {
                let found = format!("found a text of {} bytes, expected 1 to {LONGEST_BREAKER}", text.len());
                Err(Error::usage(found).setting("--dry-sequence-breaker"))
            }
            None => Ok(()),
        }
    }

    /// Returns `sampling` with the tokens of these texts. `tokenizer` is called only if a text must be encoded; `vocab`
    /// is the number of tokens of the model.
    ///
    /// # Errors
    /// The same as those of [`SamplingTexts::check`], a token is not in the vocabulary, a biased text has several
    /// tokens, or there is no tokenizer.
    pub fn resolve<'a>(
        &self,
        sampling: Sampling,
        tokenizer: impl Fn() -> Result<&'a Tokenizer>,
        vocab: usize,
    ) -> Result<Sampling> {
        let mut sampling = self.resolve_tokens(sampling, &tokenizer, vocab)?;
        if sampling.dry.is_active() {
            sampling.dry.breakers = dry_breakers(self.dry_breakers.as_deref(), tokenizer, vocab)?;
        }
        Ok(sampling)
    }

    /// Returns `sampling` with the tokens of these texts except the sequence breakers of DRY.
    pub(super) fn resolve_tokens<'a>(
        &self,
        mut sampling: Sampling,
        tokenizer: impl Fn() -> Result<&'a Tokenizer>,
        vocab: usize,
    ) -> Result<Sampling> {
        self.check()?;
        if !self.logit_bias.is_empty() {
            let biased = self.logit_bias.iter().map(|bias| {
                let (token, value) = parse_bias(bias)?;
                Ok((biased_token(token, &tokenizer, vocab)?, value))
            });
            sampling.logit_bias = biased.collect::<Result<_>>()?;
        }
        if !self.banned.is_empty() {
            let tokenizer = tokenizer()?;
            let spellings = self.banned.iter().map(|text| spellings(text, tokenizer));
            sampling.banned = spellings.collect::<Result<Vec<_>>>()?.concat().into();
        }
        Ok(sampling)
    }
}

/// Returns the tokens of DRY's sequence breakers; `None` = [`DRY_BREAKERS`].
pub(super) fn dry_breakers<'a>(
    texts: Option<&[String]>,
    tokenizer: impl Fn() -> Result<&'a Tokenizer>,
    vocab: usize,
) -> Result<Arc<Breakers>> {
    let texts = SamplingTexts {
        dry_breakers: Some(texts.map_or_else(|| DRY_BREAKERS.map(String::from).to_vec(), <[String]>::to_vec)),
        ..SamplingTexts::default()
    };
    texts.check()?;
    breakers(texts.dry_breakers.as_deref().unwrap_or_default(), tokenizer, vocab).map(Arc::new)
}

/// Reads a number of last tokens, if the option or field `name` gives one; -1 stands for all, which is `None`.
///
/// # Errors
/// The number is below -1.
pub fn last_n(name: &str, value: Option<i64>) -> Result<Option<Option<usize>>> {
    let expected = |value| Error::usage(format!("found {value}, expected 0 or more, or -1 for all")).setting(name);
    match value {
        None => Ok(None),
        Some(-1) => Ok(Some(None)),
        Some(value) => usize::try_from(value).map(|n| Some(Some(n))).map_err(|_| expected(value)),
    }
}

/// Splits a logit bias at the first sign that a number follows; returns the token and the number.
fn parse_bias(text: &str) -> Result<(&str, f64)> {
    let number = |at: usize| {
        let number = &text[at..];
        let value: f64 = number.strip_prefix('=').unwrap_or(number).parse().ok()?;
        Some((&text[..at], value))
            .filter(|(token, value)| !token.is_empty() && (value.is_finite() || *value == f64::NEG_INFINITY))
    };
    text.match_indices(['+', '-', '=']).find_map(|(at, _)| number(at)).ok_or_else(|| {
        Error::usage(format!("found `{text}`, expected TOKEN+BIAS, TOKEN-BIAS or TOKEN=BIAS"))
            .setting(LOGIT_BIAS)
            .help("TOKEN is an id or a text of one token, BIAS a number or -inf: 15043+1.5, \" yes-2\", 2=-inf")
    })
}

/// Returns the token that a logit bias names: an id, a text of one token, or a spelling of the vocabulary.
fn biased_token<'a>(token: &str, tokenizer: impl Fn() -> Result<&'a Tokenizer>, vocab: usize) -> Result<u32> {
    if token.bytes().all(|byte| byte.is_ascii_digit()) {
        let expected =
            || Error::usage(format!("found token {token}, expected an id below {vocab}")).setting(LOGIT_BIAS);
        return token.parse().ok().filter(|id| (*id as usize) < vocab).ok_or_else(expected);
    }
    let tokenizer = tokenizer()?;
    let ids = tokenizer.encode_plain(token)?;
    match (&ids[..], tokenizer.id(token)) {
        ([id], _) => Ok(*id),
        (_, Some(id)) => Ok(id),
        _ => Err(Error::usage(format!("`{token}` has the tokens {ids:?}, expected one token"))
            .setting(LOGIT_BIAS)
            .help("give the id of one of these tokens, or exclude the whole text with --ban")),
    }
}

/// Returns the tokens of a text as they appear at the beginning of a text, after a space, and after a line break or
/// inside a word.
fn spellings(text: &str, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    let mut found = vec![tokenizer.encode_plain(text)?, continuation(text, tokenizer)?];
    if !text.starts_with(char::is_whitespace) {
        found.push(tokenizer.encode_plain(&format!(" {text}"))?);
    }
    found.retain(|ids| !ids.is_empty());
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Returns the tokens of a text that continues another one, without the space that some tokenizers put before a text.
fn continuation(text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let (before, all) = (tokenizer.encode_plain("\n")?, tokenizer.encode_plain(&format!("\n{text}"))?);
    match all.strip_prefix(&before[..]) {
        Some(ids) => Ok(ids.to_vec()),
        None => tokenizer.encode_plain(text),
    }
}

/// Returns the tokens of DRY's sequence breakers: every token that contains a breaker, and every token that ends with
/// the beginning of one, together with the tokens of the rest.
fn breakers<'a>(texts: &[String], tokenizer: impl Fn() -> Result<&'a Tokenizer>, vocab: usize) -> Result<Breakers> {
    let mut breakers = Breakers::default();
    if texts.is_empty() {
        return Ok(breakers);
    }
    let tokenizer = tokenizer()?;
    let words = Words::new(tokenizer)?;
    let mut rests: HashMap<&str, Vec<u32>> = HashMap::new();
    for id in 0..vocab as u32 {
        let word = words.text(id)?;
        for text in texts {
            if word.contains(text.as_str()) {
                breakers.add(id, Vec::new());
                continue;
            }
            for (at, _) in word.char_indices().filter(|(at, _)| text.starts_with(&word[*at..])) {
                let rest = &text[word.len() - at..];
                if !rests.contains_key(rest) {
                    rests.insert(rest, continuation(rest, tokenizer)?);
                }
                breakers.add(id, rests[rest].clone());
            }
        }
    }
    Ok(breakers)
}

/// Texts of single tokens inside a text, where a token keeps the space that is removed at the beginning of a text.
struct Words<'a> {
    tokenizer: &'a Tokenizer,
    /// Token before the one that is decoded, and its text.
    before: Option<(u32, String)>,
}

impl<'a> Words<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Result<Words<'a>> {
        let before = tokenizer.encode_plain("a")?.last().copied();
        let before = before.map(|id| tokenizer.decode(&[id], false).map(|text| (id, text))).transpose()?;
        Ok(Words { tokenizer, before })
    }

    fn text(&self, id: u32) -> Result<String> {
        if let Some((before, text)) = &self.before
            && let Some(word) = self.tokenizer.decode(&[*before, id], false)?.strip_prefix(text.as_str())
        {
            return Ok(word.to_string());
        }
        self.tokenizer.decode(&[id], false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::sampler::Dry;
    use proptest::prelude::*;
    use std::path::Path;

    /// Opens the tokenizer of the embedded model: byte-pair encoding of SentencePiece, 512 tokens.
    fn tokenizer() -> Tokenizer {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        Tokenizer::open(&root.join("assets/stories260k/tokenizer.json")).unwrap()
    }

    fn resolve(texts: &SamplingTexts, tokenizer: &Tokenizer) -> Result<Sampling> {
        let sampling = Sampling { dry: Dry { multiplier: 1.0, ..Dry::default() }, ..Sampling::default() };
        texts.resolve(sampling, || Ok(tokenizer), 512)
    }

    #[test]
    fn a_bias_is_split_at_the_sign_before_its_number() {
        let cases = [
            ("15043+1.5", "15043", 1.5),
            ("15043-2", "15043", -2.0),
            ("2=-inf", "2", f64::NEG_INFINITY),
            ("2-inf", "2", f64::NEG_INFINITY),
            ("7+1e-3", "7", 1e-3),
            (" e-mail+2", " e-mail", 2.0),
            ("a=b=3", "a=b", 3.0),
        ];
        for (text, token, bias) in cases {
            assert_eq!(parse_bias(text).unwrap(), (token, bias));
        }
        for text in ["", "15043", "+1", "5+inf", "5=nan", "5+x", "5="] {
            let error = parse_bias(text).unwrap_err();
            assert!(error.to_string().contains("--logit-bias") && error.help_text().is_some(), "{text}");
        }
    }

    #[test]
    fn a_token_is_an_id_or_a_text_of_one_token() {
        let tokenizer = tokenizer();
        let list = |text: &str| SamplingTexts { logit_bias: vec![text.into()], ..SamplingTexts::default() };
        let biased = |text: &str| resolve(&list(text), &tokenizer).map(|sampling| sampling.logit_bias[0]);
        assert_eq!(biased("511-1").unwrap(), (511, -1.0));
        let once = tokenizer.encode_plain("was").unwrap();
        assert_eq!((once.len(), biased("was+2").unwrap()), (1, (once[0], 2.0)));
        assert_eq!(biased("</s>=-inf").unwrap(), (tokenizer.id("</s>").unwrap(), f64::NEG_INFINITY));
        for (text, said) in
            [("512+1", "below 512"), ("99999999999+1", "below 512"), ("elephants+1", "expected one token")]
        {
            assert!(biased(text).unwrap_err().to_string().contains(said), "{text}");
        }
    }

    #[test]
    fn a_banned_text_is_banned_at_the_beginning_and_inside_a_text() {
        let tokenizer = tokenizer();
        let texts = SamplingTexts { banned: vec!["Lily".into()], ..SamplingTexts::default() };
        let banned = resolve(&texts, &tokenizer).unwrap().banned;
        for text in ["Lily", "was Lily", "\nLily"] {
            let ids = tokenizer.encode_plain(text).unwrap();
            assert!(banned.iter().any(|sequence| ids.ends_with(sequence)), "{text}: {ids:?} and not {banned:?}");
        }
        let ids = tokenizer.encode_plain("was lucky").unwrap();
        assert!(!banned.iter().any(|sequence| ids.windows(sequence.len()).any(|part| part == sequence)));
    }

    #[test]
    fn breakers_are_all_tokens_that_contain_or_begin_one() {
        let tokenizer = tokenizer();
        let of = |breakers: &[&str]| {
            let texts = breakers.iter().map(|text| text.to_string()).collect();
            let texts = SamplingTexts { dry_breakers: Some(texts), ..SamplingTexts::default() };
            resolve(&texts, &tokenizer).unwrap().dry.breakers
        };
        let (mut expected, id) = (Breakers::default(), |token: &str| tokenizer.id(token).unwrap());
        assert_eq!(*of(&[]), expected);
        // The byte of a line break is a token of its own.
        expected.add(id("<0x0A>"), Vec::new());
        assert_eq!(*of(&["\n"]), expected);
        // A text of several tokens: its first token, followed by the rest.
        let all = continuation("zz!", &tokenizer).unwrap();
        let mut several = Breakers::default();
        several.add(all[0], all[1..].to_vec());
        assert!(all.len() > 1, "{all:?}");
        for id in 0..512u32 {
            let word = Words::new(&tokenizer).unwrap().text(id).unwrap();
            for (end, rest) in [("z", "z!"), ("zz", "!")].iter().filter(|(end, _)| word.ends_with(end)) {
                assert!(!word.contains("zz!"), "{end}");
                several.add(id, continuation(rest, &tokenizer).unwrap());
            }
        }
        assert_eq!(*of(&["zz!"]), several);
        assert_eq!(*resolve(&SamplingTexts::default(), &tokenizer).unwrap().dry.breakers, *of(&DRY_BREAKERS));
    }

    #[test]
    fn empty_and_long_texts_are_refused_without_a_model() {
        let long = "x".repeat(LONGEST_BREAKER + 1);
        let cases = [
            (SamplingTexts { banned: vec![String::new()], ..SamplingTexts::default() }, "--ban"),
            (SamplingTexts { dry_breakers: Some(vec![String::new()]), ..SamplingTexts::default() }, "0 bytes"),
            (SamplingTexts { dry_breakers: Some(vec![long]), ..SamplingTexts::default() }, "41 bytes"),
        ];
        for (texts, said) in cases {
            assert!(texts.check().unwrap_err().to_string().contains(said), "{texts:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bias_is_read_or_refused(text in ".{0,20}", number in "[-+=0-9.einf]{0,8}") {
            let text = text + &number;
            if let Ok((token, bias)) = parse_bias(&text) {
                prop_assert!(text.starts_with(token) && !token.is_empty());
                prop_assert!(bias.is_finite() || bias == f64::NEG_INFINITY);
            }
        }
    }
}
