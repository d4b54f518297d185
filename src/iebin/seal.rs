//! Appends the hash of a JSON text to the text itself, as its last field.

use crate::sha256::{Digest, Sha256, hex};

const SEAL: &str = ",\n  \"sha256\": \"";

/// Returns `body`, the text of a description without its closing brace, with its hash and the brace appended.
pub fn sealed(body: &str) -> String {
    format!("{body}{SEAL}{}\"\n}}\n", hex(Sha256::new_with_prefix(body)))
}

/// Returns the part of `text` that was passed to [`sealed`]; `None` when `text` has no hash or another one.
pub fn unsealed(text: &str) -> Option<&str> {
    let (body, _) = text.rsplit_once(SEAL)?;
    (sealed(body) == text).then_some(body)
}
