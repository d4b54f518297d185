//! Work-touch: reads one byte per stride of the mapped weights, for a given number of bytes per token, inside the
//! timed window. It measures the cost of a pass over memory of that size on this machine.

use crate::error::{Error, Result};
use crate::mapped::MappedFile;
use std::hint::black_box;
use std::sync::Arc;

/// Reader that cycles through the weights.
pub struct Touch {
    weights: Arc<MappedFile>,
    bytes_per_token: u64,
    stride: u64,
    position: usize,
    reads: u64,
    sum: u64,
}

impl Touch {
    /// Creates a work-touch that covers `bytes_per_token` bytes of the weights with each token, and reads one byte per
    /// `stride` bytes.
    pub fn new(weights: Arc<MappedFile>, bytes_per_token: u64, stride: u64) -> Touch {
        Touch { weights, bytes_per_token, stride, position: 0, reads: 0, sum: 0 }
    }

    fn reads_per_token(&self) -> u64 {
        self.bytes_per_token.div_ceil(self.stride)
    }

    /// Performs the reads of one token.
    pub fn token(&mut self) {
        let bytes = self.weights.bytes();
        let step = (self.stride % bytes.len().max(1) as u64) as usize;
        let (mut position, mut sum) = (self.position, self.sum);
        for _ in 0..self.reads_per_token() {
            sum = sum.wrapping_add(u64::from(bytes[position]));
            position += step;
            if position >= bytes.len() {
                position -= bytes.len();
            }
            self.reads += 1;
        }
        (self.position, self.sum) = (position, black_box(sum));
    }

    /// Returns the number of bytes of the weights that were covered so far.
    pub fn bytes(&self) -> u64 {
        self.reads / self.reads_per_token().max(1) * self.bytes_per_token
    }

    /// Checks that the reads for `tokens` tokens were made and that their checksum is right.
    ///
    /// # Errors
    /// The number of reads or their checksum differs.
    pub fn verify(&self, tokens: usize) -> Result<()> {
        let expected = tokens as u64 * self.reads_per_token();
        if self.reads != expected {
            return Err(Error::refused(format!("found {} reads of the work-touch, expected {expected}", self.reads)));
        }
        let bytes = self.weights.bytes();
        let place = |i: u64| (u128::from(i) * u128::from(self.stride) % bytes.len() as u128) as usize;
        let sum = (0..self.reads).fold(0u64, |sum, i| sum.wrapping_add(u64::from(bytes[place(i)])));
        if sum != self.sum {
            return Err(Error::refused(format!("found the sum {} of the work-touch, expected {sum}", self.sum)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_covers_its_bytes_and_the_count_is_checked() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), (0..=250u8).collect::<Vec<u8>>()).unwrap();
        for (bytes_per_token, stride) in [(1000, 64), (1, 1), (7, 300), (251, 251), (0, 64)] {
            let mut touch = Touch::new(MappedFile::open(file.path()).unwrap(), bytes_per_token, stride);
            (0..5).for_each(|_| touch.token());
            assert_eq!(touch.bytes(), 5 * bytes_per_token);
            touch.verify(5).unwrap();
            assert_eq!(touch.verify(6).is_err(), bytes_per_token > 0);
        }
    }
}
