//! Finds GGUF files in a directory, and the other files of a split model.

use super::reader::Gguf;
use crate::error::{Context, Error, Result};
use std::path::{Path, PathBuf};

/// Lists the GGUF files in a directory; of a split model only the first file.
///
/// # Errors
/// The directory cannot be read.
pub fn files_in(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).at(dir).map_err(Error::while_opening_model)? {
        let path = entry.at(dir).map_err(Error::while_opening_model)?.path();
        let is_later = split(&path).is_some_and(|(_, number, _)| number != 1);
        if path.extension().is_some_and(|e| e == "gguf") && !is_later && Gguf::is_at(&path) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the path of a GGUF file and of the other files of a split model.
pub fn parts_of(path: &Path) -> Vec<PathBuf> {
    match split(path) {
        // The number of a misnamed file may lie outside of the count.
        Some((stem, number, count)) if (1..=count).contains(&number) => {
            (1..=count).map(|n| path.with_file_name(format!("{stem}-{n:05}-of-{count:05}.gguf"))).collect()
        }
        _ => vec![path.to_path_buf()],
    }
}

/// Splits a name such as `model-00001-of-00003.gguf` into the stem, the number and the count.
fn split(path: &Path) -> Option<(&str, usize, usize)> {
    let (rest, count) = path.file_name()?.to_str()?.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five = |digits: &str| (digits.len() == 5).then(|| digits.parse().ok()).flatten();
    Some((stem, five(number)?, five(count)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_split_files_are_read() {
        assert_eq!(split(Path::new("d/a-b-00002-of-00010.gguf")), Some(("a-b", 2, 10)));
        assert_eq!(split(Path::new("a-1-of-2.gguf")), None);
        assert_eq!(parts_of(Path::new("d/m-00001-of-00002.gguf")).len(), 2);
        for name in ["d/m.gguf", "d/m-00005-of-00002.gguf", "d/m-00000-of-00000.gguf"] {
            assert_eq!(parts_of(Path::new(name)), [PathBuf::from(name)]);
        }
    }
}
