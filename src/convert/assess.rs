//! Says whether a checkpoint runs and, if it does not, what stands in the way: fields of its configuration that are not
//! computed, a form of quantization, its tensors or its tokenizer.

use super::arch::{Arch, Fields, LeftOut};
use super::checkpoint::{Checkpoint, LeftOutPart};
use super::companions::{self, TOKENIZER};
use super::json::{read_limited, read_object};
use super::published::{self, MatrixForm, Published, Source};
use super::source::layout::Layout;
use super::source::shards::Shards;
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::model_config::ModelConfig;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.json";
/// Largest number of settings of a quantization that are listed, and of characters of each.
const SETTINGS: usize = 8;
const CHARACTERS: usize = 40;

/// Answer to the question whether a checkpoint runs.
#[derive(Debug, Default, Serialize)]
pub struct Assessment {
    /// True when `iec pack` takes the checkpoint and `iec run` runs it.
    pub runs: bool,
    /// Obstacles, in the order in which they were found.
    pub obstacles: Vec<Obstacle>,
    /// Form in which the weights are quantized, if they are.
    pub quantization: Option<Quantization>,
    /// Quantized matrices, and what a pack holds of each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<MatrixForm>,
    /// True if the checkpoint has scales of activations, which packs do not use.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub activation_scales: bool,
    /// Tensors that do not belong to the language model.
    pub left_out: Vec<LeftOutPart>,
    /// Number of weights in each tensor of a quantized matrix: all in its codes, none in the others.
    #[serde(skip)]
    pub weights_by_tensor: HashMap<String, u64>,
    /// Class name of the model, if the configuration has one.
    #[serde(skip)]
    pub architecture: Option<String>,
    /// Dimensions of the model, as far as the configuration is understood.
    #[serde(skip)]
    pub model: Option<ModelConfig>,
}

/// Something that stands in the way of running a checkpoint.
#[derive(Debug, Serialize)]
pub struct Obstacle {
    /// File in which it was found.
    pub file: Option<PathBuf>,
    /// Field of the configuration, or name of the tensor.
    pub field: Option<String>,
    /// Description of the obstacle: found and expected value.
    pub message: String,
    /// Advice for the user.
    pub help: String,
}

/// Form in which weights are quantized.
#[derive(Debug, Serialize)]
pub struct Quantization {
    /// Method, such as `awq`, as the configuration names it.
    pub method: String,
    /// Settings that are single words or numbers.
    pub settings: Map<String, Value>,
}

impl Obstacle {
    fn new(error: &Error) -> Obstacle {
        Obstacle {
            file: error.file().map(Path::to_path_buf),
            field: error.tensor_name().map(String::from),
            message: error.cause().to_string(),
            help: error.help_text().unwrap_or_else(|| advice(error)).to_string(),
        }
    }
}

/// Returns advice for an error about the configuration that has none of its own.
fn advice(error: &Error) -> &'static str {
    let field = error.tensor_name().unwrap_or_default();
    match error.cause() {
        Cause::Unsupported(_) if field.ends_with("architectures") || field.ends_with("model_type") => {
            "docs/guide/checkpoints.md lists the models that run"
        }
        Cause::Unsupported(_) => "the value changes what the model computes, so it is not ignored; use another model",
        _ => "get the files again, all of the same revision",
    }
}

impl Assessment {
    /// Assesses the checkpoint in a directory. `shards` has its weights, if they can be listed.
    ///
    /// # Errors
    /// The directory has no weights, or a file cannot be read.
    pub fn of(dir: &Path, shards: std::result::Result<&Shards, &Error>) -> Result<Assessment> {
        let layout = Layout::find(dir)?;
        let path = layout.dir().join(CONFIG);
        let mut found = Assessment::default();
        found.obstacles.extend(shards.err().map(Obstacle::new));
        let config = match files::is_file(&path)? {
            true => read_object(&path)?,
            false => {
                let missing = Error::corrupt("found no such file, which describes the model").at(&path);
                let help = "get the whole checkpoint, or name its configuration with --config";
                found.obstacles.push(Obstacle::new(&missing.help(help)));
                return Ok(found);
            }
        };
        found.architecture = config.get("architectures").and_then(|classes| classes[0].as_str()).map(shortened);
        let source = Source { config: &config, path: &path, layout: &layout };
        found.quantization = quantization(&source)?;
        if let Ok(shards) = shards {
            found.read_quantization(&source, shards);
        }
        found.read_config(&config, &path);
        if let Ok(shards) = shards {
            found.list_parts(&Fields::new(&config), shards, &path);
        }
        if found.obstacles.is_empty() {
            found.open(dir)?;
        }
        found.runs = found.obstacles.is_empty();
        Ok(found)
    }

    fn refuse(&mut self, error: &Error) {
        self.obstacles.push(Obstacle::new(error));
    }

    /// Reads the quantization settings and describes the quantized matrices.
    fn read_quantization(&mut self, source: &Source<'_>, shards: &Shards) {
        let left_out = LeftOut::of(&Fields::new(source.config)).unwrap_or_default();
        match Published::open(source, shards, &|name| left_out.part(name).is_some()) {
            Ok(published) => self.weights_by_tensor = published.weights_by_tensor(),
            Err(error) => self.refuse(&error),
        }
    }

    /// Reads the model.
    fn read_config(&mut self, config: &Map<String, Value>, path: &Path) {
        let fields = Fields::new(config);
        match Arch::of(&fields).and_then(|arch| arch.model_config(&fields, None)).at(path) {
            Ok(model) => self.model = Some(model),
            Err(error) => self.refuse(&error),
        }
    }

    /// Lists the tensors that do not belong to the language model.
    fn list_parts(&mut self, config: &Fields, shards: &Shards, path: &Path) {
        match LeftOut::of(config).at(path) {
            Ok(left_out) => self.left_out = LeftOutPart::list(&left_out, shards, &HashSet::new()),
            // The model has the same fields, which were read before.
            Err(error) if self.obstacles.is_empty() => self.refuse(&error),
            Err(_) => {}
        }
    }

    /// Opens the checkpoint as `iec pack` does.
    fn open(&mut self, dir: &Path) -> Result<()> {
        let checkpoint = match Checkpoint::open(dir) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                self.refuse(&error);
                return Ok(());
            }
        };
        self.left_out = checkpoint.left_out().to_vec();
        self.model = Some(checkpoint.config().clone());
        self.activation_scales = checkpoint.published().has_activation_scales();
        match checkpoint.forms() {
            Ok(forms) => self.published = forms,
            Err(error) => self.refuse(&error),
        }
        let checked = match checkpoint.companion(TOKENIZER) {
            Ok(Some(path)) => {
                let bytes = read_limited(&path)?;
                companions::check(TOKENIZER, &bytes, checkpoint.config().vocab).at(&path)
            }
            Ok(None) => Err(Error::corrupt("found no tokenizer.json")
                .at(dir)
                .help("get the whole checkpoint, or name a tokenizer with `iec pack --tokenizer FILE`")),
            Err(error) => Err(error),
        };
        if let Err(error) = checked {
            self.refuse(&error);
        }
        Ok(())
    }
}

/// Returns the form in which weights are quantized: the configuration's, or that of a file beside it.
fn quantization(source: &Source<'_>) -> Result<Option<Quantization>> {
    let Some((method, fields)) = published::settings_of(source)? else { return Ok(None) };
    let method = shortened(&method);
    let is_listed = |(key, value): &(&String, &Value)| {
        let is_plain = value.is_number() || value.is_string();
        is_plain && *key != "quant_method" && key.len() <= CHARACTERS
    };
    let setting = |(key, value): (&String, &Value)| {
        (key.clone(), value.as_str().map_or(value.clone(), |text| shortened(text).into()))
    };
    let settings = fields.iter().filter(is_listed).take(SETTINGS).map(setting).collect();
    Ok(Some(Quantization { method, settings }))
}

/// Returns untrusted text in a length that fits in a line.
fn shortened(text: &str) -> String {
    text.chars().take(CHARACTERS * 2).collect()
}
