//! Exact values of the matrices of a checkpoint that another quantizer wrote, for the reference of [`crate::verify`].

use crate::convert::json::read_object;
use crate::convert::published::{Published, Source, settings_files};
use crate::convert::source::layout::Layout;
use crate::convert::source::shards::Shards;
use crate::error::Result;
use crate::files;
use crate::verify::DecodedMatrices;
use std::path::Path;

/// Quantized matrices of a checkpoint, and the files that hold them.
#[derive(Debug)]
struct Matrices {
    shards: Shards,
    published: Published,
}

/// Opens the quantized matrices of a checkpoint; `None` if it has none, or only experts of gpt-oss in MXFP4, which the
/// reference decodes itself.
///
/// # Errors
/// The format is not supported, or a matrix is not as its settings say.
pub(super) fn of_checkpoint(dir: &Path) -> Result<Option<Box<dyn DecodedMatrices>>> {
    let path = dir.join("config.json");
    if !files::exists(&path)? {
        return Ok(None);
    }
    let config = read_object(&path)?;
    let settings = ["quantization_config", "quantization"].iter().find_map(|key| config.get(*key));
    let is_own = settings.is_some_and(|settings| settings["quant_method"] == "mxfp4");
    if is_own || settings.is_none() && files::first(settings_files().map(|name| dir.join(name)))?.is_none() {
        return Ok(None);
    }
    let layout = Layout::find(dir)?;
    let shards = Shards::open_layout(&layout)?;
    let source = Source { config: &config, path: &path, layout: &layout };
    let published = Published::open(&source, &shards, &|_| false)?;
    Ok(published.format().is_some().then(|| Box::new(Matrices { shards, published }) as Box<dyn DecodedMatrices>))
}

impl DecodedMatrices for Matrices {
    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.published.get(name).map(|coded| &coded.shape[..])
    }

    fn values(&self, name: &str, matrix: usize) -> Result<Vec<f32>> {
        let coded = self.published.get(name);
        let Some((coded, [.., rows, cols])) = coded.map(|coded| (coded, &coded.shape[..])) else {
            return Ok(Vec::new());
        };
        let mut values = vec![0.0; rows * cols];
        coded.read_rows(&self.shards, matrix, 0..*rows, &mut values)?;
        Ok(values)
    }
}
