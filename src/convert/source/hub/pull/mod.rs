//! Downloads the files of a repository that a conversion needs: configuration, tokenizer and weights.
//!
//! Files are stored in the layout of Hugging Face's own tools, so that each program finds what the other has
//! downloaded: in the cache, or in a directory with `.metadata` files. Each file is written to
//! `….incomplete`, continued where an earlier attempt stopped, compared with the hash on the Hub, and only
//! then renamed to its final name.

mod client;
mod place;

use super::{RepoSpec, Variables, cache, is_hex};
use crate::convert::companions;
use crate::convert::published::settings_files;
use crate::convert::source::layout::{self, WeightFiles};
use crate::convert::source::shards::read_index;
use crate::error::{Context, Error, Result};
use crate::iebin::TOKENIZER_SOURCES;
use crate::iebin::reader::plain_file_name;
use crate::output::require_space;
use crate::{interrupt, progress, resources};
use client::Client;
use place::Place;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Interval of the checks for an interrupt while the download runs.
const POLL: Duration = Duration::from_millis(100);
/// Time that a download gets to end by itself after an interrupt.
const GRACE: Duration = Duration::from_millis(500);

/// Result of a download.
#[derive(Debug, Serialize)]
pub struct Pulled {
    /// Repository id.
    pub repo: String,
    /// Commit of the revision.
    pub commit: String,
    /// Directory of the checkpoint.
    pub dir: PathBuf,
    /// Files of the checkpoint.
    pub files: Vec<PulledFile>,
}

/// One file of a downloaded checkpoint.
#[derive(Debug, Serialize)]
pub struct PulledFile {
    /// Name in the repository.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Hash by which the Hub identifies the file.
    pub hash: String,
    /// Origin of the local file.
    pub how: How,
}

/// Origin of a local file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// The file existed already.
    Present,
    /// The file was downloaded completely.
    Downloaded,
    /// An incomplete earlier download was continued.
    Resumed,
}

/// Directory that a checkpoint is downloaded into.
enum Destination {
    /// Root of a cache of Hugging Face.
    Cache(PathBuf),
    Directory(PathBuf),
}

/// Description of a file on the Hub.
#[derive(Debug, Clone)]
struct Remote {
    name: String,
    url: String,
    etag: String,
    nbytes: u64,
}

/// Downloads a repository into the cache, or into `local_dir`. The environment variables give the address of the Hub,
/// the cache directory, and the token.
///
/// # Errors
/// The repository or revision does not exist or needs a token, it has no weights in a supported format, the network
/// fails permanently, a downloaded file does not have the hash of the Hub, or the user interrupts. Calling it again
/// continues the download.
pub fn pull(spec: &RepoSpec, local_dir: Option<&Path>, variables: &Variables<'_>) -> Result<Pulled> {
    let client = Client::new(variables)?;
    let destination = match local_dir {
        Some(dir) => Destination::Directory(dir.to_path_buf()),
        None => Destination::Cache(cache::root(variables)?),
    };
    let spec = spec.clone();
    until_interrupted(move || download(client, &spec, &destination))
}

/// Runs `work` in its own thread, and stops waiting for it soon after an interrupt: a server that does not answer
/// would delay the end by a minute. The thread is then abandoned; the next download continues from any step at which
/// the thread was.
fn until_interrupted<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    let worker = resources::spawn("download", move || sender.send(work()))?;
    loop {
        let wait = if interrupt::requested().is_some() { GRACE } else { POLL };
        match receiver.recv_timeout(wait) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) if wait == GRACE => interrupt::check()?,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                std::panic::resume_unwind(worker.join().err().unwrap_or_else(|| Box::new("no result")))
            }
        }
    }
}

fn download(client: Client, spec: &RepoSpec, destination: &Destination) -> Result<Pulled> {
    let info = client.info(spec)?;
    if !is_hex(&info.sha, 40) {
        return Err(Error::corrupt(format!("found `{:.60}`, expected a commit hash", info.sha)).tensor(&spec.id));
    }
    let names: BTreeSet<String> = info.siblings.into_iter().map(|s| s.rfilename).collect();
    let place = match destination {
        Destination::Directory(dir) => Place::directory(dir, &info.sha),
        Destination::Cache(root) => Place::cache(root, spec, &info.sha),
    };
    let fetcher = Fetcher { client, id: &spec.id, commit: &info.sha, place };
    let mut wanted = companions_of(&names);
    let mut files = Vec::new();
    match weights(&names).tensor(&spec.id)? {
        WeightFiles::One(path) | WeightFiles::OlderPack(path) => wanted.push(path.to_string_lossy().into_owned()),
        WeightFiles::Index(path) => {
            let index = path.to_string_lossy().into_owned();
            files.extend(fetcher.fetch_all(std::slice::from_ref(&index))?);
            wanted.extend(shards(&fetcher.place.path(&index), &names)?);
        }
    }
    files.extend(fetcher.fetch_all(&wanted)?);
    fetcher.place.finish(spec)?;
    let dir = fetcher.place.dir().to_path_buf();
    Ok(Pulled { repo: spec.id.clone(), commit: info.sha, dir, files })
}

/// Chooses the companions among the files of a repository. The files from which a tokenizer.json can be made are left
/// out if there is one.
fn companions_of(names: &BTreeSet<String>) -> Vec<String> {
    let has_tokenizer = names.contains(companions::TOKENIZER);
    let is_wanted = |name: &&str| names.contains(*name) && !(has_tokenizer && TOKENIZER_SOURCES.contains(name));
    companions::NAMES.iter().copied().chain(settings_files()).filter(is_wanted).map(str::to_string).collect()
}

/// Chooses the weights among the files of a repository, by the same rules as in a directory.
fn weights(names: &BTreeSet<String>) -> Result<WeightFiles> {
    let safetensors = || names.iter().filter(|name| name.ends_with(".safetensors") && !name.contains('/'));
    let known = layout::NAMES.iter().find(|name| names.contains(**name)).map(|name| name.to_string());
    let name = match known {
        Some(name) => name,
        None if safetensors().count() == 1 => safetensors().next().cloned().unwrap_or_default(),
        None => {
            return Err(Error::unsupported(
                "found no weights in a supported format, expected safetensors or pytorch_model.bin",
            )
            .help("look for a repository of the same model with safetensors"));
        }
    };
    Ok(layout::by_name(PathBuf::from(plain_file_name(&name)?)))
}

/// Returns the shards that an index names; all of them must be in the repository.
fn shards(index: &Path, names: &BTreeSet<String>) -> Result<BTreeSet<String>> {
    let shards: BTreeSet<String> = read_index(index)?.into_values().collect();
    for name in &shards {
        plain_file_name(name).tensor("weight_map").at(index)?;
        if !names.contains(name) {
            let missing = format!("found the shard `{name}`, which is not in the repository");
            let help = "choose another revision (ORG/NAME@REVISION) or another repository of the model";
            return Err(Error::corrupt(missing).at(index).help(help));
        }
    }
    Ok(shards)
}

struct Fetcher<'a> {
    client: Client,
    id: &'a str,
    commit: &'a str,
    place: Place,
}

impl Fetcher<'_> {
    /// Downloads files. Requests the hashes and sizes of all files first, so that the total is known.
    fn fetch_all(&self, names: &[String]) -> Result<Vec<PulledFile>> {
        let remotes: Vec<Remote> =
            names.iter().map(|name| self.client.describe(self.id, self.commit, name)).collect::<Result<_>>()?;
        require_space(self.place.dir(), remotes.iter().map(|r| self.place.missing(r)).sum(), 0)?;
        let bar = progress::bytes("downloading", remotes.iter().map(|r| r.nbytes).sum());
        let fetch = |remote: &Remote| {
            let how = self.place.fetch(&self.client, remote, &bar)?;
            Ok(PulledFile { name: remote.name.clone(), bytes: remote.nbytes, hash: remote.etag.clone(), how })
        };
        remotes.iter().map(fetch).collect()
    }
}
