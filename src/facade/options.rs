//! Options with which an [`Engine`](super::Engine) is opened.

use crate::error::{Error, Result};
use crate::models::Places;
use crate::runtime::device::{Devices, Offload};
use crate::runtime::kv::KvType;
use crate::runtime::{EngineOptions, Precision};
use crate::session::adapters::AdapterSource;
use crate::session::chat_templates::TemplateChoice;
use crate::session::template::RenderProcess;
use crate::session::{SessionOptions, Speculation};
use serde::{Deserialize, Deserializer};
use std::ffi::OsString;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

/// Options with which an engine is opened. They have the names and meanings of the program's options.
///
/// ```
/// let mut options = iec::OpenOptions::default();
/// options.threads = 1;
/// options.context = Some(256);
/// # assert!(iec::OpenOptions::from_json(r#"{"threads": 1, "context": 256}"#).is_ok());
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Number of threads; 0 = one per physical core.
    pub threads: usize,
    /// Longest prompt with its answer in tokens; `None` = the model's maximum, or what `kv_memory` holds.
    pub context: Option<usize>,
    /// Precision of the run, such as `int4w` or `bf16`; `None` = the fastest that the pack supports.
    #[serde(deserialize_with = "from_text")]
    pub precision: Option<Precision>,
    /// Type of cached keys and values, such as `int8`; `None` = that of the precision.
    #[serde(deserialize_with = "from_text")]
    pub kv: Option<KvType>,
    /// Memory for cached keys and values of all requests in bytes; `None` = it grows with the requests.
    pub kv_memory: Option<u64>,
    /// Device that computes: `auto`, `cpu`, `cuda` or `cuda:N`.
    #[serde(deserialize_with = "device")]
    pub device: Devices,
    /// Number of layers on GPUs; `None` = as many as fit.
    pub gpu_layers: Option<usize>,
    /// Largest number of texts that are computed together.
    pub max_seqs: usize,
    /// Largest number of tokens of a step while other texts are generated.
    pub max_step_tokens: u32,
    /// Whether requests share the computation of equal beginnings.
    pub prefix_cache: bool,
    /// Adapters that requests may name. Others can be loaded later.
    pub adapters: Vec<AdapterOptions>,
    /// Whether draft tokens are copied from earlier occurrences of the same words (prompt lookup), or come from the
    /// layer of multi-token prediction of the pack, whatever saves more time.
    pub speculate: bool,
    /// Pack of a small model with the same vocabulary that drafts tokens.
    pub draft_model: Option<PathBuf>,
    /// Chat template: `auto`, the name of a built-in one, or the path of a file.
    #[serde(deserialize_with = "template")]
    pub chat_template: TemplateChoice,
    /// Whether all weights are compared with their recorded hashes before the model is used.
    pub check: bool,
    /// Cache in which models that are no packs are packed once; `None` = they are refused.
    pub cache: Option<PathBuf>,
    /// Cache of the Hugging Face Hub, in which `ORG/NAME` is found.
    pub hub_cache: Option<PathBuf>,
    /// Program `iec`, which renders chat templates in a process of limited memory and time; `None` = they are rendered
    /// in this process, whose memory a hostile template can exhaust.
    pub program: Option<PathBuf>,
}

/// An adapter (LoRA or DoRA) in the form of PEFT.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct AdapterOptions {
    /// Name by which requests refer to it.
    pub name: String,
    /// Directory that PEFT or `iec pack` wrote.
    pub path: PathBuf,
    /// Scale of requests that name none.
    #[serde(default = "one")]
    pub scale: f32,
}

fn one() -> f32 {
    1.0
}

impl AdapterOptions {
    /// Describes an adapter of scale 1.
    pub fn new(name: impl Into<String>, path: impl Into<PathBuf>) -> AdapterOptions {
        AdapterOptions { name: name.into(), path: path.into(), scale: 1.0 }
    }

    pub(super) fn source(&self) -> Result<AdapterSource> {
        crate::session::adapters::check_name(&self.name).map_err(|e| Error::usage(e).setting("adapters"))?;
        Ok(AdapterSource { name: self.name.clone(), dir: self.path.clone(), scale: self.scale, root: None })
    }
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            threads: 0,
            context: None,
            precision: None,
            kv: None,
            kv_memory: None,
            device: Devices::Auto,
            gpu_layers: None,
            max_seqs: 32,
            max_step_tokens: 512,
            prefix_cache: true,
            adapters: Vec::new(),
            speculate: false,
            draft_model: None,
            chat_template: TemplateChoice::Auto,
            check: false,
            cache: None,
            hub_cache: None,
            program: None,
        }
    }
}

impl OpenOptions {
    /// Reads options from a JSON object with the names of the fields. Absent fields have their defaults.
    ///
    /// # Errors
    /// The text is no JSON object, or a field is unknown or has a wrong value.
    pub fn from_json(text: &str) -> Result<OpenOptions> {
        // Without this, an array would set the fields in their order.
        if !text.trim_start().starts_with('{') {
            return Err(Error::usage("options: expected a JSON object"));
        }
        serde_json::from_str(text).map_err(|e| Error::usage(format!("options: {e}")))
    }

    /// Sets the caches as the program finds them, from environment variables that `variable` reads: `IEC_CACHE`,
    /// `XDG_CACHE_HOME`, `HOME`, `HF_HOME` and their like. Caches that are set already stay.
    ///
    /// ```
    /// let options = iec::OpenOptions::default().with_caches(&|name| std::env::var_os(name))?;
    /// # Ok::<(), iec::Error>(())
    /// ```
    ///
    /// # Errors
    /// A variable has a wrong value.
    pub fn with_caches(mut self, variable: &dyn Fn(&str) -> Option<OsString>) -> Result<OpenOptions> {
        let found = Places::of(variable)?;
        self.cache = self.cache.or(found.cache);
        self.hub_cache = self.hub_cache.or(found.hub);
        Ok(self)
    }

    pub(super) fn places(&self) -> Places {
        Places { cache: self.cache.clone(), hub: self.hub_cache.clone(), limit: None }
    }

    pub(super) fn session(&self) -> Result<SessionOptions> {
        let speculation = match (&self.draft_model, self.speculate) {
            (Some(model), _) => Speculation::Auto(Some(model.clone())),
            (None, true) => Speculation::Auto(None),
            (None, false) => Speculation::Off,
        };
        let devices = if self.gpu_layers == Some(0) { Devices::Cpu } else { self.device };
        Ok(SessionOptions {
            check: self.check,
            speculation,
            engine: EngineOptions {
                precision: self.precision,
                threads: self.threads,
                context: self.context,
                kv: self.kv,
                kv_memory: self.kv_memory,
                prefill_chunk: self.max_step_tokens.max(1) as usize,
                offload: Offload { devices, layers: self.gpu_layers.filter(|layers| *layers > 0) },
                ..EngineOptions::default()
            },
            adapters: self.adapters.iter().map(AdapterOptions::source).collect::<Result<_>>()?,
            template_process: self.program.as_ref().map(|program| RenderProcess::of_program(program)),
            ..SessionOptions::default()
        })
    }
}

fn from_text<'de, D, T>(deserializer: D) -> std::result::Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: Display>,
{
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| text.parse().map_err(serde::de::Error::custom)).transpose()
}

fn device<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Devices, D::Error> {
    Ok(from_text(deserializer)?.unwrap_or(Devices::Auto))
}

fn template<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<TemplateChoice, D::Error> {
    Ok(from_text(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_by_name() {
        let text = r#"{"threads": 2, "precision": "int4w", "kv": "int8", "device": "cuda:1",
            "adapters": [{"name": "a", "path": "d", "scale": 0.5}], "chat_template": "chatml", "context": null}"#;
        let options = OpenOptions::from_json(text).unwrap();
        assert_eq!((options.threads, options.precision, options.kv), (2, Some(Precision::Int4w), Some(KvType::Int8)));
        assert_eq!((options.device, options.adapters[0].scale), (Devices::Cuda(2), 0.5));
        assert!(matches!(options.chat_template, TemplateChoice::BuiltIn(_)));
        for wrong in ["", "[]", r#"{"thread": 1}"#, r#"{"precision": "int3"}"#, r#"{"device": "tpu"}"#] {
            assert_eq!(OpenOptions::from_json(wrong).unwrap_err().cause().exit_code(), 2, "{wrong}");
        }
    }
}
