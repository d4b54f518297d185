//! Merges the parts of a divided job into one artifact.
//!
//! Each part has recorded its data and its command. Merging repeats that command with [`Share::Merge`]: it plans again
//! and thereby detects changed inputs or versions, copies the finished work of the parts, compares every hash, and
//! commits.

use super::export_hf::{self, ExportHfOptions, ExportHfSummary};
use super::gguf::{ExportOptions, ExportSummary, ImportOptions, ImportSummary, export, import};
use super::pack::{self, PackOptions, PackSummary};
use super::quantize::append::{self, AppendOptions, AppendSummary};
use super::quantize::q4::{self, Q4Options, Q4Summary};
use super::unpack::{self, UnpackOptions, UnpackSummary};
use crate::error::{Error, Result};
use crate::iebin::IebinReader;
use crate::job::{self, Command, Partial, RunOptions, Share};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

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

/// Merges the parts in `out_dir`; `run` has the options of the run, and `open_pack` opens the pack that the parts
/// read, if they read one.
///
/// # Errors
/// No parts or parts of several conversions are found, parts are missing or damaged, their inputs have changed, or the
/// output cannot be written. In these cases the parts are kept.
pub fn merge(out_dir: &Path, run: RunOptions, open_pack: impl FnOnce(&Path) -> Result<IebinReader>) -> Result<Merged> {
    let (parts, command) = the_one_with_parts(out_dir)?;
    let run = RunOptions { share: Share::Merge(parts.clone()), ..run };
    let out_dir = out_dir.to_path_buf();
    match command.name.as_str() {
        pack::COMMAND => {
            let options: PackOptions = options(&command, &parts)?;
            pack::pack(&PackOptions { out_dir, run, ..options }).map(Merged::Pack)
        }
        q4::COMMAND => {
            let options: Q4Options = options(&command, &parts)?;
            q4::write(&Q4Options { out_dir, run, ..options }).map(Merged::Q4)
        }
        append::COMMAND => {
            let options: AppendOptions = options(&command, &parts)?;
            append::append_attention(&AppendOptions { model_dir: out_dir, run, ..options }).map(Merged::Append)
        }
        import::COMMAND => {
            let options: ImportOptions = options(&command, &parts)?;
            import::import(&ImportOptions { out_dir, run, ..options }).map(Merged::Import)
        }
        export::COMMAND => {
            let options: ExportOptions = options(&command, &parts)?;
            let out = out_dir.join(options.out.file_name().unwrap_or_default());
            let reader = open_pack(&options.model_dir)?;
            export::export(&reader, &ExportOptions { out, run, ..options }).map(Merged::Export)
        }
        export_hf::COMMAND => {
            let options: ExportHfOptions = options(&command, &parts)?;
            let reader = open_pack(&options.model_dir)?;
            export_hf::export(&reader, &ExportHfOptions { out_dir, run, ..options }).map(Merged::ExportHf)
        }
        unpack::COMMAND => {
            let options: UnpackOptions = options(&command, &parts)?;
            let reader = open_pack(&options.model_dir)?;
            unpack::unpack(&reader, &UnpackOptions { out_dir, run, ..options }).map(Merged::Unpack)
        }
        other => Err(Error::corrupt(format!("found parts of an unknown command `{other}`, made by {}", command.iec))
            .at(parts)
            .help("merge with that version of iec")),
    }
}

fn the_one_with_parts(out_dir: &Path) -> Result<(PathBuf, Command)> {
    let with_parts = |partial: Partial| partial.command.map(|command| (partial.path, command));
    let mut found: Vec<(PathBuf, Command)> = job::partials(out_dir)?.into_iter().filter_map(with_parts).collect();
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => {
            job::remove_over(out_dir);
            Err(Error::corrupt("found no parts to merge")
                .at(out_dir)
                .help("first run all parts into this directory, such as `iec pack … --part 1/N` to `--part N/N`"))
        }
        _ => {
            let names: Vec<String> = found.iter().map(|(path, _)| path.display().to_string()).collect();
            Err(Error::corrupt(format!("found parts of {} different conversions: {}", names.len(), names.join(", ")))
                .at(out_dir)
                .help(
                    "move or delete all these directories but the one to merge; command.json in each names its command",
                ))
        }
    }
}

fn options<T: DeserializeOwned>(command: &Command, parts: &Path) -> Result<T> {
    serde_json::from_value(command.options.clone()).map_err(|e| {
        Error::corrupt(format!("the command of {} cannot be read: {e}", command.iec))
            .at(parts)
            .help("merge with that version of iec, or run the parts again with this one")
    })
}
