//! The model of a pack of which a checkpoint is made: its configuration, the plan of its tensors, and the files beside
//! the weights.

use super::plan::{UnpackPlan, plan};
use crate::convert::arch::{Arch, Fields, TIED, disagrees_about_output};
use crate::convert::companions;
use crate::convert::json::{read_json, read_limited};
use crate::convert::published;
use crate::dtype::DType;
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::iebin::IebinReader;
use crate::model_config::ModelConfig;
use crate::strict_json::to_python;
use serde_json::{Map, Value};
use std::path::Path;

const CONFIG: &str = "config.json";
const QUANTIZATION: &str = "quantization_config";

/// Model of a pack.
pub(in crate::convert) struct PackModel {
    /// Contents of config.json.
    pub(in crate::convert) config: Map<String, Value>,
    /// The model that the configuration describes; `tied_embeddings` is as in the pack.
    pub(in crate::convert) model: ModelConfig,
    arch: &'static Arch,
    /// True when the configuration says that the output matrix is the embedding, and the pack has one of its own.
    unties: bool,
}

/// Member `quantization_config` of the config.json that is written.
pub(in crate::convert) enum Quantization {
    /// The member that the pack has, if any.
    AsInSource,
    /// None, because all tensors are floats.
    Absent,
    /// This one.
    New(Value),
}

impl PackModel {
    /// Reads the configuration of a pack in `model_dir`.
    ///
    /// # Errors
    /// An older program made the pack, a file is damaged or missing, or the family is unknown.
    pub(in crate::convert) fn read(reader: &IebinReader, model_dir: &Path) -> Result<PackModel> {
        if reader.description.is_older() {
            return Err(Error::unsupported("found a pack of an older program")
                .at(model_dir)
                .help("convert it with `iec pack --hf-dir OLD_PACK --out-dir NEW_PACK`, then use NEW_PACK"));
        }
        reader.check_files()?;
        let config_path = reader.path(CONFIG);
        let config: Map<String, Value> = read_json(&config_path).map_err(|e| match e.cause() {
            Cause::Io(_) => e.help("the directory of the pack must have the config.json that `iec pack` wrote"),
            _ => e,
        })?;
        let fields = Fields::new(&config);
        let arch = Arch::of(&fields).at(&config_path)?;
        let mut model = arch.model_config(&fields, None).at(&config_path)?;
        // A pack has an output matrix of its own if the checkpoint had one, whatever the configuration says.
        let has_output = reader.get("lm_head.weight").is_some();
        let unties = model.tied_embeddings && has_output;
        if model.tied_embeddings || disagrees_about_output(&fields).at(&config_path)? {
            model.tied_embeddings = !has_output;
        }
        model.prediction_layers = reader.description.model.as_ref().map_or(0, |model| model.prediction_layers);
        Ok(PackModel { config, model, arch, unties })
    }

    /// Plans the tensors of the checkpoint; `dtype` is for tensors that are decoded.
    ///
    /// # Errors
    /// See [`plan`].
    pub(in crate::convert) fn plan(&self, reader: &IebinReader, dtype: DType) -> Result<UnpackPlan> {
        plan(reader, self.arch, &self.model, &Fields::new(&self.config), dtype)
    }

    /// Returns the companion files, config.json last. A tokenizer that was made from other files is left out, because
    /// the checkpoint had none.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(in crate::convert) fn companions(
        &self,
        reader: &IebinReader,
        quantization: Quantization,
    ) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let mut files = Vec::new();
        let made = !reader.description.tokenizer_from.is_empty();
        let is_copied = |name: &str| name != CONFIG && !(made && name == companions::TOKENIZER);
        for name in companions::NAMES.iter().filter(|name| is_copied(name)) {
            let path = reader.path(name);
            if files::exists(&path)? {
                files.push((*name, read_limited(&path)?));
            }
        }
        let mut made = self.config.clone();
        match quantization {
            Quantization::AsInSource => {}
            Quantization::Absent => published::remove_settings(&mut made),
            Quantization::New(value) => {
                published::remove_settings(&mut made);
                made.insert(QUANTIZATION.to_string(), value);
            }
        }
        if self.unties {
            untie(&mut made);
        }
        let is_changed = made != self.config;
        files.push((CONFIG, if is_changed { to_python(&made) } else { read_limited(&reader.path(CONFIG))? }));
        Ok(files)
    }
}

/// Writes into a configuration that the output matrix is not the embedding. Programs that believe this field would
/// otherwise drop the matrix.
fn untie(config: &mut Map<String, Value>) {
    config.insert(TIED.to_string(), false.into());
    if let Some(Value::Object(text)) = config.get_mut("text_config")
        && text.contains_key(TIED)
    {
        text.insert(TIED.to_string(), false.into());
    }
}
