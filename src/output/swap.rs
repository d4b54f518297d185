//! Replaces an output of several files at once.
//!
//! Such an output has a lead file that names or implies all others, such as `model.ie.json`; readers open it first. The
//! new files are written into a hidden directory of partial work next to the old ones. Then one rename puts a symbolic
//! link in the place of the lead file, which leads into that directory: from this moment on, readers find the new
//! files ([`member`]), and before it the old ones. After that the files are moved to their names one by one, each of
//! which is found in one of the two places at any time, and the new lead file replaces the link.
//!
//! ```text
//!                            before       swapped                              settled
//! OUT/model.ie.json          old          link to .iec-….partial/model.ie.json new
//! OUT/model.ie.bin           old          old, then new                        new
//! OUT/.iec-….partial/        new files    new files, one by one fewer          removed
//! ```
//!
//! If the process is killed in between, [`settle`] moves the rest; every command that changes the directory calls it.

use super::atomic::{AtomicFile, sync_dir};
use super::lock::DirLock;
use super::paths::{directory_of, remove_if_there};
use crate::error::{Context, Result};
use crate::files;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

/// Beginning and end of the names of directories of partial work.
pub const PARTIAL: (&str, &str) = (".iec-", ".partial");

/// Kind of an output of several files.
#[derive(Debug, Clone, Copy)]
pub struct OutputKind {
    /// Name of the file that readers open first.
    pub lead: &'static str,
    /// Names of all other files that the output may have.
    pub members: &'static [&'static str],
    /// Returns the names of files of an older output that do not belong to the new one, given the text of its lead
    /// file.
    pub obsolete: fn(&[u8]) -> Vec<&'static str>,
}

/// Returns the path of the file `name` of the output whose lead file is `lead`: in the directory of partial work if a
/// swap has not moved it yet, otherwise next to the lead file.
pub fn member(lead: &Path, name: &str) -> PathBuf {
    let staged = staged(lead).map(|work| work.join(name)).filter(|path| path.symlink_metadata().is_ok());
    staged.unwrap_or_else(|| directory_of(lead).join(name))
}

/// Returns the directory of partial work that the lead file leads to during a swap.
pub fn staged(lead: &Path) -> Option<PathBuf> {
    let target = lead.read_link().ok()?;
    let mut parts = target.components();
    let (Some(Component::Normal(work)), Some(Component::Normal(name)), None) =
        (parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    (is_partial(work) && lead.file_name() == Some(name)).then(|| directory_of(lead).join(work))
}

fn is_partial(name: &OsStr) -> bool {
    let id = name.to_str().and_then(|name| name.strip_prefix(PARTIAL.0)?.strip_suffix(PARTIAL.1));
    id.is_some_and(|id| id.len() == 16 && id.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// Replaces the output in `dir` by `files`, which are complete in `work`, a directory of partial work in `dir`. The
/// last one is the lead file. `allowed` is called immediately before the swap and refuses it by an error.
///
/// # Errors
/// A file cannot be synced or renamed, or `allowed` fails; the old output is unchanged then. If an error occurs after
/// the swap, the new output is complete, and the next command that changes the directory moves the rest of its files.
pub fn replace(
    dir: &Path,
    work: &Path,
    kind: OutputKind,
    files: Vec<AtomicFile>,
    allowed: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let work_name = work.file_name().filter(|name| is_partial(name)).expect("files are staged in partial work");
    for file in files {
        let name = file.path().file_name().expect("output files have names").to_owned();
        file.stage(&work.join(name))?;
    }
    sync_dir(work)?;
    allowed()?;
    let (lead, link) = (dir.join(kind.lead), work.join("link"));
    let target = Path::new(work_name).join(kind.lead);
    remove_if_there(&link)?;
    match std::os::unix::fs::symlink(&target, &link) {
        Ok(()) => std::fs::rename(&link, &lead).at(&lead)?,
        // FAT has no symbolic links: there, the lead file is removed first, and readers find no output until all files
        // have their names.
        Err(e) if [ErrorKind::PermissionDenied, ErrorKind::Unsupported].contains(&e.kind()) => remove_if_there(&lead)?,
        Err(e) => return Err(e).at(&link),
    }
    sync_dir(dir)?;
    finish(dir, work, kind)
}

/// Locks `dir` and completes the swap of an output in it if a killed process has left it half done.
///
/// # Errors
/// A file cannot be renamed, or the user interrupts the wait for another command; the output is complete nevertheless.
pub fn recover(dir: &Path, kind: OutputKind) -> Result<()> {
    if staged(&dir.join(kind.lead)).is_none() {
        return Ok(());
    }
    let _lock = DirLock::acquire(dir)?;
    settle(dir, kind)
}

/// Completes the swap of an output in `dir` if a killed process has left it half done. The caller holds the lock of the
/// directory.
///
/// # Errors
/// A file cannot be renamed; the output is still complete then.
pub fn settle(dir: &Path, kind: OutputKind) -> Result<()> {
    staged(&dir.join(kind.lead)).map_or(Ok(()), |work| finish(dir, &work, kind))
}

fn finish(dir: &Path, work: &Path, kind: OutputKind) -> Result<()> {
    let (from, to) = (work.join(kind.lead), dir.join(kind.lead));
    let obsolete = (kind.obsolete)(&files::read(&from)?);
    for name in kind.members {
        let (staged, path) = (work.join(name), dir.join(name));
        match std::fs::rename(&staged, &path) {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            moved => moved.at(&path)?,
        }
    }
    for name in obsolete {
        remove_if_there(&dir.join(name))?;
    }
    sync_dir(dir)?;
    std::fs::rename(&from, &to).at(&to)?;
    sync_dir(dir)
}
