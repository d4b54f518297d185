//! List of the files that a command reads; its output must not overwrite them.

use super::dir::{refuse_within, resolved};
use crate::error::{Context, Error, Result};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Files and directories that a command reads.
#[derive(Debug, Default)]
pub struct Inputs {
    files: Vec<PathBuf>,
    checkpoints: Vec<PathBuf>,
    packs: Vec<(PathBuf, Vec<&'static str>)>,
}

impl Inputs {
    /// Adds files. A symbolic link stands for its target: neither may be overwritten.
    pub fn files(mut self, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Inputs {
        self.files.extend(paths.into_iter().map(Into::into));
        self
    }

    /// Adds checkpoints: nothing is written into their directories or below them.
    pub fn checkpoints(mut self, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Inputs {
        self.checkpoints.extend(paths.into_iter().map(Into::into));
        self
    }

    /// Adds packs, whose files have the names `members`. Other files may be written next to these.
    pub fn packs(mut self, dirs: impl IntoIterator<Item = impl Into<PathBuf>>, members: &[&'static str]) -> Inputs {
        self.packs.extend(dirs.into_iter().map(|dir| (dir.into(), members.to_vec())));
        self
    }

    /// Fails if the file `out` would overwrite an input.
    ///
    /// # Errors
    /// `out` is an input or a file of a pack that is read, under this or another name, or lies inside a checkpoint.
    pub fn refuse(&self, out: &Path) -> Result<()> {
        if let Some(input) = self.files.iter().find(|input| is_same(input, out)) {
            let found = format!("found an input of this command ({})", input.display());
            return Err(Error::usage(found).at(out).help("choose another name for the output"));
        }
        let outside =
            |checkpoint: &PathBuf| refuse_within(checkpoint, out).help("choose an output outside of the checkpoint");
        self.checkpoints.iter().try_for_each(outside)?;
        for (dir, members) in &self.packs {
            if members.iter().any(|name| is_same(&dir.join(name), out)) {
                let found = format!("found a file of the pack that this command reads ({})", dir.display());
                return Err(Error::usage(found).at(out).help("choose another name for the output"));
            }
        }
        Ok(())
    }

    /// Fails if writing files with these `names` into `dir` would overwrite an input.
    ///
    /// # Errors
    /// The same as those of [`Inputs::refuse`].
    pub fn refuse_members(&self, dir: &Path, names: &[&str]) -> Result<()> {
        names.iter().try_for_each(|name| self.refuse(&dir.join(name)))
    }
}

/// Returns true when both names lead to the same existing file, or to the same path where none exists.
fn is_same(a: &Path, b: &Path) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        (Err(_), Err(_)) => resolved(a).ok().is_some_and(|a| resolved(b).ok() == Some(a)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn inputs_are_recognized_under_every_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for made in ["pack", "checkpoint/below"] {
            std::fs::create_dir_all(path(made)).unwrap();
        }
        for file in ["text", "pack/model", "checkpoint/config", "free"] {
            std::fs::write(path(file), "x").unwrap();
        }
        for (to, link) in [("text", "text-link"), ("pack", "pack-link"), ("pack/model", "model-link")] {
            symlink(path(to), path(link)).unwrap();
        }
        std::fs::hard_link(path("text"), path("text-hard")).unwrap();
        let inputs = Inputs::default()
            .files([path("text")])
            .packs([path("pack-link")], &["model", "missing"])
            .checkpoints([path("checkpoint")]);
        for (out, refused) in [
            ("text", true),
            ("pack/../text", true),
            ("text-link", true),
            ("text-hard", true),
            ("pack/model", true),
            ("pack-link/model", true),
            ("model-link", true),
            ("pack/missing", true),
            ("pack/other", false),
            ("checkpoint/new", true),
            ("checkpoint/below/new", true),
            ("free", false),
            ("new", false),
        ] {
            let answer = inputs.refuse(&path(out));
            assert_eq!(answer.is_err(), refused, "{out}: {answer:?}");
        }
        assert!(inputs.refuse_members(dir.path(), &["new", "text"]).is_err());
    }
}
