//! Merges the parts of a divided job into one artifact.
//!
//! Each part has recorded its data and its command. Merging repeats that command with [`RecordedParts::run`]: it plans
//! again and thereby detects changed inputs or versions, copies the finished work of the parts, compares every hash,
//! and commits.

use super::export_hf::{self, ExportHfOptions, ExportHfSummary};
use super::gguf::{ExportOptions, ExportSummary, ImportOptions, ImportSummary, export, import};
use super::pack::{self, PackOptions, PackSummary};
use super::quantize::append::{self, AppendOptions, AppendSummary};
use super::quantize::q4::{self, Q4Options, Q4Summary};
use super::unpack::{self, UnpackOptions, UnpackSummary};
use crate::error::{Error, Result};
use crate::iebin::IebinReader;
use crate::job::RecordedParts;
use serde::Serialize;
use std::path::Path;

/// Result of a merge.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Merged {
    /// A pack.
    Pack(PackSummary),
    /// Files of `iec q4`.
    Q4(Q4Summary),
    /// A pack whose attention projections were quantized to q4_0.
    Append(AppendSummary),
    /// A pack converted from a GGUF file.
    Import(ImportSummary),
    /// A GGUF file.
    Export(ExportSummary),
    /// A quantized checkpoint.
    ExportHf(ExportHfSummary),
    /// A checkpoint.
    Unpack(UnpackSummary),
}

/// Merges `parts`, whose output is in `out_dir`; `open_pack` opens the pack that the parts read, if they read one.
///
/// # Errors
/// Parts are missing or damaged, their inputs have changed, or the output cannot be written. In these cases the parts
/// are kept.
pub fn merge(
    parts: &RecordedParts,
    out_dir: &Path,
    open_pack: impl FnOnce(&Path) -> Result<IebinReader>,
) -> Result<Merged> {
    let (run, out_dir) = (parts.run(), out_dir.to_path_buf());
    match parts.command.name.as_str() {
        pack::COMMAND => {
            let options: PackOptions = parts.options()?;
            pack::pack(&PackOptions { out_dir, run, ..options }).map(Merged::Pack)
        }
        q4::COMMAND => {
            let options: Q4Options = parts.options()?;
            q4::write(&Q4Options { out_dir, run, ..options }).map(Merged::Q4)
        }
        append::COMMAND => {
            let options: AppendOptions = parts.options()?;
            append::append_attention(&AppendOptions { model_dir: out_dir, run, ..options }).map(Merged::Append)
        }
        import::COMMAND => {
            let options: ImportOptions = parts.options()?;
            import::import(&ImportOptions { out_dir, run, ..options }).map(Merged::Import)
        }
        export::COMMAND => {
            let options: ExportOptions = parts.options()?;
            let out = out_dir.join(options.out.file_name().unwrap_or_default());
            let reader = open_pack(&options.model_dir)?;
            export::export(&reader, &ExportOptions { out, run, ..options }).map(Merged::Export)
        }
        export_hf::COMMAND => {
            let options: ExportHfOptions = parts.options()?;
            let reader = open_pack(&options.model_dir)?;
            export_hf::export(&reader, &ExportHfOptions { out_dir, run, ..options }).map(Merged::ExportHf)
        }
        unpack::COMMAND => {
            let options: UnpackOptions = parts.options()?;
            let reader = open_pack(&options.model_dir)?;
            unpack::unpack(&reader, &UnpackOptions { out_dir, run, ..options }).map(Merged::Unpack)
        }
        other => {
            Err(Error::corrupt(format!("found parts of an unknown command `{other}`, made by {}", parts.command.iec))
                .at(&parts.dir)
                .help("merge with that version of iec"))
        }
    }
}
