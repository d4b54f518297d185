//! Mutates files of tokenizers. The first line of an input is the name of a file; its content follows. A model of
//! SentencePiece is edited as a list of fields with a length, a file of `tiktoken` and merges as lines, and the rest as
//! JSON.

use super::{Reader, below, edit, json, one_in};
use iec::rng::Rng;

pub(super) fn mutate(input: &[u8], other: &[u8], rng: &mut Rng) -> Option<Vec<u8>> {
    let (name, content) = split(input, b'\n')?;
    // Parts of another kind of file are of no use.
    let other = split(other, b'\n').filter(|(theirs, _)| *theirs == name).map_or(content, |(_, theirs)| theirs);
    let changed = match name {
        b"tokenizer.model" => fields(content, other, rng)?,
        b"tekken.json" | b"tokenizer_config.json" => json::mutate(content, other, rng)?,
        b"vocab.json" if one_in(2, rng) => {
            let ((vocab, merges), (other, _)) = (split(content, b'\n')?, split(other, b'\n')?);
            [&json::mutate(vocab, other, rng)?, &b"\n"[..], merges].concat()
        }
        _ => lines(content, other, rng),
    };
    Some([name, b"\n", &changed].concat())
}

fn split(bytes: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|byte| *byte == at)?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

fn lines(content: &[u8], other: &[u8], rng: &mut Rng) -> Vec<u8> {
    let list = |bytes: &[u8]| bytes.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect::<Vec<_>>();
    let (mut lines, others) = (list(content), list(other));
    (0..1 + below(rng, 4)).for_each(|_| change(&mut lines, &others, rng));
    lines.join(&b'\n')
}

/// Edits a list, or one of its elements.
fn change(items: &mut Vec<Vec<u8>>, others: &[Vec<u8>], rng: &mut Rng) {
    let (at, from) = (below(rng, items.len()), below(rng, others.len()));
    match items.get_mut(at).filter(|_| one_in(2, rng)) {
        Some(item) => edit(item, others.get(from).map_or(&[], Vec::as_slice), rng),
        None => edit(items, others, rng),
    }
}

/// Edits the fields of a message, each of which is written with its correct length.
fn fields(content: &[u8], other: &[u8], rng: &mut Rng) -> Option<Vec<u8>> {
    let (mut fields, others) = (parse(content)?, parse(other)?);
    for _ in 0..1 + below(rng, 4) {
        let (at, from) = (below(rng, fields.len()), below(rng, others.len()));
        match fields.get_mut(at).filter(|_| one_in(2, rng)) {
            Some((_, field)) => edit(field, others.get(from).map_or(&[], |(_, theirs)| theirs), rng),
            None => edit(&mut fields, &others, rng),
        }
    }
    let mut out = Vec::new();
    for (tag, field) in fields {
        out.push(tag);
        out.extend(varint(field.len() as u64));
        out.extend(field);
    }
    Some(out)
}

/// Splits a message whose fields all have a length and a tag of one byte.
fn parse(content: &[u8]) -> Option<Vec<(u8, Vec<u8>)>> {
    let mut reader = Reader { bytes: content, at: 0 };
    let mut fields = Vec::new();
    while reader.at < content.len() {
        let tag = reader.uint(1)? as u8;
        let mut length = 0;
        for shift in (0..35).step_by(7) {
            let byte = reader.uint(1)?;
            length |= (byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        fields.push((tag, reader.take(length)?.to_vec()));
    }
    Some(fields)
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}
