//! Merges calibration statistics that were collected separately.

use super::file::Description;
use super::{Calibration, CalibrationWriter};
use crate::error::{Error, Result};
use crate::output::AtomicFile;
use crate::progress;
use std::path::PathBuf;

/// Adds statistics of the same model that were collected from different texts, and writes the sum to `out`.
///
/// # Errors
/// A file cannot be read or written, or the statistics are of different models, windows or precisions, or of the same
/// text.
pub fn merge(paths: &[PathBuf], out: AtomicFile) -> Result<Description> {
    let parts = paths.iter().map(|path| Calibration::open(path)).collect::<Result<Vec<_>>>()?;
    let Some((first, others)) = parts.split_first() else {
        return Err(Error::usage("found no statistics, expected at least one file"));
    };
    let mut description = first.description().clone();
    if let Some(along) = parts.iter().find(|part| part.description().quantized.is_some()) {
        return Err(Error::usage("found statistics along a quantized model, whose corrections cannot be added up")
            .at(along.path())
            .help("collect them anew with `iec calib --quantized` and all texts"));
    }
    for other in others {
        let found = other.description();
        if !other.sites().eq(first.sites()) {
            return Err(Error::usage(format!("found statistics of other matrices than in {}", first.path().display()))
                .at(other.path())
                .help("merge statistics of one model, all of them with --hessian or all without"));
        }
        if (&found.source, &found.precision, found.window)
            != (&description.source, &description.precision, description.window)
        {
            return Err(Error::usage(format!(
                "found statistics of another model, precision or window than in {}",
                first.path().display()
            ))
            .at(other.path())
            .help("merge statistics of one model, collected with the same --window and from weights of one type"));
        }
        if let Some(twice) = found.texts.iter().find(|text| description.texts.iter().any(|t| t.sha256 == text.sha256)) {
            return Err(Error::usage(format!(
                "found the text `{}` in two files of statistics, expected different texts",
                twice.name
            ))
            .at(other.path())
            .help("leave one of these files of statistics out"));
        }
        description.texts.extend(found.texts.iter().cloned());
    }
    let mut writer = CalibrationWriter::begin(out, &description, first.sites().cloned().collect())?;
    let bar = progress::items("merging", first.sites().count() as u64);
    for site in first.sites() {
        let mut sums = parts.iter().filter_map(|part| part.sums(&site.name));
        let mut total = sums.next().expect("its own site");
        sums.for_each(|sums| total.iter_mut().zip(&sums).for_each(|(total, sums)| total.plus(sums)));
        writer.put([&total[0], &total[1]], &[])?;
        bar.inc(1);
    }
    writer.finish()?;
    Ok(description)
}
