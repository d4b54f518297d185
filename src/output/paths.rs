//! Small functions over paths of files.

use crate::error::{Context, Result};
use std::path::Path;

/// Returns the directory of a file; `.` for a bare name.
pub fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// Removes a file, if it exists.
///
/// # Errors
/// The file cannot be removed.
pub fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).at(path),
        _ => Ok(()),
    }
}
