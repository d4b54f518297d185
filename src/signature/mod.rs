//! Signatures of packs: the hashes of all files of a pack, signed with a key from a file, without a network.
//!
//! The signature file `model.sig` has the layout of OpenSSF model signing
//! (<https://github.com/sigstore/model-transparency>, predicate `https://model_signing/signature/v1.0`), so that its
//! tool can check packs that were signed with an ECDSA key. That tool does not know Ed25519 keys yet.
//!
//! ```text
//! Sigstore bundle (JSON)
//!   verificationMaterial.publicKey.hint   SHA-256 of the public key as PEM
//!   dsseEnvelope.signatures[0].sig        signature over the payload with its type
//!   dsseEnvelope.payload                  in-toto statement (JSON in base64)
//!     subject[0].digest.sha256            SHA-256 of the digests of all files, joined in the order of `resources`
//!     predicate.resources                 name and SHA-256 of every file
//! ```

mod bundle;
mod key;

pub use crate::iebin::SIGNATURE_NAME as FILE_NAME;
pub use key::{PrivateKey, PublicKey};

use crate::error::{Context, Error, Result};
use crate::iebin::{COMPANIONS, IebinReader, JSON_NAME, tensor_map};
use crate::progress::ProgressBar;
use crate::{progress, sha256};
use serde::Serialize;
use std::path::{Component, Path};

/// Signed hash of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Resource {
    /// Path of the file, relative to the directory of the pack.
    name: String,
    /// SHA-256 in hex.
    sha256: String,
}

/// Signature that was made or found to be valid.
#[derive(Debug, Clone, Serialize)]
pub struct Signature {
    /// Name of the model in the signature: the name of its directory when it was signed.
    pub name: String,
    /// Number of signed files.
    pub files: usize,
    /// Algorithm of the key: `ed25519`, `ecdsa-p256` or `ecdsa-p384`.
    pub algorithm: &'static str,
    /// SHA-256 of the public key as PEM, in hex.
    pub key_sha256: String,
    /// SHA-256 of the digests of all signed files, joined in the order of their list, in hex.
    pub sha256: String,
}

/// Hashes all files of a pack and signs the hashes. Returns the text of the signature file and its summary. A signature
/// vouches for the pack, so its weights and other files are compared with their recorded hashes first.
///
/// # Errors
/// The pack is damaged, a file cannot be read, the pack is replaced while it is hashed, or the system gives no random
/// numbers for the signature.
pub fn sign(reader: &IebinReader, key: &PrivateKey) -> Result<(Vec<u8>, Signature)> {
    tensor_map::refuse_damage(reader)?;
    let json = reader.path(JSON_NAME);
    let before = sha256::of_file(&json, |_| {})?;
    let mut names = files_of(reader);
    names.sort_unstable();
    let bar = progress::bytes("hash", reader.total_bytes());
    let resources = names
        .into_iter()
        .map(|name| Ok(Resource { sha256: hash_member(reader, &name, &bar)?, name }))
        .collect::<Result<Vec<_>>>()?;
    if resources.iter().any(|resource| resource.name == JSON_NAME && resource.sha256 != before) {
        return Err(Error::corrupt("was replaced while the pack was hashed").at(&json).help("run the command again"));
    }
    let dir = reader.dir.canonicalize().at(&reader.dir)?;
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let text = bundle::write(&name, &resources, key)?;
    Ok((text, summary(name, &resources, key.public())))
}

/// Checks the signature file at `path` with the public key of its maker, and compares every signed file with its hash.
///
/// # Errors
/// The signature was made with another key or is not valid, a signed file was changed, or a file of the pack is not
/// signed (exit code 4); or a signed file is missing or cannot be read.
pub fn verify(reader: &IebinReader, key: &PublicKey, path: &Path) -> Result<Signature> {
    let (name, resources) = bundle::read(path, key)?;
    let signed = |name: &str| resources.iter().any(|resource| resource.name == name);
    if let Some(added) = files_of(reader).iter().find(|name| !signed(name)) {
        return Err(Error::refused("is not covered by the signature").at(reader.dir.join(added)).help(CHANGED));
    }
    let bar = progress::bytes("hash", reader.total_bytes());
    for Resource { name, sha256 } in &resources {
        let found = hash_member(reader, name, &bar)?;
        if found != *sha256 {
            return Err(Error::refused(format!("found the SHA-256 {found}, expected {sha256} from the signature"))
                .at(reader.dir.join(name))
                .help(CHANGED));
        }
    }
    Ok(summary(name, &resources, key))
}

const CHANGED: &str =
    "the pack was changed after it was signed: get the original again, or sign it anew if the change is intended";

fn summary(name: String, resources: &[Resource], key: &PublicKey) -> Signature {
    Signature {
        name,
        files: resources.len(),
        algorithm: key.algorithm(),
        key_sha256: key.fingerprint(),
        sha256: bundle::digest_of(resources),
    }
}

/// Returns the names of all files that decide the answers of a pack.
fn files_of(reader: &IebinReader) -> Vec<String> {
    let present = COMPANIONS.into_iter().filter(|name| reader.path(name).symlink_metadata().is_ok());
    [JSON_NAME, &reader.description.weights_bin].into_iter().chain(present).map(str::to_string).collect()
}

/// Returns the hash of a file of the pack. A binary that was removed by deduplication is rebuilt in memory.
fn hash_member(reader: &IebinReader, name: &str, bar: &ProgressBar) -> Result<String> {
    if name == reader.description.weights_bin {
        return tensor_map::binary_sha256(reader, bar);
    }
    let plain = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    if !plain || name.is_empty() {
        return Err(Error::corrupt(format!("found the signed file `{name}`, expected a path inside the pack")));
    }
    sha256::of_file(&reader.path(name), |n| bar.inc(n))
}
