//! Output of one task: its sections are written in order and hashed as they are written.

use super::Section;
use crate::error::Result;
use crate::interrupt;
use crate::output::AtomicFile;
use crate::progress::ProgressBar;
use crate::sha256::{Digest, Sha256, hex};

/// Output of one task.
pub(in crate::convert) struct TaskOutput<'a> {
    sections: Vec<OpenSection<'a>>,
    bar: &'a ProgressBar,
}

/// A section and the position up to which it is filled.
struct OpenSection<'a> {
    file: &'a AtomicFile,
    at: u64,
    end: u64,
    hash: Sha256,
}

impl<'a> TaskOutput<'a> {
    pub(super) fn new(files: &'a [AtomicFile], sections: &[Section], bar: &'a ProgressBar) -> TaskOutput<'a> {
        let open = |section: &Section| OpenSection {
            file: &files[section.file],
            at: section.range.start,
            end: section.range.end,
            hash: Sha256::new(),
        };
        TaskOutput { sections: sections.iter().map(open).collect(), bar }
    }

    /// Writes the next bytes of section number `section` of the task, and hashes them.
    ///
    /// # Errors
    /// Writing fails, or the user interrupts. Panics when the section becomes longer than planned.
    pub fn append(&mut self, section: usize, bytes: &[u8]) -> Result<()> {
        interrupt::check()?;
        let OpenSection { file, at, end, hash } = &mut self.sections[section];
        assert!(bytes.len() as u64 <= *end - *at, "section {section} overflows");
        file.write_at(bytes, *at)?;
        hash.update(bytes);
        *at += bytes.len() as u64;
        self.bar.inc(bytes.len() as u64);
        Ok(())
    }

    /// Returns the number of bytes that are still to be written to section number `section`.
    pub fn length(&self, section: usize) -> u64 {
        self.sections[section].end - self.sections[section].at
    }

    /// Returns the progress bar, for tasks that spend their time on something other than writing.
    pub fn bar(&self) -> &'a ProgressBar {
        self.bar
    }

    /// Returns the SHA-256 of each section. Panics when a section is not full.
    pub(super) fn finish(self, task: &str) -> Vec<String> {
        let digest = |section: OpenSection<'_>| {
            assert_eq!(section.at, section.end, "{task} is complete");
            hex(section.hash)
        };
        self.sections.into_iter().map(digest).collect()
    }
}
