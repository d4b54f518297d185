//! Types of settings: each is read from a text (option, environment variable) and from a field of the file.

use crate::error::Result;
use crate::runtime::KvType;
use crate::serve::toml_text::Field;
use crate::session::chat_templates::TemplateChoice;
use crate::units::{duration_text, parse_count, parse_duration, parse_size};
use serde_json::{Value as Json, json};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use toml::de::DeValue;

/// Largest number of values of a list.
const MOST_VALUES: usize = 256;
/// Longest name of a model in bytes.
const LONGEST_NAME: usize = 128;

/// Size in bytes, written as `8M` or as a number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Size, String> {
        parse_size(text).map(Size)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];
        let unit = units.iter().find(|(_, bits)| self.0 > 0 && self.0.trailing_zeros() >= *bits);
        match unit {
            Some((unit, bits)) => write!(f, "{}{unit}", self.0 >> bits),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Format of the log on stderr.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// A JSON object per line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<LogFormat, String> {
        match text {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(format!("found `{text}`, expected text or json")),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        })
    }
}

/// Model to serve: `NAME=DIR`, or `DIR` for the name that the model has itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSource {
    /// Name in requests; `None`: that of the model.
    pub name: Option<String>,
    /// Pack, or anything else that names a model.
    pub path: PathBuf,
    /// Chat template; `None`: that of the settings.
    pub chat_template: Option<TemplateChoice>,
}

impl FromStr for ModelSource {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<ModelSource, String> {
        let (name, path) = text.split_once('=').map_or((None, text), |(name, path)| (Some(name), path));
        if path.is_empty() {
            return Err(format!("found `{text}`, expected NAME=DIR or DIR"));
        }
        let name = name.map(model_name).transpose()?;
        Ok(ModelSource { name, path: PathBuf::from(path), chat_template: None })
    }
}

/// Checks the name of a model.
///
/// # Errors
/// It is empty, too long, or has other characters than letters, digits and `._:/-`.
pub fn model_name(text: &str) -> std::result::Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._:/-".contains(c);
    match (1..=LONGEST_NAME).contains(&text.len()) && text.chars().all(allowed) {
        true => Ok(text.to_string()),
        false => Err("expected a name of 1 to 128 letters, digits, and the characters . _ : / -".into()),
    }
}

/// Value of a setting.
pub(super) trait Value: Sized {
    /// Name of the value in the help; `None` for a switch.
    const NAME: Option<&'static str>;
    /// True if the option may be repeated, and each occurrence adds values.
    const IS_LIST: bool = false;

    /// Parses the text of an option or an environment variable.
    fn from_text(text: &str) -> std::result::Result<Self, String>;

    /// Reads a field of the file.
    fn from_field(field: &Field<'_>) -> Result<Self> {
        Self::from_text(field.string()?).map_err(|message| field.error(&message))
    }

    /// Returns the value for the printed configuration.
    fn to_json(&self) -> Json;

    /// Returns the text that the help shows as the default; empty for a value that needs no mention.
    fn to_text(&self) -> String;

    /// Adds the values of a later occurrence, which replaces the value if it is no list.
    fn add(&mut self, later: Self) {
        *self = later;
    }
}

/// Implements [`Value`] for whole numbers.
macro_rules! whole_numbers {
    ($($type:ty),+) => {
        $(impl Value for $type {
            const NAME: Option<&'static str> = Some("N");

            fn from_text(text: &str) -> std::result::Result<$type, String> {
                text.parse().map_err(|_| format!("found `{text}`, expected a number from 0 to {}", <$type>::MAX))
            }

            fn from_field(field: &Field<'_>) -> Result<$type> {
                let most = i64::try_from(<$type>::MAX).unwrap_or(i64::MAX);
                <$type>::try_from(field.integer(0..=most)?).map_err(|e| field.error(&e.to_string()))
            }

            fn to_json(&self) -> Json {
                json!(self)
            }

            fn to_text(&self) -> String {
                self.to_string()
            }
        })+
    };
}

whole_numbers!(u16, u32, u64);

/// Implements [`Value`] for types that are written as a number or a text with a unit.
macro_rules! numbers_with_units {
    ($($type:ty, $name:literal, $parse:expr, $of:expr, $json:expr;)+) => {
        $(impl Value for $type {
            const NAME: Option<&'static str> = Some($name);

            fn from_text(text: &str) -> std::result::Result<$type, String> {
                $parse(text)
            }

            fn from_field(field: &Field<'_>) -> Result<$type> {
                match field.value {
                    DeValue::Integer(_) => {
                        let number = field.integer(0..=i64::MAX)?.unsigned_abs();
                        $of(number).map_err(|e: std::num::TryFromIntError| field.error(&e.to_string()))
                    }
                    _ => Self::from_text(field.string()?).map_err(|message| field.error(&message)),
                }
            }

            fn to_json(&self) -> Json {
                $json(self)
            }

            fn to_text(&self) -> String {
                self.to_string()
            }
        })+
    };
}

numbers_with_units! {
    usize, "N", parse_count, usize::try_from, |count: &usize| json!(count);
    Size, "SIZE", Size::from_str, |bytes| Ok(Size(bytes)), |size: &Size| json!(size.0);
}

impl Value for bool {
    const NAME: Option<&'static str> = None;

    fn from_text(text: &str) -> std::result::Result<bool, String> {
        match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "on" | "yes" => Ok(true),
            "false" | "0" | "off" | "no" => Ok(false),
            _ => Err(format!("found `{text}`, expected on or off")),
        }
    }

    fn from_field(field: &Field<'_>) -> Result<bool> {
        field.boolean()
    }

    fn to_json(&self) -> Json {
        json!(self)
    }

    fn to_text(&self) -> String {
        if *self { "on".into() } else { String::new() }
    }
}

impl Value for String {
    const NAME: Option<&'static str> = Some("TEXT");

    fn from_text(text: &str) -> std::result::Result<String, String> {
        Ok(text.into())
    }

    fn to_json(&self) -> Json {
        json!(self)
    }

    fn to_text(&self) -> String {
        self.clone()
    }
}

impl Value for PathBuf {
    const NAME: Option<&'static str> = Some("PATH");

    fn from_text(text: &str) -> std::result::Result<PathBuf, String> {
        match text.is_empty() || text.contains('\0') {
            true => Err("expected a path".into()),
            false => Ok(Path::new(text).to_path_buf()),
        }
    }

    fn to_json(&self) -> Json {
        json!(self.to_string_lossy())
    }

    fn to_text(&self) -> String {
        self.display().to_string()
    }
}

impl Value for Duration {
    const NAME: Option<&'static str> = Some("TIME");

    fn from_text(text: &str) -> std::result::Result<Duration, String> {
        parse_duration(text)
    }

    fn to_json(&self) -> Json {
        json!(duration_text(*self))
    }

    fn to_text(&self) -> String {
        duration_text(*self)
    }
}

impl Value for KvType {
    const NAME: Option<&'static str> = Some("TYPE");

    fn from_text(text: &str) -> std::result::Result<KvType, String> {
        text.parse().map_err(|e: crate::error::Error| e.to_string())
    }

    fn to_json(&self) -> Json {
        json!(self.to_string())
    }

    fn to_text(&self) -> String {
        self.to_string()
    }
}

impl Value for TemplateChoice {
    const NAME: Option<&'static str> = Some("auto|NAME|FILE");

    fn from_text(text: &str) -> std::result::Result<TemplateChoice, String> {
        text.parse()
    }

    fn to_json(&self) -> Json {
        json!(self.to_string())
    }

    fn to_text(&self) -> String {
        self.to_string()
    }
}

impl Value for LogFormat {
    const NAME: Option<&'static str> = Some("FORMAT");

    fn from_text(text: &str) -> std::result::Result<LogFormat, String> {
        text.parse()
    }

    fn to_json(&self) -> Json {
        json!(self.to_string())
    }

    fn to_text(&self) -> String {
        self.to_string()
    }
}

impl Value for Vec<String> {
    const NAME: Option<&'static str> = Some("TEXT");
    const IS_LIST: bool = true;

    /// Parses values with commas between them.
    fn from_text(text: &str) -> std::result::Result<Vec<String>, String> {
        let values: Vec<String> = text.split(',').map(|value| value.trim().to_string()).collect();
        match values.len() <= MOST_VALUES {
            true => Ok(values),
            false => Err(format!("found {} values, expected at most {MOST_VALUES}", values.len())),
        }
    }

    fn from_field(field: &Field<'_>) -> Result<Vec<String>> {
        Ok(field.strings(MOST_VALUES)?.into_iter().map(String::from).collect())
    }

    fn to_json(&self) -> Json {
        json!(self)
    }

    fn to_text(&self) -> String {
        self.join(",")
    }

    fn add(&mut self, later: Vec<String>) {
        self.extend(later);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_as_they_are_parsed() {
        for (bytes, text) in [(8 << 20, "8M"), (8 << 30, "8G"), (1 << 10, "1K"), (1000, "1000"), (3 << 40, "3T")] {
            assert_eq!((Size(bytes).to_string().as_str(), text.parse()), (text, Ok(Size(bytes))));
        }
    }

    #[test]
    fn models_have_a_name_or_their_own() {
        let model = |name: Option<&str>, path: &str| {
            Ok(ModelSource { name: name.map(String::from), path: path.into(), chat_template: None })
        };
        assert_eq!("tiny=packs/tiny".parse::<ModelSource>(), model(Some("tiny"), "packs/tiny"));
        assert_eq!("org/name:tag=a=b".parse::<ModelSource>(), model(Some("org/name:tag"), "a=b"));
        assert_eq!("packs/tiny".parse::<ModelSource>(), model(None, "packs/tiny"));
        for text in ["", "a=", "=a", "a b=c", "é=c"] {
            assert!(text.parse::<ModelSource>().is_err(), "{text}");
        }
    }
}
