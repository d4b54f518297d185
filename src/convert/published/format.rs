//! Row of the table of formats, and the settings that a format reads.

use super::coded::Coded;
use super::parts::Parts;
use crate::convert::arch::Fields;
use crate::convert::source::shards::Shards;
use crate::convert::source::source_tensor::SourceTensor;
use crate::error::{Error, Result};

/// Function that describes the matrix of a module. Its arguments are the tensors of the module and the one that the
/// format looks for.
pub(super) type Describe = Box<dyn Fn(&Parts<'_>, &SourceTensor) -> Result<Coded>>;

/// A format of quantized weights: a row of `FORMATS`.
pub(super) struct Format {
    /// Name in messages.
    pub name: &'static str,
    /// Values of `quant_method`.
    pub methods: &'static [&'static str],
    /// File beside `config.json` that may have the settings instead of it.
    pub file: Option<&'static str>,
    /// Object of that file with the settings; `None` for the file itself.
    pub file_object: Option<&'static str>,
    /// Endings of the names of tensors of which every quantized matrix has one.
    pub markers: &'static [&'static str],
    /// Settings that list modules without quantization.
    pub excluded: &'static [&'static str],
    /// True if weights that are all floats are accepted beside settings of this format.
    pub may_be_floats: bool,
    /// False if tensors with these markers have this format even without settings.
    pub needs_settings: bool,
    /// Reads the settings, and returns a function that describes matrices.
    pub open: fn(&Settings<'_>) -> Result<Describe>,
}

impl Format {
    /// Template for rows.
    pub const NONE: Format = Format {
        name: "",
        methods: &[],
        file: None,
        file_object: None,
        markers: &[],
        excluded: &[],
        may_be_floats: false,
        needs_settings: true,
        open: |_| Ok(Box::new(|parts, tensor| Err(parts.wrong(tensor, "a known format")))),
    };

    /// Returns the name of a tensor without the ending that marks a matrix of this format.
    pub fn stem<'a>(&self, tensor: &'a str) -> Option<&'a str> {
        self.markers.iter().find_map(|marker| tensor.strip_suffix(marker)).filter(|stem| !stem.is_empty())
    }
}

/// Settings of a format.
pub(super) struct Settings<'a> {
    /// Fields of the settings, if there are any.
    pub fields: Option<Fields<'a>>,
    /// `model_type` of `config.json`.
    pub model_type: Option<&'a str>,
    /// Weights, for formats that look at more than the tensors of a module.
    pub shards: &'a Shards,
}

impl<'a> Settings<'a> {
    /// Returns the fields, which the format requires.
    pub fn fields(&self) -> Result<Fields<'a>> {
        self.fields.ok_or_else(|| Error::corrupt("found no quantization settings, expected them in config.json"))
    }
}
