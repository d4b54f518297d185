//! Keys in PEM files: private keys in PKCS #8 (RFC 5958), public keys as `SubjectPublicKeyInfo` (RFC 5280).

use crate::error::{Context, Error, Result};
use crate::files;
use crate::sha256::{Digest, Sha256, hex};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{self, EcdsaKeyPair, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use std::path::Path;

/// A key file that is larger than this in bytes is refused.
const LARGEST: u64 = 64 << 10;
/// Characters of base64 per line of a PEM file (RFC 7468).
const LINE: usize = 64;
/// First bytes of an Ed25519 key in PKCS #8 (RFC 8410); the seed of 32 bytes follows.
const ED25519_PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Algorithm of a key.
struct Algorithm {
    name: &'static str,
    /// First bytes of a public key in DER; the `key_bytes` bytes of the key itself follow.
    prefix: &'static [u8],
    key_bytes: usize,
    verification: &'static dyn signature::VerificationAlgorithm,
}

static ED25519: Algorithm = Algorithm {
    name: "ed25519",
    prefix: &[0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00],
    key_bytes: 32,
    verification: &signature::ED25519,
};

static P256: Algorithm = Algorithm {
    name: "ecdsa-p256",
    prefix: &[
        0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48,
        0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
    ],
    key_bytes: 65,
    verification: &signature::ECDSA_P256_SHA256_ASN1,
};

static P384: Algorithm = Algorithm {
    name: "ecdsa-p384",
    prefix: &[
        0x30, 0x76, 0x30, 0x10, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x05, 0x2b, 0x81, 0x04,
        0x00, 0x22, 0x03, 0x62, 0x00,
    ],
    key_bytes: 97,
    verification: &signature::ECDSA_P384_SHA384_ASN1,
};

/// Key that makes signatures.
pub struct PrivateKey {
    pair: Pair,
    public: PublicKey,
}

enum Pair {
    Ed25519(Ed25519KeyPair),
    Ecdsa(EcdsaKeyPair),
}

/// Key that checks signatures.
#[derive(Clone)]
pub struct PublicKey {
    algorithm: &'static Algorithm,
    bytes: Vec<u8>,
}

impl PrivateKey {
    /// Reads a private key from a PEM file.
    ///
    /// # Errors
    /// The file is no PKCS #8 key of a supported algorithm, or is encrypted.
    pub fn open(path: &Path) -> Result<PrivateKey> {
        PrivateKey::from_pem(&files::read_text(path, LARGEST)?).at(path)
    }

    fn from_pem(text: &str) -> Result<PrivateKey> {
        let pkcs8 = der(text, "PRIVATE KEY")?;
        if let Ok(pair) = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&pkcs8) {
            return Ok(PrivateKey::ed25519(pair));
        }
        let random = SystemRandom::new();
        let curves =
            [(&P256, &signature::ECDSA_P256_SHA256_ASN1_SIGNING), (&P384, &signature::ECDSA_P384_SHA384_ASN1_SIGNING)];
        for (algorithm, signing) in curves {
            if let Ok(pair) = EcdsaKeyPair::from_pkcs8(signing, &pkcs8, &random) {
                let public = PublicKey { algorithm, bytes: pair.public_key().as_ref().to_vec() };
                return Ok(PrivateKey { pair: Pair::Ecdsa(pair), public });
            }
        }
        Err(Error::unsupported("found a private key of another algorithm, expected Ed25519, ECDSA P-256 or P-384")
            .help("make one with `iec sign --new-key FILE`"))
    }

    fn ed25519(pair: Ed25519KeyPair) -> PrivateKey {
        let public = PublicKey { algorithm: &ED25519, bytes: pair.public_key().as_ref().to_vec() };
        PrivateKey { pair: Pair::Ed25519(pair), public }
    }

    /// Makes a new Ed25519 key; returns it and its PEM text.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn generate() -> Result<(PrivateKey, String)> {
        let mut seed = [0; 32];
        SystemRandom::new().fill(&mut seed).map_err(|_| no_random_numbers())?;
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed).expect("a seed of 32 bytes is a key");
        Ok((PrivateKey::ed25519(pair), pem("PRIVATE KEY", &[&ED25519_PKCS8[..], &seed].concat())))
    }

    /// Returns the key that checks the signatures of this one.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Signs a message.
    ///
    /// # Errors
    /// The system gives no random numbers, which ECDSA needs.
    pub(super) fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        let signature = match &self.pair {
            Pair::Ed25519(pair) => pair.sign(message),
            Pair::Ecdsa(pair) => pair.sign(&SystemRandom::new(), message).map_err(|_| no_random_numbers())?,
        };
        Ok(signature.as_ref().to_vec())
    }
}

impl PublicKey {
    /// Reads a public key from a PEM file.
    ///
    /// # Errors
    /// The file is no public key of a supported algorithm.
    pub fn open(path: &Path) -> Result<PublicKey> {
        PublicKey::from_pem(&files::read_text(path, LARGEST)?).at(path)
    }

    fn from_pem(text: &str) -> Result<PublicKey> {
        let der = der(text, "PUBLIC KEY")?;
        let found = [&ED25519, &P256, &P384].into_iter().find_map(|algorithm| {
            let bytes = der.strip_prefix(algorithm.prefix).filter(|bytes| bytes.len() == algorithm.key_bytes)?;
            Some(PublicKey { algorithm, bytes: bytes.to_vec() })
        });
        found.ok_or_else(|| {
            Error::unsupported("found a public key of another algorithm, expected Ed25519, ECDSA P-256 or P-384")
                .help("the maker of the pack must sign it with such a key; `iec sign --new-key FILE` makes one")
        })
    }

    /// Returns the PEM text of the key.
    pub fn to_pem(&self) -> String {
        pem("PUBLIC KEY", &[self.algorithm.prefix, &self.bytes].concat())
    }

    /// Returns the SHA-256 of [`PublicKey::to_pem`] in hex, which names the key in signatures.
    pub fn fingerprint(&self) -> String {
        hex(Sha256::new_with_prefix(self.to_pem()))
    }

    /// Returns the name of the algorithm.
    pub fn algorithm(&self) -> &'static str {
        self.algorithm.name
    }

    /// Returns true if the signature of the message was made with this key.
    pub(super) fn accepts(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(self.algorithm.verification, &self.bytes).verify(message, signature).is_ok()
    }
}

fn no_random_numbers() -> Error {
    std::io::Error::other("the system gives no random numbers").into()
}

/// Returns the content of the block `-----BEGIN LABEL-----` of a PEM file.
fn der(text: &str, label: &str) -> Result<Vec<u8>> {
    let (begin, end) = (format!("-----BEGIN {label}-----"), format!("-----END {label}-----"));
    let block = text.split_once(&begin).and_then(|(_, rest)| rest.split_once(&end));
    let Some((block, _)) = block else {
        let found = text.lines().find_map(|line| line.strip_prefix("-----BEGIN ")?.strip_suffix("-----"));
        return Err(missing(&found.map_or_else(|| "no PEM block".into(), |found| format!("`{found}`")), label));
    };
    let block: String = block.split_whitespace().collect();
    BASE64.decode(block).map_err(|_| {
        Error::corrupt(format!("found a damaged PEM block `{label}`")).help("get the file of the key again")
    })
}

/// Builds the error for a file without the PEM block `label`; `found` describes the block that it has, if any.
fn missing(found: &str, label: &str) -> Error {
    let error = Error::corrupt(format!("found {found}, expected a PEM block `{label}`"));
    match (label, found) {
        ("PUBLIC KEY", "`PRIVATE KEY`") => error.help("name the public key, not the private one"),
        ("PRIVATE KEY", "`PUBLIC KEY`") => error.help("name the private key, not the public one"),
        ("PRIVATE KEY", _) => error.help(
            "convert the key with `openssl pkcs8 -topk8 -nocrypt -in OLD -out NEW`, or make one with \
             `iec sign --new-key FILE`",
        ),
        _ => error.help(
            "get the public key in PEM from the maker of the pack, who makes it from the private key with \
             `openssl pkey -in PRIVATE -pubout -out PUBLIC`",
        ),
    }
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = BASE64.encode(der);
    let lines: Vec<&str> = (0..text.len()).step_by(LINE).map(|at| &text[at..text.len().min(at + LINE)]).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Keys made with OpenSSL 3.0: `openssl genpkey -algorithm ed25519`, and `-algorithm EC -pkeyopt
    /// ec_paramgen_curve:P-256` and `P-384`, each followed by `openssl pkey -pubout`.
    const FILES: [(&str, &str); 3] = [
        (
            include_str!("../../tests/fixtures/keys/ed25519.pem"),
            include_str!("../../tests/fixtures/keys/ed25519.pub.pem"),
        ),
        (include_str!("../../tests/fixtures/keys/p256.pem"), include_str!("../../tests/fixtures/keys/p256.pub.pem")),
        (include_str!("../../tests/fixtures/keys/p384.pem"), include_str!("../../tests/fixtures/keys/p384.pub.pem")),
    ];

    pub fn keys() -> Vec<PrivateKey> {
        FILES.iter().map(|(private, _)| PrivateKey::from_pem(private).unwrap()).collect()
    }

    #[test]
    fn the_public_key_is_the_one_of_openssl() {
        for (key, (_, public)) in keys().iter().zip(FILES) {
            assert_eq!(key.public().to_pem(), public);
            let read = PublicKey::from_pem(public).unwrap();
            let signature = key.sign(b"text").unwrap();
            assert!(read.accepts(b"text", &signature) && !read.accepts(b"other", &signature));
        }
    }

    #[test]
    fn a_new_key_is_read_again() {
        let (key, text) = PrivateKey::generate().unwrap();
        assert_eq!(PrivateKey::from_pem(&text).unwrap().public().to_pem(), key.public().to_pem());
    }

    #[test]
    fn what_is_no_key_is_refused_with_advice() {
        let (private, public) = FILES[0];
        let swapped = PublicKey::from_pem(private).err().unwrap();
        assert!(swapped.help_text().unwrap().contains("not the private one"), "{swapped}");
        assert!(PrivateKey::from_pem(public).is_err());
        let other = pem("PUBLIC KEY", &[0x30, 0]);
        for text in ["", "\u{0}", "-----BEGIN PUBLIC KEY-----", &private[..60], &other] {
            assert!(PublicKey::from_pem(text).is_err() && PrivateKey::from_pem(text).is_err());
        }
    }
}
