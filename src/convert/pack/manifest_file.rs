//! Checks that the manifest of a pack was made from the weights of the model, and that the files of codes and
//! scales that it lists are those that `iec q4` wrote.

use crate::convert::digest::hash_file;
use crate::convert::executor::Task;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::manifest::Manifest;
use crate::progress::ProgressBar;
use crate::provenance::Source;
use std::os::unix::fs::FileExt;

/// Refuses a manifest that lists a weight file of the model with another size or hash.
pub(super) fn check_source(manifest: &Manifest, found: Option<&Source>) -> Result<()> {
    let (Some(made_from), Some(found)) = (&manifest.document().source, found) else { return Ok(()) };
    for expected in &made_from.files {
        let Some(file) = found.files.iter().find(|f| f.name == expected.name) else { continue };
        let same_hash = expected.sha256.is_empty() || expected.sha256 == file.sha256;
        if file.bytes != expected.bytes || !same_hash {
            let found = format!("found a manifest that was made from another `{}` than this model has", file.name);
            return Err(Error::corrupt(found).at(manifest.path()).help("make the manifest again from this model"));
        }
    }
    Ok(())
}

/// Lists tasks that compare the files of codes and scales with the sizes and hashes in the manifest.
pub(super) fn tasks(manifest: &Manifest) -> impl Iterator<Item = Task<'_>> {
    manifest.document().files.iter().enumerate().map(|(i, expected)| {
        let path = manifest.dir().join(&expected.name);
        let name = format!("manifest file {i}");
        let hash = move |bar: &ProgressBar| {
            let (file, found) = files::open_with_metadata(&path)?;
            let bytes = found.len();
            let sha256 = hash_file(bytes, bar, |at, out| file.read_exact_at(out, at).at(&path))?;
            if bytes != expected.bytes || sha256 != expected.sha256 {
                let found = format!("found {bytes} bytes with SHA-256 {sha256}");
                let expected = format!("expected {} bytes with {} from the manifest", expected.bytes, expected.sha256);
                return Err(Error::corrupt(format!("{found}, {expected}"))
                    .at(&path)
                    .help("restore the file, or write codes, scales and manifest again with `iec q4 --overwrite`"));
            }
            Ok(sha256)
        };
        Task::hash(name, expected.bytes, hash)
    })
}
