//! Stores downloaded files in the cache, or in a directory with the `.metadata` files of `hf download --local-dir`.

use super::super::RepoSpec;
use super::super::hash::HashKind;
use super::client::{Client, Failure};
use super::{How, Remote};
use crate::error::{Context, Error, Result};
use crate::interrupt;
use crate::output::{LockedFile, refuse_special, sync_parent, write_atomically};
use crate::progress::ProgressBar;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Number of consecutive failures without a received byte after which a download is given up.
const ATTEMPTS: u32 = 5;

/// Local destination of a checkpoint.
pub(super) struct Place {
    /// Directory of the checkpoint.
    dir: PathBuf,
    commit: String,
    kind: PlaceKind,
}

enum PlaceKind {
    /// `dir` is a snapshot in the directory `repo` of a cache.
    Cache { repo: PathBuf },
    /// `dir` contains the files themselves; `notes` is the directory of the `.metadata` files.
    Directory { notes: PathBuf },
}

impl Place {
    pub(super) fn cache(root: &Path, spec: &RepoSpec, commit: &str) -> Place {
        let repo = root.join(spec.folder());
        Place { dir: repo.join("snapshots").join(commit), commit: commit.to_string(), kind: PlaceKind::Cache { repo } }
    }

    pub(super) fn directory(dir: &Path, commit: &str) -> Place {
        let kind = PlaceKind::Directory { notes: dir.join(".cache/huggingface/download") };
        Place { dir: dir.to_path_buf(), commit: commit.to_string(), kind }
    }

    /// Returns the directory of the checkpoint.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of a file that was downloaded.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns the number of bytes of a file that are not on this disk yet.
    pub(super) fn missing(&self, remote: &Remote) -> u64 {
        let (content, incomplete) = self.content(remote);
        let have = [content, incomplete].iter().filter_map(|path| path.metadata().ok()).map(|m| m.len()).max();
        remote.nbytes.saturating_sub(have.unwrap_or(0))
    }

    /// Returns the final path of a file's content, and its path while the download is incomplete.
    fn content(&self, remote: &Remote) -> (PathBuf, PathBuf) {
        match &self.kind {
            PlaceKind::Cache { repo } => {
                let blobs = repo.join("blobs");
                (blobs.join(&remote.etag), blobs.join(format!("{}.incomplete", remote.etag)))
            }
            PlaceKind::Directory { notes } => {
                (self.path(&remote.name), notes.join(format!("{}.{}.incomplete", remote.name, remote.etag)))
            }
        }
    }

    /// Makes sure that a file exists and has the hash of the Hub; downloads it if necessary.
    pub(super) fn fetch(&self, client: &Client, remote: &Remote, bar: &ProgressBar) -> Result<How> {
        let (content, incomplete) = self.content(remote);
        for path in [&content, &incomplete, &self.path(&remote.name)] {
            let parent = path.parent().unwrap_or(Path::new("."));
            std::fs::create_dir_all(parent).at(parent)?;
        }
        let how = if self.has(remote, &content) {
            bar.inc(remote.nbytes);
            How::Present
        } else {
            refuse_special(&content)?;
            let how = download(client, remote, &incomplete, bar)?;
            std::fs::rename(&incomplete, &content).at(&content)?;
            sync_parent(&content)?;
            how
        };
        match &self.kind {
            PlaceKind::Cache { .. } => link(&Path::new("../../blobs").join(&remote.etag), &self.path(&remote.name))?,
            PlaceKind::Directory { notes } => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
                let note = format!("{}\n{}\n{now}\n", self.commit, remote.etag);
                write_atomically(&notes.join(format!("{}.metadata", remote.name)), note.as_bytes())?;
            }
        }
        Ok(how)
    }

    /// Records the commit of the revision in the cache, after its files were downloaded.
    pub(super) fn finish(&self, spec: &RepoSpec) -> Result<()> {
        let PlaceKind::Cache { repo } = &self.kind else { return Ok(()) };
        if spec.revision == self.commit {
            return Ok(());
        }
        let reference = repo.join("refs").join(&spec.revision);
        let parent = reference.parent().unwrap_or(repo);
        std::fs::create_dir_all(parent).at(parent)?;
        write_atomically(&reference, self.commit.as_bytes())
    }

    /// Returns true when the content exists: a blob is found by its name, a file in a directory
    /// is compared by its hash.
    fn has(&self, remote: &Remote, content: &Path) -> bool {
        if content.metadata().ok().filter(|m| m.is_file()).map(|m| m.len()) != Some(remote.nbytes) {
            return false;
        }
        match (&self.kind, HashKind::of(&remote.etag)) {
            // A blob is compared with its hash before it is renamed to the hash.
            (PlaceKind::Cache { .. }, _) => true,
            (PlaceKind::Directory { .. }, Some(kind)) => {
                kind.of_file(content, &ProgressBar::hidden()).is_ok_and(|found| found == remote.etag)
            }
            (PlaceKind::Directory { .. }, None) => false,
        }
    }
}

/// Downloads the content of a file to `path`, continuing an incomplete file, and checks its hash.
fn download(client: &Client, remote: &Remote, path: &Path, bar: &ProgressBar) -> Result<How> {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path).at(path)?;
    let mut file = LockedFile::from(file);
    if file.try_lock().is_err() {
        return Err(Error::usage("the file is being downloaded by another process")
            .at(path)
            .help("wait for it to finish"));
    }
    let mut have = file.metadata().at(path)?.len();
    if have > remote.nbytes {
        file.set_len(0).at(path)?;
        have = 0;
    }
    let how = if have > 0 { How::Resumed } else { How::Downloaded };
    bar.inc(have);
    let mut failures = 0;
    while have < remote.nbytes {
        let before = have;
        if let Err(failure) = receive(client, remote, &mut file, &mut have, bar) {
            failures = if have > before { 1 } else { failures + 1 };
            if !failure.transient || failures >= ATTEMPTS {
                return Err(failure.error.at(path));
            }
            pause(failures)?;
        }
    }
    file.sync_all().at(path)?;
    let kind = HashKind::of(&remote.etag)
        .ok_or_else(|| Error::corrupt("found no hash of this file on the Hub").tensor(&remote.name))?;
    let found = kind.of_file(path, &ProgressBar::hidden())?;
    if found != remote.etag {
        std::fs::remove_file(path).at(path)?;
        return Err(Error::refused(format!("found the hash {found} after the download, expected {}", remote.etag))
            .tensor(&remote.name)
            .help("the damaged file was removed; run the same command again"));
    }
    Ok(how)
}

/// Sends one request and writes the response to the file; `have` is the number of bytes on disk.
fn receive(
    client: &Client,
    remote: &Remote,
    file: &mut File,
    have: &mut u64,
    bar: &ProgressBar,
) -> std::result::Result<(), Failure> {
    let cut = |e: std::io::Error| Failure {
        error: Error::from(e).help("run the same command again; it continues"),
        transient: true,
    };
    let (start, mut body) = client.open(remote, *have)?;
    bar.dec(*have - start);
    *have = start;
    file.set_len(start).map_err(Error::from)?;
    file.seek(SeekFrom::Start(start)).map_err(Error::from)?;
    let mut buffer = vec![0; 1 << 18];
    loop {
        interrupt::check()?;
        let n = body.read(&mut buffer).map_err(cut)?;
        if n == 0 {
            break;
        }
        if *have + n as u64 > remote.nbytes {
            let found = format!("found more than the expected {} bytes in the response", remote.nbytes);
            return Err(Error::corrupt(found).tensor(&remote.name).into());
        }
        file.write_all(&buffer[..n]).map_err(Error::from)?;
        *have += n as u64;
        bar.inc(n as u64);
    }
    if *have < remote.nbytes {
        return Err(cut(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the connection ended early")));
    }
    Ok(())
}

/// Waits longer after each failure, in short steps so that an interrupt takes effect.
fn pause(failures: u32) -> Result<()> {
    for _ in 0..1u32 << failures {
        interrupt::check()?;
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Makes `path` a symbolic link to `target`; replaces an existing file atomically.
fn link(target: &Path, path: &Path) -> Result<()> {
    if std::fs::read_link(path).is_ok_and(|now| now == target) {
        return Ok(());
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.link", std::process::id()));
    let beside = PathBuf::from(beside);
    let _ = std::fs::remove_file(&beside);
    symlink(target, &beside).at(&beside)?;
    std::fs::rename(&beside, path).at(path)
}
