//! Makes an entry of the cache: packs, imports or quantizes its source.

use super::Identity;
use super::record::Record;
use super::source::{FoundModel, ModelKind};
use crate::convert::Checkpoint;
use crate::convert::gguf::import::{ImportOptions, import};
use crate::convert::pack::{PackOptions, pack};
use crate::convert::quantize::judge::OnFailure;
use crate::convert::quantize::ptq::Measured;
use crate::convert::quantize::select::SelectionOptions;
use crate::error::{Cause, Error, Result};
use crate::generate::text::strftime_now;
use crate::iebin::reader::read_description;
use crate::iebin::{Entry, IebinReader, JSON_NAME, Store};
use crate::job::{RunOptions, this_version};
use crate::output::{Inputs, Rules, Target};
use crate::progress;
use crate::provenance::Gate;
use crate::quant_spec::QuantFields;
use crate::runtime::Precision;
use crate::runtime::cpu::place::physical_cores;
use crate::trial::ModelSource;
use crate::trial::ptq::{Ptq, PtqOptions};
use crate::units::human_bytes;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// File name of the quantization manifest in an entry.
const MANIFEST_NAME: &str = "q4_manifest.json";

/// Weights that an entry holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Weights of the source, unchanged.
    Source,
    /// Matrices quantized to 8 bits.
    Int8,
    /// Matrices quantized to 4 bits.
    Int4,
}

impl Wanted {
    const ALL: [Wanted; 3] = [Wanted::Source, Wanted::Int8, Wanted::Int4];

    /// Returns the weights that a precision needs.
    pub fn of(precision: Option<Precision>) -> Wanted {
        match precision {
            Some(Precision::Int4 | Precision::Int4w) => Wanted::Int4,
            Some(Precision::Int8 | Precision::Int8w) => Wanted::Int8,
            Some(Precision::Fp32 | Precision::Bf16 | Precision::Fp16) | None => Wanted::Source,
        }
    }

    /// Returns the name in records.
    pub fn name(self) -> &'static str {
        match self {
            Wanted::Source => "source",
            Wanted::Int8 => "int8",
            Wanted::Int4 => "int4",
        }
    }

    /// Returns the weights of this name.
    pub fn by_name(name: &str) -> Option<Wanted> {
        Wanted::ALL.into_iter().find(|wanted| wanted.name() == name)
    }

    /// Returns the bits per weight for quantization.
    fn bits(self) -> Option<u32> {
        match self {
            Wanted::Source => None,
            Wanted::Int8 => Some(8),
            Wanted::Int4 => Some(4),
        }
    }
}

/// Returns true if a checkpoint has weights of 4 bits, with which `int4` runs without further quantization.
///
/// # Errors
/// The checkpoint is not valid or not supported.
pub(super) fn has_4_bit_weights(source: &FoundModel) -> Result<bool> {
    let checkpoint = Checkpoint::open(&source.path).map_err(invalid)?;
    Ok(checkpoint.tensors().iter().any(|t| matches!(t.store, Store::Tiled(spec) if spec.scheme.bits() == 4)))
}

/// Packs `source` into the directory of an entry, which the caller has locked, and writes its record.
///
/// # Errors
/// The source cannot be packed, it changes meanwhile, or the gate refuses its quantization. A directory without work
/// that a later call can continue is removed then.
pub(super) fn make(source: &FoundModel, wanted: Wanted, identity: &Identity, dir: &Path) -> Result<()> {
    let made = fill(source, wanted, dir).and_then(|summary| {
        let now = Identity::of(source, wanted)?;
        if now.fingerprint != identity.fingerprint {
            return Err(Error::corrupt("found files that changed while they were packed")
                .at(&source.path)
                .help("run the command again"));
        }
        let record = Record {
            schema_version: 0,
            source: identity.path.display().to_string(),
            repo: source.repo.clone(),
            kind: source.kind.name().into(),
            weights: wanted.name().into(),
            dtype: read_description(&dir.join(JSON_NAME))?.dtype,
            origin: identity.origin.clone(),
            fingerprint: identity.fingerprint.clone(),
            created: strftime_now("%FT%TZ").expect("all directives are known"),
            created_by: this_version(),
            files: BTreeMap::new(),
        };
        record.write(dir).map(|()| summary)
    });
    match made {
        Ok(summary) => {
            let shown = source.repo.clone().unwrap_or_else(|| source.path.display().to_string());
            progress::detail(0, || {
                format!("note: packed {shown} into the cache ({summary}); `iec list` shows it as {}", identity.name)
            });
            Ok(())
        }
        Err(e) => {
            discard_unless_resumable(dir);
            Err(invalid(e))
        }
    }
}

/// Makes the pack; returns its summary in words.
fn fill(source: &FoundModel, wanted: Wanted, dir: &Path) -> Result<String> {
    let (path, out_dir) = (source.path.clone(), dir.to_path_buf());
    let (bytes, bits, more) = match (source.kind, wanted.bits()) {
        (ModelKind::Gguf, None) => {
            let made = import(&ImportOptions { file: path, out_dir, overwrite: true, ..ImportOptions::default() })?;
            let decoded = made.decoded().map_or_else(String::new, |text| format!("; {text}"));
            (made.bytes, made.bits_per_weight, decoded)
        }
        (_, None) => {
            let made = pack(&PackOptions { hf_dir: path, out_dir, overwrite: true, ..PackOptions::default() })?;
            (made.bytes, made.bits_per_weight, String::new())
        }
        (_, Some(bits)) => {
            let (manifest, gate) = quantize(source, bits, dir)?;
            let options = PackOptions { hf_dir: path, out_dir, overwrite: true, ..PackOptions::default() };
            let made = pack(&PackOptions { manifest: Some(manifest), ..options })?;
            (made.bytes, made.bits_per_weight, format!("; {gate}"))
        }
    };
    Ok(format!("{}, {bits:.2} bits per weight{more}", human_bytes(bytes)))
}

/// Returns true if all weights of a pack are floats. A pack that cannot be read is reported when it is opened.
pub(super) fn has_only_floats(pack: &Path) -> bool {
    let is_float = |entry: &Entry| matches!(entry.store, Store::Plain(_));
    IebinReader::open(pack).is_ok_and(|reader| reader.entries().iter().all(is_float))
}

/// Chooses and checks the quantization of a model as `iec ptq --bits` does, with its defaults; returns the path of the
/// manifest and the result of the gate in words.
fn quantize(source: &FoundModel, bits: u32, dir: &Path) -> Result<(PathBuf, String)> {
    let out = dir.join(MANIFEST_NAME);
    let ptq = Ptq::open(PtqOptions {
        model: ModelSource { path: source.path.clone(), config: None },
        out: out.clone(),
        selection: SelectionOptions {
            fields: QuantFields { bits: Some(bits), ..QuantFields::default() },
            ..SelectionOptions::default()
        },
        rules: None,
        calibration: None,
        gate: Gate::default(),
        gate_text: None,
        on_failure: OnFailure::Refuse,
        max_bits: None,
        budget: None,
        force: false,
        pack: false,
        shown_tensor: None,
        threads: physical_cores(),
        run: RunOptions::default(),
    })?;
    let quantized = ptq.quantize()?;
    let target = Target::check(&out, Rules { inputs: &Inputs::default(), overwrite: true, stdout: false })?;
    target.write(&quantized.manifest().map_err(|e| refused(e, source, bits))?)?;
    Ok((out, gate_in_words(&quantized.measured)))
}

/// Replaces the help of a gate's refusal by commands for a model in the cache.
fn refused(e: Error, source: &FoundModel, bits: u32) -> Error {
    match e.cause() {
        Cause::Refused(found) => {
            let path = source.path.display();
            Error::refused(found.clone()).at(&source.path).help(format!(
                "store the tensors that fail in more bits: `iec pack {path} --bits {bits} --keep-failing int8 \
                 --out-dir DIR`, and run DIR; or leave out --precision"
            ))
        }
        _ => e,
    }
}

/// Describes the weakest results of the quantized tensors.
fn gate_in_words(measured: &Measured) -> String {
    let metrics = || measured.document.tensors.values().filter_map(|entry| entry.metrics);
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::INFINITY, f64::min);
    let mean = least(&mut metrics().map(|metrics| metrics.cosine_mean));
    let worst = least(&mut metrics().map(|metrics| metrics.cosine_min));
    format!("{} matrices pass the gate, least cosine {mean:.4}, worst row {worst:.4}", metrics().count())
}

/// Removes what a failed run leaves, unless a later one can continue it. The caller keeps its
/// lock until it drops it.
fn discard_unless_resumable(dir: &Path) {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_work = |name: std::ffi::OsString| name.to_string_lossy().ends_with(crate::output::swap::PARTIAL.1);
    if !names.into_iter().any(is_work) {
        let _ = crate::output::stale::remove_whole(dir);
    }
}

/// Turns damaged input into the error of an invalid model.
fn invalid(e: Error) -> Error {
    if matches!(e.cause(), Cause::Corrupt(_)) { e.while_opening_model() } else { e }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantized_precisions_want_quantized_weights() {
        for (precision, expected) in [
            (None, Wanted::Source),
            (Some(Precision::Bf16), Wanted::Source),
            (Some(Precision::Int8w), Wanted::Int8),
            (Some(Precision::Int4), Wanted::Int4),
        ] {
            assert_eq!(Wanted::of(precision), expected);
            assert_eq!(Wanted::by_name(expected.name()), Some(expected));
        }
        assert_eq!(Wanted::by_name("int3"), None);
    }
}
