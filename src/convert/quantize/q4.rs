//! Writes the quantized bytes of a model as a stream: codes, scales and a manifest that `pack --q4-map` takes over.
//!
//! `model.q4.bin` holds canonical codes, `model.q4.scales.fp16.bin` the scales of each tensor followed by its zero points
//! (scales are fp16 unless the entry says otherwise); `q4_manifest.expanded.json` says where each tensor lies and carries
//! the hashes of both. The three files appear together or not at all.

use super::ptq::{already_quantized, blank_entry, created_by, selected};
use super::select::Selection;
use super::weights::{Tensor, Weights};
use crate::atomic_file::AtomicFile;
use crate::error::{Context, Error, Result};
use crate::iebin::{Source, SourceFile};
use crate::manifest::{Document, PackedJson, TensorEntry, TensorQuant, VERSION};
use crate::quant::stream::{self, CanonicalChunk, Stack};
use crate::sha256::{Digest, Sha256, hex};
use crate::{interrupt, progress};
use indicatif::ProgressBar;
use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// File of the codes.
pub const CODES_NAME: &str = "model.q4.bin";
/// File of the scales and zero points.
pub const SCALES_NAME: &str = "model.q4.scales.fp16.bin";
/// File of the manifest.
pub const MANIFEST_NAME: &str = "q4_manifest.expanded.json";

/// Quantizes every selected tensor of `weights` into `out_dir`, which is made when missing; `chunk_rows` rows are read at
/// once (the bytes do not depend on it).
///
/// # Errors
/// Nothing is selected, a tensor cannot be quantized, the manifest of the selection was made from other weights, or the
/// output cannot be written; no file is left then.
pub fn write(weights: &Weights, selection: &Selection, out_dir: &Path, chunk_rows: Option<usize>) -> Result<Document> {
    let work = selected(weights, selection)?;
    let created = !out_dir.exists();
    std::fs::create_dir_all(out_dir).at(out_dir)?;
    let result = write_into(weights, selection, &work, out_dir, chunk_rows);
    if created && result.is_err() {
        // Only when empty: what others put there meanwhile stays.
        let _ = std::fs::remove_dir(out_dir);
    }
    result
}

fn write_into(
    weights: &Weights,
    selection: &Selection,
    work: &[(Tensor, TensorQuant)],
    out_dir: &Path,
    chunk_rows: Option<usize>,
) -> Result<Document> {
    let mut out = Output {
        codes: HashedFile::create(out_dir, CODES_NAME)?,
        scales: HashedFile::create(out_dir, SCALES_NAME)?,
        bar: progress::bytes("quantizing", work.iter().map(|(t, _)| t.shape.iter().product::<usize>() as u64).sum()),
    };
    let (source, tensors) = rayon::join(|| weights.source(), || out.tensors(weights, selection, work, chunk_rows));
    out.bar.finish_and_clear();
    let (source, tensors) = (source?, tensors?);
    refuse_other_source(selection, source.as_ref())?;
    let (defaults, rules) = selection.document_rules();
    let (codes, codes_file) = out.codes.finish();
    let (scales, scales_file) = out.scales.finish();
    let document = Document {
        version: VERSION,
        created_by: Some(created_by()),
        source,
        defaults,
        rules,
        gate: selection.manifest().and_then(|m| m.document().gate),
        refused: selection.manifest().is_some_and(|m| m.document().refused),
        files: vec![codes_file, scales_file],
        tensors,
    };
    let mut manifest = AtomicFile::create(&out_dir.join(MANIFEST_NAME))?;
    manifest.write_all(&document.to_json()).at(out_dir)?;
    commit([codes, scales, manifest])?;
    Ok(document)
}

/// A manifest from other weights would put its verdict on bytes it has not seen.
fn refuse_other_source(selection: &Selection, found: Option<&Source>) -> Result<()> {
    let Some(expected) = selection.manifest().and_then(|m| m.document().source.as_ref()) else { return Ok(()) };
    if Some(expected) == found {
        return Ok(());
    }
    Err(Error::corrupt("the manifest was made from other weights than this checkpoint holds")
        .help("make the manifest again with `iec ptq` from this checkpoint"))
}

/// The two binaries being written.
struct Output {
    codes: HashedFile,
    scales: HashedFile,
    bar: ProgressBar,
}

impl Output {
    fn tensors(
        &mut self,
        weights: &Weights,
        selection: &Selection,
        work: &[(Tensor, TensorQuant)],
        chunk_rows: Option<usize>,
    ) -> Result<BTreeMap<String, TensorEntry>> {
        let mut entries = BTreeMap::new();
        for (tensor, quant) in work {
            let entry = match already_quantized(tensor)? {
                Some(kept) => kept,
                None => self.tensor(weights, selection, tensor, *quant, chunk_rows).tensor(&tensor.name)?,
            };
            entries.insert(tensor.name.clone(), entry);
        }
        for (name, entry) in selection.kept_entries() {
            entries.entry(name).or_insert(entry);
        }
        Ok(entries)
    }

    fn tensor(
        &mut self,
        weights: &Weights,
        selection: &Selection,
        tensor: &Tensor,
        quant: TensorQuant,
        chunk_rows: Option<usize>,
    ) -> Result<TensorEntry> {
        let (count, rows, cols) = tensor.matrices()?;
        let (codes_start, scales_start) = (self.codes.len, self.scales.len);
        let mut zeros = Vec::new();
        let bar = self.bar.clone();
        let read = |matrix: usize, rows: Range<usize>, out: &mut [f32]| {
            bar.inc(out.len() as u64);
            weights.read_rows_f32(tensor, matrix, rows, out)
        };
        let stack = Stack { count, rows, cols, read: &read, chunk_rows };
        let outcome = stream::quantize(quant, &stack, &mut |chunk: CanonicalChunk| {
            zeros.extend_from_slice(&chunk.zeros);
            self.codes.append(&chunk.codes)?;
            self.scales.append(&chunk.scales)
        })?;
        let scales_end = self.scales.len;
        self.scales.append(&zeros)?;
        let affine = !quant.spec.symmetric;
        let packed = PackedJson {
            packed_bin: CODES_NAME.to_string(),
            q4_offset: codes_start,
            q4_nbytes: self.codes.len - codes_start,
            scale_bin: SCALES_NAME.to_string(),
            scale_offset: scales_start,
            scale_nbytes: scales_end - scales_start,
            zero_offset: affine.then_some(scales_end),
            zero_nbytes: affine.then_some(zeros.len() as u64),
            bias: 0,
        };
        let decided = selection.manifest().and_then(|m| m.document().tensors.get(&tensor.name)).cloned();
        let entry = decided.map_or_else(|| blank_entry(tensor), Ok)?;
        Ok(TensorEntry { quant: Some(quant), metrics: Some(outcome.metrics), packed: Some(packed), ..entry })
    }
}

/// An output file that knows its length and hash.
struct HashedFile {
    file: AtomicFile,
    path: PathBuf,
    name: &'static str,
    hash: Sha256,
    len: u64,
}

impl HashedFile {
    fn create(dir: &Path, name: &'static str) -> Result<HashedFile> {
        let path = dir.join(name);
        Ok(HashedFile { file: AtomicFile::create(&path)?, path, name, hash: Sha256::new(), len: 0 })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        self.file.write_all(bytes).at(&self.path)
    }

    fn finish(self) -> (AtomicFile, SourceFile) {
        (self.file, SourceFile { name: self.name.to_string(), bytes: self.len, sha256: hex(self.hash) })
    }
}

/// Gives the files their names, the manifest last. An older manifest goes first, so that none ever describes files of
/// another run; when a rename fails, what was named before is removed.
fn commit(files: [AtomicFile; 3]) -> Result<()> {
    interrupt::check()?;
    let remove = |path: &Path| match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).at(path),
        _ => Ok(()),
    };
    remove(files[2].path())?;
    let mut named: Vec<PathBuf> = Vec::new();
    for file in files {
        let path = file.path().to_path_buf();
        if let Err(e) = file.commit() {
            named.iter().try_for_each(|path| remove(path))?;
            return Err(e);
        }
        named.push(path);
    }
    Ok(())
}
