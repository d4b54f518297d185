//! Finds the tensors that belong to a coded matrix, and checks their types and shapes.

use crate::convert::source::shards::Shards;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::DType;
use crate::error::{Context, Error, Result};

/// Largest number of bytes of a tensor that is read when a checkpoint is opened.
const SMALL: usize = 1 << 16;

/// Advice for parts that do not fit each other.
const HELP: &str = "the parts of this matrix do not fit each other or the quantization settings; get all files of the \
                    same revision, or use a checkpoint before quantization";

/// Tensors of one module: their names are the stem and an ending.
pub(super) struct Parts<'a> {
    pub shards: &'a Shards,
    /// Name without the ending that the format looks for.
    pub stem: &'a str,
}

impl<'a> Parts<'a> {
    /// Returns the tensor with this ending.
    pub fn get(&self, ending: &str) -> Option<&'a SourceTensor> {
        self.shards.get(&format!("{}{ending}", self.stem))
    }

    /// Returns the tensor with this ending, which the format requires.
    ///
    /// # Errors
    /// It is missing.
    pub fn need(&self, ending: &str) -> Result<&'a SourceTensor> {
        self.get(ending).ok_or_else(|| {
            let missing = format!("missing from the checkpoint (needed for the quantized matrix {})", self.stem);
            Error::corrupt(missing).tensor(format!("{}{ending}", self.stem)).help(HELP)
        })
    }

    /// Makes an error about a tensor.
    pub fn wrong(&self, tensor: &SourceTensor, expected: impl std::fmt::Display) -> Error {
        let found = format!("found {} {:?}, expected {expected}", tensor.dtype, tensor.shape);
        Error::corrupt(found).at(self.shards.path(tensor)).tensor(&tensor.name).help(HELP)
    }

    /// Checks that a tensor has one of these types and this shape.
    ///
    /// # Errors
    /// It has not.
    pub fn check(&self, tensor: &SourceTensor, dtypes: &[DType], shape: &[usize]) -> Result<()> {
        if dtypes.contains(&tensor.dtype) && tensor.shape == shape {
            return Ok(());
        }
        let names = dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or ");
        Err(self.wrong(tensor, format!("{names} {shape:?}")))
    }

    /// Checks that a tensor of floats has one of these shapes.
    ///
    /// # Errors
    /// It has not.
    pub fn check_floats(&self, tensor: &SourceTensor, shapes: &[&[usize]]) -> Result<()> {
        match tensor.dtype.is_float() && shapes.contains(&tensor.shape.as_slice()) {
            true => Ok(()),
            false => Err(self.wrong(tensor, format!("floats of shape {:?}", shapes[0]))),
        }
    }

    /// Returns the two dimensions of a matrix, neither of them zero.
    ///
    /// # Errors
    /// The tensor is no matrix.
    pub fn matrix(&self, tensor: &SourceTensor) -> Result<[usize; 2]> {
        match tensor.shape[..] {
            [rows, cols] if rows > 0 && cols > 0 => Ok([rows, cols]),
            _ => Err(self.wrong(tensor, "a matrix")),
        }
    }

    /// Returns the width of a group: `None` or -1 in the settings means the whole row.
    ///
    /// # Errors
    /// Rows do not divide into groups.
    pub fn group(&self, tensor: &SourceTensor, group: Option<usize>, cols: usize) -> Result<usize> {
        match group {
            None => Ok(cols),
            Some(group) if group > 0 && cols.is_multiple_of(group) => Ok(group),
            Some(group) => {
                let found = format!("found {cols} columns, expected a multiple of the group size {group}");
                Err(Error::corrupt(found).at(self.shards.path(tensor)).tensor(&tensor.name).help(HELP))
            }
        }
    }

    /// Reads all bytes of a small tensor.
    ///
    /// # Errors
    /// It is not small, or reading fails.
    pub fn bytes(&self, tensor: &SourceTensor) -> Result<Vec<u8>> {
        if tensor.nbytes > SMALL {
            return Err(self.wrong(tensor, format!("at most {SMALL} bytes")));
        }
        let mut bytes = vec![0; tensor.nbytes];
        self.shards.read(tensor, 0, &mut bytes).at(self.shards.path(tensor))?;
        Ok(bytes)
    }

    /// Reads a small tensor of finite F32.
    ///
    /// # Errors
    /// It has another type or number of elements, or a number is NaN or infinite.
    pub fn numbers(&self, tensor: &SourceTensor, count: usize) -> Result<Vec<f32>> {
        self.check(tensor, &[DType::F32], &[count])?;
        let bytes = self.bytes(tensor)?;
        let numbers: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        match numbers.iter().find(|number| !number.is_finite()) {
            None => Ok(numbers),
            Some(number) => {
                let found = Error::corrupt(format!("found {number}, expected finite numbers"));
                Err(found.at(self.shards.path(tensor)).tensor(&tensor.name).help(HELP))
            }
        }
    }
}
