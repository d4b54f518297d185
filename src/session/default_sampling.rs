//! Default sampling of a conversation: that of `generation_config.json`, otherwise values of this program.

use crate::error::{Context, Error, Result};
use crate::files;
use crate::generate::sampler::Sampling;
use crate::iebin::JSON_NAME;
use crate::output::swap;
use crate::session::Session;
use crate::strict_json;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Name of the file with the sampling that the authors of a model recommend.
pub const FILE_NAME: &str = "generation_config.json";
/// Largest accepted file in bytes; real ones have a few hundred.
const FILE_LIMIT: u64 = 1 << 20;

/// Fields of the file that change the text and that this program does not have, with the numbers that turn them off.
const ABSENT: [(&str, &[f64]); 17] = [
    ("no_repeat_ngram_size", &[0.0]),
    ("encoder_no_repeat_ngram_size", &[0.0]),
    ("encoder_repetition_penalty", &[1.0]),
    ("begin_suppress_tokens", &[]),
    ("forced_bos_token_id", &[]),
    ("forced_eos_token_id", &[]),
    ("forced_decoder_ids", &[]),
    ("sequence_bias", &[]),
    ("exponential_decay_length_penalty", &[]),
    ("num_beams", &[1.0]),
    ("penalty_alpha", &[0.0]),
    ("epsilon_cutoff", &[0.0]),
    ("eta_cutoff", &[0.0]),
    ("min_length", &[0.0]),
    ("min_new_tokens", &[0.0]),
    ("guidance_scale", &[1.0]),
    ("watermarking_config", &[]),
];

/// Sampling of a conversation, and the name of its source, shown to the user.
#[derive(Debug, Clone, PartialEq)]
pub struct DefaultSampling {
    /// Parameters, with seed 0.
    pub sampling: Sampling,
    /// Name of the source.
    pub source: &'static str,
    /// Fields of the source that have no effect although they would change the text.
    pub ignored: Vec<&'static str>,
}

impl DefaultSampling {
    /// Returns true if the authors of the model recommend this sampling.
    pub fn is_of_model(&self) -> bool {
        self.source == FILE_NAME
    }

    /// Returns a note about the fields that have no effect, if there are some.
    pub fn note(&self) -> Option<String> {
        match self.ignored.is_empty() {
            true => None,
            false => Some(format!("note: {FILE_NAME}: no effect of `{}`", self.ignored.join("`, `"))),
        }
    }

    /// Returns the default sampling of the model of a session; see [`DefaultSampling::read`].
    ///
    /// # Errors
    /// The file was changed since the pack was made, and the errors of [`DefaultSampling::read`].
    pub fn of(session: &Session) -> Result<DefaultSampling> {
        session.reader.check_file(FILE_NAME)?;
        DefaultSampling::read(&session.reader.dir)
    }

    /// Reads `generation_config.json` of the pack in `dir`. Fields have the names and default values of
    /// `transformers`: `do_sample: false` is greedy, and sampling without `top_k` keeps 50 tokens. If the file has no
    /// sampling field, or does not exist, the values are temperature 0.8, top-k 40, top-p 0.95 and min-p 0.05. Tokens
    /// of `suppress_tokens` and sequences of `bad_words_ids` are banned in any case.
    ///
    /// # Errors
    /// The file cannot be read or is not JSON, or a value is out of range.
    pub fn read(dir: &Path) -> Result<DefaultSampling> {
        let path = swap::member(&dir.join(JSON_NAME), FILE_NAME);
        if !files::exists(&path)? {
            return Ok(own());
        }
        strict_json::parse_python(&files::read_limited(&path, FILE_LIMIT)?)
            .and_then(|config| of_config(&config))
            .at(&path)
    }
}

/// Returns the sampling for models whose authors recommend none.
fn own() -> DefaultSampling {
    let sampling = Sampling { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..Sampling::default() };
    DefaultSampling { sampling, source: "defaults of iec", ignored: Vec::new() }
}

fn of_config(config: &Value) -> Result<DefaultSampling> {
    let number = |name: &str| match &config[name] {
        Value::Null => Ok(None),
        value => value
            .as_f64()
            .map(Some)
            .ok_or_else(|| Error::corrupt(format!("`{name}`: found {value}, expected a number"))),
    };
    let (temperature, top_p, min_p) = (number("temperature")?, number("top_p")?, number("min_p")?);
    let (top_k, penalty) = (number("top_k")?, number("repetition_penalty")?);
    let draws = match &config["do_sample"] {
        Value::Bool(draws) => Some(*draws),
        Value::Null => temperature.or(top_p).or(min_p).or(top_k).map(|_| true),
        other => return Err(Error::corrupt(format!("`do_sample`: found {other}, expected true or false"))),
    };
    let sampling = match draws {
        Some(true) => Sampling {
            temperature: temperature.unwrap_or(1.0),
            top_k: top_k.unwrap_or(50.0) as usize,
            top_p: top_p.unwrap_or(1.0),
            min_p: min_p.unwrap_or(0.0),
            ..Sampling::default()
        },
        Some(false) => Sampling::default(),
        None => own().sampling,
    };
    let sampling = Sampling {
        repeat_penalty: penalty.unwrap_or(1.0),
        typical_p: number("typical_p")?.filter(|_| draws == Some(true)).unwrap_or(1.0),
        logit_bias: suppressed(config)?,
        banned: banned(config)?,
        ..sampling
    };
    sampling.validate().map_err(|e| Error::corrupt(e.to_string()))?;
    let is_of_file = draws.is_some() || penalty.is_some();
    let source = if is_of_file { FILE_NAME } else { own().source };
    let is_on = |(name, off): &(&'static str, &[f64])| match &config[*name] {
        Value::Null | Value::Bool(false) => false,
        value => !value.as_f64().is_some_and(|number| off.contains(&number)),
    };
    let ignored = ABSENT.iter().filter(|field| is_on(field)).map(|(name, _)| *name).collect();
    Ok(DefaultSampling { sampling, source, ignored })
}

/// Returns the tokens of `suppress_tokens`, which are never generated, as logit biases.
fn suppressed(config: &Value) -> Result<Arc<[(u32, f64)]>> {
    let ids = match &config["suppress_tokens"] {
        Value::Null => return Ok(Arc::default()),
        value => ids(value).ok_or_else(|| expected("suppress_tokens", "a list of token ids"))?,
    };
    Ok(ids.into_iter().map(|id| (id, f64::NEG_INFINITY)).collect())
}

/// Returns the sequences of `bad_words_ids`.
fn banned(config: &Value) -> Result<Arc<[Vec<u32>]>> {
    let lists = match &config["bad_words_ids"] {
        Value::Null => return Ok(Arc::default()),
        value => value.as_array().and_then(|lists| lists.iter().map(ids).collect::<Option<Vec<_>>>()),
    };
    let lists = lists.filter(|lists| lists.iter().all(|list| !list.is_empty()));
    lists.map(Arc::from).ok_or_else(|| expected("bad_words_ids", "lists of token ids"))
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

fn expected(name: &str, what: &str) -> Error {
    Error::corrupt(format!("`{name}`: found another value, expected {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<DefaultSampling> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE_NAME), text).unwrap();
        DefaultSampling::read(dir.path())
    }

    #[test]
    fn fields_have_the_meaning_of_transformers() {
        let drawn = |temperature, top_k, top_p| Sampling { temperature, top_k, top_p, ..Sampling::default() };
        let cases = [
            (r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.9}"#, drawn(0.6, 50, 0.9), FILE_NAME),
            (r#"{"temperature": 0.7, "top_k": 20}"#, drawn(0.7, 20, 1.0), FILE_NAME),
            (r#"{"do_sample": false, "temperature": 0.7}"#, Sampling::default(), FILE_NAME),
            (r#"{"do_sample": true, "top_k": 0}"#, drawn(1.0, 0, 1.0), FILE_NAME),
            (r#"{"eos_token_id": [1, 2]}"#, own().sampling, "defaults of iec"),
            (r#"{"repetition_penalty": 1.2}"#, Sampling { repeat_penalty: 1.2, ..own().sampling }, FILE_NAME),
            (
                r#"{"do_sample": false, "repetition_penalty": 1.1}"#,
                Sampling { repeat_penalty: 1.1, ..Sampling::default() },
                FILE_NAME,
            ),
        ];
        for (text, sampling, source) in cases {
            assert_eq!(read(text).unwrap(), DefaultSampling { sampling, source, ignored: Vec::new() }, "{text}");
        }
        assert_eq!(DefaultSampling::read(tempfile::tempdir().unwrap().path()).unwrap(), own());
    }

    #[test]
    fn bans_are_honoured_and_what_is_absent_is_named() {
        struct Case {
            file: &'static str,
            banned: &'static [&'static [u32]],
            suppressed: &'static [u32],
            ignored: &'static [&'static str],
            is_of_model: bool,
        }
        let plain = Case { file: "{}", banned: &[], suppressed: &[], ignored: &[], is_of_model: false };
        let cases = [
            Case { file: r#"{"suppress_tokens": [7, 9]}"#, suppressed: &[7, 9], ..plain },
            Case {
                file: r#"{"bad_words_ids": [[1], [2, 3]], "temperature": 0.5}"#,
                banned: &[&[1], &[2, 3]],
                is_of_model: true,
                ..plain
            },
            Case {
                file: r#"{"no_repeat_ngram_size": 3, "forced_eos_token_id": 2, "num_beams": 1, "min_length": 0}"#,
                ignored: &["no_repeat_ngram_size", "forced_eos_token_id"],
                ..plain
            },
            Case {
                file: r#"{"no_repeat_ngram_size": 0, "begin_suppress_tokens": null, "guidance_scale": 1.0}"#,
                ..plain
            },
        ];
        for Case { file, banned, suppressed, ignored, is_of_model } in cases {
            let found = read(file).unwrap();
            let biases: Vec<(u32, f64)> = suppressed.iter().map(|id| (*id, f64::NEG_INFINITY)).collect();
            assert_eq!(found.sampling.logit_bias.to_vec(), biases, "{file}");
            assert_eq!(found.sampling.banned.iter().collect::<Vec<_>>(), banned, "{file}");
            assert_eq!((&found.ignored[..], found.is_of_model()), (ignored, is_of_model), "{file}");
            assert_eq!(found.note().is_some(), !ignored.is_empty(), "{file}");
        }
        for file in [r#"{"suppress_tokens": 1}"#, r#"{"bad_words_ids": [1]}"#, r#"{"bad_words_ids": [[]]}"#] {
            assert!(read(file).unwrap_err().to_string().contains("found another value"), "{file}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused_with_the_file() {
        for text in [
            r#"{"temperature": "hot"}"#,
            r#"{"do_sample": true, "top_p": 7}"#,
            "[",
            r#"{"temperature": -1}"#,
            r#"{"repetition_penalty": -1}"#,
            r#"{"do_sample": "yes"}"#,
        ] {
            let error = read(text).unwrap_err();
            assert!(error.file().is_some_and(|path| path.ends_with(FILE_NAME)), "{text}: {error}");
        }
    }
}
