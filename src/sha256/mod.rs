//! SHA-256 in the one spelling that all our files use: lower-case hex.
//!
//! The rounds of one stream wait for each other, so a processor with instructions for them does two streams at once for little more
//! than one takes. [`Stream`] is a hasher of which two can be fed together ([`Stream::update_both`]).

mod two;

pub use sha2::{Digest, Sha256};

/// The digest of everything the hasher was given.
pub fn hex(hasher: Sha256) -> String {
    in_hex(&hasher.finalize())
}

fn in_hex(digest: &[u8]) -> String {
    use std::fmt::Write;
    digest.iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Bytes that are compressed at once.
type Block = [u8; 64];

/// Eight words that stand for all blocks so far.
type State = [u32; 8];

/// A hasher that can be fed together with another one.
#[derive(Debug, Clone)]
pub struct Stream {
    state: State,
    /// All bytes so far.
    len: u64,
    /// The last `len % 64` of them.
    rest: Block,
}

impl Default for Stream {
    fn default() -> Stream {
        let state =
            [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];
        Stream { state, len: 0, rest: [0; 64] }
    }
}

impl Stream {
    /// Hashes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let blocks = self.begin(bytes);
        sha2::block_api::compress256(&mut self.state, blocks);
    }

    /// Hashes the next bytes of two streams.
    pub fn update_both(&mut self, bytes: &[u8], other: &mut Stream, of_other: &[u8]) {
        let (mine, others) = (self.begin(bytes), other.begin(of_other));
        let both = mine.len().min(others.len());
        let (mine, my_rest) = mine.split_at(both);
        let (others, others_rest) = others.split_at(both);
        two::compress(&mut self.state, mine, &mut other.state, others);
        sha2::block_api::compress256(&mut self.state, my_rest);
        sha2::block_api::compress256(&mut other.state, others_rest);
    }

    /// The digest of everything the hasher was given.
    pub fn hex(mut self) -> String {
        let bits = self.len.wrapping_mul(8);
        // A one, zeros, and the length at the end of a block.
        let mut padding = [0u8; 128];
        padding[0] = 0x80;
        let zeros = (119 - self.len as usize % 64) % 64;
        padding[zeros + 1..][..8].copy_from_slice(&bits.to_be_bytes());
        self.update(&padding[..zeros + 9]);
        let digest: Vec<u8> = self.state.iter().flat_map(|word| word.to_be_bytes()).collect();
        in_hex(&digest)
    }

    /// Takes note of the bytes; returns those that are whole blocks still to be compressed.
    fn begin<'a>(&mut self, bytes: &'a [u8]) -> &'a [Block] {
        let held = (self.len % 64) as usize;
        self.len += bytes.len() as u64;
        let mut bytes = bytes;
        if held > 0 {
            let (head, tail) = bytes.split_at(bytes.len().min(64 - held));
            self.rest[held..held + head.len()].copy_from_slice(head);
            if held + head.len() < 64 {
                return &[];
            }
            sha2::block_api::compress256(&mut self.state, &[self.rest]);
            bytes = tail;
        }
        let (blocks, rest) = bytes.as_chunks();
        self.rest[..rest.len()].copy_from_slice(rest);
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn the_digest_of_abc_is_the_one_of_the_standard() {
        let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(Sha256::new_with_prefix("abc")), digest);
        let mut stream = Stream::default();
        stream.update(b"abc");
        assert_eq!(stream.hex(), digest);
    }

    #[test]
    fn two_streams_fed_together_in_pieces_give_the_digests_of_each_alone() {
        let mut rng = Rng::new(5);
        let mut up_to = |n: usize| rng.next_u64() as usize % (n + 1);
        let bytes: Vec<u8> = (0..3000).map(|_| up_to(255) as u8).collect();
        for case in 0..300 {
            let (a, b) = (&bytes[..up_to(3000)], &bytes[up_to(1500)..][..up_to(1500)]);
            let (mut one, mut other) = (Stream::default(), Stream::default());
            let (mut i, mut j) = (0, 0);
            while (i, j) != (a.len(), b.len()) {
                let (m, n) = (up_to((a.len() - i).min(500)), up_to((b.len() - j).min(500)));
                match case % 3 {
                    0 => (one.update(&a[i..i + m]), other.update(&b[j..j + n])).1,
                    1 => one.update_both(&a[i..i + m], &mut other, &b[j..j + n]),
                    _ => other.update_both(&b[j..j + n], &mut one, &a[i..i + m]),
                }
                (i, j) = (i + m, j + n);
            }
            assert_eq!(one.hex(), hex(Sha256::new_with_prefix(a)), "{}", a.len());
            assert_eq!(other.hex(), hex(Sha256::new_with_prefix(b)), "{}", b.len());
        }
    }
}
