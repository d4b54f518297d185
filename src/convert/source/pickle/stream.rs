//! Reads the bytes of a pickle forward through a small buffer, and limits the memory that pickles may take.

use crate::convert::source::read_at::ReadAt;
use crate::error::{Error, Result};
use std::cell::Cell;

const BUFFER: u64 = 1 << 16;

/// Memory that interpreting the pickles of a file may take. It is proportional to the size of the file, so
/// that a small hostile file cannot take much. Charges are never returned; as each opcode charges something,
/// the time is bounded, too.
pub(super) struct Budget {
    left: Cell<u64>,
    limit: u64,
}

impl Budget {
    /// Makes the budget for a file of `nbytes` bytes.
    pub(super) fn of(nbytes: u64) -> Budget {
        // In small files the description is large compared with the data, hence the constant part.
        let limit = nbytes.saturating_mul(4).saturating_add(1 << 20);
        Budget { left: Cell::new(limit), limit }
    }

    /// Charges `count` items of type `T`; returns an error when the budget is exceeded.
    pub(super) fn charge<T>(&self, count: usize) -> Result<()> {
        let bytes = (count as u64).saturating_mul(size_of::<T>() as u64);
        match self.left.get().checked_sub(bytes) {
            Some(left) => {
                self.left.set(left);
                Ok(())
            }
            None => Err(Error::corrupt(format!(
                "malformed pickle: its objects take more than {} bytes of memory",
                self.limit
            ))
            .help(
                "the file is damaged or hostile; objects of real checkpoints take less than four times the file size",
            )),
        }
    }
}

/// Forward reader over a range of a file.
pub(super) struct Stream<'a> {
    file: &'a dyn ReadAt,
    /// Position of the first byte after the buffer.
    next: u64,
    end: u64,
    buffer: Vec<u8>,
    at: usize,
}

impl<'a> Stream<'a> {
    /// Opens the range of `nbytes` bytes from `start` on, which must lie in the file.
    pub(super) fn new(file: &'a dyn ReadAt, start: u64, nbytes: u64) -> Result<Stream<'a>> {
        match start.checked_add(nbytes) {
            Some(end) if end <= file.nbytes() => Ok(Stream { file, next: start, end, buffer: Vec::new(), at: 0 }),
            _ => Err(malformed("a pickle that reaches past the end of the file")),
        }
    }

    /// Returns the position of the next byte in the file.
    pub(super) fn position(&self) -> u64 {
        self.next - (self.buffer.len() - self.at) as u64
    }

    /// Reads the next byte.
    pub(super) fn byte(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    /// Reads the next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        for byte in &mut out {
            if self.at == self.buffer.len() {
                self.refill()?;
            }
            *byte = self.buffer[self.at];
            self.at += 1;
        }
        Ok(out)
    }

    /// Reads the next `n` bytes; checks that they exist before it allocates memory.
    pub(super) fn bytes(&mut self, n: u64, budget: &Budget) -> Result<Vec<u8>> {
        let at = self.position();
        if n > self.end - at {
            return Err(malformed(format!("{n} bytes of text where {} are left", self.end - at)));
        }
        budget.charge::<u8>(usize::try_from(n).unwrap_or(usize::MAX))?;
        let bytes = self.file.read_vec(at, n)?;
        self.skip(n);
        Ok(bytes)
    }

    /// Reads a line and returns it without its end; names of callables are written as lines.
    pub(super) fn line(&mut self) -> Result<String> {
        const LONGEST: usize = 256;
        let mut line = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => return String::from_utf8(line).map_err(|_| malformed("a name that is not UTF-8")),
                byte if line.len() < LONGEST => line.push(byte),
                _ => return Err(malformed(format!("a name of more than {LONGEST} bytes"))),
            }
        }
    }

    /// Skips `n` bytes, which must exist.
    fn skip(&mut self, n: u64) {
        let to = self.position() + n;
        if to < self.next {
            self.at = self.buffer.len() - (self.next - to) as usize;
        } else {
            self.next = to;
            self.buffer.clear();
            self.at = 0;
        }
    }

    fn refill(&mut self) -> Result<()> {
        let n = BUFFER.min(self.end - self.next);
        if n == 0 {
            return Err(malformed("the data ends too early"));
        }
        self.buffer = self.file.read_vec(self.next, n)?;
        self.next += n;
        self.at = 0;
        Ok(())
    }
}

/// Makes an error about the structure of a pickle.
pub(super) fn malformed(what: impl std::fmt::Display) -> Error {
    Error::corrupt(format!("malformed pickle: {what}")).help("the file is damaged or was not written by torch.save")
}
