//! Finds the files that describe a model, without packing it.

use super::cache::{Cache, Entry};
use super::make::Wanted;
use super::source::{FoundModel, ModelKind};
use super::{Identity, Places};
use crate::error::{Error, Result};
use crate::files;
use crate::generate::text::ChatTemplate;
use crate::output::directory_of;
use std::path::{Path, PathBuf};

/// Model that the user named, and the files that describe it.
#[derive(Debug)]
pub struct Description {
    /// The name.
    pub spec: PathBuf,
    /// Kind of the model that has this name.
    pub kind: ModelKind,
    /// Path of the pack in the cache if there is one, otherwise of the model itself.
    pub path: PathBuf,
    /// Most recently used entry of the cache that was made from the present state of the model.
    pub entry: Option<Entry>,
    /// True if the model has a chat template; `None` for a GGUF file that is not imported yet.
    pub has_template: Option<bool>,
}

/// Returns true if an entry is complete and was made from the present state of its source.
fn is_current(entry: &Entry, source: &FoundModel) -> bool {
    let Some(record) = &entry.record else { return false };
    let now = |wanted| Identity::of(source, wanted).is_ok_and(|now| now.fingerprint == record.fingerprint);
    source.kind == ModelKind::Cached || Wanted::by_name(&record.weights).is_some_and(now)
}

impl Description {
    /// Finds the model that `spec` names.
    ///
    /// # Errors
    /// Nothing has this name, or it is no model.
    pub fn of(spec: &Path, places: &Places) -> Result<Description> {
        let source = FoundModel::find(spec, places)?;
        let entry = match (source.kind, &places.cache) {
            (ModelKind::Pack, _) | (_, None) => None,
            _ => {
                let name = if source.kind == ModelKind::Cached { spec } else { &source.path };
                let entries = Cache::of(places)?.named(name)?;
                entries.into_iter().find(|entry| is_current(entry, &source))
            }
        };
        let path = entry.as_ref().map_or_else(|| source.path.clone(), |entry| entry.dir.clone());
        let is_dir = files::is_dir(&path).map_err(Error::while_opening_model)?;
        let dir = if is_dir { &path } else { directory_of(&path) };
        let is_open = source.kind != ModelKind::Gguf || entry.is_some();
        let has_template = is_open.then(|| ChatTemplate::open(dir).is_ok());
        Ok(Description { spec: spec.to_path_buf(), kind: source.kind, has_template, path, entry })
    }
}
