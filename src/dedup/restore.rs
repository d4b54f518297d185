//! Verifies that a store rebuilds its pack, and restores the pack.

use super::artifact::Chain;
use super::description::{Description, FILE_NAMES, JSON_NAME, Payload};
use super::store::{Room, Store};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin;
use crate::iebin::writer::PACK;
use crate::output::{AtomicFile, DirLock, OutDir, require_space, swap, sync_dir, write_atomically};
use crate::progress::{self, ProgressBar};
use crate::sha256::{Digest, Sha256};
use std::path::Path;

/// Returns true for a pack whose binary was removed and that has a store from which it can be rebuilt.
///
/// # Errors
/// The system cannot tell whether its files exist.
pub fn is_reduced(dir: &Path) -> Result<bool> {
    Ok(!files::exists(&dir.join(iebin::BIN_NAME))? && files::exists(&dir.join(JSON_NAME))?)
}

/// Rebuilds every payload in memory and compares its hash; returns the number of bytes that were compared.
///
/// # Errors
/// A file is missing or was changed.
pub fn verify(dir: &Path) -> Result<u64> {
    Store::open(dir, &Chain::default()).map_err(Error::while_opening_model)?.verify_all()
}

/// Verifies a store as [`verify`] does, with `text` in place of `model.dedup.json`.
///
/// # Errors
/// The same as for [`verify`].
pub fn verify_as(dir: &Path, text: &[u8]) -> Result<u64> {
    let description = Description::parse(text).at(dir.join(JSON_NAME));
    let pack = dir.join(iebin::JSON_NAME);
    let store = description.and_then(|description| Store::of(description, &pack, dir, &Chain::default()));
    store.map_err(Error::while_opening_model)?.verify_all()
}

/// Removes the binary of a pack after its store was verified.
///
/// # Errors
/// The verification fails; then nothing is removed.
pub fn remove_original(dir: &Path) -> Result<()> {
    let _lock = DirLock::acquire(dir).map_err(Error::while_opening_model)?;
    swap::settle(dir, PACK)?;
    verify(dir)?;
    let binary = dir.join(iebin::BIN_NAME);
    std::fs::remove_file(&binary).at(&binary)?;
    sync_dir(dir)
}

/// Writes the binary again into `out_dir`, with the files that belong to a pack; every payload is compared with its
/// hash. Returns the length of the binary in bytes.
///
/// # Errors
/// A file is missing or was changed, or the disk is full. In these cases no incomplete binary is left.
pub fn restore(dir: &Path, out_dir: &Path) -> Result<u64> {
    let open = || Store::open(dir, &Chain::default()).map_err(Error::while_opening_model);
    drop(open()?);
    let out = OutDir::make(out_dir)?;
    let _lock = DirLock::acquire(out.path())?;
    // Opened again, because another command may have replaced the pack before the lock was taken.
    let store = open()?;
    let total = store.description.total_bytes;
    refuse_other_pack(dir, out_dir)?;
    require_space(out.path(), total, 0)?;
    let bar = progress::bytes("restore", total);
    let path = out.path().join(iebin::BIN_NAME);
    let file = AtomicFile::create(&path)?;
    file.file().set_len(total).at(&path)?;
    let mut room = Room::default();
    for (i, payload) in store.description.payloads.iter().enumerate() {
        write_payload(&store, i, payload, &mut room, &file, &bar).at(&path)?;
    }
    file.commit()?;
    copy_companions(dir, out.path())?;
    Ok(total)
}

/// Refuses an `out_dir` that holds another pack.
fn refuse_other_pack(dir: &Path, out_dir: &Path) -> Result<()> {
    let there = out_dir.join(iebin::JSON_NAME);
    if !files::exists(&there)? || files::read(&there)? == files::read(&dir.join(iebin::JSON_NAME))? {
        return Ok(());
    }
    Err(Error::usage("found another pack").at(out_dir).help("choose another --out-dir"))
}

/// Copies tokenizer, configuration and description; the description last, because with it a pack is complete.
fn copy_companions(dir: &Path, out_dir: &Path) -> Result<()> {
    if dir.canonicalize().at(dir)? == out_dir.canonicalize().at(out_dir)? {
        return Ok(());
    }
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).at(dir)? {
        let entry = entry.at(dir)?;
        let name = entry.file_name();
        let ours = [iebin::BIN_NAME, iebin::JSON_NAME, JSON_NAME].iter().chain(&FILE_NAMES).any(|own| name == **own);
        if !ours && files::is_file(&entry.path())? && !name.as_encoded_bytes().starts_with(b".") {
            names.push(name);
        }
    }
    names.push(iebin::JSON_NAME.into());
    names.iter().try_for_each(|name| {
        let (from, to) = (dir.join(name), out_dir.join(name));
        write_atomically(&to, &files::read(&from)?)
    })
}

fn write_payload(
    store: &Store,
    i: usize,
    payload: &Payload,
    room: &mut Room,
    file: &AtomicFile,
    bar: &ProgressBar,
) -> Result<()> {
    let (mut hasher, mut at) = (Sha256::new(), payload.offset);
    store.pieces(i, room, |bytes| {
        hasher.update(bytes);
        file.write_at(bytes, at)?;
        at += bytes.len() as u64;
        bar.inc(bytes.len() as u64);
        Ok(())
    })?;
    store.compare(payload, hasher)
}
