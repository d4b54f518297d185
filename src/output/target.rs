//! Destinations of output files that the user named: checked before the work starts and written when it ends.

use super::atomic::{AtomicFile, exists};
use super::inputs::Inputs;
use super::paths::directory_of;
use super::space::require_space;
use super::stale;
use crate::error::{Context, Error, Result};
use crate::files::{self, Stream};
use rustix::fs::{Access, access};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Maximum number of links to follow before they count as a cycle; the limit of the system.
const MOST_LINKS: usize = 40;

/// Conditions that an output must meet.
#[derive(Debug, Clone, Copy)]
pub struct Rules<'a> {
    /// Files that the command reads.
    pub inputs: &'a Inputs,
    /// True when an existing file may be replaced.
    pub overwrite: bool,
    /// True when `-` is allowed, because nothing else is printed on stdout.
    pub stdout: bool,
}

/// Destination of an output file that was checked before the work.
#[derive(Debug, Clone)]
pub struct Target {
    path: PathBuf,
    place: TargetPlace,
    overwrite: bool,
}

/// Kind of destination that a path leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TargetPlace {
    /// Regular file or a file that does not exist yet; links are resolved.
    File(PathBuf),
    /// Device, pipe or file descriptor.
    Stream(PathBuf),
    Stdout,
}

impl TargetPlace {
    fn of(path: &Path) -> Result<TargetPlace> {
        if path.as_os_str() == "-" {
            return Ok(TargetPlace::Stdout);
        }
        let mut place = path.to_path_buf();
        for _ in 0..MOST_LINKS {
            match descriptor(&place) {
                Some("1") => return Ok(TargetPlace::Stdout),
                Some(_) => return Ok(TargetPlace::Stream(place)),
                None => {}
            }
            match place.symlink_metadata() {
                Ok(found) if found.is_symlink() => {
                    let target = place.read_link().at(path)?;
                    place = directory_of(&place).join(target);
                }
                Ok(found) if found.is_file() => return Ok(TargetPlace::File(place)),
                Ok(found) if found.is_dir() || found.file_type().is_socket() => {
                    return Err(Error::usage(format!("found {}, expected a file", files::special(&found))).at(path));
                }
                Ok(_) => return Ok(TargetPlace::Stream(place)),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(TargetPlace::File(place)),
                Err(e) => return Err(e).at(path),
            }
        }
        Err(Error::usage(format!(
            "found more than {MOST_LINKS} symbolic links in a row, or a cycle of them; name the file itself"
        ))
        .at(path))
    }

    /// Opens a destination that cannot be replaced by a rename.
    pub(super) fn open(&self) -> std::io::Result<Stream> {
        match self {
            TargetPlace::Stdout => Ok(Stream::of(std::io::stdout().as_fd().try_clone_to_owned()?.into())),
            // Appends, because a descriptor may be a file that another process has started to write.
            TargetPlace::Stream(path) | TargetPlace::File(path) => Stream::append(path),
        }
    }
}

/// Returns the number of the file descriptor of this process that a path such as `/dev/fd/N` names. The open file
/// behind it need not have a name of its own.
fn descriptor(path: &Path) -> Option<&str> {
    let path = path.to_str()?;
    let number = |text: &'_ str| text.bytes().all(|digit| digit.is_ascii_digit());
    match path {
        "/dev/stdout" => Some("1"),
        "/dev/stderr" => Some("2"),
        _ => ["/dev/fd/", "/proc/self/fd/"].iter().find_map(|dir| path.strip_prefix(dir)).filter(|text| number(text)),
    }
}

impl Target {
    /// Checks an output before the work, as far as possible.
    ///
    /// # Errors
    /// The output is an input of the same command, a directory, or an existing file without permission to overwrite
    /// it, or it could not be created in its directory.
    pub fn check(path: &Path, rules: Rules<'_>) -> Result<Target> {
        let place = TargetPlace::of(path)?;
        match &place {
            TargetPlace::File(file) => {
                rules.inputs.refuse(file)?;
                if files::exists(file)? && !rules.overwrite {
                    stale::remove(directory_of(file));
                    return Err(exists(path));
                }
                access(directory_of(file), Access::WRITE_OK | Access::EXEC_OK)
                    .map_err(std::io::Error::from)
                    .at(path)?;
            }
            TargetPlace::Stdout if !rules.stdout && path.as_os_str() == "-" => {
                return Err(Error::usage("`-` is stdout, which this command prints to; name a file instead"));
            }
            TargetPlace::Stream(stream) => access(stream, Access::WRITE_OK).map_err(std::io::Error::from).at(path)?,
            TargetPlace::Stdout => {}
        }
        let path = if place == TargetPlace::Stdout { Path::new("stdout") } else { path };
        Ok(Target { path: path.to_path_buf(), place, overwrite: rules.overwrite })
    }

    /// Returns the path that the user gave, or `stdout`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true when both targets lead to the same destination.
    pub fn is_same(&self, other: &Target) -> bool {
        self.place == other.place
    }

    /// Returns true for a regular file or a file that does not exist yet.
    pub fn is_file(&self) -> bool {
        matches!(self.place, TargetPlace::File(_))
    }

    /// Returns true for stdout, under any name.
    pub fn is_stdout(&self) -> bool {
        self.place == TargetPlace::Stdout
    }

    /// Returns the path to write to for work that needs temporary files next to its output, writes in any order, or
    /// reads its output again. For a file, this is the file itself; for a stream, a temporary file whose bytes
    /// [`Target::deliver`] copies to the stream.
    pub fn work_path(&self) -> PathBuf {
        match &self.place {
            TargetPlace::File(file) => file.clone(),
            TargetPlace::Stream(_) | TargetPlace::Stdout => {
                tempfile::env::temp_dir().join(format!("iec-{}.out", std::process::id()))
            }
        }
    }

    /// Finishes work at [`Target::work_path`]: for a stream, copies the temporary file there to the stream and removes
    /// it; for a file, does nothing.
    ///
    /// # Errors
    /// The stream cannot be written.
    pub fn deliver(&self) -> Result<()> {
        if self.is_file() {
            return Ok(());
        }
        let path = self.work_path();
        let mut made = files::open(&path)?;
        std::fs::remove_file(&path).at(&path)?;
        let mut stream = self.place.open().at(&self.path)?;
        std::io::copy(&mut made, &mut stream).map(drop).at(&self.path)
    }

    /// Fails if `bytes` bytes do not fit on the disk.
    ///
    /// # Errors
    /// There is not enough free disk space.
    pub fn require_space(&self, bytes: u64) -> Result<()> {
        require_space(&self.work_path(), bytes, 0)
    }

    /// Creates the file, to be written sequentially.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(&self) -> Result<AtomicFile> {
        match &self.place {
            TargetPlace::File(file) => Ok(AtomicFile::create(file)?.overwrite(self.overwrite)),
            stream => AtomicFile::written(stream, &self.path),
        }
    }

    /// Creates a file that only its owner can read. A device or pipe keeps its permissions.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create_private(&self) -> Result<AtomicFile> {
        match &self.place {
            TargetPlace::File(file) => Ok(AtomicFile::create_private(file)?.overwrite(self.overwrite)),
            stream => AtomicFile::written(stream, &self.path),
        }
    }

    /// Writes a small file at once.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let mut file = self.create()?;
        file.write_all(bytes).at(&self.path)?;
        file.commit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn check(path: &Path) -> Result<Target> {
        Target::check(path, Rules { inputs: &Inputs::default(), overwrite: false, stdout: false })
    }

    #[test]
    fn links_are_followed_to_files_devices_and_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for (to, link) in [("a", "b"), ("b", "c"), ("/dev/null", "null"), ("/dev/stdout", "out"), ("loop", "loop")] {
            symlink(to, path(link)).unwrap();
        }
        let place = |name: &str| check(&path(name)).map(|target| target.place);
        assert_eq!(place("c").unwrap(), TargetPlace::File(path("a")));
        assert_eq!(place("null").unwrap(), TargetPlace::Stream("/dev/null".into()));
        assert_eq!(place("out").unwrap(), TargetPlace::Stdout);
        assert!(place("loop").unwrap_err().to_string().contains("symbolic links in a row"));
        assert!(check(&path("c")).unwrap().is_same(&check(&path("b")).unwrap()));
    }

    #[test]
    fn work_for_a_stream_is_delivered_and_leaves_no_file() {
        let target = check(Path::new("/dev/null")).unwrap();
        std::fs::write(target.work_path(), "made").unwrap();
        target.deliver().unwrap();
        assert!(!target.work_path().exists());
        target.write(b"text").unwrap();
        assert!(check(Path::new("/dev/fd/99")).is_err());
    }

    #[test]
    fn a_minus_is_stdout_only_where_it_is_free() {
        assert_eq!(check(Path::new("-")).unwrap_err().cause().exit_code(), 2);
        let rules = Rules { inputs: &Inputs::default(), overwrite: false, stdout: true };
        assert!(Target::check(Path::new("-"), rules).unwrap().is_stdout());
    }
}
