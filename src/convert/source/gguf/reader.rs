//! Opens GGUF files and locates their tensors.
//!
//! A file consists of the magic `GGUF`, a `u32` version, the `u64` number of tensors, the `u64` number of keys, the
//! keys with their values, the name, dimensions (fastest first), type and offset of every tensor, padding to the
//! alignment, and the data (github.com/ggml-org/ggml, docs/gguf.md). Versions 2 and 3 are read, little-endian only.
//! Files are untrusted input: no memory is allocated for bytes that the file does not have, and the range of every
//! [`GgufTensor`] is checked to lie in the file. Data is read with positioned reads.

use super::header::{Header, parse};
use super::types::GgmlType;
use super::value::Metadata;
use crate::convert::source::read_at::{InputFile, ReadAt};
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use std::path::Path;

pub(super) const MAGIC: &[u8; 4] = b"GGUF";

/// A tensor of a GGUF file. Its range lies in the file, and its size fits the type and dimensions.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufTensor {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub kind: GgmlType,
    /// Dimensions, slowest first (the file lists them fastest first).
    pub shape: Vec<usize>,
    /// Index of the file among the files of a split model.
    pub file: usize,
    /// Position of the data in the file, in bytes.
    pub start: u64,
    /// Length of the data in bytes.
    pub nbytes: u64,
}

impl GgufTensor {
    /// Returns the tensor's shape as a stack of matrices: `(count, rows, cols)`. A vector is one row.
    pub fn matrices(&self) -> (usize, usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(1);
        let rows = self.shape.len().checked_sub(2).map_or(1, |i| self.shape[i]);
        let elements: usize = self.shape.iter().product();
        (elements / (rows * cols), rows, cols)
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A GGUF model: a single file, or all files of a split model.
#[derive(Debug)]
pub struct Gguf {
    /// Format version of the first file.
    pub version: u32,
    /// Metadata of the first file.
    pub metadata: Metadata,
    /// Tensors of all files.
    pub tensors: Vec<GgufTensor>,
    files: Vec<InputFile>,
}

impl Gguf {
    /// Returns true when the file at `path` begins with the magic of GGUF.
    pub fn is_at(path: &Path) -> bool {
        files::begins_with(path, MAGIC)
    }

    /// Opens a file, and in the same directory the other files of a split model (`…-00001-of-0000N.gguf`).
    ///
    /// # Errors
    /// A file is missing, is no GGUF file of a supported version, or any count, length, type or offset in it is
    /// impossible.
    pub fn open(path: &Path) -> Result<Gguf> {
        let (first, header) = open_file(path, 0)?;
        let parts = header.metadata.count_opt("split.count").at(path)?.unwrap_or(1);
        let mut model =
            Gguf { version: header.version, metadata: header.metadata, tensors: header.tensors, files: vec![first] };
        if parts > 1 {
            model.open_split(path, parts)?;
        }
        refuse_duplicates(&model.tensors).at(path)?;
        Ok(model)
    }

    fn open_split(&mut self, path: &Path, parts: usize) -> Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let number = self.metadata.count_opt("split.no").at(path)?.unwrap_or(0);
        let suffix = |number: usize| format!("-{:05}-of-{parts:05}.gguf", number + 1);
        let Some(stem) = name.strip_suffix(&suffix(number)) else {
            let found =
                format!("found part {} of {parts}, expected a name that ends in {}", number + 1, suffix(number));
            return Err(Error::corrupt(found).at(path).help("give the files of a split model their original names"));
        };
        if number != 0 {
            let first = path.with_file_name(format!("{stem}{}", suffix(0)));
            return Err(Error::usage(format!("found part {} of {parts}, expected part 1", number + 1))
                .at(path)
                .help(format!("name the first part: {}", first.display())));
        }
        for number in 1..parts {
            let path = path.with_file_name(format!("{stem}{}", suffix(number)));
            let (file, header) = open_file(&path, number)?;
            if header.metadata.count_opt("split.no").at(&path)? != Some(number) {
                return Err(Error::corrupt(format!("found another part, expected part {} of {parts}", number + 1))
                    .at(&path)
                    .help("give the files of a split model their original names"));
            }
            self.files.push(file);
            self.tensors.extend(header.tensors);
        }
        match self.metadata.count_opt("split.tensors.count").at(path)? {
            Some(n) if n != self.tensors.len() => {
                let found = format!("found {} tensors in {parts} parts, expected {n}", self.tensors.len());
                Err(Error::corrupt(found).at(path).help("the parts belong to different files; get all of them again"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the files in the order of their part numbers.
    pub fn files(&self) -> &[InputFile] {
        &self.files
    }

    /// Reads data of a tensor into `out`, starting at byte `offset` of the tensor.
    pub fn read(&self, tensor: &GgufTensor, offset: u64, out: &mut [u8]) -> Result<()> {
        debug_assert!(offset + out.len() as u64 <= tensor.nbytes);
        let file = &self.files[tensor.file];
        file.read_at(tensor.start + offset, out).tensor(&tensor.name)
    }

    /// Reads a small tensor and decodes all of its values to f32.
    pub fn floats(&self, tensor: &GgufTensor) -> Result<Vec<f32>> {
        let (count, rows, cols) = tensor.matrices();
        let mut raw = vec![0; usize::try_from(tensor.nbytes).unwrap_or(usize::MAX)];
        self.read(tensor, 0, &mut raw)?;
        let mut out = vec![0.0; count * rows * cols];
        super::blocks::dequantize(tensor.kind, &raw, &mut out).tensor(&tensor.name)?;
        Ok(out)
    }
}

fn open_file(path: &Path, number: usize) -> Result<(InputFile, Header)> {
    let help = match number {
        0 => "name a GGUF model file",
        _ => "put all files of the split model into the directory of the first one, under their original names",
    };
    let file = InputFile::open(path).help(help)?;
    let header = parse(&file, number).at(path).map_err(|e| match e.cause() {
        Cause::Corrupt(_) => e.help("the file is damaged; get it again"),
        _ => e,
    })?;
    Ok((file, header))
}

fn refuse_duplicates(tensors: &[GgufTensor]) -> Result<()> {
    let mut names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::corrupt("found two tensors with this name, expected one").tensor(pair[0])),
        None => Ok(()),
    }
}
