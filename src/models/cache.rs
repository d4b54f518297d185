//! Directory of packs that were made from checkpoints and GGUF files: finds, lists, removes and limits its entries.
//!
//! ```text
//! CACHE/models/NAME-HASH/      one entry: a pack, its quantization manifest, and
//!     cache.json               its record, written last
//!     cache.lock               locked shared by readers and exclusively by a writer; its modification time is that
//!                              of the last use; holds the digest of the source path and the wanted weights
//! ```
//!
//! An entry without a valid record is incomplete: it is being made, or the process that made it was killed. The hash in
//! the name is that of the source's files and of the wanted weights, so a changed source gets a new entry.

use super::Places;
use super::record::{LOCK_NAME, RECORD_NAME, Record};
use super::source::canonical;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::dependants;
use crate::output::{self, Lease, stale};
use crate::progress;
use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Help for a cache that cannot be written.
pub(super) const ELSEWHERE: &str = "name a directory that can be written with IEC_CACHE, or make the pack elsewhere: \
     `iec pack` or `iec import-gguf` with --out-dir";
/// Directory of the entries below the cache directory.
const MODELS: &str = "models";

/// Longest digest in a lock file in bytes.
const ORIGIN_LIMIT: u64 = 128;
/// Number of equal first letters that make names similar.
const ALIKE: usize = 3;
/// Most similar names that an error lists.
const LISTED: usize = 5;

/// Directory of packs.
#[derive(Debug, Clone)]
pub struct Cache {
    /// Directory of the entries; it need not exist.
    root: PathBuf,
    /// Largest size of all entries in bytes.
    limit: Option<u64>,
}

/// Entry of the cache.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Name, which is that of its directory.
    pub name: String,
    /// Its directory.
    pub dir: PathBuf,
    /// Record of its source; `None` if the entry is incomplete.
    pub record: Option<Record>,
    /// Digest of the source path and the wanted weights; of an incomplete entry, it is read from the lock file.
    pub origin: Option<String>,
    /// Size of all files in bytes.
    pub bytes: u64,
    /// Time of the last use, or of the beginning of an incomplete entry.
    pub last_used: SystemTime,
}

/// Removed entries.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Removed {
    /// Names of the entries.
    pub names: Vec<String>,
    /// Their size in bytes.
    pub bytes: u64,
}

impl Cache {
    /// Returns the cache at its place. Nothing is read or created.
    ///
    /// # Errors
    /// The place is not known.
    pub fn of(places: &Places) -> Result<Cache> {
        let root = places.cache.as_ref().ok_or_else(|| {
            Error::usage("found no cache directory: none of IEC_CACHE, XDG_CACHE_HOME and HOME is set")
                .help("name one with IEC_CACHE")
        })?;
        Ok(Cache { root: root.join(MODELS), limit: places.limit })
    }

    /// Returns the directory of the entries.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Lists all entries, the most recently used first.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn entries(&self) -> Result<Vec<Entry>> {
        let listed = match std::fs::read_dir(&self.root) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            listed => listed.at(&self.root)?,
        };
        let mut entries = Vec::new();
        for found in listed {
            let found = found.at(&self.root)?;
            let Ok(name) = found.file_name().into_string() else { continue };
            if !name.starts_with('.') && found.file_type().is_ok_and(|kind| kind.is_dir()) {
                entries.push(Entry::read(name, found.path()));
            }
        }
        entries.sort_by(|a, b| (b.last_used, &a.name).cmp(&(a.last_used, &b.name)));
        Ok(entries)
    }

    /// Returns the entries that `spec` names: the one of this name; otherwise those whose name without the hash, whose
    /// repository or whose source path it is.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn named(&self, spec: &Path) -> Result<Vec<Entry>> {
        let mut entries = self.entries()?;
        if let Some(exact) = entries.iter().position(|entry| Path::new(&entry.name) == spec) {
            return Ok(vec![entries.swap_remove(exact)]);
        }
        let source = canonical(spec).unwrap_or_else(|_| spec.to_path_buf());
        let is_meant = |entry: &Entry| {
            let short = entry.name.rsplit_once('-').map(|(name, _)| name);
            let record = entry.record.as_ref();
            let repo = record.and_then(|record| record.repo.as_deref());
            let path = record.map(|record| Path::new(&record.source));
            [short, repo].into_iter().flatten().any(|name| Path::new(name) == spec) || path == Some(&source)
        };
        entries.retain(is_meant);
        Ok(entries)
    }

    /// Removes an entry.
    ///
    /// # Errors
    /// A process uses it, other packs are rebuilt from it, or it cannot be removed.
    pub fn remove(&self, entry: &Entry) -> Result<()> {
        stale::remove(&self.root);
        let lock = entry.dir.join(LOCK_NAME);
        let lease = Lease::try_exclusive(&lock)?;
        if lease.is_none() && files::exists(&lock)? {
            let found = "another process uses this entry of the cache, so it was not removed";
            return Err(Error::from(io::Error::new(ErrorKind::ResourceBusy, found))
                .at(&entry.name)
                .help("end that process first"));
        }
        dependants::refuse_if_needed(&entry.dir)?;
        // The lock is released after the directory has lost its name; a process that waits for it then finds no entry.
        stale::remove_whole(&entry.dir)
    }

    /// Returns all entries that `specs` name, each once.
    ///
    /// # Errors
    /// No entry has one of these names; the error lists similar ones.
    pub fn all_named(&self, specs: &[PathBuf]) -> Result<Vec<Entry>> {
        let mut all: Vec<Entry> = Vec::new();
        for spec in specs {
            let found = self.named(spec)?;
            if found.is_empty() {
                return Err(missing(spec, &self.entries()?));
            }
            let sources = found.iter().filter_map(|entry| entry.record.as_ref().map(|record| &record.source));
            if sources.collect::<BTreeSet<_>>().len() > 1 {
                let names: Vec<&str> = found.iter().map(|entry| &*entry.name).collect();
                let several = format!("found packs of several models with this name: {}", names.join(", "));
                return Err(Error::usage(several).at(spec).help("name one of them; `iec list` shows their sources"));
            }
            all.extend(found);
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all.dedup_by(|a, b| a.name == b.name);
        Ok(all)
    }

    /// Removes entries; returns those that were removed, and the first error. An error does not end the removal.
    pub fn remove_all(&self, entries: &[Entry]) -> (Removed, Option<Error>) {
        // Removals that were interrupted are finished, even if there is nothing else to remove.
        stale::remove(&self.root);
        let (mut removed, mut error) = (Removed::default(), None);
        for entry in entries {
            match self.remove(entry) {
                Ok(()) => {
                    removed.names.push(entry.name.clone());
                    removed.bytes += entry.bytes;
                }
                Err(e) => drop(error.get_or_insert(e)),
            }
        }
        (removed, error)
    }

    /// Removes entries of earlier states of a source. Those in use stay until the next time.
    pub(super) fn remove_outdated(&self, made: &Entry) {
        let is_outdated =
            |entry: &Entry| entry.name != made.name && made.origin.is_some() && entry.origin == made.origin;
        for entry in self.entries().unwrap_or_default().iter().filter(|entry| is_outdated(entry)) {
            if self.remove(entry).is_ok() {
                progress::detail(1, || format!("{}: removed, because its source has changed", entry.name));
            }
        }
    }

    /// Removes the least recently used entries until the rest is not larger than the limit. The entry `made` and those
    /// in use stay.
    pub(super) fn enforce_limit(&self, made: &str) {
        let Some(limit) = self.limit else { return };
        let entries = self.entries().unwrap_or_default();
        let mut total: u64 = entries.iter().map(|entry| entry.bytes).sum();
        for entry in entries.iter().rev().filter(|entry| entry.name != made) {
            if total <= limit {
                return;
            }
            if self.remove(entry).is_ok() {
                total -= entry.bytes;
                let text = || format!("note: removed {} from the cache, the least recently used model", entry.name);
                progress::detail(0, text);
            }
        }
        if total > limit {
            progress::detail(0, || {
                let [total, limit] = [total, limit].map(crate::units::human_bytes);
                format!("note: the cache has {total}, more than the {limit} of IEC_CACHE_MAX")
            });
        }
    }

    /// Creates the directory of an entry, locks the entry exclusively and notes its [`Record::origin`] in the lock
    /// file. Waits for other processes that use it.
    ///
    /// # Errors
    /// The directory cannot be created or written.
    pub(super) fn lock(&self, name: &str, origin: &str) -> Result<(PathBuf, Lease)> {
        let dir = self.root.join(name);
        let lock = dir.join(LOCK_NAME);
        stale::remove(&self.root);
        loop {
            output::make_dir(&dir).help(ELSEWHERE)?;
            match Lease::exclusive(&lock) {
                // Another process has removed the entry in between.
                Err(e) if e.is_not_found() => {}
                lease => {
                    let mut lease = lease.help(ELSEWHERE)?;
                    lease.mark(&lock, origin)?;
                    return Ok((dir, lease));
                }
            }
        }
    }
}

impl Entry {
    /// Reads an entry. Files that cannot be read count as missing.
    pub(super) fn read(name: String, dir: PathBuf) -> Entry {
        let modified = |path: &Path| path.symlink_metadata().and_then(|found| found.modified()).ok();
        let last_used = modified(&dir.join(LOCK_NAME)).or_else(|| modified(&dir)).unwrap_or(SystemTime::UNIX_EPOCH);
        let record = Record::read(&dir.join(RECORD_NAME)).ok();
        let noted = || String::from_utf8(files::read_limited(&dir.join(LOCK_NAME), ORIGIN_LIMIT).ok()?).ok();
        let origin = record.as_ref().map(|record| record.origin.clone()).or_else(noted);
        Entry { bytes: size_of(&dir), record, origin, last_used, name, dir }
    }
}

/// Builds the error for a name that no entry has.
fn missing(spec: &Path, entries: &[Entry]) -> Error {
    let name = spec.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let alike = |entry: &Entry| {
        let other = entry.name.to_lowercase();
        let common = other.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
        if !name.is_empty() && other.contains(&name) { name.len() } else { common }
    };
    let mut near: Vec<&Entry> = entries.iter().filter(|entry| alike(entry) >= ALIKE).collect();
    near.sort_by_key(|entry| std::cmp::Reverse(alike(entry)));
    let names: Vec<&str> = near.iter().take(LISTED).map(|entry| &*entry.name).collect();
    let help = match names.is_empty() {
        true => "`iec list` shows the models in the cache".to_string(),
        false => format!("similar names: {}; `iec list` shows all", names.join(", ")),
    };
    let found = "found no model of this name in the cache";
    Error::from(io::Error::new(ErrorKind::NotFound, found)).at(spec).help(help)
}

/// Returns the size of all files below a directory in bytes.
fn size_of(dir: &Path) -> u64 {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(found) if found.is_dir() => bytes += size_of(&entry.path()),
            Ok(found) => bytes += found.len(),
            Err(_) => {}
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::record::test_record;
    use super::*;
    use std::time::Duration;

    /// Creates a cache with entries of 100 bytes and a record each, given as name, origin and age in seconds.
    fn cache(limit: Option<u64>, entries: &[(&str, &str, u64)]) -> (tempfile::TempDir, Cache) {
        let home = tempfile::tempdir().unwrap();
        let cache = Cache::of(&Places { cache: Some(home.path().to_path_buf()), hub: None, limit }).unwrap();
        for (name, origin, age) in entries {
            let (dir, _lease) = cache.lock(name, origin).unwrap();
            std::fs::write(dir.join("model.ie.bin"), [0; 100]).unwrap();
            test_record(origin).write(&dir).unwrap();
            let lock = std::fs::File::options().append(true).open(dir.join(LOCK_NAME)).unwrap();
            lock.set_modified(SystemTime::now() - Duration::from_secs(*age)).unwrap();
        }
        (home, cache)
    }

    fn names(cache: &Cache) -> Vec<String> {
        cache.entries().unwrap().into_iter().map(|entry| entry.name).collect()
    }

    #[test]
    fn a_limit_removes_the_least_recently_used_entries_that_are_free() {
        let (_home, cache) = cache(Some(1), &[("a-1", "a", 30), ("b-2", "b", 20), ("c-3", "c", 10), ("d-4", "d", 40)]);
        assert_eq!(names(&cache), ["c-3", "b-2", "a-1", "d-4"]);
        let used = Lease::shared(&cache.root().join("a-1").join(LOCK_NAME)).unwrap();
        cache.enforce_limit("c-3");
        assert_eq!(names(&cache), ["c-3", "a-1"]);
        drop(used);
        let roomy = Cache { limit: Some(1 << 20), ..cache.clone() };
        roomy.enforce_limit("c-3");
        assert_eq!(names(&cache), ["c-3", "a-1"]);
        cache.enforce_limit("c-3");
        assert_eq!(names(&cache), ["c-3"]);
    }

    #[test]
    fn only_entries_of_the_same_origin_are_outdated() {
        let (_home, cache) = cache(None, &[("a-1", "a", 1), ("a-2", "a", 2), ("b-3", "b", 3)]);
        let made = cache.named(Path::new("a-1")).unwrap().remove(0);
        cache.remove_outdated(&made);
        assert_eq!(names(&cache), ["a-1", "b-3"]);
    }

    #[test]
    fn entries_are_found_by_name_repository_and_path() {
        let (_home, cache) = cache(None, &[("a-1", "x", 1), ("a-2", "y", 2), ("b-3", "z", 3)]);
        for (spec, expected) in
            [("a-2", 1), ("a", 2), ("b", 1), ("org/x", 1), ("/models/z", 1), ("c", 0), ("a-", 0), ("org/q", 0)]
        {
            assert_eq!(cache.named(Path::new(spec)).unwrap().len(), expected, "{spec}");
        }
    }

    #[test]
    fn an_entry_in_use_and_one_that_others_need_stay() {
        let (_home, cache) = cache(None, &[("a-1", "a", 1)]);
        let entry = cache.entries().unwrap().remove(0);
        let used = Lease::shared(&entry.dir.join(LOCK_NAME)).unwrap();
        let refused = cache.remove(&entry).unwrap_err();
        assert!(refused.to_string().contains("another process uses"), "{refused}");
        drop(used);
        cache.remove(&entry).unwrap();
        assert!(names(&cache).is_empty() && std::fs::read_dir(cache.root()).unwrap().next().is_none());
    }

    #[test]
    fn a_missing_name_is_an_error_with_the_similar_ones() {
        let (_home, cache) = cache(None, &[("llama-1", "a", 1), ("gemma-2", "b", 2)]);
        for (spec, expected) in
            [("qwen", "`iec list` shows the models"), ("llame", "similar names: llama-1;"), ("emma", "gemma-2")]
        {
            let refused = cache.all_named(&[spec.into()]).unwrap_err();
            assert_eq!(refused.cause().exit_code(), 1);
            assert!(refused.help_text().unwrap().contains(expected), "{spec}: {:?}", refused.help_text());
        }
        let both = cache.all_named(&["llama".into(), "llama-1".into(), "gemma-2".into()]).unwrap();
        let (removed, refused) = cache.remove_all(&both);
        assert!(removed.names == ["gemma-2", "llama-1"] && removed.bytes > 200 && refused.is_none());
    }

    #[test]
    fn an_incomplete_entry_of_an_earlier_state_is_removed() {
        let (_home, cache) = cache(None, &[("a-2", "origin", 1), ("b-1", "other", 2)]);
        drop(cache.lock("a-1", "origin").unwrap());
        let made = cache.named(Path::new("a-2")).unwrap().remove(0);
        cache.remove_outdated(&made);
        assert_eq!(names(&cache), ["a-2", "b-1"]);
    }

    #[test]
    fn an_incomplete_entry_is_listed_and_can_be_removed() {
        let (_home, cache) = cache(None, &[]);
        assert!(cache.entries().unwrap().is_empty());
        drop(cache.lock("a-1", "b").unwrap());
        std::fs::create_dir(cache.root().join("b-2")).unwrap();
        let entries = cache.entries().unwrap();
        assert!(entries.len() == 2 && entries.iter().all(|entry| entry.record.is_none()));
        entries.iter().for_each(|entry| cache.remove(entry).unwrap());
        assert!(names(&cache).is_empty());
    }
}
