//! Use of keys that survives a restart: the file `usage.json` in the directory of `--state-dir`.
//!
//! ```text
//! {"format": "iec_usage_v1", "saved_at": 1790000000,
//!  "models": {"tiny": {"alice": {"day_used": 10, "prompt_tokens": 7, "cached_tokens": 0, "generated_tokens": 3}}}}
//! ```
//!
//! `saved_at` is the Unix time in seconds. `day_used` are tokens that the limit per day lacked at that time; the limit
//! refills continuously, also while the server does not run ([`Saved::usage_of`]). The other numbers are totals. The
//! file has names of keys and numbers only, and only its owner can read it. It is replaced atomically, so a process can
//! be killed at any time; what keys used of the day since the last save is in the log of `usage_log.rs`.

use crate::error::{Context, Error, Result};
use crate::files;
use crate::output::{AtomicFile, make_dir, pretty};
use crate::sched::{KeyLimits, KeyUsage};
use crate::strict_json;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Name of the file.
pub const FILE: &str = "usage.json";
/// Time between two saves of a running server.
pub const SAVE_INTERVAL: Duration = Duration::from_secs(30);

/// Value of `format`: name and version.
const FORMAT: &str = "iec_usage_v1";
/// Largest accepted file in bytes.
const FILE_LIMIT: u64 = 64 << 20;
/// Longest name of a model or a key in bytes.
const LONGEST_NAME: usize = 256;
/// Seconds of a day.
const DAY: f64 = 86_400.0;

/// Use of keys by model: each model has a scheduler of its own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    models: BTreeMap<String, BTreeMap<String, KeyUsage>>,
}

/// Use of keys with the time at which it was saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// Use of keys.
    pub usage: Usage,
    /// Time of the save.
    pub at: SystemTime,
}

impl Usage {
    /// Sets the use of a key. Requests that are unfinished are not kept.
    pub fn set(&mut self, model: &str, key: &str, usage: KeyUsage) {
        let keys = self.models.entry(model.to_string()).or_default();
        keys.insert(key.to_string(), KeyUsage { unfinished: 0, ..usage });
    }

    /// Returns the use of a key.
    pub fn get(&self, model: &str, key: &str) -> Option<&KeyUsage> {
        self.models.get(model)?.get(key)
    }

    /// Returns the text of the file.
    pub fn to_bytes(&self, now: SystemTime) -> Vec<u8> {
        let keys = |keys: &BTreeMap<String, KeyUsage>| -> Value {
            let keys = keys.iter().map(|(name, usage)| (name.clone(), to_json(usage)));
            Value::Object(keys.collect())
        };
        let models: Map<String, Value> = self.models.iter().map(|(name, of)| (name.clone(), keys(of))).collect();
        let saved_at = now.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        pretty(&json!({"format": FORMAT, "saved_at": saved_at, "models": models}))
    }

    /// Writes the file, readable by its owner only. Creates the directory if it does not exist.
    ///
    /// # Errors
    /// The directory or the file cannot be written.
    pub fn save(&self, state_dir: &Path, now: SystemTime) -> Result<()> {
        make_dir(state_dir)?;
        let path = state_dir.join(FILE);
        let mut file = AtomicFile::create_private(&path)?;
        file.write_all(&self.to_bytes(now)).at(&path)?;
        file.commit()
    }
}

impl Saved {
    /// Reads the file of a directory; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    pub fn load(state_dir: &Path) -> Result<Option<Saved>> {
        let path = state_dir.join(FILE);
        let file = match files::open(&path) {
            Err(e) if e.is_not_found() => return Ok(None),
            opened => opened?,
        };
        let mut text = Vec::new();
        file.take(FILE_LIMIT + 1).read_to_end(&mut text).at(&path)?;
        let saved = Saved::parse(&text).at(&path);
        saved.help("remove the file; keys then begin with unused limits and totals of zero").map(Some)
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// The text is not JSON of this format.
    pub fn parse(text: &[u8]) -> Result<Saved> {
        if text.len() as u64 > FILE_LIMIT {
            return Err(Error::corrupt(format!("found more than {FILE_LIMIT} bytes of usage counters")));
        }
        let file = strict_json::parse(text)?;
        match file["format"].as_str() {
            Some(FORMAT) => {}
            Some(other) => return Err(Error::corrupt(format!("found `{other}`, expected {FORMAT}")).tensor("format")),
            None => return Err(Error::corrupt(format!("expected an object with the format {FORMAT}"))),
        }
        let seconds =
            file["saved_at"].as_u64().and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
        let at = seconds.ok_or_else(|| Error::corrupt("expected a Unix time in seconds").tensor("saved_at"))?;
        let mut usage = Usage::default();
        for (model, keys) in object(&file["models"], "models")? {
            for (key, value) in object(keys, model)? {
                if model.len() > LONGEST_NAME || key.len() > LONGEST_NAME {
                    return Err(Error::corrupt(format!("expected names of at most {LONGEST_NAME} bytes")).tensor(key));
                }
                usage.set(model, key, from_json(value).ok_or_else(|| not_counters(key))?);
            }
        }
        Ok(Saved { usage, at })
    }

    /// Returns the use of a key at a later time, for [`Scheduler::restore_usage`](crate::sched::Scheduler): tokens of
    /// the day are lowered by what its limit has refilled since the save. `None` if the key was not saved.
    pub fn usage_of(&self, model: &str, key: &str, limits: &KeyLimits, now: SystemTime) -> Option<KeyUsage> {
        let usage = self.usage.get(model, key)?;
        Some(KeyUsage { day_used: still_used(usage.day_used, self.at, limits, now), ..*usage })
    }
}

/// Returns how many of the tokens that a limit per day lacked at `then` it still lacks `now`; it is refilled all day.
pub fn still_used(tokens: u64, then: SystemTime, limits: &KeyLimits, now: SystemTime) -> u64 {
    let seconds = now.duration_since(then).map_or(0.0, |time| time.as_secs_f64());
    let refilled = limits.tokens_per_day.map_or(f64::INFINITY, |limit| limit as f64 * seconds / DAY);
    (tokens as f64 - refilled).max(0.0).ceil() as u64
}

fn not_counters(key: &str) -> Error {
    Error::corrupt("expected the counters day_used, prompt_tokens, cached_tokens and generated_tokens").tensor(key)
}

fn object<'a>(value: &'a Value, name: &str) -> Result<&'a Map<String, Value>> {
    value.as_object().ok_or_else(|| Error::corrupt("expected an object").tensor(name))
}

fn to_json(usage: &KeyUsage) -> Value {
    let KeyUsage { day_used, unfinished: _, prompt_tokens, cached_tokens, generated_tokens } = *usage;
    json!({
        "day_used": day_used,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "generated_tokens": generated_tokens,
    })
}

/// Returns the counters of an object; `None` if one is missing or wrong. No more tokens are cached than prompts have.
fn from_json(value: &Value) -> Option<KeyUsage> {
    let number = |name: &str| value.get(name)?.as_u64();
    let usage = KeyUsage {
        day_used: number("day_used")?,
        unfinished: 0,
        prompt_tokens: number("prompt_tokens")?,
        cached_tokens: number("cached_tokens")?,
        generated_tokens: number("generated_tokens")?,
    };
    (usage.cached_tokens <= usage.prompt_tokens).then_some(usage)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::PermissionsExt;

    fn usage(day_used: u64) -> KeyUsage {
        KeyUsage { day_used, unfinished: 0, prompt_tokens: 7, cached_tokens: 2, generated_tokens: 3 }
    }

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn saved_counters_are_loaded_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        assert_eq!(Saved::load(&state).unwrap(), None);
        let mut counters = Usage::default();
        counters.set("tiny", "alice", KeyUsage { unfinished: 4, ..usage(10) });
        counters.set("tiny", "bob", usage(0));
        counters.set("big", "alice", usage(u64::MAX));
        counters.save(&state, at(500)).unwrap();
        counters.save(&state, at(501)).unwrap();
        assert_eq!(Saved::load(&state).unwrap(), Some(Saved { usage: counters.clone(), at: at(501) }));
        assert_eq!(counters.get("tiny", "alice"), Some(&usage(10)));
        assert_eq!((counters.get("tiny", "eve"), counters.get("none", "alice")), (None, None));
        let mode = std::fs::metadata(state.join(FILE)).unwrap().permissions().mode();
        assert_eq!((mode & 0o777, std::fs::read_dir(&state).unwrap().count()), (0o600, 1));
    }

    #[test]
    fn the_limit_of_a_day_refills_while_the_server_does_not_run() {
        let mut counters = Usage::default();
        counters.set("m", "k", usage(1000));
        let saved = Saved { usage: counters, at: at(1_000_000) };
        let limits = |tokens_per_day| KeyLimits { tokens_per_day, ..KeyLimits::default() };
        let cases = [(0, 1000), (21_600, 500), (30_000, 306), (90_000, 0)];
        for (seconds, day_used) in cases {
            let now = at(1_000_000 + seconds);
            assert_eq!(saved.usage_of("m", "k", &limits(Some(2000)), now), Some(usage(day_used)), "{seconds}");
        }
        assert_eq!(
            saved.usage_of("m", "k", &limits(Some(2000)), at(0)),
            Some(usage(1000)),
            "a clock that was set back"
        );
        assert_eq!(saved.usage_of("m", "k", &limits(None), at(1_000_000)), Some(usage(0)));
        assert_eq!(saved.usage_of("m", "new", &limits(None), at(1_000_000)), None);
    }

    #[test]
    fn a_damaged_file_is_named_with_the_next_step() {
        let dir = tempfile::tempdir().unwrap();
        let key = r#"{"day_used": 1, "prompt_tokens": 2, "cached_tokens": 1, "generated_tokens": 1}"#;
        let file = |saved_at: &str, models: &str| {
            format!(r#"{{"format": "iec_usage_v1", "saved_at": {saved_at}, "models": {models}}}"#)
        };
        let good = file("1", &format!(r#"{{"m": {{"k": {key}}}}}"#));
        Saved::parse(good.as_bytes()).unwrap();
        let cases = [
            (String::new(), "EOF"),
            ("[]".into(), "expected an object with the format"),
            (good.replace("_v1", "_v2"), "format: found `iec_usage_v2`, expected iec_usage_v1"),
            (file("-1", "{}"), "saved_at: expected a Unix time"),
            (file("18446744073709551615", "{}"), "saved_at: expected a Unix time"),
            (file("1", "[]"), "models: expected an object"),
            (file("1", r#"{"m": 1}"#), "m: expected an object"),
            (good.replace(r#""day_used": 1, "#, ""), "k: expected the counters"),
            (good.replace(r#""day_used": 1"#, r#""day_used": 1.5"#), "k: expected the counters"),
            (good.replace(r#""cached_tokens": 1"#, r#""cached_tokens": 3"#), "k: expected the counters"),
            (good.replace(r#""k""#, &format!("\"{}\"", "k".repeat(257))), "expected names of at most 256 bytes"),
            (good.replace(r#""models""#, r#""format""#), "format"),
            (good[..good.len() - 1].into(), "EOF"),
        ];
        for (text, message) in cases {
            std::fs::write(dir.path().join(FILE), &text).unwrap();
            let error = Saved::load(dir.path()).unwrap_err();
            assert!(error.to_string().contains(message), "{text}: {error}, expected {message}");
            assert!(error.file().is_some() && error.help_text().unwrap().contains("remove the file"));
        }
    }

    proptest! {
        #[test]
        fn counters_are_read_as_they_are_written(
            counters in proptest::collection::vec((".{0,20}", ".{0,20}", any::<[u64; 4]>()), 0..20),
            seconds in 0..1u64 << 40,
        ) {
            let mut usage = Usage::default();
            for (model, key, [day_used, prompt_tokens, cached, generated_tokens]) in counters {
                let cached_tokens = cached.min(prompt_tokens);
                let unfinished = 0;
                let counters = KeyUsage { day_used, unfinished, prompt_tokens, cached_tokens, generated_tokens };
                usage.set(&model, &key, counters);
            }
            let saved = Saved::parse(&usage.to_bytes(at(seconds))).unwrap();
            prop_assert_eq!(saved, Saved { usage, at: at(seconds) });
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>, cut in 0..400usize) {
            let _ = Saved::parse(&bytes);
            let mut usage = Usage::default();
            usage.set("m", "k", KeyUsage::default());
            let text = usage.to_bytes(at(1));
            let _ = Saved::parse(&[&text[..cut.min(text.len())], &bytes].concat());
        }
    }
}
