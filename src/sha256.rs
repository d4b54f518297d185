//! SHA-256 digests in lower-case hex, the form in all files of this program.

use crate::error::{Context, Result};
use crate::{files, interrupt};
pub use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::Path;

/// Bytes that are read and hashed at once.
const PIECE: usize = 1 << 20;

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

/// Returns the digest of a regular file in hex. Calls `read` with the number of bytes of each piece that was read.
///
/// # Errors
/// The file cannot be read, or the program is interrupted.
pub fn of_file(path: &Path, mut read: impl FnMut(u64)) -> Result<String> {
    let mut file = files::open(path)?;
    let (mut hash, mut piece) = (Sha256::new(), vec![0; PIECE]);
    loop {
        interrupt::check()?;
        match file.read(&mut piece).at(path)? {
            0 => return Ok(hex(hash)),
            n => {
                hash.update(&piece[..n]);
                read(n as u64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_several_pieces_has_the_digest_of_its_bytes() {
        let bytes: Vec<u8> = (0..PIECE * 2 + 7).map(|i| (i * 31 % 251) as u8).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let mut count = 0;
        let digest = of_file(file.path(), |n| count += n).unwrap();
        assert_eq!((digest, count), (hex(Sha256::new_with_prefix(&bytes)), bytes.len() as u64));
    }

    #[test]
    fn the_digest_of_abc_is_the_one_of_the_standard() {
        let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(Sha256::new_with_prefix("abc")), digest);
    }
}
