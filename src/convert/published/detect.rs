//! Finds the quantization settings of a checkpoint, and the format that they name.

use super::format::Format;
use super::table::{FORMATS, REFUSED};
use crate::convert::arch::Fields;
use crate::convert::json::read_object;
use crate::convert::source::layout::Layout;
use crate::convert::source::shards::Shards;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Objects of `config.json` with settings, most usual first. The last is an older name of `compressed-tensors`.
pub(super) const KEYS: [&str; 3] = [QUANTIZATION_CONFIG, QUANTIZATION, "compression_config"];
const QUANTIZATION_CONFIG: &str = "quantization_config";
/// Object of MLX, which names no method and may have a copy under the usual key.
const QUANTIZATION: &str = "quantization";
const METHOD: &str = "quant_method";

/// Endings of tensors that no product reads: scales of activations and of a quantized KV cache.
const UNREAD: [&str; 8] = [
    ".input_scale",
    ".activation_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
];

/// Configuration of a checkpoint and the files beside it.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Content of `config.json`.
    pub config: &'a Map<String, Value>,
    /// Path of `config.json`.
    pub path: &'a Path,
    /// Files of the checkpoint.
    pub layout: &'a Layout,
}

impl<'a> Source<'a> {
    /// Returns `model_type`, if the configuration has one.
    pub(super) fn model_type(&self) -> Option<&'a str> {
        self.config.get("model_type").and_then(Value::as_str)
    }
}

/// Settings that were found, and their format.
pub(super) struct FoundSettings {
    pub format: Option<&'static Format>,
    /// Object that holds the settings under `key`.
    outer: Map<String, Value>,
    /// Key of the settings; empty if the outer object is the settings.
    key: &'static str,
    /// File with the settings.
    pub path: PathBuf,
}

/// Returns true for tensors that no product reads.
pub(super) fn unread(name: &str) -> bool {
    UNREAD.iter().any(|ending| name.ends_with(ending))
}

/// Returns the method that a configuration or a file beside it names, and all its settings, whether it is supported or
/// not.
///
/// # Errors
/// A file cannot be read.
pub fn settings_of(source: &Source<'_>) -> Result<Option<(String, Map<String, Value>)>> {
    let inner = source.config.get("text_config").and_then(Value::as_object);
    let maps = || [Some(source.config), inner].into_iter().flatten();
    let own = maps().flat_map(|map| KEYS.iter().filter_map(|key| map.get(*key)?.as_object())).next();
    let method = |fields: &Map<String, Value>, usual: &str| {
        fields.get(METHOD).and_then(Value::as_str).unwrap_or(usual).to_string()
    };
    if let Some(fields) = own {
        return Ok(Some((method(fields, "mlx"), fields.clone())));
    }
    for format in &FORMATS {
        let Some(path) = format.file.map_or(Ok(None), |file| source.layout.companion(file))? else { continue };
        let mut whole = read_object(&path)?;
        let fields = match format.file_object {
            None => Some(whole),
            Some(key) => whole.remove(key).and_then(|value| value.as_object().cloned()),
        };
        return Ok(fields.map(|fields| (method(&fields, format.methods[0]), fields)));
    }
    Ok(None)
}

impl FoundSettings {
    /// Finds the settings and the format of a checkpoint.
    ///
    /// # Errors
    /// The format is not supported, or two different ones are found.
    pub fn of(source: &Source<'_>, shards: &Shards) -> Result<FoundSettings> {
        let inner = source.config.get("text_config").and_then(Value::as_object);
        let is_object = |map: &Map<String, Value>, key: &str| map.get(key).is_some_and(|v| !v.is_null());
        let named = [Some(source.config), inner].into_iter().flatten();
        let mut named = named.flat_map(|map| KEYS.iter().map(move |key| (map, *key)));
        let Some((outer, key)) = named.find(|(map, key)| is_object(map, key)) else {
            return FoundSettings::beside(source, shards);
        };
        let found = FoundSettings { format: None, outer: outer.clone(), key, path: source.path.to_path_buf() };
        let format = found.format_of(key).map_err(|e| e.at(source.path))?;
        found.refuse_second(source, format)?;
        Ok(FoundSettings { format: Some(format), ..found })
    }

    /// Finds settings in a file beside `config.json`, or tensors that need none.
    fn beside(source: &Source<'_>, shards: &Shards) -> Result<FoundSettings> {
        for format in &FORMATS {
            let Some(path) = format.file.map_or(Ok(None), |file| source.layout.companion(file))? else { continue };
            let outer = read_object(&path)?;
            let key = format.file_object.unwrap_or_default();
            let found = FoundSettings { format: Some(format), outer, key, path };
            let method = found.fields().map_or(Ok(None), |fields| fields.word_opt(METHOD));
            return match method.map_err(|e| e.at(&found.path))? {
                Some(_) => {
                    Ok(FoundSettings { format: Some(found.format_of(key).map_err(|e| e.at(&found.path))?), ..found })
                }
                None => Ok(found),
            };
        }
        let has = |format: &Format| shards.tensors().any(|tensor| format.stem(&tensor.name).is_some());
        let format = FORMATS.iter().find(|format| !format.needs_settings && has(format));
        Ok(FoundSettings { format, outer: Map::new(), key: "", path: source.path.to_path_buf() })
    }

    /// Returns the format that the settings name.
    fn format_of(&self, key: &str) -> Result<&'static Format> {
        let fields = match self.fields() {
            Some(fields) => fields,
            None => return Err(Fields::new(&self.outer).wrong(key, "an object")),
        };
        let method = match fields.word_opt(METHOD)? {
            Some(method) => method,
            None if key == "compression_config" => "compressed-tensors",
            None if fields.get("group_size").is_some() && fields.get("bits").is_some() => "mlx",
            None => return Err(fields.unsupported(METHOD, "expected the name of a format")),
        };
        let lower = method.to_ascii_lowercase();
        if let Some(format) = FORMATS.iter().find(|format| format.methods.contains(&lower.as_str())) {
            return Ok(format);
        }
        let known = FORMATS.iter().flat_map(|format| &format.methods[..1]).copied().collect::<Vec<_>>().join(", ");
        let why = REFUSED.iter().find(|(name, _)| *name == lower).map_or(String::new(), |(_, why)| format!("{why}; "));
        let method: String = method.chars().take(60).collect();
        let error = Error::unsupported(format!("`{method}` is not supported; {why}expected one of {known}"));
        Err(error
            .tensor(fields.name(METHOD))
            .help("get the checkpoint before it was quantized, and quantize it with `iec pack --bits 4`"))
    }

    /// Refuses settings of another format beside those that were found.
    fn refuse_second(&self, source: &Source<'_>, format: &'static Format) -> Result<()> {
        let two = |path: &Path, other: &str| {
            let found = format!("found settings of {} and of {other}, expected one format", format.name);
            let help = "config.json or another file is not of these weights; get all files of the same revision";
            Err(Error::corrupt(found).at(path).tensor(self.key).help(help))
        };
        let has_mlx = source.config.get(QUANTIZATION).is_some_and(|value| value.get("group_size").is_some());
        if self.key == QUANTIZATION_CONFIG && has_mlx && !format.methods.contains(&"mlx") {
            return two(source.path, "MLX");
        }
        for other in FORMATS.iter().filter(|other| other.file_object.is_some() && other.name != format.name) {
            if let Some(path) = other.file.map_or(Ok(None), |file| source.layout.companion(file))? {
                return two(&path, other.name);
            }
        }
        Ok(())
    }

    /// Returns the settings.
    pub fn fields(&self) -> Option<Fields<'_>> {
        let fields = Fields::new(&self.outer);
        match self.key {
            "" if self.outer.is_empty() => None,
            "" => Some(fields),
            key => fields.object_opt(key).ok().flatten(),
        }
    }

    /// Returns the text of the settings.
    pub fn text(&self) -> String {
        let settings = self.outer.get(self.key);
        settings.map_or_else(|| Value::Object(self.outer.clone()).to_string(), Value::to_string)
    }

    /// Makes an error about settings beside weights that are all floats.
    pub fn no_matrices(&self) -> Error {
        let name = self.format.map_or("", |format| format.name);
        let field = if self.key.is_empty() { METHOD.to_string() } else { format!("{}.{METHOD}", self.key) };
        let method = self.fields().and_then(|fields| fields.word_opt(METHOD).ok().flatten()).unwrap_or(name);
        let method: String = method.chars().take(60).collect();
        Error::unsupported(format!("found settings of `{method}`, but no tensor of {name} in the weights"))
            .at(&self.path)
            .tensor(field)
            .help("if the weights are floats, remove these settings; otherwise get all files of the same revision")
    }
}
