//! State of the files of a scenario as its readers see them, and the comparison of a state with the states that are
//! allowed.

use iec::signature::PrivateKey;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Beginning of the names of temporary files and directories of the program.
const OWN: &str = ".iec-";

/// Data files of a deduplicated store, which `model.dedup.json` describes.
const STORE: [&str; 3] = ["model.dedup.defaults.bin", "model.dedup.masks.bin", "model.dedup.exceptions.bin"];

/// List of the packs that are rebuilt from a pack. Readers compare it with these packs before they use it, so it may be
/// out of date and is not part of the state.
const FAMILY: &str = "model.dedup.family.json";

/// Files without which a reader finds no pack, q4 files or checkpoint.
const LEADS: [&str; 4] = ["cache.json", "model.ie.json", "q4_manifest.expanded.json", "config.json"];

/// Entries of the cache, whose names end in a hash of the times of their sources.
const ENTRIES: &str = "cache/models";
/// Record of an entry, which holds times.
const RECORD: &str = "cache.json";
/// Lock file of an entry, whose time is that of the last use.
const CACHE_LOCK: &str = "cache.lock";

/// New keys, which are random.
const KEY: &str = "new.pem";
const PUBLIC_KEY: &str = "new.pem.pub";

/// Content hashes of all files below a directory, by relative path. Temporary files of the program are left out. Files
/// of an output that is being replaced are those that its readers find: see `src/output/swap.rs`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    pub files: BTreeMap<PathBuf, String>,
    /// Directories in which a swap is not finished; files of the old output may still be there.
    swapped: BTreeSet<PathBuf>,
}

impl State {
    /// Reads the state of a directory.
    pub fn read(root: &Path) -> State {
        let mut state = State::default();
        state.collect(root, Path::new(""));
        state
    }

    fn collect(&mut self, root: &Path, at: &Path) {
        let mut staged = None;
        for entry in fs::read_dir(root.join(at)).into_iter().flatten().flatten() {
            let (name, path) = (entry.file_name(), at.join(entry.file_name()));
            if name.to_string_lossy().starts_with(OWN) || name == FAMILY || name == CACHE_LOCK {
                continue;
            }
            let link = entry.path().read_link().ok();
            let parent = link.as_deref().and_then(Path::parent).map(Path::to_path_buf);
            if let Some(work) = parent.filter(|parent| parent.to_string_lossy().starts_with(OWN)) {
                staged = Some(work);
            }
            if entry.path().is_dir() {
                self.collect(root, &path);
            } else if is_measurement(&path) {
                let kind = path.extension().unwrap_or_default();
                let (name, found) = (path.with_file_name("measurement").with_extension(kind), whole(&entry.path()));
                let known = self.files.entry(name).or_insert_with(|| found.clone());
                // If there are several, one that is not complete determines the result.
                *known = std::cmp::max(found, std::mem::take(known));
            } else if path.starts_with(KEY) || path.starts_with(PUBLIC_KEY) {
                let found = if path.starts_with(KEY) { private_key(&entry.path()) } else { public_key(&entry.path()) };
                self.files.insert(path, found);
            } else if name == RECORD {
                let text = fs::read(entry.path()).unwrap_or_default();
                let is_whole = serde_json::from_slice::<serde_json::Value>(&text).is_ok();
                self.files.insert(stable(&path), if is_whole { "complete" } else { "torn" }.to_string());
            } else {
                self.files.insert(stable(&path), hash(&entry.path()));
            }
        }
        if let Some(work) = staged {
            for entry in fs::read_dir(root.join(at).join(work)).into_iter().flatten().flatten() {
                let name = entry.file_name();
                if !is_internal(&name.to_string_lossy()) {
                    self.files.insert(stable(&at.join(name)), hash(&entry.path()));
                }
            }
            // Readers use an entry of the cache only when its record is there, which is after the swap.
            if !at.starts_with(ENTRIES) {
                self.swapped.insert(at.to_path_buf());
            }
        }
        // Readers look for the store only if this file describes it.
        if !self.files.contains_key(&at.join("model.dedup.json")) {
            STORE.iter().for_each(|name| drop(self.files.remove(&at.join(name))));
        }
    }

    /// Returns the directories in which a swap is not finished.
    pub fn swapped(&self) -> impl Iterator<Item = &Path> {
        self.swapped.iter().map(PathBuf::as_path)
    }

    /// Returns the files below a unit: a directory whose files change together ([`Allowed::units`]).
    fn within<'a>(&'a self, unit: &'a Path) -> BTreeMap<&'a Path, &'a str> {
        let files = self.files.iter().filter(|(path, _)| path.starts_with(unit));
        files.map(|(path, hash)| (path.as_path(), hash.as_str())).collect()
    }
}

/// Returns a path without the hash in the name of an entry of the cache.
fn stable(path: &Path) -> PathBuf {
    let Ok(below) = path.strip_prefix(ENTRIES) else { return path.to_path_buf() };
    let mut parts = below.components();
    let entry = parts.next().map(|name| name.as_os_str().to_string_lossy().into_owned()).unwrap_or_default();
    let name = entry.rsplit_once('-').map_or(&*entry, |(name, _)| name);
    Path::new(ENTRIES).join(name).join(parts.as_path())
}

/// Returns true for files in a directory of partial work that are no output.
fn is_internal(name: &str) -> bool {
    ["journal", "link", "command.json"].contains(&name) || name.starts_with(OWN) || name.starts_with("part-")
}

/// Returns true for files that hold times and therefore differ from run to run.
fn is_measurement(path: &Path) -> bool {
    path.starts_with("reports") || path.extension().is_some_and(|kind| kind == "md")
}

/// Returns `complete` for a complete file with measured times, otherwise a note with its length.
fn whole(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let is_whole = match path.extension().and_then(|kind| kind.to_str()) {
        Some("jsonl") => text.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()),
        Some("html") => text.trim_end().ends_with("</html>"),
        Some("md") => text.trim_end().ends_with("-->"),
        _ => true,
    };
    if is_whole && text.ends_with('\n') { "complete".to_string() } else { format!("torn after {} bytes", text.len()) }
}

/// Returns what a file with a new private key is. Keys are random: their content differs from run to run.
fn private_key(path: &Path) -> String {
    let mode = path.metadata().map_or(0, |metadata| metadata.permissions().mode() & 0o777);
    match PrivateKey::open(path) {
        Ok(_) => format!("private key with the permissions {mode:o}"),
        Err(error) => format!("no key: {error}"),
    }
}

/// Returns what a file with the public part of a new key is.
fn public_key(path: &Path) -> String {
    let private = PrivateKey::open(&path.with_extension(""));
    let expected = private.map(|key| key.public().to_pem());
    let is_right = expected.is_ok_and(|pem| fs::read_to_string(path).is_ok_and(|text| text == pem));
    if is_right { "public key of the private one" } else { "another text" }.to_string()
}

/// Returns the hash of a file, or a note that it cannot be read.
fn hash(path: &Path) -> String {
    match fs::read(path) {
        Ok(bytes) => Sha256::digest(&bytes)[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
        Err(error) => format!("unreadable ({:?})", error.kind()),
    }
}

/// Returns the files of the program below `root` that no reader uses: temporary files and directories, and data files
/// of a store without its description.
pub fn remains(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(OWN) {
            found.push(entry.path());
        } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(remains(&entry.path()));
        } else if STORE.iter().any(|name| entry.file_name() == *name) && !root.join("model.dedup.json").exists() {
            found.push(entry.path());
        }
    }
    found
}

/// Returns all names below a directory, with the targets of links.
pub fn names(root: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let (name, target) = (entry.file_name(), entry.path().read_link().unwrap_or_default());
        found.insert(format!("{} {}", name.display(), target.display()));
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(names(&entry.path()).into_iter().map(|below| format!("{}/{below}", name.display())));
        }
    }
    found
}

/// Copies a directory with everything in it, and the times at which files were modified: they are part of the
/// fingerprint of an interrupted job.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the copy can be created");
    for entry in fs::read_dir(from).expect("the directory can be read").flatten() {
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        match entry.file_type().expect("the kind of a file is known") {
            kind if kind.is_symlink() => {
                std::os::unix::fs::symlink(source.read_link().expect("a link"), target).expect("a link can be made");
            }
            kind if kind.is_dir() => copy(&source, &target),
            _ => {
                fs::copy(&source, &target).expect("a file can be copied");
                let modified = source.metadata().and_then(|metadata| metadata.modified()).expect("files have times");
                let copied = fs::File::options().append(true).open(target);
                copied.and_then(|file| file.set_modified(modified)).expect("times can be set");
            }
        }
    }
}

/// States that a scenario may leave: the old one, the new one, and complete states between them.
#[derive(Debug)]
pub struct Allowed<'a> {
    pub states: Vec<&'a State>,
    /// Directories whose files change together.
    pub units: &'a [&'a str],
}

impl Allowed<'_> {
    /// Lists the places where `found` is none of the allowed states.
    pub fn violations(&self, found: &State) -> Vec<String> {
        let mut wrong = Vec::new();
        for unit in self.units.iter().map(Path::new) {
            let now = found.within(unit);
            let whole = self.states.iter().any(|state| state.within(unit) == now)
                || found.swapped.contains(unit) && self.is_new_with_remains(unit, &now)
                || self.is_nothing_yet(unit, &now);
            if !whole {
                let shown: Vec<String> = now.iter().map(|(path, hash)| format!("{}={hash}", path.display())).collect();
                wrong.push(format!("{}: found none of the allowed states: {shown:?}", unit.display()));
            }
        }
        let names: BTreeSet<&PathBuf> =
            self.states.iter().flat_map(|state| state.files.keys()).chain(found.files.keys()).collect();
        for path in names {
            let alone = !self.units.iter().any(|unit| path.starts_with(unit));
            let now = found.files.get(path);
            if alone && !self.states.iter().any(|state| state.files.get(path) == now) {
                wrong.push(format!("{}: found {now:?}, which is neither old nor new", path.display()));
            }
        }
        wrong
    }

    /// Returns true if readers find no output, because the file that they open first is missing, as it is in one of the
    /// allowed states. Every other file must be that of an allowed state.
    fn is_nothing_yet(&self, unit: &Path, now: &BTreeMap<&Path, &str>) -> bool {
        let states: Vec<_> = self.states.iter().map(|state| state.within(unit)).collect();
        let lead = LEADS
            .iter()
            .map(|lead| unit.join(lead))
            .find(|lead| states.iter().any(|state| state.contains_key(lead.as_path())));
        lead.is_some_and(|lead| {
            !now.contains_key(lead.as_path())
                && states.iter().any(|state| !state.contains_key(lead.as_path()))
                && now.iter().all(|(path, hash)| states.iter().any(|state| state.get(path) == Some(hash)))
        })
    }

    /// Returns true if `now` consists of the new files and of files of earlier states that the new one does not have.
    fn is_new_with_remains(&self, unit: &Path, now: &BTreeMap<&Path, &str>) -> bool {
        let Some((new, earlier)) = self.states.split_last() else { return false };
        let new = new.within(unit);
        new.iter().all(|(path, hash)| now.get(path) == Some(hash))
            && now.iter().all(|(path, hash)| {
                new.get(path).map_or_else(
                    || earlier.iter().any(|state| state.within(unit).get(path) == Some(hash)),
                    |expected| expected == hash,
                )
            })
    }
}
