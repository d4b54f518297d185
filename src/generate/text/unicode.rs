//! Normal forms of Unicode texts.

use crate::error::{Error, Result};
use serde::Deserialize;
use tokenizers::normalizers::{NFC, NFD, NFKC, NFKD};
use tokenizers::{NormalizedString, Normalizer};

/// Normal form of Unicode texts (Unicode Standard Annex #15).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnicodeForm {
    /// Canonical composition.
    Nfc,
    /// Canonical decomposition.
    Nfd,
    /// Compatibility composition.
    Nfkc,
    /// Compatibility decomposition.
    Nfkd,
}

impl UnicodeForm {
    /// Returns the text in this form.
    ///
    /// # Errors
    /// The normalizer fails.
    pub fn of(self, text: &str) -> Result<String> {
        let mut normalized = NormalizedString::from(text);
        let done = match self {
            UnicodeForm::Nfc => NFC.normalize(&mut normalized),
            UnicodeForm::Nfd => NFD.normalize(&mut normalized),
            UnicodeForm::Nfkc => NFKC.normalize(&mut normalized),
            UnicodeForm::Nfkd => NFKD.normalize(&mut normalized),
        };
        done.map_err(|e| Error::usage(format!("the prompt cannot be normalized: {e}")))?;
        Ok(normalized.get().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_those_of_the_standard() {
        // U+00E9, U+0065 U+0301, and the ligature U+FB01.
        let cases = [
            (UnicodeForm::Nfc, "e\u{301}\u{fb01}", "\u{e9}\u{fb01}"),
            (UnicodeForm::Nfd, "\u{e9}\u{fb01}", "e\u{301}\u{fb01}"),
            (UnicodeForm::Nfkc, "e\u{301}\u{fb01}", "\u{e9}fi"),
            (UnicodeForm::Nfkd, "\u{e9}\u{fb01}", "e\u{301}fi"),
        ];
        for (form, text, expected) in cases {
            assert_eq!(form.of(text).unwrap(), expected, "{form:?}");
        }
    }
}
