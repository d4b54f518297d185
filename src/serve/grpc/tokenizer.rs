//! Files of the tokenizer of a model, for routers that encode texts themselves: a ZIP archive in pieces, and its
//! SHA-256 with the last piece.
//!
//! The archive is stored without compression:
//!
//! ```text
//! for each file: header (30 bytes), name, content
//! for each file: entry of the directory (46 bytes), name
//! end of the directory (22 bytes)
//! ```
//!
//! The same files give the same bytes: names are in order, and times are those of 1980.

use super::proto::smg::grpc::common::GetTokenizerChunk;
use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::error::Result as IecResult;
use crate::files;
use crate::host::model::Facts;
use crate::iebin::JSON_NAME;
use crate::output::swap;
use crate::sha256::{Digest, Sha256, hex};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tonic::Status;
use tonic::codegen::tokio_stream::Stream;

/// Names of the files, as far as a model has them, in order. The chat template is that of the server.
const NAMES: [&str; 8] = [
    "added_tokens.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
];
/// Name of the file with the chat template.
const TEMPLATE: &str = "chat_template.jinja";
/// Largest file in bytes.
const FILE_LIMIT: u64 = 256 << 20;
/// Bytes of a piece.
const PIECE: usize = 64 << 10;
/// Date in an archive: 1 January 1980.
const DATE: u16 = 0x21;
/// Version of the format that a reader must know: 2.0.
const VERSION: u16 = 20;

/// Pieces of an archive.
pub struct Chunks {
    archive: Vec<u8>,
    sha256: String,
    sent: usize,
}

impl Stream for Chunks {
    type Item = Result<GetTokenizerChunk, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let rest = &self.archive[self.sent..];
        if rest.is_empty() {
            return Poll::Ready(None);
        }
        let data = rest[..rest.len().min(PIECE)].to_vec();
        let is_last = data.len() == rest.len();
        self.sent += data.len();
        let sha256 = if is_last { self.sha256.clone() } else { String::new() };
        Poll::Ready(Some(Ok(GetTokenizerChunk { data, sha256 })))
    }
}

/// Reads the files of a model.
///
/// # Errors
/// A file cannot be read, or the archive is too large.
pub async fn chunks(facts: Arc<Facts>) -> ApiResult<Chunks> {
    let made = tokio::task::spawn_blocking(move || archive(&files_of(&facts)?)).await;
    let archive = made.map_err(|e| ApiError::new(ApiStatus::INTERNAL_SERVER_ERROR, e.to_string()))?;
    // The message would show a path of the server.
    let archive = archive.map_err(|_| {
        ApiError::new(ApiStatus::INTERNAL_SERVER_ERROR, "the files of the tokenizer cannot be read; see the pack")
    })?;
    let sha256 = hex(Sha256::new_with_prefix(&archive));
    Ok(Chunks { archive, sha256, sent: 0 })
}

/// Returns the names and contents of the files of a model.
fn files_of(facts: &Facts) -> IecResult<Vec<(&'static str, Vec<u8>)>> {
    let lead = facts.root.join(JSON_NAME);
    let mut found = Vec::new();
    if let Some(format) = &facts.template {
        found.push((TEMPLATE, format.template.template.source().as_bytes().to_vec()));
    }
    for name in NAMES {
        let path = swap::member(&lead, name);
        if files::is_file(&path)? {
            found.push((name, files::read_limited(&path, FILE_LIMIT)?));
        }
    }
    Ok(found)
}

/// Builds an archive.
fn archive(files: &[(&str, Vec<u8>)]) -> IecResult<Vec<u8>> {
    let (mut archive, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in files {
        let offset = archive.len() as u32;
        // Fields that the header of a file and its entry in the directory have in common.
        let mut common = Vec::new();
        for field in [VERSION, 0, 0, 0, DATE] {
            common.extend(field.to_le_bytes());
        }
        let size = content.len() as u32;
        for field in [crc32fast::hash(content), size, size] {
            common.extend(field.to_le_bytes());
        }
        common.extend((name.len() as u16).to_le_bytes());
        common.extend(0u16.to_le_bytes());
        archive.extend(b"PK\x03\x04");
        archive.extend(&common);
        archive.extend(name.as_bytes());
        archive.extend(content);
        directory.extend(b"PK\x01\x02");
        directory.extend(VERSION.to_le_bytes());
        directory.extend(&common);
        // No comment, first disk, no attributes.
        directory.extend([0; 10]);
        directory.extend(offset.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (count, begin) = (files.len() as u16, archive.len() as u32);
    archive.extend(&directory);
    archive.extend(b"PK\x05\x06");
    archive.extend([0; 4]);
    archive.extend([count.to_le_bytes(), count.to_le_bytes()].as_flattened());
    archive.extend((directory.len() as u32).to_le_bytes());
    archive.extend(begin.to_le_bytes());
    archive.extend([0; 2]);
    match u32::try_from(archive.len()) {
        Ok(_) => Ok(archive),
        Err(_) => Err(crate::error::Error::unsupported("the files of the tokenizer are larger than 4 GiB")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_lists_its_files_with_their_sums() {
        let made = archive(&[("a.txt", b"abc".to_vec()), ("b", Vec::new())]).unwrap();
        let number = |at: usize| u32::from_le_bytes(made[at..at + 4].try_into().unwrap());
        assert_eq!(&made[..4], b"PK\x03\x04");
        assert_eq!((number(14), number(18), number(22)), (0x352441c2, 3, 3), "CRC-32 and sizes of abc");
        assert_eq!(&made[30..38], b"a.txtabc");
        let end = made.len() - 22;
        assert_eq!((&made[end..end + 4], number(end + 12)), (&b"PK\x05\x06"[..], (46 + 5 + 46 + 1) as u32));
        let directory = number(end + 16) as usize;
        assert_eq!(&made[directory..directory + 4], b"PK\x01\x02");
        assert_eq!((number(directory + 42), number(directory + 51 + 42)), (0, 38), "offsets of both files");
    }
}
