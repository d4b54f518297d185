//! A tensor as a weight file lists it: where its bytes lie and how to read them in row-major order.

use super::read_at::ReadAt;
use super::strided::Strided;
use crate::dtype::DType;
use crate::error::Result;

/// A tensor of a shard; its range lies in the file and has the size that dtype and shape demand.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceTensor {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Number of the shard in its checkpoint.
    pub shard: usize,
    /// Position of the first element in the file.
    pub start: u64,
    /// Length of the data in row-major order.
    pub nbytes: usize,
    /// Elements from one index to the next along each axis, when the file does not hold the tensor in row-major order
    /// without gaps. [`read`](SourceTensor::read) returns row-major order.
    pub strides: Option<Vec<usize>>,
}

impl SourceTensor {
    /// Fills `out` with the data from byte `offset` on, in row-major order.
    pub fn read(&self, file: &dyn ReadAt, offset: usize, out: &mut [u8]) -> Result<()> {
        debug_assert!(offset + out.len() <= self.nbytes);
        match &self.strides {
            None => file.read_at(self.start + offset as u64, out),
            Some(strides) => {
                let size = self.dtype.size();
                Strided { file, start: self.start, size, shape: &self.shape, strides }.read(offset, out)
            }
        }
    }
}
