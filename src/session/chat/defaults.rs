//! Default sampling of a conversation: that of `generation_config.json`, otherwise values of this program.

use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::JSON_NAME;
use crate::output::swap;
use crate::runtime::sampler::Sampling;
use crate::session::Session;
use crate::strict_json;
use serde_json::Value;
use std::path::Path;

/// Name of the file with the sampling that the authors of a model recommend.
pub const FILE_NAME: &str = "generation_config.json";
/// Largest accepted file in bytes; real ones have a few hundred.
const FILE_LIMIT: u64 = 1 << 20;

/// Sampling of a conversation, and the name of its source, shown to the user.
#[derive(Debug, Clone, PartialEq)]
pub struct DefaultSampling {
    /// Parameters, with seed 0.
    pub sampling: Sampling,
    /// Name of the source.
    pub source: &'static str,
}

impl DefaultSampling {
    /// Returns true if the authors of the model recommend this sampling.
    pub fn is_of_model(&self) -> bool {
        self.source == FILE_NAME
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
    /// sampling field, or does not exist, the values are temperature 0.8, top-k 40, top-p 0.95 and min-p 0.05.
    ///
    /// # Errors
    /// The file cannot be read or is not JSON, or a value is out of range.
    pub fn read(dir: &Path) -> Result<DefaultSampling> {
        let path = swap::member(&dir.join(JSON_NAME), FILE_NAME);
        if !files::exists(&path)? {
            return Ok(own());
        }
        strict_json::parse(&files::read_limited(&path, FILE_LIMIT)?).and_then(|config| of_config(&config)).at(&path)
    }
}

/// Returns the sampling for models whose authors recommend none.
fn own() -> DefaultSampling {
    let sampling = Sampling { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..Sampling::default() };
    DefaultSampling { sampling, source: "defaults of iec" }
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
        None if penalty.is_none() => return Ok(own()),
        None => own().sampling,
    };
    let sampling = Sampling { repeat_penalty: penalty.unwrap_or(1.0), ..sampling };
    sampling.validate().map_err(|e| Error::corrupt(e.to_string()))?;
    Ok(DefaultSampling { sampling, source: FILE_NAME })
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
            assert_eq!(read(text).unwrap(), DefaultSampling { sampling, source }, "{text}");
        }
        assert_eq!(DefaultSampling::read(tempfile::tempdir().unwrap().path()).unwrap(), own());
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
