//! Tests the readers with random files: what is written is read again, and damaged files end in an error.

use super::proto::{Algorithm, PieceKind, SentencePieceModel};
use super::{SourceFile, make, names};
use crate::rng::Rng;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use std::path::Path;
use tokenizers::Tokenizer;

/// Number of random files of each kind.
const ROUNDS: usize = 60;

fn below(rng: &mut Rng, n: usize) -> usize {
    (rng.next_u64() % n as u64) as usize
}

/// Appends a field of protocol buffers with a length.
fn field(message: &mut Vec<u8>, number: u64, bytes: &[u8]) {
    varint(message, number << 3 | 2);
    varint(message, bytes.len() as u64);
    message.extend(bytes);
}

fn number(message: &mut Vec<u8>, number: u64, value: u64) {
    varint(message, number << 3);
    varint(message, value);
}

fn varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

/// A random piece: text, score and kind.
type RandomPiece = (String, f32, u64);

/// Returns pieces for `<unk>`, `<s>`, the bytes, all letters, and random words of these letters.
fn pieces(rng: &mut Rng) -> Vec<RandomPiece> {
    let letters: Vec<char> = "abcé▁漢😀".chars().collect();
    let mut pieces = vec![("<unk>".to_string(), 0.0, 2), ("<s>".to_string(), 0.0, 3), ("<x>".to_string(), 0.0, 4)];
    pieces.extend((0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), 0.0, 6)));
    pieces.extend(letters.iter().map(|letter| (letter.to_string(), -1e3, 1)));
    for rank in 0..below(rng, 30) {
        let word: String = (0..2 + below(rng, 3)).map(|_| letters[below(rng, letters.len())]).collect();
        if pieces.iter().all(|(text, ..)| *text != word) {
            pieces.push((word, -(rank as f32), 1));
        }
    }
    pieces
}

/// Returns a model file, in which unknown fields lie between the known ones.
fn model(pieces: &[RandomPiece], algorithm: u64, rng: &mut Rng) -> Vec<u8> {
    let mut file = Vec::new();
    for (text, score, kind) in pieces {
        let mut piece = Vec::new();
        field(&mut piece, 1, text.as_bytes());
        piece.push(2 << 3 | 5);
        piece.extend(score.to_le_bytes());
        number(&mut piece, 3, *kind);
        field(&mut file, 1, &piece);
    }
    let mut trainer = Vec::new();
    number(&mut trainer, 3, algorithm);
    number(&mut trainer, 35, 1);
    // A negative number has ten bytes.
    number(&mut trainer, 42, u64::MAX);
    trainer.push(10 << 3 | 5);
    trainer.extend(1f32.to_le_bytes());
    field(&mut file, 2, &trainer);
    let mut normalizer = Vec::new();
    field(&mut normalizer, 1, b"identity");
    (3..5).for_each(|flag| number(&mut normalizer, flag, below(rng, 2) as u64));
    field(&mut file, 3, &normalizer);
    varint(&mut file, 99 << 3 | 1);
    file.extend([0; 8]);
    file
}

fn file(name: &str, bytes: impl Into<Vec<u8>>) -> SourceFile {
    let name = names().find(|known| *known == name).expect("a known name");
    SourceFile { name, path: Path::new("checkpoint").join(name), bytes: bytes.into() }
}

fn made(files: Vec<SourceFile>, model_type: &str) -> Tokenizer {
    let made = make(files, &[model_type]).unwrap().expect("a vocabulary is among the files");
    Tokenizer::from_bytes(made.json).unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, false).unwrap().get_ids().to_vec()
}

/// Returns a text of letters that are in the vocabularies of these tests, and of some that are not.
fn text(rng: &mut Rng) -> String {
    let letters: Vec<char> = "abcé漢😀z\u{0}\n".chars().collect();
    (0..1 + below(rng, 20)).map(|_| letters[below(rng, letters.len())]).collect()
}

#[test]
fn pieces_are_read_as_they_were_written() {
    let mut rng = Rng::new(1);
    for round in 0..ROUNDS {
        let pieces = pieces(&mut rng);
        let bytes = model(&pieces, 1 + round as u64 % 2, &mut rng);
        let read = SentencePieceModel::parse(&bytes).unwrap();
        assert_eq!(read.pieces.len(), pieces.len());
        for (found, (text, score, kind)) in read.pieces.iter().zip(&pieces) {
            let kinds = [
                PieceKind::Normal,
                PieceKind::Unknown,
                PieceKind::Control,
                PieceKind::UserDefined,
                PieceKind::Unused,
                PieceKind::Byte,
            ];
            assert_eq!((found.text, found.score, found.kind), (&**text, *score, kinds[*kind as usize - 1]));
        }
        let algorithm = [Algorithm::Unigram, Algorithm::Bpe][round % 2];
        assert_eq!((read.trainer.algorithm, read.trainer.byte_fallback), (algorithm, true));
        assert_eq!((read.trainer.bos, read.trainer.eos), (1, -1));
    }
}

#[test]
fn a_model_that_was_cut_between_two_fields_is_refused() {
    let (mut file, mut piece) = (Vec::new(), Vec::new());
    field(&mut piece, 1, b"a");
    for (number, bytes, missing) in [(1, &piece[..], "trainer_spec"), (2, &[], "normalizer_spec")] {
        field(&mut file, number, bytes);
        let why = SentencePieceModel::parse(&file).unwrap_err().to_string();
        assert!(why.contains(&format!("found no {missing}")), "{why}");
    }
    field(&mut file, 3, &[]);
    assert_eq!(SentencePieceModel::parse(&file).unwrap().pieces.len(), 1);
}

/// Merges like SentencePiece: again and again the pair of neighbours whose concatenation has the highest score.
fn merged(text: &str, pieces: &[RandomPiece]) -> Vec<u32> {
    let mut symbols: Vec<String> = text.chars().map(String::from).collect();
    let find = |text: &str| pieces.iter().position(|(piece, _, kind)| piece == text && *kind == 1);
    loop {
        let pairs = (0..symbols.len().saturating_sub(1)).filter_map(|at| {
            let piece = find(&[&*symbols[at], &symbols[at + 1]].concat())?;
            Some((pieces[piece].1, at))
        });
        let Some((_, at)) = pairs.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))) else { break };
        let right = symbols.remove(at + 1);
        symbols[at].push_str(&right);
    }
    let id = |symbol: &String| match find(symbol) {
        Some(id) => vec![id as u32],
        // The bytes follow the first three pieces.
        None => symbol.bytes().map(|byte| 3 + u32::from(byte)).collect(),
    };
    symbols.iter().flat_map(id).collect()
}

#[test]
fn merges_of_random_models_are_those_of_sentence_piece() {
    let mut rng = Rng::new(2);
    let settings = json!({"tokenizer_class": "GemmaTokenizer"}).to_string();
    for _ in 0..ROUNDS {
        let pieces = pieces(&mut rng);
        let mut bytes = model(&pieces, 2, &mut rng);
        // The last field wins: no spaces are removed.
        field(&mut bytes, 3, &[4 << 3, 0]);
        let tokenizer = made(vec![file("tokenizer.model", bytes), file("tokenizer_config.json", &*settings)], "llama");
        for _ in 0..20 {
            let text = text(&mut rng);
            assert_eq!(ids(&tokenizer, &text), merged(&text, &pieces), "{text:?} {pieces:?}");
        }
    }
}

/// Returns random byte tokens: all bytes in a random order, and words of them.
fn byte_tokens(rng: &mut Rng) -> Vec<Vec<u8>> {
    let mut tokens: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
    (0..256).for_each(|at| tokens.swap(at, below(rng, 256)));
    for _ in 0..below(rng, 40) {
        let word = [&tokens[below(rng, tokens.len())][..], &tokens[below(rng, tokens.len())]].concat();
        if !tokens.contains(&word) {
            tokens.push(word);
        }
    }
    tokens
}

#[test]
fn every_rank_of_a_file_of_tiktoken_is_the_id_of_its_bytes() {
    let mut rng = Rng::new(3);
    let settings = json!({"tokenizer_class": "TikTokenTokenizer"}).to_string();
    for _ in 0..ROUNDS {
        let tokens = byte_tokens(&mut rng);
        let line = |(rank, token): (usize, &Vec<u8>)| format!("{} {rank}\n", BASE64.encode(token));
        let lines: String = tokens.iter().enumerate().map(line).collect();
        let tokenizer = made(vec![file("tiktoken.model", lines), file("tokenizer_config.json", &*settings)], "kimi_k2");
        let alphabet = crate::convert::tokenizer_json::byte_alphabet();
        for (rank, token) in tokens.iter().enumerate() {
            let spelled: String = token.iter().map(|byte| alphabet[usize::from(*byte)]).collect();
            assert_eq!(tokenizer.token_to_id(&spelled), Some(rank as u32), "{token:?}");
        }
        let first = tokens.len() as u32;
        assert_eq!(tokenizer.token_to_id(&format!("<|reserved_token_{first}|>")), Some(first));
        for _ in 0..20 {
            let text = text(&mut rng);
            assert_eq!(tokenizer.decode(&ids(&tokenizer, &text), false).unwrap(), text);
        }
    }
}

#[test]
fn every_token_of_a_tekken_file_follows_its_special_tokens() {
    let mut rng = Rng::new(4);
    for _ in 0..ROUNDS {
        let tokens = byte_tokens(&mut rng);
        let count = below(&mut rng, 4);
        let special: Vec<Value> =
            (0..2 + count).map(|rank| json!({"rank": rank, "token_str": format!("[{rank}]")})).collect();
        let entry = |(rank, token): (usize, &Vec<u8>)| json!({"rank": rank, "token_bytes": BASE64.encode(token)});
        let vocab: Vec<Value> = tokens.iter().enumerate().map(entry).collect();
        let all = 6 + count + tokens.len();
        let config =
            json!({"pattern": "\\S+|\\s+", "default_num_special_tokens": 6 + count, "default_vocab_size": all});
        let content = json!({"config": config, "vocab": vocab, "special_tokens": special}).to_string();
        let tokenizer = made(vec![file("tekken.json", content)], "mistral");
        assert_eq!(tokenizer.get_vocab_size(true), all);
        assert_eq!(tokenizer.token_to_id(&format!("<SPECIAL_{}>", 5 + count)), Some(5 + count as u32));
        let text = text(&mut rng);
        let found = ids(&tokenizer, &format!("{text}[1]"));
        assert_eq!(found.last(), Some(&1));
        assert_eq!(tokenizer.decode(&found[..found.len() - 1], false).unwrap(), text);
    }
}

#[test]
fn damaged_files_of_every_kind_end_in_an_error_or_a_tokenizer() {
    let mut rng = Rng::new(5);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers");
    let (mut read, mut refused) = (0, 0);
    for case in ["llama", "mistral-unigram", "gpt2", "kimi", "tekken"] {
        let content = |name: &str| {
            let plain = std::fs::read(root.join(case).join(name));
            plain.or_else(|_| zstd::decode_all(&std::fs::read(root.join(case).join(format!("{name}.zst")))?[..]))
        };
        let files: Vec<SourceFile> = names().filter_map(|name| Some(file(name, content(name).ok()?))).collect();
        let model_type: Value = serde_json::from_slice(&content("config.json").unwrap()).unwrap();
        for _ in 0..ROUNDS {
            let mut files = files.clone();
            let at = below(&mut rng, files.len());
            let bytes = &mut files[at].bytes;
            for _ in 0..1 + below(&mut rng, 3) {
                let (at, length) = (below(&mut rng, bytes.len().max(1)), bytes.len());
                match below(&mut rng, 3) {
                    0 => bytes.truncate(at),
                    1 if length > 0 => bytes[at] = rng.next_u64() as u8,
                    _ => bytes.insert(at, rng.next_u64() as u8),
                }
            }
            match make(files, &[model_type["model_type"].as_str().unwrap()]) {
                Ok(made) => read += usize::from(made.is_some()),
                Err(_) => refused += 1,
            }
        }
    }
    assert!(read > 10 && refused > 100, "{read} read, {refused} refused");
}
