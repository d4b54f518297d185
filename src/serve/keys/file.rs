//! File of keys.

use super::{CacheUse, Digest, Key, Keys, SCOPES, Scopes};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::serve::toml_text::{Document, Field, Table};
use std::collections::HashSet;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Largest accepted file in bytes.
const FILE_LIMIT: u64 = 4 << 20;
/// Largest number of keys.
const MOST_KEYS: usize = 10_000;
/// Longest name of a key in bytes.
const LONGEST_NAME: usize = 64;
/// Largest number of models that a key may list.
const MOST_MODELS: usize = 1000;
/// Longest name of a model in bytes.
const LONGEST_MODEL: usize = 256;
/// Largest limit of requests or tokens, which floating-point numbers represent exactly.
const LARGEST_LIMIT: i64 = 1_000_000_000_000_000;
/// Largest limit of unfinished requests.
const MOST_CONCURRENT: i64 = 1_000_000;
/// Smallest and largest weight.
const WEIGHTS: std::ops::RangeInclusive<f64> = 0.001..=1000.0;

/// Names of the fields of a key.
const FIELDS: [&str; 12] = [
    "name",
    "sha256",
    "scopes",
    "rpm",
    "tpm",
    "tokens_per_day",
    "concurrent",
    "max_tokens",
    "max_priority",
    "weight",
    "models",
    "cache",
];

/// Advice for a digest that is none.
const MAKE_DIGEST: &str = "write the digest of the key, not the key: printf %s \"$KEY\" | sha256sum";

/// Keys of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyFile {
    /// The keys.
    pub keys: Keys,
    /// Warning for the log if other users of the machine can read or change the file.
    pub warning: Option<String>,
}

impl Keys {
    /// Reads a file of keys.
    ///
    /// # Errors
    /// The file cannot be read, or is not one of keys.
    pub fn read(path: &Path) -> Result<KeyFile> {
        let (file, found) = files::open_with_metadata(path)?;
        let mut text = Vec::new();
        file.take(FILE_LIMIT + 1).read_to_end(&mut text).at(path)?;
        let keys = Keys::parse(&text).at(path)?;
        Ok(KeyFile { keys, warning: exposed(found.permissions().mode(), path) })
    }

    /// Parses the text of a file of keys.
    ///
    /// # Errors
    /// The text is not TOML, has unknown fields, no keys or too many, or two keys with the same name or digest.
    pub fn parse(text: &[u8]) -> Result<Keys> {
        if text.len() as u64 > FILE_LIMIT {
            return Err(Error::usage(format!("expected at most {FILE_LIMIT} bytes of keys, found more")));
        }
        let document = Document::parse(text)?;
        let mut list = Vec::new();
        for field in document.table().fields() {
            if field.name != "key" {
                return Err(field.unknown(&["key"]).help("each key is a table that begins with a line [[key]]"));
            }
            let tables = field.tables(MOST_KEYS)?;
            let (mut names, mut digests) = (HashSet::new(), HashSet::new());
            for table in tables {
                let key = parse_key(table)?;
                if !digests.insert(key.digest) {
                    return Err(table.error(&format!("key `{}` has the digest of an earlier key", key.name)));
                }
                if !names.insert(key.name.clone()) {
                    return Err(table.error(&format!("key `{}` has the name of an earlier key", key.name)));
                }
                list.push(key);
            }
        }
        match list.is_empty() {
            true => Err(Error::usage("found no key, expected a table [[key]] with name and sha256")),
            false => Ok(Keys { list, open: false }),
        }
    }
}

/// Returns a warning if the permissions of a file let other users read or change it.
fn exposed(mode: u32, path: &Path) -> Option<String> {
    let path = path.display();
    let what = match mode {
        _ if mode & 0o022 != 0 => "change",
        _ if mode & 0o004 != 0 => "read",
        _ => return None,
    };
    Some(format!("{path}: other users can {what} the key file; `chmod 600 {path}` prevents it"))
}

/// Parses the table of a key.
fn parse_key(table: Table<'_>) -> Result<Key> {
    let mut key = Key::new("", Scopes::INFER, Digest([0; 32]));
    let (mut named, mut digested) = (false, false);
    for field in table.fields() {
        let limit = |most: i64| field.integer(1..=most).map(|n| n.unsigned_abs());
        match field.name {
            "name" => (key.name, named) = (parse_name(&field)?, true),
            "sha256" => (key.digest, digested) = (parse_digest(&field)?, true),
            "scopes" => key.scopes = parse_scopes(&field)?,
            "rpm" => key.limits.rpm = Some(limit(LARGEST_LIMIT)?),
            "tpm" => key.limits.tpm = Some(limit(LARGEST_LIMIT)?),
            "tokens_per_day" => key.limits.tokens_per_day = Some(limit(LARGEST_LIMIT)?),
            "concurrent" => key.limits.concurrent = usize::try_from(limit(MOST_CONCURRENT)?).ok(),
            "max_tokens" => key.limits.max_tokens = u32::try_from(limit(i64::from(u32::MAX))?).ok(),
            "max_priority" => {
                let priority = field.integer(i64::from(i32::MIN)..=i64::from(i32::MAX))?;
                key.limits.max_priority = i32::try_from(priority).map_err(|_| field.expected("a priority"))?;
            }
            "weight" => key.limits.weight = field.number(WEIGHTS)?,
            "models" => key.models = Some(parse_models(&field)?),
            "cache" => {
                key.cache = match field.string()? {
                    "private" => CacheUse::Private,
                    "shared" => CacheUse::Shared,
                    _ => return Err(field.error("found another text, expected \"private\" or \"shared\"")),
                }
            }
            _ => return Err(field.unknown(&FIELDS)),
        }
    }
    match (named, digested) {
        (true, true) => Ok(key),
        (false, _) => Err(table.error("this key has no `name`")),
        (true, false) => Err(table.error(&format!("key `{}` has no `sha256`", key.name)).help(MAKE_DIGEST)),
    }
}

fn parse_name(field: &Field<'_>) -> Result<String> {
    let name = field.string()?;
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    match (1..=LONGEST_NAME).contains(&name.len()) && name.chars().all(allowed) {
        true => Ok(name.to_string()),
        false => Err(field.error("expected 1 to 64 letters, digits, dots, hyphens and underscores")),
    }
}

fn parse_digest(field: &Field<'_>) -> Result<Digest> {
    let text = field.string()?;
    let digit = |i: usize| char::from(*text.as_bytes().get(i)?).to_digit(16);
    let byte = |i: usize| u8::try_from(digit(2 * i)? * 16 + digit(2 * i + 1)?).ok();
    let bytes = (0..32).map(byte).collect::<Option<Vec<u8>>>().filter(|_| text.len() == 64);
    let Some(bytes) = bytes.and_then(|bytes| <[u8; 32]>::try_from(bytes).ok()) else {
        let found = text.chars().count();
        return Err(field.error(&format!("found {found} characters, expected 64 hex digits")).help(MAKE_DIGEST));
    };
    match Digest(bytes) == Digest::of("") {
        true => Err(field.error("found the digest of an empty text, expected that of a key").help(MAKE_DIGEST)),
        false => Ok(Digest(bytes)),
    }
}

fn parse_scopes(field: &Field<'_>) -> Result<Scopes> {
    let mut scopes = Scopes::NONE;
    for text in field.strings(SCOPES.len())? {
        let found = SCOPES.iter().find(|(name, _)| *name == text);
        scopes.insert(found.ok_or_else(|| field.error("found another text, expected infer, admin or metrics"))?.1);
    }
    match scopes == Scopes::NONE {
        true => Err(field.error("found an empty list, expected infer, admin or metrics")),
        false => Ok(scopes),
    }
}

fn parse_models(field: &Field<'_>) -> Result<Vec<String>> {
    let names = field.strings(MOST_MODELS)?;
    let valid = |name: &&str| (1..=LONGEST_MODEL).contains(&name.len()) && !name.chars().any(char::is_control);
    match !names.is_empty() && names.iter().all(valid) {
        true => Ok(names.into_iter().map(String::from).collect()),
        false => {
            Err(field.error("expected names of models, each of 1 to 256 bytes; without `models`, all are allowed"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::digest_of;
    use super::*;
    use crate::sched::KeyLimits;
    use crate::serve::keys::Scope;
    use proptest::prelude::*;

    fn file(fields: &str) -> String {
        format!("[[key]]\nname = \"a\"\nsha256 = \"{}\"\n{fields}\n", digest_of("x"))
    }

    #[test]
    fn all_fields_are_read() {
        let text = file(
            "scopes = [\"infer\", \"metrics\"]\nrpm = 1\ntpm = 2\ntokens_per_day = 3\nconcurrent = 4\nmax_tokens = 5\n\
             max_priority = -6\nweight = 2\nmodels = [\"m\", \"org/n\"]\ncache = \"shared\"",
        );
        let keys = Keys::parse(text.as_bytes()).unwrap();
        let key = &keys.list()[0];
        let limits = KeyLimits {
            weight: 2.0,
            rpm: Some(1),
            tpm: Some(2),
            tokens_per_day: Some(3),
            concurrent: Some(4),
            max_tokens: Some(5),
            max_priority: -6,
        };
        assert_eq!(key.limits, limits);
        assert!(key.may(Scope::Infer) && !key.may(Scope::Admin) && key.may(Scope::Metrics));
        assert!(key.may_use_model("org/n") && !key.may_use_model("n"));
        assert_eq!((key.cache_owner(), key.name.as_str()), (None, "a"));
        let plain = Keys::parse(file("").as_bytes()).unwrap();
        let plain = &plain.list()[0];
        assert_eq!((&plain.limits, plain.scopes), (&KeyLimits::default(), Scopes::INFER));
        assert_eq!((&plain.models, plain.cache_owner()), (&None, Some("a")));
    }

    #[test]
    fn each_mistake_is_refused_with_its_line() {
        let digest = digest_of("y");
        let other = |name: &str, digest: &str| file("") + &format!("[[key]]\nname = \"{name}\"\nsha256 = \"{digest}\"");
        let cases = [
            (String::new(), "found no key"),
            ("key = 1".into(), "line 1: `key`: found a whole number, expected tables"),
            ("[[keys]]".into(), "line 1: found the unknown name `keys`, expected perhaps `key`"),
            (file("rpms = 1"), "line 4: found the unknown name `rpms`, expected perhaps `rpm`"),
            (file("rpm = 0"), "line 4: `rpm`: the number is out of range"),
            (file("rpm = \"1\""), "line 4: `rpm`: found a text"),
            (file("max_tokens = 4294967296"), "out of range"),
            (file("weight = 0.0"), "expected a number from 0.001 to 1000"),
            (file("weight = nan"), "expected a number"),
            (file("scopes = []"), "empty list"),
            (file("scopes = [\"all\"]"), "expected infer, admin or metrics"),
            (file("models = []"), "without `models`"),
            (file("cache = \"public\""), "expected \"private\" or \"shared\""),
            (file("trusted = true"), "unknown name `trusted`"),
            (other("b", &digest_of("x")), "line 5: key `b` has the digest of an earlier key"),
            (other("a", &digest), "line 5: key `a` has the name of an earlier key"),
            (other("b c", &digest), "line 6: `name`: expected 1 to 64"),
            (other(&"n".repeat(65), &digest), "expected 1 to 64"),
            (other("b", &digest[1..]), "found 63 characters, expected 64 hex digits"),
            (other("b", &digest.replace(&digest[..1], "g")), "expected 64 hex digits"),
            (other("b", &digest_of("")), "digest of an empty text"),
            ("[[key]]\nname = \"a\"".into(), "key `a` has no `sha256`"),
            (format!("[[key]]\nsha256 = \"{digest}\""), "this key has no `name`"),
            (format!("#{}", " ".repeat(4 << 20)), "at most 4194304 bytes"),
            ("[[key]]\n".repeat(10_001), "found 10001 tables, expected at most 10000"),
        ];
        let failures: Vec<String> = cases
            .iter()
            .filter_map(|(text, message)| match Keys::parse(text.as_bytes()) {
                Ok(_) => Some(format!("{message}: accepted")),
                Err(e) if e.to_string().contains(message) && e.cause().exit_code() == 2 => None,
                Err(e) => Some(format!("{message}: {e}")),
            })
            .collect();
        assert!(failures.is_empty(), "{failures:#?}");
    }

    #[test]
    fn a_plain_key_in_the_file_is_not_shown() {
        let text = "[[key]]\nname = \"a\"\nsha256 = \"sk-very-secret\"";
        let error = Keys::parse(text.as_bytes()).unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
        assert!(error.help_text().unwrap().contains("sha256sum"));
    }

    #[test]
    fn a_file_that_others_can_read_or_change_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        std::fs::write(&path, file("")).unwrap();
        for (mode, warning) in [(0o600, None), (0o640, None), (0o644, Some("read")), (0o660, Some("change"))] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let found = Keys::read(&path).unwrap();
            let fits = match (&found.warning, warning) {
                (Some(found), Some(word)) => found.contains(word),
                (found, expected) => found.is_none() && expected.is_none(),
            };
            assert!(fits && found.keys.list().len() == 1, "{mode:o}: {found:?}");
        }
        let missing = Keys::read(&dir.path().join("none")).unwrap_err();
        assert!(missing.is_not_found() && missing.file().is_some());
    }

    proptest! {
        #[test]
        fn limits_are_read_as_they_are_written(rpm in 1..=LARGEST_LIMIT, priority: i32, weight in WEIGHTS) {
            let text = file(&format!("rpm = {rpm}\nmax_priority = {priority}\nweight = {weight:?}"));
            let keys = Keys::parse(text.as_bytes()).unwrap();
            let limits = &keys.list()[0].limits;
            prop_assert_eq!(limits.rpm, u64::try_from(rpm).ok());
            prop_assert_eq!((limits.max_priority, limits.weight), (priority, weight));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>, cut in 0..200usize) {
            let _ = Keys::parse(&bytes);
            let text = file("scopes = [\"infer\"]\nrpm = 1");
            let _ = Keys::parse(&[&text.as_bytes()[..cut.min(text.len())], &bytes].concat());
        }
    }
}
