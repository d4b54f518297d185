//! Writes and reads signature files: a Sigstore bundle with a DSSE envelope around an in-toto statement.
//!
//! The signature covers the pre-authentication encoding of the payload
//! (<https://github.com/secure-systems-lab/dsse/blob/master/protocol.md>):
//! `DSSEv1 LENGTH TYPE LENGTH PAYLOAD`, with lengths in decimal and single spaces.

use super::{PrivateKey, PublicKey, Resource};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::sha256::{Digest, Sha256, hex};
use crate::strict_json;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use std::path::Path;

const MEDIA_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
/// Beginning of the media types of all versions.
const ANY_MEDIA_TYPE: &str = "application/vnd.dev.sigstore.bundle";
const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";
const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE_TYPE: &str = "https://model_signing/signature/v1.0";
/// Largest accepted size of a signature file in bytes. Each signed file adds less than 200.
const LARGEST: u64 = 16 << 20;

/// Signs the hashes of files with `key`. Returns the text of the signature file; `name` is the name of the model.
///
/// # Errors
/// The system gives no random numbers for the signature.
pub(super) fn write(name: &str, resources: &[Resource], key: &PrivateKey) -> Result<Vec<u8>> {
    let resource = |r: &Resource| json!({"name": r.name, "algorithm": "sha256", "digest": r.sha256});
    let statement = json!({
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest_of(resources)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": false,
                "ignore_paths": [super::FILE_NAME],
            },
            "resources": resources.iter().map(resource).collect::<Vec<_>>(),
        },
    });
    let payload = serde_json::to_vec(&statement).expect("plain data always serializes");
    let signature = key.sign(&encoded(&payload))?;
    let bundle = json!({
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": key.public().fingerprint()}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": BASE64.encode(payload),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": BASE64.encode(signature), "keyid": ""}],
        },
    });
    Ok(crate::output::pretty(&bundle))
}

/// Reads a signature file and checks the signature. Returns the name of the model and its signed files.
///
/// # Errors
/// The file is not a signature of this kind, or it was made with another key (exit code 4).
pub(super) fn read(path: &Path, key: &PublicKey) -> Result<(String, Vec<Resource>)> {
    let text = files::read_limited(path, LARGEST)?;
    parse(&text, key).at(path).help("get the signature file again from the maker of the pack")
}

fn parse(text: &[u8], key: &PublicKey) -> Result<(String, Vec<Resource>)> {
    let bundle = strict_json::parse(text)?;
    expect(&bundle, "/mediaType", |found| found.starts_with(ANY_MEDIA_TYPE), ANY_MEDIA_TYPE)?;
    let envelope = bundle.pointer("/dsseEnvelope").unwrap_or(&Value::Null);
    expect(envelope, "/payloadType", |found| found == PAYLOAD_TYPE, PAYLOAD_TYPE)?;
    let hint = bundle.pointer("/verificationMaterial/publicKey/hint").and_then(Value::as_str);
    if let Some(hint) = hint.filter(|hint| !hint.is_empty() && *hint != key.fingerprint()) {
        let found = format!("was made with the key {hint}, expected the given key {}", key.fingerprint());
        return Err(Error::refused(found).help("name the public key of the maker with --key"));
    }
    let payload = decode(envelope, "/payload")?;
    let signature = decode(envelope, "/signatures/0/sig")?;
    if !key.accepts(&encoded(&payload), &signature) {
        return Err(Error::refused("found a signature that is not valid for the given key").help(
            "the signature file was changed or made with another key; get the pack, its signature and the key again",
        ));
    }
    statement(&strict_json::parse(&payload)?)
}

/// Returns the name of the model and the signed files of a statement whose signature is valid.
fn statement(statement: &Value) -> Result<(String, Vec<Resource>)> {
    for (field, expected) in [
        ("/_type", STATEMENT_TYPE),
        ("/predicateType", PREDICATE_TYPE),
        ("/predicate/serialization/method", "files"),
        ("/predicate/serialization/hash_type", "sha256"),
    ] {
        expect(statement, field, |found| found == expected, expected)?;
    }
    let listed = statement.pointer("/predicate/resources").and_then(Value::as_array);
    let listed = listed.ok_or_else(|| Error::corrupt("found no list `predicate.resources` of signed files"))?;
    let resources = listed.iter().map(resource).collect::<Result<Vec<_>>>()?;
    let digest = digest_of(&resources);
    expect(statement, "/subject/0/digest/sha256", |found| found == digest, &digest)?;
    let name = statement.pointer("/subject/0/name").and_then(Value::as_str).unwrap_or_default();
    Ok((name.to_string(), resources))
}

fn resource(value: &Value) -> Result<Resource> {
    expect(value, "/algorithm", |found| found == "sha256", "sha256")?;
    let text = |field: &str| value.get(field).and_then(Value::as_str).map(str::to_string);
    match (text("name"), text("digest")) {
        (Some(name), Some(sha256)) if bytes_of(&sha256).is_some() => Ok(Resource { name, sha256 }),
        _ => {
            Err(Error::corrupt(format!("found the signed file {value}, expected `name` and a SHA-256 `digest` in hex")))
        }
    }
}

/// Returns the SHA-256 of the digests of all files (32 bytes each), joined in the order of `resources`, in hex.
pub(super) fn digest_of(resources: &[Resource]) -> String {
    let mut hash = Sha256::new();
    resources.iter().filter_map(|resource| bytes_of(&resource.sha256)).for_each(|digest| hash.update(digest));
    hex(hash)
}

/// Decodes a SHA-256 in lower-case hex.
fn bytes_of(sha256: &str) -> Option<[u8; 32]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, _) = sha256.as_bytes().as_chunks::<2>();
    let bytes: Option<Vec<u8>> = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
    bytes.filter(|_| sha256.len() == 64)?.try_into().ok()
}

/// Returns the pre-authentication encoding of a payload, which is what the signature covers.
fn encoded(payload: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {PAYLOAD_TYPE} {} ", PAYLOAD_TYPE.len(), payload.len());
    [head.as_bytes(), payload].concat()
}

/// Fails if the text at a JSON pointer is not as expected.
fn expect(value: &Value, field: &str, good: impl Fn(&str) -> bool, expected: &str) -> Result<()> {
    match value.pointer(field).and_then(Value::as_str) {
        Some(found) if good(found) => Ok(()),
        found => Err(Error::corrupt(format!(
            "found {}, expected `{expected}`",
            found.map_or_else(|| "nothing".into(), |f| format!("`{f}`"))
        ))
        .tensor(field.trim_start_matches('/').replace('/', "."))),
    }
}

fn decode(value: &Value, field: &str) -> Result<Vec<u8>> {
    let text = value.pointer(field).and_then(Value::as_str).unwrap_or_default();
    let bytes = BASE64.decode(text).ok().filter(|bytes| !bytes.is_empty());
    bytes.ok_or_else(|| {
        Error::corrupt("found no text in base64, expected some").tensor(field.trim_start_matches('/').replace('/', "."))
    })
}

#[cfg(test)]
mod tests {
    use super::super::key::tests::keys;
    use super::*;
    use proptest::prelude::*;

    fn resources() -> Vec<Resource> {
        let resource = |name: &str| Resource { name: name.into(), sha256: hex(Sha256::new_with_prefix(name)) };
        vec![resource("config.json"), resource("model.ie.bin")]
    }

    #[test]
    fn a_signature_is_read_again_with_its_own_key_only() {
        for key in keys() {
            let text = write("model", &resources(), &key).unwrap();
            assert_eq!(parse(&text, key.public()).unwrap(), ("model".to_string(), resources()));
            for other in keys().iter().filter(|other| other.public().fingerprint() != key.public().fingerprint()) {
                assert_eq!(parse(&text, other.public()).unwrap_err().cause().exit_code(), 4);
            }
        }
    }

    #[test]
    fn a_changed_payload_signature_or_hint_is_refused() {
        let key = &keys()[0];
        let text = String::from_utf8(write("model", &resources(), key).unwrap()).unwrap();
        let mut bundle: Value = serde_json::from_str(&text).unwrap();
        for field in ["/dsseEnvelope/payload", "/dsseEnvelope/signatures/0/sig"] {
            let old = bundle.pointer(field).unwrap().clone();
            let mut bytes = BASE64.decode(old.as_str().unwrap()).unwrap();
            bytes[7] ^= 1;
            *bundle.pointer_mut(field).unwrap() = BASE64.encode(bytes).into();
            let refused = parse(bundle.to_string().as_bytes(), key.public()).unwrap_err();
            assert_eq!(refused.cause().exit_code(), 4, "{field}: {refused}");
            *bundle.pointer_mut(field).unwrap() = old;
        }
        parse(bundle.to_string().as_bytes(), key.public()).unwrap();
    }

    #[test]
    fn other_statements_are_refused_although_their_signature_is_valid() {
        let key = &keys()[0];
        let signed = |statement: &Value| {
            let payload = serde_json::to_vec(statement).unwrap();
            let signature = key.sign(&encoded(&payload)).unwrap();
            let bundle = json!({"mediaType": MEDIA_TYPE, "dsseEnvelope": {"payload": BASE64.encode(payload),
                "payloadType": PAYLOAD_TYPE, "signatures": [{"sig": BASE64.encode(signature)}]}});
            parse(bundle.to_string().as_bytes(), key.public())
        };
        let bundle: Value = serde_json::from_slice(&write("model", &resources(), key).unwrap()).unwrap();
        let payload = BASE64.decode(bundle["dsseEnvelope"]["payload"].as_str().unwrap()).unwrap();
        let good: Value = serde_json::from_slice(&payload).unwrap();
        signed(&good).unwrap();
        for (field, other) in [
            ("/_type", json!("https://in-toto.io/Statement/v2")),
            ("/predicateType", json!("https://slsa.dev/provenance/v1")),
            ("/predicate/serialization/method", json!("shards")),
            ("/predicate/serialization/hash_type", json!("blake3")),
            ("/predicate/resources/0/algorithm", json!("sha1")),
            ("/predicate/resources/0/digest", json!("00")),
            ("/predicate/resources/0/name", json!(7)),
            ("/predicate/resources", json!({})),
            ("/subject/0/digest/sha256", json!("00")),
        ] {
            let mut bad = good.clone();
            *bad.pointer_mut(field).unwrap() = other;
            assert!(signed(&bad).is_err(), "{field}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "\\PC*", at in 0usize..600, byte: u8) {
            let key = &keys()[0];
            let _ = parse(text.as_bytes(), key.public());
            let mut bytes = write("model", &resources(), key).unwrap();
            if let Some(changed) = bytes.get_mut(at) {
                *changed = byte;
            }
            let _ = parse(&bytes, key.public());
        }
    }
}
