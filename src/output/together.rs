//! Several output files that one command writes, such as a manifest and its page.
//!
//! They get their names one after the other, because no file system renames two files at once. A record of their hashes
//! is written before the first of them, and removed after the last:
//!
//! ```text
//! DIR/.iec-0123456789abcdef.outputs     {"sha256": ["…", "…"]}
//! ```
//!
//! If the process is killed in between, the same command finds the record by the paths of its outputs, and replaces
//! those that have the recorded hashes. A file that the user wrote or changed since then is none of them.

use super::atomic::write_atomically;
use super::dir::absolute;
use super::paths::{directory_of, remove_if_there};
use super::stale::{self, PREFIX};
use super::target::{Rules, Target};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::sha256::{self, Digest, Sha256, hex};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};

/// End of the name of a record.
const SUFFIX: &str = ".outputs";
/// Largest length of a record in bytes.
const LARGEST: u64 = 1 << 20;

/// Output files of one command, checked before its work and written after it.
#[derive(Debug)]
pub struct Together {
    targets: Vec<Target>,
    record: PathBuf,
}

/// Content of the record: the SHA-256 of each output, in the order of [`Together::check`]; `None` for a device or pipe.
#[derive(Debug, Default, Serialize, Deserialize)]
struct TogetherRecord {
    sha256: Vec<Option<String>>,
}

impl Together {
    /// Checks outputs as [`Target::check`] does. Outputs that an interrupted run of the same command has left without
    /// the others may be replaced.
    ///
    /// # Errors
    /// The same as for [`Target::check`]; or two outputs are the same file. Remains of killed processes are removed
    /// from the directories of all outputs.
    pub fn check(outputs: &[(&Path, Rules<'_>)]) -> Result<Together> {
        let paths = outputs.iter().map(|(path, _)| absolute(path)).collect::<Result<Vec<_>>>()?;
        let record = record_path(&paths);
        let left = TogetherRecord::read(&record).incomplete(&paths);
        let one = |(number, (path, rules)): (usize, &(&Path, Rules<'_>))| {
            Target::check(path, Rules { overwrite: rules.overwrite || left.has(number, path), ..*rules })
        };
        let targets = outputs.iter().enumerate().map(one).collect::<Result<Vec<_>>>().and_then(distinct);
        let targets = targets.inspect_err(|_| paths.iter().for_each(|path| stale::remove(directory_of(path))));
        if left.sha256.is_empty() {
            // A run was killed before any of its outputs had its name, or after all had.
            let _ = remove_if_there(&record);
        }
        Ok(Together { targets: targets?, record })
    }

    /// Returns the checked destination of an output, in the order of [`Together::check`].
    pub fn target(&self, number: usize) -> &Target {
        &self.targets[number]
    }

    /// Writes all outputs, whose contents have the order of [`Together::check`]. None has its name before all are
    /// written and synced.
    ///
    /// # Errors
    /// A file cannot be written, or one exists that may not be replaced. The same command can be run again.
    pub fn write(&self, contents: &[Vec<u8>]) -> Result<()> {
        assert_eq!(contents.len(), self.targets.len(), "one content per output");
        let mut files = Vec::new();
        for (target, content) in self.targets.iter().zip(contents) {
            let mut file = target.create()?;
            file.write_all(content).at(target.path())?;
            files.push(file);
        }
        let hash =
            |(target, content): (&Target, &Vec<u8>)| target.is_file().then(|| hex(Sha256::new_with_prefix(content)));
        let record = TogetherRecord { sha256: self.targets.iter().zip(contents).map(hash).collect() };
        let is_needed = record.sha256.iter().flatten().count() > 1;
        if is_needed {
            write_atomically(&self.record, &serde_json::to_vec(&record).expect("plain data always serializes"))?;
        }
        files.into_iter().try_for_each(super::AtomicFile::commit)?;
        if is_needed {
            // The outputs are complete; the next run would find that, too, and remove the record.
            let _ = remove_if_there(&self.record);
        }
        Ok(())
    }
}

impl TogetherRecord {
    /// Reads a record; one that is missing or damaged is empty.
    fn read(path: &Path) -> TogetherRecord {
        files::read_limited(path, LARGEST).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    /// Returns the record if some of its outputs have their names and others have not, and an empty one otherwise.
    fn incomplete(self, paths: &[PathBuf]) -> TogetherRecord {
        let named = self.sha256.iter().enumerate().filter(|(_, sha256)| sha256.is_some());
        let there: Vec<bool> =
            named.map(|(number, _)| paths.get(number).is_some_and(|path| self.has(number, path))).collect();
        if there.contains(&true) && there.contains(&false) { self } else { TogetherRecord::default() }
    }

    /// Returns true if the file at `path` is output `number` of the interrupted run.
    fn has(&self, number: usize, path: &Path) -> bool {
        let expected = self.sha256.get(number).and_then(Option::as_ref);
        expected.is_some_and(|expected| sha256::of_file(path, |_| ()).is_ok_and(|found| found == *expected))
    }
}

/// Returns the path of the record of these outputs, in the directory of the first.
fn record_path(paths: &[PathBuf]) -> PathBuf {
    let mut hash = Sha256::new();
    for path in paths {
        let name = path.as_os_str().as_encoded_bytes();
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
    }
    let dir = paths.first().map_or(Path::new("."), |path| directory_of(path));
    dir.join(format!("{PREFIX}{}{SUFFIX}", &hex(hash)[..16]))
}

fn distinct(targets: Vec<Target>) -> Result<Vec<Target>> {
    let twice = |(i, target): &(usize, &Target)| targets[..*i].iter().any(|other| other.is_same(target));
    match targets.iter().enumerate().find(twice) {
        Some((_, target)) => {
            Err(Error::usage("found two outputs that name the same file, expected two files").at(target.path()))
        }
        None => Ok(targets),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Inputs;

    fn check(dir: &Path) -> Result<Together> {
        let rules = Rules { inputs: &Inputs::default(), overwrite: false, stdout: false };
        Together::check(&[(&dir.join("page"), rules), (&dir.join("manifest"), rules)])
    }

    fn contents() -> [Vec<u8>; 2] {
        [b"page".to_vec(), b"manifest".to_vec()]
    }

    /// Leaves what a run leaves that was killed between the two names.
    fn interrupted(dir: &Path) -> PathBuf {
        let outputs = check(dir).unwrap();
        outputs.write(&contents()).unwrap();
        let record =
            TogetherRecord { sha256: contents().map(|text| Some(hex(Sha256::new_with_prefix(text)))).to_vec() };
        std::fs::write(&outputs.record, serde_json::to_vec(&record).unwrap()).unwrap();
        std::fs::remove_file(dir.join("manifest")).unwrap();
        outputs.record
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn an_interrupted_run_can_be_repeated_and_a_complete_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        interrupted(dir.path());
        check(dir.path()).unwrap().write(&contents()).unwrap();
        assert_eq!(names(dir.path()), ["manifest", "page"]);
        assert_eq!(check(dir.path()).unwrap_err().cause().exit_code(), 2);
    }

    #[test]
    fn a_record_of_complete_outputs_is_removed_and_allows_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let record = interrupted(dir.path());
        std::fs::write(dir.path().join("manifest"), "manifest").unwrap();
        assert_eq!(check(dir.path()).unwrap_err().cause().exit_code(), 2);
        assert!(!record.exists());
    }

    #[test]
    fn files_that_were_changed_since_are_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        interrupted(dir.path());
        std::fs::write(dir.path().join("page"), "written by the user").unwrap();
        assert_eq!(check(dir.path()).unwrap_err().cause().exit_code(), 2);
        assert_eq!(std::fs::read(dir.path().join("page")).unwrap(), b"written by the user");
    }

    #[test]
    fn one_file_cannot_be_two_outputs() {
        let dir = tempfile::tempdir().unwrap();
        let rules = Rules { inputs: &Inputs::default(), overwrite: false, stdout: false };
        let path = dir.path().join("out");
        assert!(Together::check(&[(&path, rules), (&path, rules)]).is_err());
    }
}
