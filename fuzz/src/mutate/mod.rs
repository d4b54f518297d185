//! Structural mutations of inputs: an input is parsed into a small model of its format, the model is changed in a few
//! places, and the changed model is written with correct lengths, counts and checksums.
//!
//! An input with random bytes is mostly refused by the outer layer of its format. An input with a correct outer layer
//! reaches the code behind it. Every format is modelled as lists of elements, so all formats share [`edit`].

mod gguf;
mod json;
mod pickle;
mod safetensors;
mod template;
mod tokenizer_files;
mod toml;

use iec::rng::Rng;
use std::ops::Range;

/// Mutates an input of a target in one to four places, with parts of another input of the target. Returns `None` when
/// the input does not have the outer structure of its format, or when the result would be longer than `limit` bytes.
pub fn mutate(target: &str, input: &[u8], other: &[u8], rng: &mut Rng, limit: usize) -> Option<Vec<u8>> {
    let mutate = match target {
        "safetensors" | "adapter" => safetensors::mutate,
        "pickle" => pickle::mutate,
        "gguf" => gguf::mutate,
        "template" => template::mutate,
        "api_keys" | "serve_config" => toml::mutate,
        "dedup" => json::mutate_open,
        "prefix_page" | "gbnf" => mutate_bytes,
        "tokenizer_files" => tokenizer_files::mutate,
        _ => json::mutate,
    };
    mutate(input, other, rng).filter(|output| output.len() <= limit)
}

/// Mutates an input without any structure.
fn mutate_bytes(input: &[u8], other: &[u8], rng: &mut Rng) -> Option<Vec<u8>> {
    let mut bytes = input.to_vec();
    (0..1 + below(rng, 4)).for_each(|_| edit(&mut bytes, other, rng));
    Some(bytes)
}

/// Returns a random number below `n`, or 0 when `n` is 0.
pub fn below(rng: &mut Rng, n: usize) -> usize {
    (rng.next_u64() % n.max(1) as u64) as usize
}

/// Returns true once in `n` calls on average.
fn one_in(n: usize, rng: &mut Rng) -> bool {
    below(rng, n) == 0
}

/// Returns a random element of a list that is not empty.
fn pick<'a, T>(items: &'a [T], rng: &mut Rng) -> &'a T {
    &items[below(rng, items.len())]
}

/// Returns a random range of a list of `n` elements: mostly one element, at most eight; empty if `n` is 0.
fn range(n: usize, rng: &mut Rng) -> Range<usize> {
    let (start, longest) = (below(rng, n), *pick(&[1, 1, 2, 8], rng));
    start..n.min(start + 1 + below(rng, longest))
}

/// Edits a list in one place: deletes, repeats, moves or swaps elements, or copies elements of another list.
fn edit<T: Clone>(items: &mut Vec<T>, others: &[T], rng: &mut Rng) {
    let (part, copied) = (range(items.len(), rng), range(others.len(), rng));
    let to = below(rng, items.len());
    match below(rng, 6) {
        0 => drop(items.drain(part)),
        1 => drop(items.splice(to..to, items[part].to_vec())),
        2 => items[part.start.min(to)..part.end.max(to)].rotate_left(part.len()),
        3 if !items.is_empty() => items.swap(part.start, to),
        4 => drop(items.splice(part, others[copied].iter().cloned())),
        _ => drop(items.splice(to..to, others[copied].iter().cloned())),
    }
}

/// Edits the characters of a text in one place as [`edit`] does; texts of `others` are copied as a whole.
fn edit_text(text: &mut Vec<u8>, others: &[&str], rng: &mut Rng) {
    let own = String::from_utf8_lossy(text).into_owned();
    let mut letters: Vec<&str> = own.split("").collect();
    edit(&mut letters, others, rng);
    *text = letters.concat().into_bytes();
}

/// Returns a neighbour, a multiple or a fraction of a number, or an edge value: a power of two or a neighbour of one,
/// which includes the limits of all integer types and of exact floats.
fn number(n: u64, rng: &mut Rng) -> u64 {
    let power = 1u64.checked_shl(below(rng, 65) as u32).unwrap_or(0);
    let factor = 1 + below(rng, 8) as u64;
    *pick(
        &[
            n.wrapping_add(1),
            n.wrapping_sub(1),
            n.wrapping_mul(factor),
            n / factor,
            power,
            power.wrapping_sub(1),
            power + 1,
        ],
        rng,
    )
}

/// Reads fields of binary formats; every function returns `None` at the end of the bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: u64) -> Option<&'a [u8]> {
        let end = self.at.checked_add(usize::try_from(n).ok()?)?;
        let taken = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    /// Reads a little-endian integer of at most 8 bytes.
    fn uint(&mut self, nbytes: u64) -> Option<u64> {
        Some(self.take(nbytes)?.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }

    /// Reads bytes that follow their length, which is an integer of `nbytes` bytes.
    fn prefixed(&mut self, nbytes: u64) -> Option<&'a [u8]> {
        let length = self.uint(nbytes)?;
        self.take(length)
    }
}
