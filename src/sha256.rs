//! SHA-256 digests in lower-case hex, the form in all files of this program.

pub use sha2::{Digest, Sha256};

/// Returns the digest of all bytes that the hasher was given, in hex.
pub fn hex(hasher: Sha256) -> String {
    hex_of(hasher)
}

/// Returns the digest of any hash function in hex, like [`hex`].
pub fn hex_of(hasher: impl Digest) -> String {
    use std::fmt::Write;
    hasher.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_of_abc_is_the_one_of_the_standard() {
        let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(Sha256::new_with_prefix("abc")), digest);
    }
}
