//! Masks are compared with a brute-force reference on random vocabularies and languages; sources that are refused are
//! tried one by one.

use super::*;
use crate::generate::text::spelling::{Leading, Spelling};
use crate::rng::Rng;
use std::collections::BTreeSet;

fn vocabulary(tokens: &[&str], leading: Leading) -> Arc<Vocabulary> {
    let bytes = tokens.iter().map(|token| token.as_bytes().to_vec()).collect();
    Arc::new(Vocabulary::new(Spelling { bytes, leading }).unwrap())
}

/// Vocabulary with a token for each byte; its ids are the bytes.
pub(super) fn bytes() -> Arc<Vocabulary> {
    let bytes = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    Arc::new(Vocabulary::new(Spelling { bytes, leading: Leading::Kept }).unwrap())
}

fn schema(text: &str) -> ConstraintSource {
    ConstraintSource::JsonSchema(text.into())
}

fn grammar(text: &str) -> ConstraintSource {
    ConstraintSource::Grammar(text.into())
}

fn regex(text: &str) -> ConstraintSource {
    ConstraintSource::Regex(text.into())
}

/// Returns true if the masks allow `text` byte by byte, and its end after it.
pub(super) fn accepts(constraint: &Constraint, text: &str) -> bool {
    let mut state = constraint.start();
    for byte in text.bytes() {
        if !state.mask().unwrap().allows(byte.into()) {
            return false;
        }
        state.accept(byte.into()).unwrap();
    }
    state.mask().unwrap().ends()
}

/// A pattern with all texts that it matches.
struct Language {
    pattern: String,
    texts: BTreeSet<String>,
}

/// Largest number of texts of a random language.
const TEXTS: usize = 300;

fn random_language(rng: &mut Rng, depth: usize) -> Language {
    let kind = if depth == 0 { 0 } else { rng.next_u64() % 6 };
    match kind {
        0 | 1 => {
            let letter = ["a", "b", "ab", "ca", "é"][(rng.next_u64() % 5) as usize];
            Language { pattern: letter.into(), texts: [letter.to_string()].into() }
        }
        2 | 3 => {
            let (left, right) = (random_language(rng, depth - 1), random_language(rng, depth - 1));
            let texts = left.texts.iter().flat_map(|a| right.texts.iter().map(move |b| format!("{a}{b}"))).collect();
            Language { pattern: format!("{}{}", left.pattern, right.pattern), texts }
        }
        4 => {
            let (left, right) = (random_language(rng, depth - 1), random_language(rng, depth - 1));
            let pattern = format!("({}|{})", left.pattern, right.pattern);
            Language { pattern, texts: left.texts.union(&right.texts).cloned().collect() }
        }
        _ => {
            let inner = random_language(rng, depth - 1);
            let twice = inner.texts.iter().flat_map(|a| inner.texts.iter().map(move |b| format!("{a}{b}")));
            let texts = twice.chain(inner.texts.iter().cloned()).chain([String::new()]).collect();
            Language { pattern: format!("({}){{0,2}}", inner.pattern), texts }
        }
    }
}

/// Follows random allowed tokens, and compares every mask with the texts that begin with the text so far.
fn compare(source: &ConstraintSource, texts: &BTreeSet<String>, rng: &mut Rng) {
    let mut tokens: Vec<Vec<u8>> = vec![b"a".into(), b"b".into(), b"c".into(), vec![0xc3], vec![0xa9]];
    for _ in 0..rng.next_u64() % 12 {
        let word: String =
            (0..1 + rng.next_u64() % 4).map(|_| ['a', 'b', 'c', 'é', 'x'][(rng.next_u64() % 5) as usize]).collect();
        tokens.push(word.into_bytes());
    }
    let spelling = Spelling { bytes: tokens.clone(), leading: Leading::Kept };
    let vocabulary = Arc::new(Vocabulary::new(spelling).unwrap());
    let constraint = Constraint::compile(source, &vocabulary).unwrap();
    for _ in 0..4 {
        let (mut state, mut text) = (constraint.start(), Vec::new());
        loop {
            let begins = |text: &[u8]| texts.iter().any(|whole| whole.as_bytes().starts_with(text));
            let mask = state.mask().unwrap();
            let mut allowed = Vec::new();
            for (id, token) in (0..).zip(&tokens) {
                let expected = begins(&[&text[..], token].concat());
                assert_eq!(mask.allows(id), expected, "{source:?} after {text:?}: {token:?}");
                allowed.extend(expected.then_some(id));
            }
            let ends = texts.iter().any(|whole| whole.as_bytes() == text);
            assert_eq!(mask.ends(), ends, "{source:?} after {text:?}");
            assert_eq!(state.is_complete(), allowed.is_empty(), "{source:?} after {text:?}");
            if allowed.is_empty() || (ends && rng.next_u64().is_multiple_of(4)) {
                break;
            }
            let id = allowed[(rng.next_u64() % allowed.len() as u64) as usize];
            state.accept(id).unwrap();
            text.extend_from_slice(&tokens[id as usize]);
        }
    }
}

#[test]
fn masks_of_random_patterns_allow_what_a_text_of_the_language_continues() {
    let mut rng = Rng::new(3);
    let mut compared = 0;
    while compared < 60 {
        let language = random_language(&mut rng, 4);
        if language.texts.len() <= TEXTS && !language.pattern.is_empty() {
            compare(&regex(&language.pattern), &language.texts, &mut rng);
            compared += 1;
        }
    }
}

#[test]
fn masks_of_random_choices_allow_what_a_choice_continues() {
    let mut rng = Rng::new(4);
    for _ in 0..60 {
        let word = |rng: &mut Rng| -> String {
            (0..1 + rng.next_u64() % 6).map(|_| ['a', 'b', 'c', 'é'][(rng.next_u64() % 4) as usize]).collect()
        };
        let texts: BTreeSet<String> = (0..1 + rng.next_u64() % 8).map(|_| word(&mut rng)).collect();
        compare(&ConstraintSource::Choice(texts.iter().cloned().collect()), &texts, &mut rng);
    }
}

#[test]
fn letters_with_a_meaning_in_patterns_are_plain_in_choices() {
    let texts = ["a.b*", "(x|y)", "\\d", "[z]", "a/b", "$^", "\"q\"\n"];
    let source = ConstraintSource::Choice(texts.iter().map(|text| text.to_string()).collect());
    let constraint = Constraint::compile(&source, &bytes()).unwrap();
    for text in texts {
        assert!(accepts(&constraint, text), "{text}");
    }
    for text in ["axb*", "x", "7", "z", "ab"] {
        assert!(!accepts(&constraint, text), "{text}");
    }
}

#[test]
fn a_space_that_is_not_shown_is_no_part_of_the_text() {
    let tokens = [" yes", "yes", " no", "n", "o", " ", " n", "  n"];
    let source = ConstraintSource::Choice(vec!["yes".into(), "no".into(), " n".into()]);
    let allowed = |mask: &TokenMask| -> Vec<u32> { (0..8).filter(|id| mask.allows(*id)).collect() };
    let constraint = Constraint::compile(&source, &vocabulary(&tokens, Leading::FirstDropped)).unwrap();
    // ` no` shows `no`, which is no token; ` ` shows nothing; `  n` shows ` n`.
    let mut state = constraint.start();
    assert_eq!(allowed(&state.mask().unwrap()), [0, 1, 3, 6, 7]);
    state.accept(6).unwrap();
    assert_eq!(allowed(&state.mask().unwrap()), [4]);
    state.accept(4).unwrap();
    assert!(state.is_complete());
    let mut state = constraint.start();
    state.accept(0).unwrap();
    assert!(state.is_complete());
    let constraint = Constraint::compile(&source, &vocabulary(&tokens, Leading::Kept)).unwrap();
    assert_eq!(allowed(&constraint.start().mask().unwrap()), [1, 3, 5, 6]);
}

#[test]
fn masked_logits_keep_allowed_tokens_and_the_end_where_it_is_allowed() {
    let tokens: Vec<String> = (0..70).map(|i| format!("t{i}")).collect();
    let names: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let constraint = Constraint::compile(&regex("t6(4)?"), &vocabulary(&names, Leading::Kept)).unwrap();
    let logits: Vec<f32> = (0..70).map(|i| i as f32).collect();
    let mut masked = vec![9.0; 3];
    let mut state = constraint.start();
    let finite = |masked: &[f32]| -> Vec<usize> { (0..masked.len()).filter(|i| masked[*i].is_finite()).collect() };
    state.mask().unwrap().apply(&logits, &[7, 69], &mut masked);
    assert_eq!(finite(&masked), [6, 64]);
    assert_eq!((masked.len(), masked[64]), (70, 64.0));
    state.accept(6).unwrap();
    state.mask().unwrap().apply(&logits, &[7, 69, 1000], &mut masked);
    assert_eq!(finite(&masked), [7, 69]);
}

#[test]
fn a_vocabulary_without_the_letters_is_an_error() {
    let error = Constraint::compile(&regex("xyz"), &vocabulary(&["a", "b"], Leading::Kept)).unwrap_err();
    assert!(error.to_string().starts_with("regular expression:"), "{error}");
    let constraint = Constraint::compile(&regex("ab?c"), &vocabulary(&["a", "b"], Leading::Kept)).unwrap();
    let mut state = constraint.start();
    state.accept(0).unwrap();
    state.accept(1).unwrap();
    assert!(state.mask().unwrap_err().to_string().contains("cannot be continued"));
    assert!(constraint.start().accept(1).is_err());
}

#[test]
fn keywords_of_older_drafts_are_enforced_under_their_schema() {
    let source = schema(r#"{"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}"#);
    let constraint = Constraint::compile(&source, &bytes()).unwrap();
    assert!(accepts(&constraint, "5") && !accepts(&constraint, "4"));
    let source = schema(
        r#"{"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
        "items": [{"const": 1}, {"const": 2}], "additionalItems": false}"#,
    );
    let constraint = Constraint::compile(&source, &bytes()).unwrap();
    assert!(accepts(&constraint, "[1,2]") && !accepts(&constraint, "[1,2,3]") && !accepts(&constraint, "[2]"));
}

#[test]
fn references_and_rules_as_deep_as_accepted_fit_the_stack() {
    let vocabulary = bytes();
    let chain: Vec<String> =
        (0..120).map(|i| format!(r##""a{i}": {{"items": {{"$ref": "#/$defs/a{}"}}}}"##, i + 1)).collect();
    let long = format!(r##"{{"$ref": "#/$defs/a0", "$defs": {{{}, "a120": {{}}}}}}"##, chain.join(","));
    Constraint::compile(&schema(&long), &vocabulary).unwrap();
    for letter in ["r", "R"] {
        let rules: Vec<String> = (0..990).map(|i| format!("{letter}{i}: \"a\" {letter}{}", i + 1)).collect();
        let chain = format!("start: {letter}0\n{}\n{letter}990: \"a\"\n", rules.join("\n"));
        // Too many steps for the compiler would be an error; a stack overflow would end the process.
        let _ = Constraint::compile(&grammar(&chain), &vocabulary);
        let groups = format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000));
        assert!(Constraint::compile(&grammar(&groups), &vocabulary).is_err());
        let negated = format!("start: A\nA: {}\"a\"", "~".repeat(60_000));
        assert!(Constraint::compile(&grammar(&negated), &vocabulary).is_err());
    }
}

#[test]
fn a_grammar_generates_its_language() {
    let text = "// Sums of numbers, with nested brackets.\nstart: sum\nsum: term (\"+\" term)*\n\
                term: NUMBER | \"(\" sum \")\"\nNUMBER: /[0-9]{1,3}/\n%ignore \" \"\n";
    let constraint = Constraint::compile(&grammar(text), &bytes()).unwrap();
    for text in ["1", "1+2", "(1+(23+4))+567", "1 + 2"] {
        assert!(accepts(&constraint, text), "{text}");
    }
    for text in ["", "1+", "(1", "1234", "a"] {
        assert!(!accepts(&constraint, text), "{text}");
    }
    let with_schema = "start: \"answer: \" body\nbody: %json {\"type\": \"integer\", \"maximum\": 9, \"minimum\": 0}\n";
    let constraint = Constraint::compile(&grammar(with_schema), &bytes()).unwrap();
    assert!(accepts(&constraint, "answer: 7") && !accepts(&constraint, "answer: 12"));
}

#[test]
fn every_feature_of_grammars_patterns_and_choices_allows_its_texts() {
    struct Case(ConstraintSource, &'static [&'static str], &'static [&'static str]);
    let choices = |texts: &[&str]| ConstraintSource::Choice(texts.iter().map(|text| text.to_string()).collect());
    let cases = [
        Case(grammar("start: \"a\" | \"é\" | \"\\u00e8\\n\""), &["a", "é", "è\n"], &["", "e", "è"]),
        Case(grammar("start: \"a\"? \"b\"* \"c\"+"), &["c", "ac", "abbcc"], &["", "ab", "aac"]),
        Case(grammar("start: \"a\"~2 (\"b\" \"c\"){1,2} [\"d\"]"), &["aabc", "aabcbcd"], &["abc", "aa", "aabcbcbc"]),
        Case(grammar("start: \"a\"..\"f\" \"x\"i"), &["ax", "fX"], &["gx", "ay"]),
        Case(grammar("start: W\nW: /[a-z]+/ & ~/.*bad.*/"), &["good", "ba"], &["bad", "abadb"]),
        Case(grammar("start: A B\nA: /a+/\nB: \"b\" | \"c\"\n%ignore /[ \\t]+/"), &["ab", "aa  \t c"], &["a", "a\nb"]),
        Case(grammar("start: s\ns: \"(\" s \")\" s |"), &["", "()", "(())()"], &["(", ")"]),
        Case(grammar("start: e\ne: e \"+\" e | /[0-9]/"), &["1", "1+2+3"], &["+", "1+"]),
        Case(grammar("start: w\nw[lazy]: /.*x/"), &["abcx"], &["abc"]),
        Case(grammar("start: t \"!\"\nt[suffix=\"!\"]: /[a-z]*/"), &["ab!!"], &["ab"]),
        Case(grammar("start: t\nt[max_tokens=3]: /[a-z]+/"), &["abc"], &["abcd", "1"]),
        Case(grammar("start: %regex {\"substring_words\": \"the big cat\"}"), &["the big ", "big cat"], &["dog"]),
        Case(
            grammar("start: \"x=\" %json {\"type\": \"string\", \"maxLength\": 2} \";\"\n%ignore \" \""),
            &["x=\"é\";", "x=\"\\u00e9\\/\" ;"],
            &["x=\"abc\";", "x=1;"],
        ),
        Case(
            grammar("start: (%json {\"$schema\": \"http://json-schema.org/draft-04/schema\", \"const\": 5} \"\\n\")+"),
            &["5\n", "5.0\n5\n"],
            &["4\n", "\n"],
        ),
        Case(regex("a|bc?|[x-z]{2,3}"), &["a", "b", "bc", "xyz", "zz"], &["", "c", "x", "xyzx"]),
        Case(regex("(?i)straße|(?s:.)"), &["STRAßE", "straße", "\n", "🙂"], &["ab"]),
        Case(regex(r"\d\w\s\p{Greek}\x41\u00e9"), &["1a αAé", "٣é\tΩAé"], &["aa αAé"]),
        Case(regex(r"^(\{\}|\[\]|\\|/)$"), &["{}", "[]", "\\", "/"], &["{", "//"]),
        Case(regex("(?P<a>x)(?<b>y)(?:z)??"), &["xy", "xyz"], &["x"]),
        Case(
            choices(&["yes", "yes, but", "Да", "a\\b/\"c\""]),
            &["yes", "yes, but", "Да", "a\\b/\"c\""],
            &["ye", "yes,"],
        ),
    ];
    let vocabulary = bytes();
    let mut failures = Vec::new();
    for Case(source, valid, invalid) in cases {
        match Constraint::compile(&source, &vocabulary) {
            Ok(constraint) => {
                for (texts, expected) in [(valid, true), (invalid, false)] {
                    let wrong = texts.iter().filter(|text| accepts(&constraint, text) != expected);
                    failures.extend(wrong.map(|text| format!("{source:?}: {text:?}, expected {expected}")));
                }
            }
            Err(e) => failures.push(format!("{source:?}: {e}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn parts_of_grammars_without_effect_are_refused_by_name() {
    let rules: String = (0..1001).map(|i| format!("r{i}: \"a\"\n")).collect();
    struct Case<'a>(&'a str, &'a str);
    let cases = [
        Case("root ::= \"a\" | \"b\"", "`::=` in line 1"),
        Case("start: \"a\"\nb: <|end|>", "special token in line 2"),
        Case("start: a\na[temperature=0.5]: /x/", "`temperature`"),
        Case("start: a\na[stop=\"y\"]: /x*/", "`stop`"),
        Case("start: @other", "another grammar"),
        Case("%llguidance {\"allow_invalid_utf8\": true}\nstart: \"a\"", "`allow_invalid_utf8`"),
        Case("start: %json {\"type\": \"array\", \"uniqueItems\": true}", "`uniqueItems`"),
        Case("start: %json {", "`%json` without JSON"),
        Case("begin: \"a\"", "no start rule"),
        Case("start: missing", "missing"),
        Case("  \n", "expected 1 to"),
        Case(&rules, "more than 1000 rules"),
        Case(&"#".repeat(70_000), "70000 bytes"),
    ];
    let vocabulary = bytes();
    let mut failures = Vec::new();
    for Case(text, part) in cases {
        let shown: String = text.chars().take(60).collect();
        match Constraint::compile(&grammar(text), &vocabulary) {
            Err(e) if format!("{e}").contains(part) => {}
            Err(e) => failures.push(format!("{shown}: {e}")),
            Ok(_) => failures.push(format!("{shown}: accepted")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    // The same characters inside texts, patterns and comments mean nothing.
    let plain = "start: \"<a> ::= @b temperature=1\" /<x>@/ # <c> ::=\n";
    let constraint = Constraint::compile(&grammar(plain), &vocabulary).unwrap();
    assert!(accepts(&constraint, "<a> ::= @b temperature=1<x>@"));
}

#[test]
fn patterns_and_choices_beyond_their_limits_are_refused() {
    let vocabulary = bytes();
    let choices = |texts: Vec<String>| ConstraintSource::Choice(texts);
    struct Case<'a>(ConstraintSource, &'a str);
    let cases = [
        Case(regex(""), "1 to 65536"),
        Case(regex(&"a".repeat(70_000)), "70000 bytes"),
        Case(regex("(a"), "unclosed group"),
        Case(regex(r"(a)\1"), "backreferences"),
        Case(regex("(?=a)b"), "look-around"),
        Case(regex(r"a\bc"), "look"),
        Case(regex("(?P<stop>a)b"), "`stop`"),
        Case(regex(&"(".repeat(1000)), "pattern"),
        Case(choices(Vec::new()), "0 choices"),
        Case(choices(vec!["a".into(), String::new()]), "empty choice"),
        Case(choices(vec!["a".repeat(40_000), "b".repeat(40_000)]), "80000 bytes"),
    ];
    let mut failures = Vec::new();
    for Case(source, part) in cases {
        match Constraint::compile(&source, &vocabulary) {
            Err(e) if format!("{e}").contains(part) => {}
            Err(e) => failures.push(format!("{part}: {e}")),
            Ok(_) => failures.push(format!("{part}: accepted")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let anchored = Constraint::compile(&regex("^a+$"), &vocabulary).unwrap();
    assert!(accepts(&anchored, "aa") && !accepts(&anchored, "^a$"));
}
