//! Settings of a server.
//!
//! Each setting has a name, which is that of its option (`--max-seqs`), of its environment variable (`IEC_MAX_SEQS`)
//! and of its line in the file of `--config` (`max-seqs = 16`). An option wins over a variable, a variable over the
//! file, and the file over the default. The file is TOML:
//!
//! ```text
//! host = "0.0.0.0"
//! api-key-file = "keys.toml"
//! max-seqs = 16
//! queue-timeout = "30s"
//! max-body = "16M"
//! cors-origin = ["https://chat.example"]
//!
//! [[model]]
//! name = "tiny"
//! path = "packs/tiny"
//! chat-template = "chatml"
//!
//! [[lora]]
//! name = "poems"
//! dir = "adapters/poems"
//! scale = 1.0
//! ```
//!
//! Relative paths begin at the working directory, as on the command line.

mod check;
mod value;

pub use value::{LogFormat, ModelSource, Size, model_name};

use crate::error::{Context, Error, Result};
use crate::files;
use crate::runtime::KvType;
use crate::sched;
use crate::serve::toml_text::{Document, Field, Table};
use crate::session::adapters::AdapterSource;
use crate::session::chat_templates::TemplateChoice;
use serde_json::{Map, Value as Json, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;
use value::Value;

/// Largest accepted file in bytes.
const FILE_LIMIT: u64 = 1 << 20;
/// Largest number of models, and of adapters.
const MOST_SOURCES: usize = 1000;

/// Name of a setting, with what a command line needs to offer it as an option.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    field: &'static str,
    help: &'static str,
    /// Name of the value in the help; `None` for a switch.
    pub value_name: Option<&'static str>,
    /// True if the option may be repeated, and each occurrence adds values.
    pub is_list: bool,
    /// Function that returns the text of the default; `None` if there is none, or if it is an empty list or off.
    pub default: fn() -> Option<String>,
}

impl Setting {
    /// Returns the name as in options and in the file: `max-seqs`.
    pub fn name(&self) -> String {
        self.field.replace('_', "-")
    }

    /// Returns the name of the environment variable: `IEC_MAX_SEQS`.
    pub fn variable(&self) -> String {
        match self.field {
            // All commands read IEC_LOG as the filter of their notes.
            "log" => "IEC_LOG_FORMAT".into(),
            field => format!("IEC_{}", field.to_ascii_uppercase()),
        }
    }

    /// Returns the description.
    pub fn help(&self) -> &'static str {
        self.help.trim_start()
    }
}

/// Type of a setting: optional without a default.
macro_rules! setting_type {
    ($type:ty) => { Option<$type> };
    ($type:ty, $default:expr) => { $type };
}

/// Value of a setting: the given one or the default.
macro_rules! effective {
    ($given:expr) => {
        $given
    };
    ($given:expr, $default:expr) => {
        $given.unwrap_or_else(|| $default)
    };
}

/// Text of the default of a setting.
macro_rules! default_text {
    ($type:ty) => {
        None
    };
    ($type:ty, $default:expr) => {{
        let default: $type = $default;
        Some(Value::to_text(&default)).filter(|text| !text.is_empty())
    }};
}

/// JSON of a setting.
macro_rules! setting_json {
    ($value:expr) => {
        $value.as_ref().map_or(Json::Null, Value::to_json)
    };
    ($value:expr, $default:expr) => {
        Value::to_json(&$value)
    };
}

/// Declares the settings: description, name, type, and default if there is one.
macro_rules! settings {
    ($($(#[doc = $help:literal])+ $field:ident: $type:ty $(= $default:expr)?;)+) => {
        /// Effective settings of a server.
        #[derive(Debug, Clone, PartialEq)]
        pub struct ServeSettings {
            $($(#[doc = $help])+ pub $field: setting_type!($type $(, $default)?),)+
            /// Models to serve.
            pub models: Vec<ModelSource>,
            /// Adapters that are loaded at the start.
            pub loras: Vec<AdapterSource>,
        }

        /// Settings that a source (options, environment variables or the file) gives.
        #[derive(Debug, Clone, Default, PartialEq)]
        pub struct Given {
            $($(#[doc = $help])+ pub $field: Option<$type>,)+
            /// Models to serve.
            pub models: Option<Vec<ModelSource>>,
            /// Adapters that are loaded at the start.
            pub loras: Option<Vec<AdapterSource>>,
        }

        /// All settings except models and adapters, in the order of the help.
        pub const SETTINGS: &[Setting] = &[$(Setting {
            field: stringify!($field),
            help: concat!($($help),+),
            value_name: <$type as Value>::NAME,
            is_list: <$type as Value>::IS_LIST,
            default: || default_text!($type $(, $default)?),
        }),+];

        impl Given {
            /// Returns the settings of both; those of `self` win.
            pub fn or(self, lower: Given) -> Given {
                Given {
                    $($field: self.$field.or(lower.$field),)+
                    models: self.models.or(lower.models),
                    loras: self.loras.or(lower.loras),
                }
            }

            /// Adds defaults.
            fn complete(self) -> ServeSettings {
                ServeSettings {
                    $($field: effective!(self.$field $(, $default)?),)+
                    models: self.models.unwrap_or_default(),
                    loras: self.loras.unwrap_or_default(),
                }
            }

            /// Sets the setting of a field from a text; `None` if no setting has the name.
            fn set_text(&mut self, name: &str, text: &str) -> Option<std::result::Result<(), String>> {
                $(if name == stringify!($field) {
                    return Some(Value::from_text(text).map(|value| put(&mut self.$field, value)));
                })+
                None
            }

            /// Sets the setting of a field from the file; `None` if no setting has the name.
            fn set_field(&mut self, name: &str, field: &Field<'_>) -> Option<Result<()>> {
                $(if name == stringify!($field) {
                    return Some(Value::from_field(field).map(|value| put(&mut self.$field, value)));
                })+
                None
            }
        }

        impl ServeSettings {
            /// Returns all settings except models and adapters.
            fn fields_json(&self) -> Map<String, Json> {
                let fields = [$((stringify!($field), setting_json!(self.$field $(, $default)?))),+];
                fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
            }
        }
    };
}

settings! {
    /// Address or name of the interface to listen on; all interfaces are 0.0.0.0 or ::
    host: String = "127.0.0.1".to_string();
    /// Port to listen on; 0 lets the system choose one
    port: u16 = 8080;
    /// Unix socket to listen on
    unix: PathBuf;
    /// Port for gRPC on the same host, in the protocol of vLLM's engine; 0 lets the system choose one [default: no
    /// gRPC]
    grpc_port: u16;
    /// File of API keys with their limits. A server on another interface than the loopback one needs keys
    api_key_file: PathBuf;
    /// Serve without keys, on any interface
    no_auth: bool = false;
    /// Largest number of requests that are computed together
    max_seqs: usize = 32;
    /// Largest number of tokens of a step
    max_step_tokens: u32 = 512;
    /// Milliseconds that a step with generating requests may take
    step_ms: u64 = 200;
    /// Largest number of waiting requests
    max_queue: usize = 256;
    /// Largest number of prompt tokens of all waiting requests [default: 60 seconds of prefill]
    max_queue_tokens: u64;
    /// Time after which a waiting request ends with an error
    queue_timeout: Duration = Duration::from_secs(60);
    /// Time of waiting that raises a request by one priority
    aging: Duration = Duration::from_secs(10);
    /// Longest context in tokens, at most that of the model [default: that of the model]
    ctx: usize;
    /// Type of the KV cache [default: that of the precision]
    kv: KvType;
    /// Chat template of models that name none: auto (that of the model), a built-in one such as chatml, or the path of
    /// a file [default: auto]
    chat_template: TemplateChoice;
    /// Memory for the KV cache [default: half of the free memory; on a GPU, what it has left]
    kv_memory: Size;
    /// Reuse keys and values of equal beginnings of prompts
    prefix_cache: bool = true;
    /// Compare the weights with their recorded hashes while they are served; a model with a difference takes no more
    /// requests
    check_weights: bool = true;
    /// Directory for what survives a restart: pages of the prefix cache, the list of adapters, usage counters
    state_dir: PathBuf;
    /// Disk space for pages of the prefix cache
    state_disk: Size = Size(8 << 30);
    /// Directory below which adapters may be loaded while the server runs [default: none, no loading]
    adapter_dir: PathBuf;
    /// Largest number of loaded adapters
    max_adapters: usize = 16;
    /// Memory for adapters
    lora_memory: Size = Size(1 << 30);
    /// Largest rank of an adapter
    max_lora_rank: usize = 128;
    /// Directory of which each pack, checkpoint and GGUF file becomes a model, which is loaded when a request names it
    models_dir: PathBuf;
    /// Time after which a model that no request uses is unloaded; the next request loads it again [default: never]
    idle_unload: Duration;
    /// Largest body of a request
    max_body: Size = Size(8 << 20);
    /// Largest number of answers of a request
    max_n: usize = 16;
    /// Largest number of alternatives per token whose log-probabilities a request may ask for
    max_logprobs: usize = 20;
    /// Time after SIGTERM in which new requests are still accepted
    drain_delay: Duration = Duration::ZERO;
    /// Time after which running requests are cut at the end
    drain_timeout: Duration = Duration::from_secs(60);
    /// Refuse requests with unknown fields instead of ignoring these
    strict_fields: bool = false;
    /// Origin of web pages that may use the server (scheme, host and port), or * for all; repeatable
    cors_origin: Vec<String> = Vec::new();
    /// Name in the Host header that is accepted besides those of the interface, or * for all; repeatable
    allowed_host: Vec<String> = Vec::new();
    /// Format of the log: text or json
    log: LogFormat = LogFormat::Text;
    /// Collector that gets OpenTelemetry traces over HTTP, such as http://127.0.0.1:4318 [default:
    /// OTEL_EXPORTER_OTLP_ENDPOINT]
    otlp_endpoint: String;
}

/// Sets a value, or adds it to a list.
fn put<T: Value>(setting: &mut Option<T>, value: T) {
    match setting {
        Some(earlier) => earlier.add(value),
        None => *setting = Some(value),
    }
}

/// Adds a value to a list.
fn push<T>(list: &mut Option<Vec<T>>, value: T) {
    list.get_or_insert_default().push(value);
}

impl Given {
    /// Reads the file of `--config`.
    ///
    /// # Errors
    /// The file cannot be read, is not TOML, or has an unknown name or a wrong value.
    pub fn read(path: &Path) -> Result<Given> {
        let mut text = Vec::new();
        files::open(path)?.take(FILE_LIMIT + 1).read_to_end(&mut text).at(path)?;
        Given::parse(&text).at(path)
    }

    /// Parses the text of the file.
    ///
    /// # Errors
    /// The text is not TOML, or has an unknown name or a wrong value.
    pub fn parse(text: &[u8]) -> Result<Given> {
        if text.len() as u64 > FILE_LIMIT {
            return Err(Error::usage(format!("expected at most {FILE_LIMIT} bytes of settings, found more")));
        }
        let mut given = Given::default();
        for field in Document::parse(text)?.table().fields() {
            match field.name {
                "model" => given.models = Some(parse_all(&field, parse_model)?),
                "lora" => given.loras = Some(parse_all(&field, parse_lora)?),
                _ => {
                    let name = Some(field.name.replace('-', "_")).filter(|_| !field.name.contains('_'));
                    let set = name.and_then(|name| given.set_field(&name, &field));
                    set.unwrap_or_else(|| Err(unknown(&field)))?;
                }
            }
        }
        Ok(given)
    }

    /// Sets one setting by its name from a text, as an option or an environment variable gives it. Also takes `model`
    /// and `lora`. A list gets the values in addition.
    ///
    /// # Errors
    /// No setting has the name, or the text is no value of it.
    pub fn set(&mut self, name: &str, text: &str) -> std::result::Result<(), String> {
        match name {
            "model" => push(&mut self.models, text.parse()?),
            "lora" => push(&mut self.loras, text.parse()?),
            _ => {
                let set = self.set_text(&name.replace('-', "_"), text);
                set.unwrap_or_else(|| Err(format!("there is no setting `{name}`")))?;
            }
        }
        Ok(())
    }

    /// Returns the effective settings: options over the file over defaults. Environment variables are options that
    /// were not given ([`Given::or`]).
    ///
    /// # Errors
    /// A value is out of range, or settings contradict each other.
    pub fn merge(options: Given, file: Given) -> Result<ServeSettings> {
        let settings = options.or(file).complete();
        settings.check()?;
        Ok(settings)
    }
}

/// Builds the error for an unknown name in the file.
fn unknown(field: &Field<'_>) -> Error {
    let names: Vec<String> = SETTINGS.iter().map(Setting::name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).chain(["model", "lora"]).collect();
    let dashed = field.name.replace('_', "-");
    match names.contains(&dashed.as_str()) {
        true => field.error(&format!("expected the name with hyphens, `{dashed}`")),
        false => field.unknown(&names),
    }
}

/// Parses the tables of a list.
fn parse_all<'a, T>(field: &Field<'a>, parse: impl Fn(Table<'a>) -> Result<T>) -> Result<Vec<T>> {
    field.tables(MOST_SOURCES)?.into_iter().map(parse).collect()
}

fn parse_model(table: Table<'_>) -> Result<ModelSource> {
    let (mut name, mut path, mut chat_template) = (None, None, None);
    for field in table.fields() {
        match field.name {
            "name" => name = Some(model_name(field.string()?).map_err(|message| field.error(&message))?),
            "path" => path = Some(PathBuf::from_field(&field)?),
            "chat-template" => chat_template = Some(TemplateChoice::from_field(&field)?),
            _ => return Err(field.unknown(&["name", "path", "chat-template"])),
        }
    }
    match path {
        Some(path) => Ok(ModelSource { name, path, chat_template }),
        None => Err(table.error("this model has no `path`")),
    }
}

fn parse_lora(table: Table<'_>) -> Result<AdapterSource> {
    let (mut name, mut dir, mut scale) = (None, None, 1.0f32);
    for field in table.fields() {
        match field.name {
            "name" => {
                // The name is checked as in an option, with another directory in the place of that of the file.
                let text = field.string()?;
                let source = format!("{text}=.").parse::<AdapterSource>().map_err(|message| field.error(&message))?;
                name = Some(source.name).filter(|name| name == text);
                name.as_ref().ok_or_else(|| field.error("found the character `=`, expected a name"))?;
            }
            "dir" => dir = Some(PathBuf::from_field(&field)?),
            "scale" => scale = field.number(-1e6..=1e6)? as f32,
            _ => return Err(field.unknown(&["name", "dir", "scale"])),
        }
    }
    match (name, dir) {
        (Some(name), Some(dir)) => Ok(AdapterSource { name, dir, scale, root: None }),
        (None, _) => Err(table.error("this adapter has no `name`")),
        (_, None) => Err(table.error("this adapter has no `dir`")),
    }
}

impl Default for ServeSettings {
    fn default() -> ServeSettings {
        Given::default().complete()
    }
}

impl ServeSettings {
    /// Returns the limits of a scheduler with this number of pages and this context.
    pub fn scheduler_options(&self, pages: u32, ctx: u32) -> sched::Options {
        let micros = |time: Duration| sched::Micros::try_from(time.as_micros()).unwrap_or(sched::Micros::MAX);
        sched::Options {
            max_seqs: self.max_seqs,
            max_step_tokens: self.max_step_tokens,
            step: self.step_ms.saturating_mul(1000),
            max_queue: self.max_queue,
            max_queue_tokens: self.max_queue_tokens.unwrap_or(u64::MAX),
            queue_timeout: micros(self.queue_timeout),
            aging: micros(self.aging),
            ..sched::Options::with_pages(pages, ctx)
        }
    }

    /// Returns the settings as JSON, with sizes in bytes and durations as texts. They contain no keys.
    pub fn to_json(&self) -> Json {
        let mut object = self.fields_json();
        let models = self.models.iter().map(|model| {
            let template = model.chat_template.as_ref().map(Value::to_json);
            json!({"name": model.name, "path": model.path.to_json(), "chat_template": template})
        });
        let lora = |lora: &AdapterSource| json!({"name": lora.name, "dir": lora.dir.to_json(), "scale": lora.scale});
        object.insert("models".into(), models.collect());
        object.insert("loras".into(), self.loras.iter().map(lora).collect());
        Json::Object(object)
    }
}

#[cfg(test)]
mod tests;
