//! Compares the weights of a model with their recorded hashes while the model is served.
//!
//! Kernels read weights where they are mapped, so opening a pack compares none of them. One thread per model reads the
//! file once, with the lowest priority and a pause three times as long as each piece takes. If a tensor differs, the
//! model takes no more requests: its answers would be those of another model.

use super::Shared;
use crate::error::{Error, Result};
use crate::host::metrics::ModelMetrics;
use crate::host::model::Model;
use crate::iebin::IebinReader;
use crate::mapped::MappedFile;
use crate::resources::spawn;
use crate::sha256::{Digest, Sha256, hex};
use std::sync::Arc;
use std::time::Instant;

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;
/// Time of a pause, in times of a piece.
const PAUSE: u32 = 3;
/// Change of the priority of the thread.
const NICE: i32 = 19;

/// A tensor with its place in the file and its recorded hash.
struct Recorded {
    name: String,
    offset: usize,
    bytes: usize,
    sha256: String,
}

/// Starts the comparison, if the pack records hashes. The weights of a deduplicated pack are compared when they are
/// rebuilt.
///
/// # Errors
/// The system refuses the thread.
pub fn start(model: &Arc<Model>, reader: &IebinReader, metrics: &Arc<ModelMetrics>, shared: &Shared) -> Result<()> {
    let Ok(file) = reader.bin() else { return Ok(()) };
    let recorded = reader.entries().iter().filter_map(|entry| {
        let (name, sha256) = (entry.name.clone(), entry.sha256.clone()?);
        Some(Recorded { name, offset: entry.offset, bytes: entry.nbytes, sha256 })
    });
    let recorded: Vec<Recorded> = recorded.collect();
    if recorded.is_empty() {
        return Ok(());
    }
    let (model, file, metrics, log) = (model.clone(), file.clone(), metrics.clone(), shared.log.clone());
    spawn("iec-check", move || {
        // Where the priority cannot change, the pauses suffice.
        let _ = rustix::process::nice(NICE);
        let differing = recorded.iter().find_map(|tensor| {
            let found = compare(&file, tensor).err();
            metrics.checked_tensor(found.is_none());
            found
        });
        match differing {
            None => log(&format!("the weights of `{}` are as recorded", model.name)),
            Some(e) => {
                model.set_damaged();
                log(&format!("`{}` takes no more requests: {e}; make the pack again and start the server", model.name));
            }
        }
    })
    .map(drop)
}

/// Compares a tensor with its hash.
fn compare(file: &MappedFile, tensor: &Recorded) -> Result<()> {
    let (mut hash, mut done) = (Sha256::new(), 0);
    let mut piece = vec![0; PIECE.min(tensor.bytes)];
    while done < tensor.bytes {
        let begin = Instant::now();
        let piece = &mut piece[..PIECE.min(tensor.bytes - done)];
        file.read_at((tensor.offset + done) as u64, piece)?;
        hash.update(&*piece);
        done += piece.len();
        std::thread::sleep(begin.elapsed() * PAUSE);
    }
    let found = hex(hash);
    match found == tensor.sha256 {
        true => Ok(()),
        false => {
            let found = format!("found the SHA-256 {found}, expected {} from the description", tensor.sha256);
            Err(Error::corrupt(found).at(file.path()).tensor(&tensor.name))
        }
    }
}
