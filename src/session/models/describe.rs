//! Finds the files that describe a model, without packing it.

use super::Places;
use super::cache::{Cache, Entry};
use super::source::{Kind, Source};
use crate::error::{Error, Result};
use crate::files;
use crate::output::directory_of;
use crate::runtime::text::ChatTemplate;
use std::path::{Path, PathBuf};

/// Model under the name that the user gave.
#[derive(Debug)]
pub struct Description {
    /// The name.
    pub spec: PathBuf,
    /// Kind of the model that has this name.
    pub kind: Kind,
    /// Path of the pack in the cache if there is one, otherwise of the model itself.
    pub path: PathBuf,
    /// Most recently used entry of the cache that was made from the model.
    pub entry: Option<Entry>,
    /// True if the model has a chat template; `None` for a GGUF file that is not imported yet.
    pub has_template: Option<bool>,
}

impl Description {
    /// Finds the model that `spec` names.
    ///
    /// # Errors
    /// Nothing has this name, or it is no model.
    pub fn of(spec: &Path, places: &Places) -> Result<Description> {
        let source = Source::find(spec, places)?;
        let entry = match (source.kind, &places.cache) {
            (Kind::Pack, _) | (_, None) => None,
            _ => {
                let name = if source.kind == Kind::Cached { spec } else { &source.path };
                Cache::of(places)?.named(name)?.into_iter().find(|entry| entry.record.is_some())
            }
        };
        let path = entry.as_ref().map_or_else(|| source.path.clone(), |entry| entry.dir.clone());
        let is_dir = files::is_dir(&path).map_err(Error::while_opening_model)?;
        let dir = if is_dir { &path } else { directory_of(&path) };
        let is_open = source.kind != Kind::Gguf || entry.is_some();
        let has_template = is_open.then(|| ChatTemplate::open(dir).is_ok());
        Ok(Description { spec: spec.to_path_buf(), kind: source.kind, has_template, path, entry })
    }
}
