//! Adapters of a session by name.

use super::{Session, SessionOptions};
use crate::convert::adapter;
use crate::error::{Cause, Context, Error, Result};
use crate::progress;
use crate::runtime::adapters::{AdapterBinder, AdapterSet, BoundAdapter, MOST};
use crate::units::human_bytes;
use std::collections::{BTreeMap, btree_map};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Name and directory of an adapter: `NAME=DIR`, `DIR`, and either with `:SCALE` at the end.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterSource {
    /// Name by which requests refer to the adapter; by default that of the directory.
    pub name: String,
    /// Directory that PEFT wrote.
    pub dir: PathBuf,
    /// Scale of requests that do not name one.
    pub scale: f32,
    /// Directory, without links in its path, in which all files must lie that are read; `None` = anywhere.
    pub root: Option<PathBuf>,
}

/// Number type of the factors of adapters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AdapterPrecision {
    /// That of the files, as far as the precision of the run has use for it; see [`AdapterBinder::bind`].
    #[default]
    Auto,
    /// int8 with a scale per row; an adapter whose rows lose too much is refused.
    Int8,
}

impl FromStr for AdapterPrecision {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<AdapterPrecision, String> {
        match text {
            "auto" => Ok(AdapterPrecision::Auto),
            "int8" => Ok(AdapterPrecision::Int8),
            _ => Err("expected auto or int8".into()),
        }
    }
}

impl FromStr for AdapterSource {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<AdapterSource, String> {
        let (rest, scale) =
            match text.rsplit_once(':').and_then(|(rest, scale)| Some((rest, scale.parse::<f32>().ok()?))) {
                Some((rest, scale)) if scale.is_finite() => (rest, scale),
                Some(_) => return Err("expected a finite scale after the last colon".into()),
                None => (text, 1.0),
            };
        let (name, dir) = match rest.split_once('=') {
            Some((name, dir)) => (name.to_string(), Path::new(dir)),
            None => {
                let dir = Path::new(rest);
                (dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(), dir)
            }
        };
        check_name(&name)?;
        match dir.as_os_str().is_empty() {
            true => Err("expected NAME=DIR or DIR".into()),
            false => Ok(AdapterSource { name, dir: dir.to_path_buf(), scale, root: None }),
        }
    }
}

impl AdapterSource {
    /// Checks that nothing in the directory is a link out of the root, through which files of others could be read.
    ///
    /// # Errors
    /// There is such a link, or the directory cannot be read.
    pub fn check_links(&self) -> Result<()> {
        let Some(root) = &self.root else { return Ok(()) };
        let (mut dirs, mut entries) = (vec![self.dir.clone()], 0);
        stays_in(root, &self.dir)?;
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(&dir).at(&dir)? {
                let path = entry.at(&dir)?.path();
                let kind = std::fs::symlink_metadata(&path).at(&path)?.file_type();
                match () {
                    () if kind.is_symlink() => stays_in(root, &path)?,
                    () if kind.is_dir() => dirs.push(path),
                    () => {}
                }
                entries += 1;
                if entries > MOST_ENTRIES {
                    let found = format!("found more than {MOST_ENTRIES} files, expected the directory of an adapter");
                    return Err(Error::usage(found).at(&self.dir));
                }
            }
        }
        Ok(())
    }
}

/// Largest number of files below the directory of an adapter whose files must lie in a root.
const MOST_ENTRIES: usize = 10_000;

/// Refuses a path that leads out of a root, or nowhere.
fn stays_in(root: &Path, path: &Path) -> Result<()> {
    match path.canonicalize() {
        Ok(target) if target.starts_with(root) => Ok(()),
        _ => Err(Error::usage("found a link out of the directory for adapters").at(path)),
    }
}

/// Checks the name of an adapter.
///
/// # Errors
/// It is empty, too long, or has other characters than letters, digits, dots, hyphens and underscores.
pub fn check_name(name: &str) -> std::result::Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    match !name.is_empty() && name.len() <= 128 && name.chars().all(allowed) {
        true => Ok(()),
        false => {
            Err(format!("found the name `{name}`, expected up to 128 letters, digits, dots, hyphens and underscores"))
        }
    }
}

impl Session {
    /// Registers adapters. If all of them fit in the memory for adapters, they are loaded and used together for
    /// sequences that choose none; if they cannot be used together, only requests that choose some are valid. Otherwise
    /// each is loaded when a request needs it.
    pub(super) fn with_adapters(mut self, options: &SessionOptions) -> Result<Session> {
        let (sources, limit) = (&options.adapters, options.adapter_memory);
        self.adapters = Adapters::new(self.engine.adapter_binder(), options.adapter_precision, limit);
        if sources.is_empty() {
            return Ok(self);
        }
        sources.iter().try_for_each(|source| self.adapters.add(source.clone()))?;
        if limit.is_none_or(|limit| self.adapters.needed() <= limit) {
            self.adapters.load_all()?;
            if let Ok(Some(together)) = self.adapters.together() {
                self.engine.set_adapters(together);
            }
        }
        Ok(self)
    }
}

/// Adapters by name. Those that requests use are in memory, where they stay until others need their room; then those
/// without a use leave, the least recently used first. Methods may be called by several threads while an engine
/// computes with the adapters.
#[derive(Debug, Default)]
pub struct Adapters {
    binder: Option<AdapterBinder>,
    precision: AdapterPrecision,
    /// Largest number of bytes of all adapters in memory.
    limit: Option<u64>,
    state: Mutex<AdapterState>,
    /// Notified when an adapter was loaded or could not be loaded.
    loaded: Condvar,
}

#[derive(Debug, Default)]
struct AdapterState {
    entries: BTreeMap<String, AdapterEntry>,
    /// Number of uses of all adapters so far.
    uses: u64,
}

/// An adapter and its state.
#[derive(Debug)]
struct AdapterEntry {
    source: AdapterSource,
    /// Changes of other parts than the language model, in words.
    left_out: Option<String>,
    /// Bytes that its factors take in memory; those of its numbers until it was loaded, without padding.
    bytes: u64,
    place: AdapterPlace,
    /// Number of the last use.
    used: u64,
    hits: u64,
    loads: u64,
    sha256: Option<String>,
}

impl AdapterEntry {
    /// Returns the bytes that it takes in memory now.
    fn held(&self) -> u64 {
        if matches!(self.place, AdapterPlace::Disk) { 0 } else { self.bytes }
    }
}

#[derive(Debug)]
enum AdapterPlace {
    Disk,
    /// A thread is loading it; its bytes count already.
    Loading,
    Memory(Arc<BoundAdapter>),
}

/// Use of an adapter so far.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterUse {
    /// Name by which requests refer to it.
    pub name: String,
    /// Scale of requests that do not name one.
    pub scale: f32,
    /// Bytes of its factors in memory; 0 if it is not in memory.
    pub bytes: u64,
    /// Number of requests that found it in memory.
    pub hits: u64,
    /// Number of times that it was loaded.
    pub loads: u64,
    /// SHA-256 digest of its files, once it was loaded.
    pub sha256: Option<String>,
}

/// Returns an adapter to the state of not being loaded if loading ends without it.
struct Loading<'a> {
    adapters: &'a Adapters,
    name: &'a str,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.adapters.state().entries.get_mut(self.name)
            && matches!(entry.place, AdapterPlace::Loading)
        {
            entry.place = AdapterPlace::Disk;
        }
        self.adapters.loaded.notify_all();
    }
}

impl Adapters {
    /// Creates a set without adapters. `limit` is the largest number of bytes of all adapters in memory.
    pub fn new(binder: AdapterBinder, precision: AdapterPrecision, limit: Option<u64>) -> Adapters {
        Adapters { binder: Some(binder), precision, limit, ..Adapters::default() }
    }

    /// Registers an adapter, whose configuration and header are read.
    ///
    /// # Errors
    /// Another adapter has its name, its files are invalid, or it alone exceeds the memory for adapters.
    pub fn add(&self, source: AdapterSource) -> Result<()> {
        let entry = self.entry(source)?;
        match self.state().entries.entry(entry.source.name.clone()) {
            btree_map::Entry::Occupied(_) => {
                let found = format!("found two adapters with the name `{}`", entry.source.name);
                Err(Error::usage(found).help("name them with NAME=DIR"))
            }
            btree_map::Entry::Vacant(place) => {
                place.insert(entry);
                Ok(())
            }
        }
    }

    /// Replaces an adapter that no request uses, and loads the new one. The former one can be used until then, and
    /// stays if this fails. Returns false if there is no room until requests have ended that use other adapters.
    ///
    /// # Errors
    /// There is no such adapter, it is in use, or the new one cannot be loaded.
    pub fn replace(&self, source: AdapterSource) -> Result<bool> {
        let name = source.name.clone();
        let new = self.entry(source)?;
        {
            let mut state = self.state();
            // The former one leaves memory when the new one comes.
            let former = idle(&state, &name)?.held();
            if !self.make_room_but(&mut state, new.bytes.saturating_sub(former), Some(&name)) {
                return Ok(false);
            }
        }
        let adapter = self.load(&new.source)?;
        let mut state = self.state();
        let former = idle(&state, &name)?.held();
        let bytes = adapter.bytes as u64;
        self.check_room(bytes, &format!("adapter `{name}` needs"))?;
        if !self.make_room_but(&mut state, bytes.saturating_sub(former), Some(&name)) {
            return Ok(false);
        }
        state.uses += 1;
        let (used, sha256) = (state.uses, Some(adapter.hash.clone()));
        state
            .entries
            .insert(name, AdapterEntry { bytes, used, loads: 1, sha256, place: AdapterPlace::Memory(adapter), ..new });
        Ok(true)
    }

    /// Describes an adapter that is not loaded, after its configuration and header were read.
    fn entry(&self, source: AdapterSource) -> Result<AdapterEntry> {
        source.check_links()?;
        let summary = adapter::describe(&source.dir)?;
        let (bytes, left_out) = (summary.parameters * self.number_bytes(), adapter::left_out(&summary.unused));
        self.check_room(bytes, &format!("adapter `{}` needs", source.name))?;
        Ok(AdapterEntry {
            source,
            left_out,
            bytes,
            place: AdapterPlace::Disk,
            used: 0,
            hits: 0,
            loads: 0,
            sha256: None,
        })
    }

    /// Returns the bytes that a number of a factor takes in memory.
    fn number_bytes(&self) -> u64 {
        match self.precision {
            AdapterPrecision::Int8 => 1,
            AdapterPrecision::Auto => self.binder.as_ref().map_or(4, AdapterBinder::number_bytes),
        }
    }

    /// Removes an adapter that no request uses.
    ///
    /// # Errors
    /// There is no such adapter, or it is loading or in use.
    pub fn remove(&self, name: &str) -> Result<()> {
        let mut state = self.state();
        idle(&state, name)?;
        state.entries.remove(name);
        Ok(())
    }

    /// Returns true if there is an adapter of this name.
    pub fn has(&self, name: &str) -> bool {
        self.state().entries.contains_key(name)
    }

    /// Loads all adapters.
    fn load_all(&self) -> Result<()> {
        let names: Vec<String> = self.state().entries.keys().cloned().collect();
        names.iter().try_for_each(|name| self.get(name).map(drop))
    }

    /// Says which adapters change more than the language model.
    pub fn notes(&self) -> Vec<String> {
        let note =
            |(name, entry): (&String, &AdapterEntry)| Some(format!("adapter `{name}`: {}", entry.left_out.as_ref()?));
        self.state().entries.iter().filter_map(note).collect()
    }

    /// Returns the names of all adapters.
    pub fn names(&self) -> Vec<String> {
        self.state().entries.keys().cloned().collect()
    }

    /// Returns the bytes that all adapters would take in memory.
    fn needed(&self) -> u64 {
        self.state().entries.values().map(|entry| entry.bytes).sum()
    }

    /// Returns the adapters that were used, in the order of their names.
    pub fn used(&self) -> Vec<AdapterUse> {
        let of = |(name, entry): (&String, &AdapterEntry)| AdapterUse {
            name: name.clone(),
            scale: entry.source.scale,
            bytes: if matches!(entry.place, AdapterPlace::Memory(_)) { entry.bytes } else { 0 },
            hits: entry.hits,
            loads: entry.loads,
            sha256: entry.sha256.clone(),
        };
        self.state().entries.iter().filter(|(_, entry)| entry.loads > 0).map(of).collect()
    }

    /// Returns the set of all adapters with their scales; see [`Adapters::set`].
    ///
    /// # Errors
    /// They cannot be used together, or one cannot be loaded.
    pub fn together(&self) -> Result<Option<AdapterSet>> {
        let names: Vec<(String, f32)> = self.state().entries.keys().map(|name| (name.clone(), 1.0)).collect();
        self.set(&names)
    }

    /// Checks names before their adapters are loaded.
    ///
    /// # Errors
    /// A name is unknown, there are too many, or they need more than the memory for adapters.
    pub fn check(&self, names: &[(String, f32)]) -> Result<()> {
        let state = self.state();
        let mut distinct: Vec<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
        distinct.sort_unstable();
        distinct.dedup();
        if distinct.len() > MOST {
            let found = format!("found {} adapters for one text, expected at most {MOST}", distinct.len());
            return Err(Error::usage(found));
        }
        let bytes = |name: &&str| Ok(state.entries.get(*name).ok_or_else(|| unknown(name, &state))?.bytes);
        let bytes: u64 = distinct.iter().map(bytes).sum::<Result<u64>>()?;
        self.check_room(bytes, "the adapters of one text need")
    }

    /// Returns the set of adapters that a request names, and loads those that are not in memory; a scale multiplies
    /// that of the adapter. `None` = there is no room until requests have ended that use other adapters.
    ///
    /// # Errors
    /// A name is unknown, an adapter cannot be loaded, or they cannot be used together.
    pub fn set(&self, names: &[(String, f32)]) -> Result<Option<AdapterSet>> {
        self.check(names)?;
        let mut all = Vec::with_capacity(names.len());
        for (name, scale) in names {
            match self.get(name)? {
                Some((adapter, own)) => all.push((adapter, own * scale)),
                None => {
                    // Loading tells how many bytes an adapter takes, which may be more than there is.
                    self.check(names)?;
                    return Ok(None);
                }
            }
        }
        AdapterSet::new(all).map(Some)
    }

    /// Returns an adapter, loaded if necessary, with its scale; `None` = there is no room for it now.
    fn get(&self, name: &str) -> Result<Option<(Arc<BoundAdapter>, f32)>> {
        let source = {
            let mut state = self.state();
            loop {
                state.uses += 1;
                let number = state.uses;
                let found = match state.entries.get_mut(name) {
                    None => return Err(unknown(name, &state)),
                    Some(entry) => entry,
                };
                match &found.place {
                    AdapterPlace::Memory(adapter) => {
                        (found.used, found.hits) = (number, found.hits + 1);
                        return Ok(Some((adapter.clone(), found.source.scale)));
                    }
                    AdapterPlace::Loading => state = self.loaded.wait(state).unwrap_or_else(PoisonError::into_inner),
                    AdapterPlace::Disk => break,
                }
            }
            let needed = state.entries[name].bytes;
            if !self.make_room(&mut state, needed) {
                return Ok(None);
            }
            let entry = state.entries.get_mut(name).expect("the entry that was found");
            entry.place = AdapterPlace::Loading;
            entry.source.clone()
        };
        let _loading = Loading { adapters: self, name };
        // Other threads use and load other adapters meanwhile.
        let adapter = self.load(&source)?;
        let mut state = self.state();
        let number = state.uses;
        if let Some(entry) = state.entries.get_mut(name) {
            entry.bytes = adapter.bytes as u64;
        }
        if !self.make_room(&mut state, 0) {
            return Ok(None);
        }
        let entry = state.entries.get_mut(name).expect("an adapter that is loading is not removed");
        (entry.used, entry.loads, entry.sha256) = (number, entry.loads + 1, Some(adapter.hash.clone()));
        entry.place = AdapterPlace::Memory(adapter.clone());
        Ok(Some((adapter, source.scale)))
    }

    /// Makes room for an adapter. Returns false if adapters that are in use leave too little.
    fn make_room(&self, state: &mut AdapterState, needed: u64) -> bool {
        self.make_room_but(state, needed, None)
    }

    /// Makes room for an adapter, and leaves the adapter `kept` where it is.
    fn make_room_but(&self, state: &mut AdapterState, needed: u64, kept: Option<&str>) -> bool {
        let Some(limit) = self.limit else { return true };
        let mut held: u64 = state.entries.values().map(AdapterEntry::held).sum();
        while held.saturating_add(needed) > limit {
            let idle = |entry: &&mut AdapterEntry| {
                let is_idle = matches!(&entry.place, AdapterPlace::Memory(a) if Arc::strong_count(a) == 1);
                is_idle && kept != Some(entry.source.name.as_str())
            };
            let Some(oldest) = state.entries.values_mut().filter(idle).min_by_key(|entry| entry.used) else {
                return false;
            };
            oldest.place = AdapterPlace::Disk;
            held -= oldest.bytes;
        }
        true
    }

    fn load(&self, source: &AdapterSource) -> Result<Arc<BoundAdapter>> {
        let binder = self.binder.as_ref().expect("a set with adapters has a binder");
        source.check_links()?;
        let mut read = adapter::read(&source.dir, binder.config())?;
        if self.precision == AdapterPrecision::Int8 {
            adapter::round_to_int8(&mut read).at(&source.dir)?;
        }
        let bound = binder.bind(&read).at(&source.dir)?;
        progress::detail(1, || {
            let (name, size) = (&source.name, human_bytes(bound.bytes as u64));
            format!("adapter {name}: rank {}, {} numbers, {size} in memory", read.rank(), read.parameters())
        });
        Ok(bound)
    }

    fn check_room(&self, needed: u64, what: &str) -> Result<()> {
        match self.limit.filter(|limit| needed > *limit) {
            None => Ok(()),
            Some(limit) => {
                let (needed, limit) = (human_bytes(needed), human_bytes(limit));
                let found = format!("{what} {needed}, but --lora-memory is {limit}");
                Err(Error::new(Cause::OutOfMemory(found)).help("raise --lora-memory, or leave it out"))
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, AdapterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns an adapter that no request uses.
fn idle<'a>(state: &'a AdapterState, name: &str) -> Result<&'a AdapterEntry> {
    let entry = state.entries.get(name).ok_or_else(|| unknown(name, state))?;
    let is_busy = match &entry.place {
        AdapterPlace::Disk => false,
        AdapterPlace::Loading => true,
        AdapterPlace::Memory(adapter) => Arc::strong_count(adapter) > 1,
    };
    match is_busy {
        true => Err(Error::usage(format!("adapter `{name}` is in use")).help("wait until its requests have ended")),
        false => Ok(entry),
    }
}

/// Largest number of names in a message.
const LISTED: usize = 10;

fn unknown(name: &str, state: &AdapterState) -> Error {
    let mut known: Vec<&str> = state.entries.keys().take(LISTED).map(String::as_str).collect();
    let more = format!("{} more", state.entries.len() - known.len());
    if known.len() < state.entries.len() {
        known.push(&more);
    }
    let help = match known.is_empty() {
        true => "load it with --lora NAME=DIR".into(),
        false => format!("the adapters are {}", known.join(", ")),
    };
    Error::usage(format!("found no adapter `{name}`")).help(help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_have_names_and_scales_of_their_own_or_by_default() {
        let source =
            |name: &str, dir: &str, scale| Ok(AdapterSource { name: name.into(), dir: dir.into(), scale, root: None });
        assert_eq!("a/b".parse(), source("b", "a/b", 1.0));
        assert_eq!("x=a/b:0.5".parse(), source("x", "a/b", 0.5));
        assert_eq!("x=c:\\b".parse(), source("x", "c:\\b", 1.0));
        assert_eq!("a/b:-2".parse(), source("b", "a/b", -2.0));
        for wrong in ["", "=a", "x=", "x y=a", "a:inf", "..", "x=a:nan"] {
            assert!(wrong.parse::<AdapterSource>().is_err(), "{wrong}");
        }
    }
}
