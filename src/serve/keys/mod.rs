//! Tenants: API keys with their scopes and limits.
//!
//! The file of `--api-key-file` is TOML with a table per key. It holds the SHA-256 of each key, so that a copy of the
//! file gives no access:
//!
//! ```text
//! [[key]]
//! name = "alice"                # in logs and metrics; letters, digits, dots, hyphens and underscores
//! sha256 = "4f5b...c1"          # printf %s "$KEY" | sha256sum
//! scopes = ["infer", "metrics"] # infer, admin, metrics; by default infer
//! rpm = 60                      # requests per minute
//! tpm = 20000                   # tokens per minute, prompt and answer
//! tokens_per_day = 1000000
//! concurrent = 4                # unfinished answers
//! max_tokens = 2048             # tokens of an answer
//! max_priority = 0              # most urgent priority that requests may ask for; lower is more urgent
//! weight = 1.0                  # share of the machine in relation to other keys
//! models = ["tiny"]             # models and adapters; by default all
//! cache = "private"             # "shared": pages of the prefix cache are shared with other shared keys
//! ```
//!
//! Only `name` and `sha256` are required. A new random key and its digest are made with
//!
//! ```text
//! KEY=$(head -c 32 /dev/urandom | base64 | tr -d '+/=')
//! printf %s "$KEY" | sha256sum
//! ```
//!
//! (`echo "$KEY"` would add a line break to the digested text.) A presented key is digested and compared with all keys
//! in a time that depends on nothing but their number. Neither keys nor digests are shown or logged.

mod file;
mod ids;

pub use file::KeyFile;
pub use ids::KeyIds;

use crate::error::{Error, Result};
use crate::sched::KeyLimits;
use crate::sha256::{Digest as _, Sha256, hex};
use std::fmt;
use subtle::{ConditionallySelectable, ConstantTimeEq};

/// Name of the key of `IEC_API_KEY`, and of all requests to a server without keys.
pub const DEFAULT_NAME: &str = "default";

/// Group of requests that a key may make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Requests to models.
    Infer,
    /// Loading and unloading of adapters.
    Admin,
    /// Metrics.
    Metrics,
}

/// Names of scopes in the key file.
const SCOPES: [(&str, Scope); 3] = [("infer", Scope::Infer), ("admin", Scope::Admin), ("metrics", Scope::Metrics)];

impl Scope {
    /// Returns the name in the key file.
    pub fn name(self) -> &'static str {
        SCOPES.iter().find(|(_, scope)| *scope == self).map_or("", |(name, _)| name)
    }
}

/// Set of scopes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scopes {
    infer: bool,
    admin: bool,
    metrics: bool,
}

impl Scopes {
    /// All scopes.
    pub const ALL: Scopes = Scopes { infer: true, admin: true, metrics: true };
    /// Requests to models only.
    pub const INFER: Scopes = Scopes { infer: true, ..Scopes::NONE };
    const NONE: Scopes = Scopes { infer: false, admin: false, metrics: false };

    /// Returns true if the set has this scope.
    pub fn has(self, scope: Scope) -> bool {
        match scope {
            Scope::Infer => self.infer,
            Scope::Admin => self.admin,
            Scope::Metrics => self.metrics,
        }
    }

    /// Adds a scope.
    fn insert(&mut self, scope: Scope) {
        match scope {
            Scope::Infer => self.infer = true,
            Scope::Admin => self.admin = true,
            Scope::Metrics => self.metrics = true,
        }
    }
}

/// Keys that may use the pages of the prefix cache that a key has filled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CacheUse {
    /// The key alone: the time of an answer tells other keys nothing about its prompts.
    #[default]
    Private,
    /// All keys with this value.
    Shared,
}

/// SHA-256 of a key. Its debug output does not show it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Digest([u8; 32]);

impl Digest {
    fn of(secret: &str) -> Digest {
        Digest(Sha256::digest(secret).into())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Digest(..)")
    }
}

/// Key with what it allows.
#[derive(Debug, Clone, PartialEq)]
pub struct Key {
    /// Name in logs and metrics.
    pub name: String,
    /// Groups of requests that the key may make.
    pub scopes: Scopes,
    /// Limits in the scheduler.
    pub limits: KeyLimits,
    /// Models and adapters that the key may use; `None`: all.
    pub models: Option<Vec<String>>,
    /// Keys that may use its pages of the prefix cache.
    pub cache: CacheUse,
    digest: Digest,
}

impl Key {
    /// Creates a key for models without limits.
    fn new(name: &str, scopes: Scopes, digest: Digest) -> Key {
        let (models, cache, limits) = (None, CacheUse::default(), KeyLimits::default());
        Key { name: name.to_string(), scopes, limits, models, cache, digest }
    }

    /// Returns true if the key may make requests of this scope.
    pub fn may(&self, scope: Scope) -> bool {
        self.scopes.has(scope)
    }

    /// Returns true if the key may use this model or adapter.
    pub fn may_use_model(&self, model: &str) -> bool {
        self.models.as_ref().is_none_or(|models| models.iter().any(|name| name == model))
    }

    /// Returns the owner of the key's pages in the prefix cache: its name, or `None` if it shares them.
    pub fn cache_owner(&self) -> Option<&str> {
        match self.cache {
            CacheUse::Private => Some(&self.name),
            CacheUse::Shared => None,
        }
    }
}

/// All keys of a server.
#[derive(Debug, Clone, PartialEq)]
pub struct Keys {
    list: Vec<Key>,
    /// True if requests need no key.
    open: bool,
}

impl Keys {
    /// Returns the keys of a server without authentication: one without limits, which all requests use.
    pub fn open() -> Keys {
        Keys { list: vec![Key::new(DEFAULT_NAME, Scopes::ALL, Digest([0; 32]))], open: true }
    }

    /// Returns the keys of a server with one key, which has all scopes and no limits.
    ///
    /// # Errors
    /// The key is empty, or has characters that a header cannot carry.
    pub fn of_secret(secret: &str) -> Result<Keys> {
        if secret.is_empty() || !secret.chars().all(|c| c.is_ascii_graphic()) {
            let found = if secret.is_empty() { "an empty key" } else { "a space or another special character" };
            return Err(Error::usage(format!("API key: found {found}, expected visible ASCII characters"))
                .help("set IEC_API_KEY to a random text, or name a file of keys with --api-key-file"));
        }
        Ok(Keys { list: vec![Key::new(DEFAULT_NAME, Scopes::ALL, Digest::of(secret))], open: false })
    }

    /// Returns true if requests need no key.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Returns the number of the presented key in the list. Compares its digest with those of all keys, in a time that
    /// does not depend on which one is equal. Without authentication, the number is always 0.
    pub fn find(&self, presented: &str) -> Option<usize> {
        if self.open {
            return Some(0);
        }
        let digest = Digest::of(presented);
        let mut found = u64::MAX;
        for (i, key) in self.list.iter().enumerate() {
            found.conditional_assign(&(i as u64), key.digest.0[..].ct_eq(&digest.0[..]));
        }
        usize::try_from(found).ok().filter(|i| *i < self.list.len())
    }

    /// Returns the number of the key of a request that presented this key or none.
    pub fn authorize(&self, presented: Option<&str>) -> Option<usize> {
        match presented {
            Some(presented) => self.find(presented),
            None => self.open.then_some(0),
        }
    }

    /// Returns all keys.
    pub fn list(&self) -> &[Key] {
        &self.list
    }

    /// Returns a key by its number in the list.
    pub fn get(&self, index: usize) -> Option<&Key> {
        self.list.get(index)
    }
}

/// Returns the key in the headers of a request: `Authorization: Bearer KEY`, otherwise `x-api-key: KEY`.
pub fn presented<'a>(authorization: Option<&'a str>, x_api_key: Option<&'a str>) -> Option<&'a str> {
    let bearer = authorization.and_then(|value| {
        let (scheme, key) = value.trim().split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or(x_api_key.map(str::trim)).filter(|key| !key.is_empty())
}

/// Returns the digest of a key as the key file holds it, like `printf %s "$KEY" | sha256sum`.
pub fn digest_of(secret: &str) -> String {
    hex(Sha256::new_with_prefix(secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_by_its_text_only() {
        let text = |name: &str| format!("[[key]]\nname = \"{name}\"\nsha256 = \"{}\"\n", digest_of(name));
        let file: String = ["alpha", "beta", "gamma"].map(text).concat();
        let keys = Keys::parse(file.as_bytes()).unwrap();
        for (presented, found) in
            [("alpha", Some(0)), ("gamma", Some(2)), ("Alpha", None), ("", None), ("alpha ", None)]
        {
            assert_eq!(keys.find(presented), found, "{presented}");
            assert_eq!(keys.authorize(Some(presented)), found, "{presented}");
        }
        assert_eq!(keys.find(&digest_of("alpha")), None, "the digest is no key");
        assert_eq!((keys.authorize(None), keys.is_open()), (None, false));
    }

    #[test]
    fn a_server_without_keys_takes_all_requests_and_one_with_a_secret_only_its_own() {
        let open = Keys::open();
        assert_eq!((open.find("x"), open.authorize(None), open.is_open()), (Some(0), Some(0), true));
        let keys = Keys::of_secret("sk-1").unwrap();
        assert_eq!((keys.find("sk-1"), keys.find("sk-2"), keys.authorize(None)), (Some(0), None, None));
        let key = keys.get(0).unwrap();
        assert!(key.may(Scope::Admin) && key.may_use_model("any") && key.cache_owner() == Some("default"));
        for bad in ["", " ", "a b", "sk\n", "é"] {
            let error = Keys::of_secret(bad).unwrap_err();
            assert_eq!(error.cause().exit_code(), 2, "{error}");
        }
    }

    #[test]
    fn neither_keys_nor_digests_are_shown() {
        let keys = Keys::of_secret("sk-very-secret").unwrap();
        let shown = format!("{keys:?}");
        assert!(!shown.contains("secret") && !shown.contains(&digest_of("sk-very-secret")[..8]), "{shown}");
        let first = keys.list[0].digest.0[0];
        assert!(shown.contains("Digest(..)") && !shown.contains(&format!("[{first}")), "{shown}");
    }

    #[test]
    fn the_key_is_taken_from_either_header() {
        struct Case(Option<&'static str>, Option<&'static str>, Option<&'static str>);
        let cases = [
            Case(Some("Bearer k"), None, Some("k")),
            Case(Some("bearer  k "), Some("other"), Some("k")),
            Case(Some("Basic dTpw"), Some("k"), Some("k")),
            Case(None, Some(" k "), Some("k")),
            Case(Some("Bearer "), None, None),
            Case(Some("k"), None, None),
            Case(None, Some(""), None),
            Case(None, None, None),
        ];
        for Case(authorization, x_api_key, key) in cases {
            assert_eq!(presented(authorization, x_api_key), key, "{authorization:?} {x_api_key:?}");
        }
    }

    #[test]
    fn the_digest_is_that_of_sha256sum() {
        assert_eq!(digest_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
