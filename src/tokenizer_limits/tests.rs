use super::*;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::RngSeed;
use serde_json::json;
use std::path::Path;
use tokenizers::{
    Decoder, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

/// Returns a small tokenizer.json with these parts.
fn file(parts: &Value) -> Vec<u8> {
    let mut file = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": null, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    });
    for (key, value) in parts.as_object().unwrap() {
        file[key] = value.clone();
    }
    file.to_string().into_bytes()
}

fn refusal(parts: &Value) -> String {
    check(&file(parts)).expect_err(&parts.to_string().chars().take(300).collect::<String>()).to_string()
}

fn replace(pattern: &str, content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
}

fn sequence(kind: &str, steps: Vec<Value>) -> Value {
    json!({"type": "Sequence", kind: steps})
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

fn template(pieces: Vec<Value>, ids: usize) -> Value {
    let special = json!({"x": {"id": "x", "ids": vec![0; ids], "tokens": vec!["a"; ids]}});
    json!({"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": special})
}

#[test]
fn steps_that_make_texts_much_longer_are_refused() {
    let (special, text) =
        (json!({"SpecialToken": {"id": "x", "type_id": 0}}), json!({"Sequence": {"id": "A", "type_id": 0}}));
    let steps = |step: Value, count: usize| vec![step; count];
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true});
    let added = json!({"id": 2, "content": "x".repeat(4000), "normalized": true});
    let cases = [
        (
            json!({"normalizer": sequence("normalizers", steps(replace("a", &"a".repeat(3000)), 3))}),
            "normalizer.normalizers[0]: found texts that grow 3.000e3 times",
        ),
        (json!({"normalizer": sequence("normalizers", steps(replace("a", "aa"), 24))}), "normalizer.normalizers[7]"),
        (
            json!({"normalizer": sequence("normalizers", steps(json!({"type": "NFKD"}), 3))}),
            "normalizer.normalizers[2]",
        ),
        (json!({"normalizer": sequence("normalizers", steps(json!({"type": "NFC"}), 65))}), "more than 64 steps"),
        (
            json!({"normalizer": {"type": "Prepend", "prepend": "x".repeat(100_000)}}),
            "normalizer.prepend: found 100000 bytes",
        ),
        (json!({"normalizer": {"prepend": "x".repeat(200)}}), "normalizer: found texts that grow"),
        (
            json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/".repeat(4000)}}),
            "not base64 or ends too early",
        ),
        (json!({"pre_tokenizer": sequence("pretokenizers", steps(byte_level, 4))}), "pre_tokenizer.pretokenizers[3]"),
        (json!({"decoder": sequence("decoders", steps(replace("e", &"e".repeat(1000)), 4))}), "decoder.decoders[0]"),
        (json!({"decoder": sequence("decoders", steps(replace("a", "aa"), 40))}), "decoder.decoders[4]"),
        (json!({"post_processor": template(steps(special.clone(), 1025), 1)}), "post_processor: found 1025 pieces"),
        (json!({"post_processor": template(vec![text.clone(), special.clone()], 1025)}), "1025 tokens added"),
        (
            json!({"post_processor": sequence("processors", steps(template(vec![special, text.clone()], 600), 2))}),
            "post_processor.processors[1]",
        ),
        (json!({"post_processor": template(steps(text, 2), 1)}), "sequence A 2 times"),
        (
            json!({"model": {"type": "BPE", "vocab": {"a": 0, "b".repeat(5000): 1}, "merges": []}}),
            "a token of 5000 bytes",
        ),
        (
            json!({"model": {"type": "BPE", "vocab": {"a": 303, "b": 0, "ent": 303}, "merges": []}}),
            "two tokens with the id 303",
        ),
        (
            json!({"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 1_000_000}}),
            "model.max_input_chars_per_word: found 1000000",
        ),
        (json!({"added_tokens": [{"id": 2, "content": "x".repeat(5000)}]}), "added_tokens[0]"),
        (
            json!({"normalizer": replace("x", &"x".repeat(120)), "added_tokens": steps(added, 200)}),
            "added_tokens: found tokens that may take",
        ),
    ];
    for (parts, expected) in cases {
        let said = refusal(&parts);
        assert!(said.contains(expected) && said.len() < 300, "expected {expected}: {said}");
    }
}

#[test]
fn patterns_that_backtrack_or_become_large_are_refused() {
    let slow = [
        r"(?=(a|a)+(?!b)$)b",
        r"(a+)+(?!b)",
        r"(a|b)*(?!c)",
        r"(\w+)\1",
        r"a*a*a*(?!b)",
        r"a+(?=.*b)",
        r"\ba+a+\b",
        "(?:a?){30}(?!b)",
        &(r"a?".repeat(30) + "(?!b)"),
        r"(?>a+)+(?!b)x+y+(?!z)",
    ]
    .map(str::to_string);
    for pattern in slow {
        let said = refusal(&json!({"pre_tokenizer": split(&pattern)}));
        assert!(said.contains("pre_tokenizer.pattern: found a pattern that backtracks"), "{pattern}: {said}");
    }
    for (pattern, expected) in [
        (r"\p{L}{2000}".to_string(), "found a pattern of 2.000e3 characters"),
        (r"((\p{L}{100}){100}){100}".into(), "found a pattern of 1.000e6 characters"),
        ("(".into(), "found a pattern that cannot be used"),
        ("x".repeat(5000), "found 5000 bytes"),
    ] {
        let said = refusal(&json!({"pre_tokenizer": split(&pattern)}));
        assert!(said.contains(expected), "{pattern}: {said}");
    }
}

#[test]
fn patterns_of_known_models_are_accepted() {
    let cased = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+";
    let signs = r"[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+| ?[\p{P}\p{S}]+[\r\n]*";
    let end = r"\s*[\r\n]+|\s+(?!\S)|\s+";
    for pattern in [
        format!(r"(?i:'s|'t|'ll)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{end}"),
        format!(r"'(?i:[sd]|ll)|[^\r\n\p{{L}}]?+\p{{L}}++|\p{{N}}{{1,3}}+| ?[^\s\p{{L}}]++[\r\n]*+|\s++$|{end}"),
        format!(r"[^\r\n\p{{L}}\p{{N}}]?{cased}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}|{end}"),
        format!(r"{signs}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|{end}"),
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+".into(),
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))".into(),
        r"\d{1,3}(?=(?:\d{3})*\b)".into(),
        r"(?=(\d{3})+(?!\d))".into(),
        r" ?[^(\s|[.,!?…。，、।۔،])]+".into(),
    ] {
        patterns::check(&pattern).expect(&pattern);
    }
}

#[test]
fn tokenizers_of_all_fixtures_are_accepted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let more = std::env::var("IEC_TOKENIZERS").unwrap_or_default();
    let fixtures = std::fs::read_dir(root.join("tests/fixtures")).unwrap().map(|entry| entry.unwrap().path());
    let more = more.split(':').filter(|dir| !dir.is_empty()).map(Into::into);
    let files = fixtures.chain([root.join("assets/stories260k")]).chain(more).map(|dir| dir.join("tokenizer.json"));
    let mut count = 0;
    for path in files.filter(|path| path.exists()) {
        let bounds = check(&std::fs::read(&path).unwrap()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert!(bounds.encode_growth <= 24.0 && bounds.decode_growth <= 2.0, "{}: {bounds:?}", path.display());
        count += 1;
    }
    assert!(count >= 15, "{count}");
}

#[test]
fn the_character_map_of_t5_would_pass_with_its_other_steps() {
    // A map from `a` to 11 bytes: the growth of the real map, whose longest replacement is that of U+FDFA.
    let map = charsmap("a", "bbbbbbbbbbb");
    let spaces = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"});
    let normalizer = sequence("normalizers", vec![json!({"type": "Precompiled", "precompiled_charsmap": map}), spaces]);
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let bounds = check(&file(&json!({"normalizer": normalizer, "pre_tokenizer": metaspace}))).unwrap();
    assert_eq!(bounds.encode_growth, 99.0);
    assert_eq!(bounds.bytes_per_token, None);
    let longer = json!({"type": "Precompiled", "precompiled_charsmap": charsmap("a", &"b".repeat(200))});
    assert!(refusal(&json!({"normalizer": longer})).contains("grow 2.000e2 times"));
}

/// Returns a character map with one key of one byte.
fn charsmap(key: &str, replacement: &str) -> String {
    let mut units = vec![0u32; 512];
    let at = 256 ^ key.as_bytes()[0] as usize;
    units[0] = 256 << 10;
    units[at] = u32::from(key.as_bytes()[0]) | 1 << 8 | 1 << 10;
    let mut blob = (units.len() as u32 * 4).to_le_bytes().to_vec();
    blob.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
    blob.extend(replacement.bytes().chain([0]));
    base64(&blob)
}

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits = (0..3).fold(0u32, |bits, i| bits << 8 | u32::from(*three.get(i).unwrap_or(&0)));
        for i in 0..4 {
            let c = ALPHABET[(bits >> (18 - 6 * i)) as usize & 63] as char;
            text.push(if i <= three.len() { c } else { '=' });
        }
    }
    text
}

#[test]
fn no_character_grows_or_shrinks_more_than_its_step_may() {
    let steps: Vec<(NormalizerWrapper, Growth)> = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel", "Bert"]
        .into_iter()
        .map(|kind| {
            let step = json!({"type": kind, "clean_text": true, "handle_chinese_chars": true, "lowercase": true});
            let step = typed::<NormalizerWrapper>(&step, "normalizer").unwrap().unwrap();
            let mut growth = Growth::new(f64::INFINITY);
            growth.normalizer(&step, "normalizer").unwrap();
            (step, growth)
        })
        .collect();
    let planes = (0..0x3_4000).chain(0xe_0000..0xe_0200).filter_map(char::from_u32);
    for c in planes {
        for (step, growth) in &steps {
            let mut text = NormalizedString::from(c.to_string());
            step.normalize(&mut text).unwrap();
            let (before, after) = (c.len_utf8() as f64, text.get().len() as f64);
            assert!(after <= growth.total.grow * before, "{c:?} grows from {before} to {after} by {step:?}");
            let shrink = growth.total.shrink;
            assert!(
                shrink.is_infinite() || before <= shrink * after,
                "{c:?} shrinks from {before} to {after} by {step:?}"
            );
        }
    }
}

const CHARACTERS: [&str; 18] =
    ["a", "a", "b", "ab", " ", "  ", "é", "e\u{301}", "▁", "Ａ", "\u{fdfa}", "ﬁ", "中", "K", "1", ".", "\n", "가"];

const TOKENS: [&str; 10] = ["", "a", "aa", "Ġa", "é", "Ã", "<0x41>", "<0xFF>", " ", "▁b"];

fn normalizer() -> impl Strategy<Value = Value> {
    let text = select(&["", "a", "b", " ", "é", "ab", "▁"][..]);
    let regex = select(&["a+", "[ab]", r"\s{2,}", "b*", "(?=a)", "^", r"\p{L}(?!b)"][..]);
    let content = select(&["", "x", "aa", "▁▁", " "][..]);
    let plain = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel"];
    prop_oneof![
        (text.clone(), content.clone()).prop_map(|(pattern, content)| replace(pattern, content)),
        (regex, content.clone()).prop_map(
            |(pattern, content)| json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
        ),
        content.prop_map(|text| json!({"type": "Prepend", "prepend": text})),
        select(plain.to_vec()).prop_map(|kind| json!({"type": kind})),
        any::<[bool; 4]>().prop_map(|[a, b, c, d]| json!({
            "type": "Bert", "clean_text": a, "handle_chinese_chars": b, "strip_accents": c, "lowercase": d})),
        Just(json!({"type": "Strip", "strip_left": true, "strip_right": true})),
        Just(json!({"type": "Precompiled", "precompiled_charsmap": charsmap("a", "xyz")})),
    ]
}

fn pre_tokenizer() -> impl Strategy<Value = Value> {
    let behavior = select(&["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"][..]);
    let regex = select(&["a", r"\p{L}+", "", r"\s+(?!\S)|\s+"][..]);
    let plain = ["Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts"];
    prop_oneof![
        (regex, behavior.clone(), any::<bool>()).prop_map(|(pattern, behavior, invert)| json!({
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert})),
        any::<[bool; 2]>().prop_map(|[prefix, regex]| json!({
            "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex})),
        (select(&["always", "first", "never"][..]), any::<bool>()).prop_map(|(scheme, split)| json!({
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})),
        behavior.prop_map(|behavior| json!({"type": "Punctuation", "behavior": behavior})),
        any::<bool>().prop_map(|single| json!({"type": "Digits", "individual_digits": single})),
        Just(json!({"type": "FixedLength", "length": 2})),
        Just(json!({"type": "CharDelimiterSplit", "delimiter": "a"})),
        select(plain.to_vec()).prop_map(|kind| json!({"type": kind})),
    ]
}

fn decoder() -> impl Strategy<Value = Value> {
    let content = select(&["", "x", "aa", " "][..]);
    let text = select(&["", "a", "b", " "][..]);
    prop_oneof![
        (text.clone(), content).prop_map(|(pattern, content)| replace(pattern, content)),
        text.clone().prop_map(|suffix| json!({"type": "BPEDecoder", "suffix": suffix})),
        (text.clone(), any::<bool>())
            .prop_map(|(prefix, cleanup)| json!({"type": "WordPiece", "prefix": prefix, "cleanup": cleanup})),
        (text, any::<bool>()).prop_map(|(text, cleanup)| json!({
            "type": "CTC", "pad_token": text, "word_delimiter_token": text, "cleanup": cleanup})),
        select(vec!["ByteFallback", "Fuse"]).prop_map(|kind| json!({"type": kind})),
        Just(json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true})),
        Just(json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"})),
        Just(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})),
    ]
}

fn steps<S: Strategy<Value = Value>>(kind: &'static str, step: S) -> impl Strategy<Value = Value> {
    prop::collection::vec(step, 0..5).prop_map(move |steps| sequence(kind, steps))
}

/// Compares the length of a prepared text with the bounds of its steps.
fn compare(normalizers: &Value, pre_tokenizers: &Value, text: &str) -> std::result::Result<(), TestCaseError> {
    let mut growth = Growth::new(f64::INFINITY);
    let normalizer = typed::<NormalizerWrapper>(normalizers, "normalizer").unwrap().unwrap();
    growth.normalizer(&normalizer, "normalizer").unwrap();
    let pre_tokenizer = typed::<PreTokenizerWrapper>(pre_tokenizers, "pre_tokenizer").unwrap().unwrap();
    growth.pre_tokenizer(&pre_tokenizer, "pre_tokenizer").unwrap();
    let prepared = fenced(|| {
        let mut normalized = NormalizedString::from(text);
        normalizer.normalize(&mut normalized)?;
        let mut pieces = PreTokenizedString::from(normalized);
        pre_tokenizer.pre_tokenize(&mut pieces)?;
        let pieces = pieces.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
        Ok(pieces.iter().map(|(piece, ..)| piece.len()).sum::<usize>())
    });
    if let Ok(prepared) = prepared {
        let (before, after) = (text.len() as f64, prepared as f64);
        prop_assert!(after <= growth.total.grow * before, "{before} to {after}: {:?}", growth.total);
        let shrink = growth.total.shrink;
        prop_assert!(shrink.is_infinite() || before <= shrink * after, "{before} to {after}: {:?}", growth.total);
    }
    Ok(())
}

#[test]
fn an_empty_prefix_stays_within_its_bound() {
    let normalizers = sequence("normalizers", vec![json!({"type": "Prepend", "prepend": ""})]);
    let step = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    compare(&normalizers, &sequence("pretokenizers", vec![step]), "▁a").unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(98),
        ..ProptestConfig::with_cases(2000)
    })]

    #[test]
    fn texts_never_grow_or_shrink_beyond_the_bounds(
        normalizers in steps("normalizers", normalizer()),
        pre_tokenizers in steps("pretokenizers", pre_tokenizer()),
        text in prop::collection::vec(select(&CHARACTERS[..]), 0..24),
    ) {
        compare(&normalizers, &pre_tokenizers, &text.concat())?;
    }

    #[test]
    fn decoded_texts_never_grow_beyond_the_bound(
        decoders in steps("decoders", decoder()),
        tokens in prop::collection::vec(select(&TOKENS[..]), 1..12),
    ) {
        let mut growth = Growth::new(f64::INFINITY);
        let decoder = typed::<DecoderWrapper>(&decoders, "decoder").unwrap().unwrap();
        growth.decoder(&decoder, "decoder").unwrap();
        let before: usize = tokens.iter().map(|token| token.len() + 1).sum();
        let tokens: Vec<String> = tokens.iter().map(|token| token.to_string()).collect();
        if let Ok(text) = fenced(|| decoder.decode(tokens)) {
            prop_assert!(text.len() as f64 <= growth.total.grow * before as f64, "{before} to {}", text.len());
        }
    }
}
