//! Computes the growth of a `Precompiled` normalizer, the character map of SentencePiece.
//!
//! The map is a base64 text of three parts: the size of a trie in bytes (u32, little endian), the trie as a double
//! array of u32 units, and replacements that end with a zero byte. A unit of the trie has the label of its edge in
//! bits 0 to 7, a mark for a complete key in bit 8, and in bits 10 to 30 the offset of its children, which is shifted
//! left by 8 bits if bit 9 is set. The position of a child is the XOR of the unit's position, the offset and the label
//! of the child. For a complete key, the child with the label 0 holds the position of the replacement.

use crate::error::{Error, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use std::collections::BTreeSet;

/// Longest grapheme in bytes that is looked up as a whole; longer ones are looked up character by character.
const LONGEST_KEY: usize = 5;
/// Largest accepted length of the base64 text in bytes; the maps of known models have 320 KB.
const LIMIT: usize = 1 << 20;

/// A character map.
pub(super) struct CharsMap {
    units: Vec<u32>,
    replacements: Vec<u8>,
}

/// Parses a map.
///
/// # Errors
/// The map is too large, or shorter than it states.
pub(super) fn parse(base64: &str) -> Result<CharsMap> {
    if base64.len() > LIMIT {
        let found = format!("found a character map of {} bytes, expected at most {LIMIT}", base64.len());
        return Err(Error::corrupt(found));
    }
    let broken = || Error::corrupt("found a precompiled_charsmap that is not base64 or ends too early");
    let blob = BASE64.decode(base64).map_err(|_| broken())?;
    let (size, rest) = blob.split_first_chunk::<4>().ok_or_else(broken)?;
    let trie = u32::from_le_bytes(*size) as usize / 4 * 4;
    let (trie, replacements) = rest.split_at_checked(trie).ok_or_else(broken)?;
    let units = trie.as_chunks().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    Ok(CharsMap { units, replacements: replacements.to_vec() })
}

/// Returns the largest number of bytes by which a map replaces one byte. Visits all nodes that a key can reach, by the
/// length of the key. A node that is reached twice at one length is visited once, so that a hostile trie with cycles
/// costs no more than a large one.
pub(super) fn growth(CharsMap { units, replacements }: &CharsMap) -> f64 {
    let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
    let lengths = replacement_lengths(replacements);
    let mut largest = 1.0f64;
    let mut nodes = BTreeSet::from_iter(units.first().map(|root| offset(*root)));
    for key_length in 1..=LONGEST_KEY {
        let mut next = BTreeSet::new();
        for (node, byte) in nodes.iter().flat_map(|node| (1..=255usize).map(move |byte| (*node, byte))) {
            let at = node ^ byte;
            let Some(&unit) = units.get(at) else { continue };
            if unit & ((1 << 31) | 0xff) != byte as u32 {
                continue;
            }
            let child = at ^ offset(unit);
            if unit & (1 << 8) != 0 {
                let value = units.get(child).map_or(0, |value| value & !(1 << 31)) as usize;
                let length = lengths.get(value).copied().unwrap_or(0);
                largest = largest.max(f64::from(length) / key_length as f64);
            } else {
                // Only the shortest key counts, so nothing below a complete one is ever used.
                next.insert(child);
            }
        }
        nodes = next;
    }
    largest
}

/// Returns for each position the length in bytes of the replacement that starts there: the distance to the next zero
/// byte.
fn replacement_lengths(replacements: &[u8]) -> Vec<u32> {
    let mut lengths = vec![0; replacements.len()];
    let mut length = 0;
    for (at, byte) in replacements.iter().enumerate().rev() {
        length = if *byte == 0 { 0 } else { length + 1 };
        lengths[at] = length;
    }
    lengths
}
