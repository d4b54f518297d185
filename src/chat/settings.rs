//! Settings of a conversation, changed by `/set`.

use crate::error::{Error, Result};
use crate::generate::sampler::Sampling;
use crate::similar::nearest;
use std::str::FromStr;

/// Display of reasoning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Think {
    /// All of it, dimmed.
    #[default]
    On,
    /// None of it.
    Off,
    /// One line with its length.
    Fold,
}

/// Names of the values of [`Think`].
const THINK: [(&str, Think); 3] = [("on", Think::On), ("off", Think::Off), ("fold", Think::Fold)];

impl Think {
    /// Returns the name of the value.
    pub fn name(self) -> &'static str {
        THINK.iter().find(|(_, think)| *think == self).map_or("", |(name, _)| name)
    }
}

impl FromStr for Think {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Think, String> {
        let found = THINK.iter().find(|(name, _)| *name == text);
        found.map(|(_, think)| *think).ok_or_else(|| format!("found `{text}`, expected on, off or fold"))
    }
}

/// Settings of a conversation; by default greedy answers without a limit of tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Settings {
    /// Sampling; each answer draws from its seed plus the number of answers before.
    pub sampling: Sampling,
    /// Largest number of tokens of an answer; `None` = up to the end of the context.
    pub max_new: Option<usize>,
    /// Display of reasoning.
    pub think: Think,
    /// Statistics after each answer.
    pub stats: bool,
}

/// Names of the settings, with their values for the help.
pub const NAMES: &[(&str, &str)] = &[
    ("temperature", "0 (greedy) or more"),
    ("top_k", "number of tokens; 0 = all"),
    ("top_p", "more than 0, at most 1"),
    ("min_p", "0 to 1"),
    ("repeat_penalty", "1 has no effect"),
    ("seed", "whole number"),
    ("max_new", "tokens per answer; 0 = up to the context"),
    ("think", "on, off or fold: display of reasoning"),
    ("stats", "on or off: statistics after each answer"),
];

impl Settings {
    /// Changes a setting; `-` counts as `_` in its name.
    ///
    /// # Errors
    /// There is no such setting, or the value is out of range; nothing is changed then.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let name = name.replace('-', "_");
        let mut changed = self.clone();
        let sampling = &mut changed.sampling;
        match name.as_str() {
            "temperature" | "temp" => sampling.temperature = parsed(&name, value)?,
            "top_k" => sampling.top_k = parsed(&name, value)?,
            "top_p" => sampling.top_p = parsed(&name, value)?,
            "min_p" => sampling.min_p = parsed(&name, value)?,
            "repeat_penalty" => sampling.repeat_penalty = parsed(&name, value)?,
            "seed" => sampling.seed = parsed(&name, value)?,
            "max_new" | "num_predict" => changed.max_new = Some(parsed(&name, value)?).filter(|most| *most > 0),
            "think" => changed.think = value.parse().map_err(|why| Error::usage(format!("think: {why}")))?,
            "stats" => changed.stats = switch(value)?,
            _ => return Err(unknown(&name)),
        }
        changed.sampling.validate()?;
        *self = changed;
        Ok(())
    }

    /// Returns the value of a setting; `None` if there is no such setting.
    pub fn get(&self, name: &str) -> Option<String> {
        let sampling = &self.sampling;
        Some(match name {
            "temperature" => sampling.temperature.to_string(),
            "top_k" => sampling.top_k.to_string(),
            "top_p" => sampling.top_p.to_string(),
            "min_p" => sampling.min_p.to_string(),
            "repeat_penalty" => sampling.repeat_penalty.to_string(),
            "seed" => sampling.seed.to_string(),
            "max_new" => self.max_new.unwrap_or(0).to_string(),
            "think" => self.think.name().into(),
            "stats" => if self.stats { "on" } else { "off" }.into(),
            _ => return None,
        })
    }

    /// Describes the sampling in a few words.
    pub fn describe_sampling(&self) -> String {
        let sampling = &self.sampling;
        let mut words = match sampling.temperature {
            0.0 => vec!["greedy".to_string()],
            temperature => vec![format!("temperature {temperature}")],
        };
        let drawn = sampling.temperature > 0.0;
        for (name, value, neutral) in [
            ("top-k", sampling.top_k as f64, !drawn || sampling.top_k == 0),
            ("top-p", sampling.top_p, !drawn || sampling.top_p == 1.0),
            ("min-p", sampling.min_p, !drawn || sampling.min_p == 0.0),
            ("repeat-penalty", sampling.repeat_penalty, sampling.repeat_penalty == 1.0),
        ] {
            if !neutral {
                words.push(format!("{name} {value}"));
            }
        }
        words.join(", ")
    }
}

fn parsed<T: FromStr>(name: &str, value: &str) -> Result<T> {
    value.parse().map_err(|_| Error::usage(format!("{name}: found `{value}`, expected a number")))
}

fn switch(value: &str) -> Result<bool> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Error::usage(format!("stats: found `{value}`, expected on or off"))),
    }
}

fn unknown(name: &str) -> Error {
    let names = || NAMES.iter().map(|(name, _)| *name).chain(["system"]);
    let hint = nearest(name, names()).map_or(String::new(), |known| format!("; did you mean {known}?"));
    Error::usage(format!("there is no setting `{name}`{hint}")).help("/set lists the settings")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings::default()
    }

    #[test]
    fn each_setting_is_set_by_its_name_and_shown() {
        let mut all = settings();
        let values = ["0.5", "7", "0.9", "0.1", "1.1", "42", "9", "fold", "on"];
        for ((name, _), value) in NAMES.iter().zip(values) {
            assert_ne!(all.get(name).as_deref(), Some(value), "{name}");
            all.set(name, value).unwrap();
            assert_eq!(all.get(name).as_deref(), Some(value), "{name}");
        }
        assert_eq!(all.describe_sampling(), "temperature 0.5, top-k 7, top-p 0.9, min-p 0.1, repeat-penalty 1.1");
        all.set("max_new", "0").unwrap();
        all.set("top-p", "1").unwrap();
        assert_eq!((all.max_new, all.sampling.top_p), (None, 1.0));
        assert_eq!(settings().describe_sampling(), "greedy");
    }

    #[test]
    fn a_wrong_value_changes_nothing() {
        let cases = [
            ("temperature", "-1", "temperature"),
            ("temperature", "warm", "number"),
            ("top_p", "2", "top-p"),
            ("max_new", "-1", "number"),
            ("think", "loud", "fold"),
            ("stats", "yes", "on or off"),
            ("temprature", "1", "temperature?"),
            ("x", "1", "no setting"),
        ];
        for (name, value, expected) in cases {
            let mut all = settings();
            let error = all.set(name, value).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(all, settings());
        }
    }
}
