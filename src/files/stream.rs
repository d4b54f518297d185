//! Reads and writes pipes, terminals and devices so that an interrupt ends a wait for their other end.

use super::{open_now, utf8};
use crate::error::{Context, Error, Result};
use crate::interrupt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

/// Interval at which a wait checks for an interrupt.
const INTERVAL: Duration = Duration::from_millis(50);
/// Most bytes written at once: a pipe that `poll` reports as writable takes this many without blocking.
const PIECE: usize = 4096;

/// Largest size in bytes of the text files that `eval`, `verify`, `bench --expected-tokens` and similar options read.
pub const TEXT_LIMIT: u64 = 4 << 30;

/// Open pipe, terminal, device or file that is read or written in order. Waiting for its other end fails with an
/// [`io::Error`] that holds [`crate::error::Cause::Interrupted`] once an interrupt was requested.
#[derive(Debug)]
pub struct Stream<F = File>(F);

impl Stream {
    /// Opens `path` for reading. A named pipe need not have a writer yet.
    ///
    /// # Errors
    /// The path cannot be opened.
    pub fn open(path: &Path) -> io::Result<Stream> {
        Ok(Stream(open_now(path, OFlags::RDONLY)?))
    }

    /// Opens `path` to append to it. Waits for the reader of a named pipe.
    ///
    /// # Errors
    /// The path cannot be opened, or the wait was interrupted.
    pub fn append(path: &Path) -> io::Result<Stream> {
        loop {
            match open_now(path, OFlags::WRONLY | OFlags::APPEND) {
                // This is the error for a named pipe without a reader.
                Err(e) if e.raw_os_error() == Some(Errno::NXIO.raw_os_error()) && is_pipe(path) => {
                    interrupt::check().map_err(io::Error::other)?;
                    std::thread::sleep(INTERVAL);
                }
                opened => return opened.map(Stream),
            }
        }
    }

    /// Returns the open file.
    pub fn file(&self) -> &File {
        &self.0
    }
}

impl<F: AsFd> Stream<F> {
    /// Wraps a file or descriptor that is already open, such as stdin. Reads and writes go to the descriptor directly:
    /// bytes that `opened` itself has buffered are not seen.
    pub fn of(opened: F) -> Stream<F> {
        Stream(opened)
    }

    /// Reads UTF-8 text up to the end.
    ///
    /// # Errors
    /// Reading fails or is interrupted, or the text is not UTF-8 or longer than `most` bytes.
    pub fn read_text(self, most: u64) -> Result<String> {
        let mut bytes = Vec::new();
        self.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > most {
            return Err(Error::corrupt(format!(
                "found more than {most} bytes of text, which is the limit; use a part of it"
            )));
        }
        utf8(bytes)
    }

    /// Waits until the stream is ready, or fails once an interrupt was requested.
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let timeout = Timespec::try_from(INTERVAL).expect("a fraction of a second");
        loop {
            match poll(&mut [PollFd::new(&self.0, flags)], Some(&timeout)) {
                Ok(0) | Err(Errno::INTR) => interrupt::check().map_err(io::Error::other)?,
                // On some systems, `poll` does not support some devices; reading or writing then blocks.
                Ok(_) | Err(_) => return Ok(()),
            }
        }
    }
}

fn is_pipe(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo())
}

impl<F: AsFd> Read for Stream<F> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            interrupt::check().map_err(io::Error::other)?;
            self.wait(PollFlags::IN)?;
            match rustix::io::read(&self.0, &mut *out) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                read => return Ok(read?),
            }
        }
    }
}

impl<F: AsFd> Write for Stream<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            self.wait(PollFlags::OUT)?;
            match rustix::io::write(&self.0, &bytes[..bytes.len().min(PIECE)]) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                written => return Ok(written?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads UTF-8 text from a file, a pipe or a device.
///
/// # Errors
/// It cannot be opened or read, an interrupt was requested, or the text is not UTF-8 or longer than `most` bytes.
pub fn read_text(path: &Path, most: u64) -> Result<String> {
    Stream::open(path).map_err(Error::from).and_then(|stream| stream.read_text(most)).at(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_read_in_pieces_up_to_its_end() {
        let (reader, mut writer) = io::pipe().unwrap();
        let writing = std::thread::spawn(move || {
            for piece in ["one ", "two"] {
                std::thread::sleep(INTERVAL * 2);
                writer.write_all(piece.as_bytes()).unwrap();
            }
        });
        assert_eq!(Stream::of(reader).read_text(7).unwrap(), "one two");
        writing.join().unwrap();
    }

    #[test]
    fn too_long_and_invalid_texts_are_refused() {
        assert!(read_text(Path::new("/dev/zero"), 1000).unwrap_err().to_string().contains("more than 1000 bytes"));
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"a\xff").unwrap();
        drop(writer);
        assert!(Stream::of(reader).read_text(9).unwrap_err().to_string().contains("byte offset 1"));
    }

    #[test]
    fn a_writer_waits_for_the_reader_of_a_full_pipe() {
        let (reader, writer) = io::pipe().unwrap();
        let mut stream = Stream::of(writer);
        let written = vec![7; 300_000];
        let reading = std::thread::spawn(move || {
            let mut read = Vec::new();
            Stream::of(reader).read_to_end(&mut read).map(|_| read)
        });
        stream.write_all(&written).unwrap();
        drop(stream);
        assert_eq!(reading.join().unwrap().unwrap(), written);
    }
}
