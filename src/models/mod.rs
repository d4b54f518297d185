//! Turns what a user names as a model into a pack that can be opened.
//!
//! A pack is used where it is. A checkpoint, a GGUF file or a model in the Hugging Face cache is packed once into a
//! [`Cache`], and later calls use that pack as long as the files of the source are the same.
//!
//! ```no_run
//! # use iec::models::{Places, open_session};
//! # use iec::session::SessionOptions;
//! let places = Places::of(&|name| std::env::var_os(name))?;
//! let session = open_session("models/tinyllama".as_ref(), &SessionOptions::default(), &places)?;
//! # iec::Result::Ok(())
//! ```

mod cache;
mod describe;
pub mod embedded;
mod make;
mod record;
mod source;

use cache::ELSEWHERE;
pub use cache::{Cache, Entry, Removed};
pub use describe::Description;
pub use record::Record;
pub use source::{FoundModel, ModelKind};

use crate::convert::source::hub::{self, Variables};
use crate::error::{Cause, Context, Error, Result};
use crate::job::Fingerprint;
use crate::output::{Lease, stale};
use crate::progress;
use crate::runtime::Precision;
use crate::session::{Session, SessionOptions};
use crate::units::parse_size;
use make::Wanted;
use record::{LOCK_NAME, RECORD_NAME};
use std::path::{Path, PathBuf};

/// Largest number of attempts when an entry or its source changes while it is looked up or made.
const ATTEMPTS: usize = 4;
/// Most entries that an error lists.
const LISTED: usize = 8;
/// Number of hex digits in the name of an entry.
const DIGITS: usize = 8;

/// Directories in which models are found and kept.
#[derive(Debug, Clone)]
pub struct Places {
    /// Cache directory of this program, if its place is known.
    pub cache: Option<PathBuf>,
    /// Cache of the Hugging Face Hub, if its place is known.
    pub hub: Option<PathBuf>,
    /// Largest size of the packs in the cache in bytes; `None` = no limit.
    pub limit: Option<u64>,
}

impl Places {
    /// Reads the places from environment variables: the cache is `IEC_CACHE`, `XDG_CACHE_HOME/iec` or `~/.cache/iec`,
    /// its limit is `IEC_CACHE_MAX`, and [`hub::cache::root`] finds that of the Hub.
    ///
    /// # Errors
    /// The limit is not a size.
    pub fn of(variable: &Variables<'_>) -> Result<Places> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| set(name).map(PathBuf::from);
        let cache = path("IEC_CACHE")
            .or_else(|| path("XDG_CACHE_HOME").filter(|dir| dir.is_absolute()).map(|dir| dir.join("iec")))
            .or_else(|| path("HOME").map(|home| home.join(".cache/iec")));
        let limit = set("IEC_CACHE_MAX").map(|text| {
            let text = text.to_string_lossy();
            parse_size(&text).map_err(|e| Error::usage(format!("IEC_CACHE_MAX: {e}")).help("use a size like 50G"))
        });
        Ok(Places { cache, hub: hub::cache::root(variable).ok(), limit: limit.transpose()? })
    }
}

/// Pack that was found or made.
#[derive(Debug)]
pub struct Resolved {
    /// Directory or description of the pack.
    pub pack: PathBuf,
    /// Record of its source, if the pack lies in the cache.
    pub record: Option<Record>,
    /// Keeps the entry of the cache from being removed while this value lives.
    lease: Option<Lease>,
}

/// Opens the model that `model` names, as the program does: a pack, a checkpoint directory, a GGUF file, or `ORG/NAME`
/// of a downloaded model. A model that is no pack is packed into the cache of `places` first.
///
/// # Errors
/// The same as those of [`resolve`] and of [`Session::open`].
pub fn open_session(model: &Path, options: &SessionOptions, places: &Places) -> Result<Session> {
    let found = resolve(model, options.engine.precision, places)?;
    let shown = found.record.as_ref().map(|record| record.shown_source().to_string());
    let name = options.name.clone().or(shown);
    let session = Session::open(&found.pack, &SessionOptions { name, ..options.clone() })?;
    Ok(session.holding(found.lease))
}

/// Finds the model that `spec` names, and packs it into the cache if it is no pack yet. `precision` is the one in which
/// it will run: for a quantized one, a model of floats is quantized, with the defaults and the gate of `iec ptq`.
///
/// # Errors
/// Nothing has this name, the model is not supported, it cannot be packed, or the gate refuses its quantization.
pub fn resolve(spec: &Path, precision: Option<Precision>, places: &Places) -> Result<Resolved> {
    let source = FoundModel::find(spec, places)?;
    match source.kind {
        ModelKind::Cached => from_cache(spec, precision, places),
        ModelKind::Pack | ModelKind::Checkpoint | ModelKind::Gguf => from_source(&source, precision, places),
    }
}

/// Uses an entry that the user named. If its source still exists, changes of the source are detected.
fn from_cache(spec: &Path, precision: Option<Precision>, places: &Places) -> Result<Resolved> {
    let entries = Cache::of(places)?.named(spec)?;
    let complete = || entries.iter().filter_map(|entry| Some((entry, entry.record.as_ref()?)));
    let Some((newest, first)) = complete().next() else {
        return Err(Error::new(Cause::Model("found an incomplete entry of the cache".into()))
            .at(spec)
            .help("name its checkpoint or GGUF file again, or remove it with `iec rm`"));
    };
    if complete().any(|(_, record)| record.source != first.source) {
        let names: Vec<&str> = entries.iter().take(LISTED).map(|entry| &*entry.name).collect();
        let found = format!("found {} models of this name in the cache: {}", entries.len(), names.join(", "));
        return Err(Error::new(Cause::Model(found)).at(spec).help("name one of them; `iec list` shows their sources"));
    }
    let is_exact = entries.iter().any(|entry| Path::new(&entry.name) == spec);
    if let Ok(source) = FoundModel::find(Path::new(&first.source), places)
        && source.kind.name() == first.kind
    {
        return match Wanted::by_name(&first.weights).filter(|_| is_exact) {
            Some(wanted) => packed(&source, wanted, places),
            None => from_source(&source, precision, places),
        };
    }
    let wanted = Wanted::of(precision).name();
    let (entry, record) = complete().find(|(_, record)| record.weights == wanted).unwrap_or((newest, first));
    let lease = Lease::shared(&entry.dir.join(LOCK_NAME))?;
    lease.iter().for_each(Lease::touch);
    record.check(&entry.dir).map_err(Error::while_opening_model)?;
    Ok(Resolved { pack: entry.dir.clone(), record: Some(record.clone()), lease })
}

/// Finds the pack of a source or makes its entry, with the weights that the precision needs.
fn from_source(source: &FoundModel, precision: Option<Precision>, places: &Places) -> Result<Resolved> {
    let wanted = Wanted::of(precision);
    let is_made = || Ok::<_, Error>(Identity::of(source, wanted)?.is_made(&Cache::of(places)?));
    match source.kind {
        _ if wanted == Wanted::Source => unchanged(source, places),
        ModelKind::Checkpoint if wanted == Wanted::Int4 && !is_made()? && make::has_4_bit_weights(source)? => {
            unchanged(source, places)
        }
        ModelKind::Checkpoint => packed(source, wanted, places),
        ModelKind::Gguf if is_made()? => packed(source, wanted, places),
        ModelKind::Pack | ModelKind::Cached | ModelKind::Gguf => {
            let found = unchanged(source, places)?;
            if make::has_only_floats(&found.pack) { packed(source, wanted, places) } else { Ok(found) }
        }
    }
}

/// Finds or makes the pack with the weights of the source as they are.
fn unchanged(source: &FoundModel, places: &Places) -> Result<Resolved> {
    match source.kind {
        ModelKind::Pack | ModelKind::Cached => Ok(Resolved { pack: source.path.clone(), record: None, lease: None }),
        ModelKind::Checkpoint | ModelKind::Gguf => packed(source, Wanted::Source, places),
    }
}

/// Identity of an entry: it follows from the source, the state of its files, and the wanted weights.
#[derive(Debug)]
struct Identity {
    /// Name of the entry.
    name: String,
    /// Canonical path of the source.
    path: PathBuf,
    /// See [`Record::origin`].
    origin: String,
    /// See [`Record::fingerprint`].
    fingerprint: String,
}

impl Identity {
    fn of(source: &FoundModel, wanted: Wanted) -> Result<Identity> {
        let state = source.state().map_err(Error::while_opening_model)?;
        let digest = |what: &str, value: &dyn std::fmt::Display| {
            let mut fingerprint = Fingerprint::new("cache");
            fingerprint.field(what, value);
            fingerprint.field("kind", source.kind.name());
            fingerprint.field("weights", wanted.name());
            fingerprint.finish()
        };
        let fingerprint = digest("state", &state.fingerprint);
        let origin = digest("path", &state.path.display());
        let name = format!("{}-{}", source.readable_name(), &fingerprint[..DIGITS]);
        Ok(Identity { name, path: state.path, origin, fingerprint })
    }

    /// Returns the record of the complete entry; an error if it is damaged, and `None` if there is none.
    fn record(&self, dir: &Path) -> Result<Option<Record>> {
        let record = match Record::read(&dir.join(RECORD_NAME)) {
            Err(e) if e.is_not_found() => return Ok(None),
            record => record?,
        };
        if record.fingerprint != self.fingerprint {
            return Ok(None);
        }
        record.check(dir).map(|()| Some(record))
    }

    fn is_made(&self, cache: &Cache) -> bool {
        matches!(self.record(&cache.root().join(&self.name)), Ok(Some(_)))
    }
}

/// Finds or makes an entry.
fn packed(source: &FoundModel, wanted: Wanted, places: &Places) -> Result<Resolved> {
    let cache = Cache::of(places)?;
    for _ in 0..ATTEMPTS {
        let identity = Identity::of(source, wanted)?;
        let dir = cache.root().join(&identity.name);
        if let Some(lease) = Lease::shared(&dir.join(LOCK_NAME)).help(ELSEWHERE)? {
            match identity.record(&dir) {
                Ok(Some(record)) => {
                    lease.touch();
                    stale::remove(&dir);
                    return Ok(Resolved { pack: dir, record: Some(record), lease: Some(lease) });
                }
                Ok(None) => {}
                Err(e) => {
                    progress::detail(0, || format!("note: {e}: this entry of the cache is damaged; making it again"))
                }
            }
        }
        let (dir, _lease) = cache.lock(&identity.name, &identity.origin)?;
        if matches!(identity.record(&dir), Ok(Some(_))) {
            continue;
        }
        make::make(source, wanted, &identity, &dir)?;
        cache.remove_outdated(&Entry::read(identity.name.clone(), dir));
        cache.enforce_limit(&identity.name);
    }
    Err(Error::corrupt("found files that change while they are packed")
        .at(&source.path)
        .help("run the command again later"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_the_first_variable_says() {
        let of = |set: &[(&str, &str)]| {
            Places::of(&|name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).into()))
        };
        let (cache, xdg, home) = (("IEC_CACHE", "/1"), ("XDG_CACHE_HOME", "/2"), ("HOME", "/3"));
        for (set, expected) in [
            (&[cache, xdg, home][..], "/1"),
            (&[xdg, home], "/2/iec"),
            (&[("IEC_CACHE", ""), ("XDG_CACHE_HOME", "relative"), home], "/3/.cache/iec"),
        ] {
            let places = of(set).unwrap();
            assert_eq!((places.cache.as_deref(), places.limit), (Some(Path::new(expected)), None));
        }
        let nowhere = Cache::of(&of(&[]).unwrap()).unwrap_err();
        assert!(nowhere.to_string().contains("none of IEC_CACHE"), "{nowhere}");
        assert_eq!(of(&[cache, ("IEC_CACHE_MAX", "2K")]).unwrap().limit, Some(2048));
        let refused = of(&[cache, ("IEC_CACHE_MAX", "much")]).unwrap_err();
        assert!(refused.to_string().contains("IEC_CACHE_MAX"), "{refused}");
    }
}
