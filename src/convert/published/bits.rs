//! Unpacks codes of 1 to 8 bits from dense bit streams, words and nibbles into one byte per code.

use super::coded::INTERLEAVED;

/// Unpacks the codes from number `first` on of a dense little-endian bit stream; code `j` has bits `bits * j ..`.
///
/// # Panics
/// The stream ends before the last code.
pub(super) fn stream(bytes: &[u8], bits: u32, first: usize, out: &mut [u8]) {
    match bits {
        8 => out.copy_from_slice(&bytes[first..first + out.len()]),
        4 if first.is_multiple_of(2) => {
            let (pairs, rest) = out.as_chunks_mut::<2>();
            let bytes = &bytes[first / 2..];
            for (pair, byte) in pairs.iter_mut().zip(bytes) {
                *pair = [byte & 15, byte >> 4];
            }
            if let [last] = rest {
                *last = bytes[pairs.len()] & 15;
            }
        }
        _ => {
            let mask = ((1u16 << bits) - 1) as u8;
            for (j, code) in (first..).zip(out) {
                let at = j * bits as usize;
                let low = u16::from(bytes[at / 8]);
                // The next byte is read only if the code reaches into it; it may not exist otherwise.
                let is_split = at % 8 + bits as usize > 8;
                let high = if is_split { u16::from(bytes[at / 8 + 1]) } else { 0 };
                *code = ((low | high << 8) >> (at % 8)) as u8 & mask;
            }
        }
    }
}

/// Unpacks the first codes of 32-bit words with `32 / bits` codes each, lowest bits first.
pub(super) fn words(bytes: &[u8], bits: u32, out: &mut [u8]) {
    let (words, _) = bytes.as_chunks::<4>();
    for (word, codes) in words.iter().zip(out.chunks_mut((32 / bits) as usize)) {
        let mut word = u32::from_le_bytes(*word);
        for code in codes {
            *code = (word & ((1 << bits) - 1)) as u8;
            word = word.checked_shr(bits).unwrap_or(0);
        }
    }
}

/// Unpacks the nibbles from number `first` on of bytes whose high nibble comes first.
pub(super) fn high_nibble_first(bytes: &[u8], first: usize, out: &mut [u8]) {
    for (j, code) in (first..).zip(out) {
        *code = if j % 2 == 0 { bytes[j / 2] >> 4 } else { bytes[j / 2] & 15 };
    }
}

/// Nibble of each output of a word: the inverse of [`INTERLEAVED`].
const NIBBLE: [usize; 8] = {
    let (mut nibble, mut i) = ([0; 8], 0);
    while i < 8 {
        nibble[INTERLEAVED[i]] = i;
        i += 1;
    }
    nibble
};

/// Returns the nibble of an output among words of eight outputs in interleaved order; `words` are little-endian.
pub(super) fn interleaved(words: &[u8], output: usize) -> u8 {
    let nibble = NIBBLE[output % 8];
    words[output / 8 * 4 + nibble / 2] >> (nibble % 2 * 4) & 15
}

/// Unpacks the outputs from number `first` on of lines of words, each of which holds a column as [`interleaved`]
/// expects, to rows of `cols` codes.
///
/// # Panics
/// A line ends before the last output.
pub(super) fn interleaved_rows(lines: &[u8], first: usize, cols: usize, out: &mut [u8]) {
    /// Columns whose words stay in the first-level cache while many rows are written.
    const AT_ONCE: usize = 256;
    let words = lines.as_chunks::<4>().0;
    let width = words.len() / cols.max(1);
    for start in (0..cols).step_by(AT_ONCE) {
        let until = cols.min(start + AT_ONCE);
        for (row, out) in out.chunks_exact_mut(cols).enumerate() {
            let (at, bit) = ((first + row) / 8, 4 * NIBBLE[(first + row) % 8]);
            // This loops over indices, because iterator adapters are not certain to be inlined.
            for i in start..until {
                out[i] = (u32::from_le_bytes(words[i * width + at]) >> bit) as u8 & 15;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// Packs codes into a dense bit stream, bit by bit.
    fn packed(codes: &[u8], bits: u32) -> Vec<u8> {
        let mut bytes = vec![0u8; (codes.len() * bits as usize).div_ceil(32) * 4];
        for (j, code) in codes.iter().enumerate() {
            for b in 0..bits as usize {
                let at = j * bits as usize + b;
                bytes[at / 8] |= (code >> b & 1) << (at % 8);
            }
        }
        bytes
    }

    #[test]
    fn streams_of_every_width_give_their_codes_from_any_place() {
        let mut rng = Rng::new(1);
        for bits in 1..=8u32 {
            let codes: Vec<u8> = (0..67).map(|_| (rng.next_u64() & ((1 << bits) - 1)) as u8).collect();
            let bytes = packed(&codes, bits);
            for first in [0, 1, 2, 31, 66, 67] {
                let mut found = vec![0xAA; codes.len() - first];
                stream(&bytes, bits, first, &mut found);
                assert_eq!(found, codes[first..], "{bits} bits from {first}");
            }
        }
    }

    #[test]
    fn words_leave_their_highest_bits_unused() {
        let mut found = [0; 12];
        let text = [(0..10).fold(0u32, |word, i| word | (i % 8) << (3 * i)), 0b101_110];
        words(&text.map(u32::to_le_bytes).concat(), 3, &mut found);
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 6, 5]);
        words(&0x8040_2010u32.to_le_bytes(), 8, &mut found[..4]);
        assert_eq!(found[..4], [0x10, 0x20, 0x40, 0x80]);
    }

    #[test]
    fn nibbles_come_in_the_order_of_their_format() {
        let mut found = [0; 3];
        high_nibble_first(&[0x12, 0x34], 1, &mut found);
        assert_eq!(found, [2, 3, 4]);
        let word = 0x7654_3210u32.to_le_bytes();
        let found: Vec<u8> = (0..8).map(|output| interleaved(&word, output)).collect();
        assert_eq!(found, [0, 4, 1, 5, 2, 6, 3, 7]);
        let mut rng = Rng::new(2);
        let (cols, width) = (300, 3);
        let lines: Vec<u8> = (0..4 * cols * width).map(|_| rng.next_u64() as u8).collect();
        let mut rows = vec![0; 17 * cols];
        interleaved_rows(&lines, 5, cols, &mut rows);
        for (i, code) in rows.iter().enumerate() {
            assert_eq!(*code, interleaved(&lines[4 * width * (i % cols)..], 5 + i / cols));
        }
    }
}
