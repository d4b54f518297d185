//! One system call of the traced program that changes files: what it does, and to which paths.

use crate::arch::Registers;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

/// Kind of a system call that changes files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Opens a file for writing, and may create or truncate it.
    Open,
    Write,
    /// Copies between two open files.
    Copy,
    Sync,
    Rename,
    Unlink,
    Link,
    Symlink,
    Mkdir,
    Truncate,
    Allocate,
    Lock,
    Chmod,
}

/// A system call that is about to be made and changes a path in the directory of the scenario.
#[derive(Debug, Clone)]
pub struct Call {
    pub kind: Kind,
    /// The path that the call changes: of a rename or link, the new name.
    pub path: PathBuf,
    /// The old name of a rename or link; the target of a symbolic link.
    pub from: Option<PathBuf>,
    /// Flags of `open`, `unlinkat` and `renameat2`.
    pub flags: u64,
    /// Number of bytes of a write.
    pub bytes: u64,
    /// True for the call after one for which [`Call::gives_up`] is true; it syncs the directory.
    pub in_cleanup: bool,
}

impl Call {
    /// Decodes the call before which the thread is stopped. Returns `None` for calls on other files than those below
    /// `root`, which is a canonical path.
    pub fn decode(kind: Kind, tid: i32, registers: &Registers, root: &Path) -> Option<Call> {
        let (number, arguments) = (registers.number() as libc::c_long, registers.arguments());
        let place = Place { tid };
        let mut call = Call { kind, path: PathBuf::new(), from: None, flags: 0, bytes: 0, in_cleanup: false };
        match kind {
            Kind::Write | Kind::Sync | Kind::Truncate | Kind::Allocate | Kind::Lock => {
                call.path = place.of_descriptor(arguments[0])?;
                call.bytes = if kind == Kind::Write { arguments[2] } else { 0 };
            }
            Kind::Copy if number == libc::SYS_sendfile => call.path = place.of_descriptor(arguments[0])?,
            Kind::Copy => call.path = place.of_descriptor(arguments[2])?,
            Kind::Chmod if number == libc::SYS_fchmod => call.path = place.of_descriptor(arguments[0])?,
            _ => place.named(number, &arguments, &mut call)?,
        }
        let changes = kind != Kind::Open || call.flags & (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT) as u64 != 0;
        (changes && call.path.starts_with(root)).then_some(call)
    }

    /// Returns true if the call renames a directory of partial work that is not needed any more; the next calls remove
    /// it (`give_up` in src/output/stale.rs).
    pub fn gives_up(&self) -> bool {
        self.kind == Kind::Rename && self.path.extension().is_some_and(|kind| kind == "removed")
    }

    /// Returns true if the program may ignore an error of this call: it removes remains of completed work; it reserves
    /// space, copies inside the file system or locks, which some file systems do not support.
    pub fn may_be_ignored(&self) -> bool {
        let removes = [Kind::Unlink, Kind::Lock, Kind::Allocate, Kind::Copy].contains(&self.kind);
        removes || self.gives_up() || self.in_cleanup && self.kind == Kind::Sync
    }
}

/// Resolves file descriptors and paths as a stopped thread sees them.
struct Place {
    tid: i32,
}

impl Place {
    fn of_descriptor(&self, descriptor: u64) -> Option<PathBuf> {
        let path = std::fs::read_link(format!("/proc/{}/fd/{}", self.tid, descriptor as i32)).ok()?;
        let name = path.to_str()?;
        Some(PathBuf::from(name.strip_suffix(" (deleted)").unwrap_or(name)))
    }

    fn text(&self, address: u64) -> Option<PathBuf> {
        let memory = File::open(format!("/proc/{}/mem", self.tid)).ok()?;
        let mut bytes = Vec::new();
        let mut piece = [0; 256];
        while bytes.len() < libc::PATH_MAX as usize {
            let found = memory.read_at(&mut piece, address + bytes.len() as u64).ok()?;
            match piece[..found].iter().position(|byte| *byte == 0) {
                Some(end) => {
                    bytes.extend(&piece[..end]);
                    return String::from_utf8(bytes).ok().map(PathBuf::from);
                }
                None if found == 0 => return None,
                None => bytes.extend(&piece[..found]),
            }
        }
        None
    }

    fn path(&self, directory: u64, address: u64) -> Option<PathBuf> {
        let path = self.text(address)?;
        let base = if path.is_absolute() {
            PathBuf::new()
        } else if directory as i32 == libc::AT_FDCWD {
            std::fs::read_link(format!("/proc/{}/cwd", self.tid)).ok()?
        } else {
            self.of_descriptor(directory)?
        };
        Some(cleaned(&base.join(path)))
    }

    /// Fills in the paths and flags of a call that names files; returns `None` if a path cannot be read.
    fn named(&self, number: libc::c_long, arguments: &[u64; 6], call: &mut Call) -> Option<()> {
        #[cfg(target_arch = "x86_64")]
        const HERE: u64 = libc::AT_FDCWD as u64;
        let [a, b, c, d, e, _] = *arguments;
        #[cfg(target_arch = "x86_64")]
        match number {
            libc::SYS_open => (call.path, call.flags) = (self.path(HERE, a)?, b),
            libc::SYS_creat => (call.path, call.flags) = (self.path(HERE, a)?, (libc::O_CREAT | libc::O_TRUNC) as u64),
            libc::SYS_rename | libc::SYS_link => {
                (call.from, call.path) = (Some(self.path(HERE, a)?), self.path(HERE, b)?);
            }
            libc::SYS_symlink => (call.from, call.path) = (Some(self.text(a)?), self.path(HERE, b)?),
            libc::SYS_unlink | libc::SYS_mkdir | libc::SYS_chmod => call.path = self.path(HERE, a)?,
            libc::SYS_rmdir => (call.path, call.flags) = (self.path(HERE, a)?, libc::AT_REMOVEDIR as u64),
            _ => {}
        }
        if !call.path.as_os_str().is_empty() {
            return Some(());
        }
        match call.kind {
            Kind::Open | Kind::Unlink => (call.path, call.flags) = (self.path(a, b)?, c),
            Kind::Mkdir | Kind::Chmod => call.path = self.path(a, b)?,
            Kind::Rename => {
                call.flags = if number == libc::SYS_renameat2 { e } else { 0 };
                (call.from, call.path) = (Some(self.path(a, b)?), self.path(c, d)?);
            }
            Kind::Link => (call.from, call.path) = (Some(self.path(a, b)?), self.path(c, d)?),
            Kind::Symlink => (call.from, call.path) = (Some(self.text(a)?), self.path(b, c)?),
            _ => return None,
        }
        Some(())
    }
}

/// Removes `.` and `..` from an absolute path.
fn cleaned(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(result.pop()),
            part => result.push(part),
        }
    }
    result
}
