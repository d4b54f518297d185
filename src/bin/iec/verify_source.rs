//! `iec verify-source`: compares a downloaded checkpoint with the hashes of the Hugging Face Hub.

use crate::console;
use crate::global::Global;
use crate::source::SourceArgs;
use iec::convert::source::hub::verify::{Hashes, Report, Status, verify};
use iec::error::{Cause, Error, Result};
use iec::files;
use iec::units::human_bytes;
use serde_json::json;

/// Help of the first argument.
const CHECKPOINT: &str = "The checkpoint: a directory, or the id ORG/NAME of a repository in the Hugging Face cache";

/// Arguments of `iec verify-source`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "iec verify-source [OPTIONS] <CHECKPOINT>")]
#[command(mut_arg("checkpoint", |arg| arg.value_name("CHECKPOINT").help(CHECKPOINT)))]
#[command(mut_arg("hf_dir", |arg| arg.help("The directory of a downloaded checkpoint")))]
#[command(group = clap::ArgGroup::new("source").required(true).args(["checkpoint", "hf_dir", "hf_repo"]))]
#[command(after_help = "Examples:
  iec verify-source openai/gpt-oss-20b
  iec verify-source models/tinyllama --json

Every file is compared with its hash on the Hub. In the cache, the hash is the name of the blob; in a directory of
`hf download --local-dir`, the metadata has it. No network is used. Exit code 4 when something is missing or differs.")]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Print the report as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let dir = args.source.required()?;
    if files::is_file(&dir)? {
        return Err(Error::usage("expected the directory of a checkpoint, not a file").at(dir));
    }
    let report = verify(&dir).map_err(|e| match e.cause() {
        Cause::Io(_) => {
            e.help("name the directory of a downloaded checkpoint with --hf-dir, or its repository with --hf-repo")
        }
        _ => e,
    })?;
    if args.json {
        let mut json = json!(report);
        json["ok"] = report.is_good().into();
        console::print_json(&json)?;
    } else {
        print(&report, global)?;
    }
    if report.is_good() {
        return Ok(());
    }
    let bad = report.count(Status::Damaged) + report.count(Status::Missing);
    let first = report.files.iter().find(|f| matches!(f.status, Status::Damaged | Status::Missing));
    let what = match (first, report.problems.first()) {
        (Some(file), _) => {
            format!("{bad} files are missing or differ from those of the Hub, the first is {}", file.name)
        }
        (None, Some(problem)) => problem.clone(),
        (None, None) => "the checkpoint is incomplete".into(),
    };
    let again = if cfg!(feature = "hub") { "`iec pull` or `hf download`" } else { "`hf download`" };
    Err(Error::refused(what).at(dir).help(format!(
        "delete the damaged files and download them again ({again}); in the Hugging Face cache also delete the blobs \
         that their links lead to, because a blob that exists is not downloaded again"
    )))
}

fn print(report: &Report, global: &Global) -> Result<()> {
    for file in &report.files {
        let status = match file.status {
            Status::Ok => "ok",
            Status::Damaged => "DAMAGED",
            Status::Missing => "MISSING",
            Status::Unchecked => "unchecked",
        };
        let size = file.bytes.map_or("-".into(), human_bytes);
        console::print_line(format_args!("{status:<9}  {size:>10}  {}", file.name))?;
        if let (Some(expected), Some(found)) = (&file.expected, &file.found) {
            console::print_line(format_args!("           expected {expected}, found {found}"))?;
        }
    }
    for problem in &report.problems {
        console::print_line(format_args!("PROBLEM    {problem}"))?;
    }
    let source = match report.hashes {
        Hashes::CacheBlobs => "hashes come from the names of the cache's blobs",
        Hashes::DownloadMetadata => "hashes come from the metadata of the download",
        Hashes::None => "a plain directory has no record of hashes; only headers and completeness were checked",
    };
    global.note(format_args!(
        "{}: {} ok, {} unchecked; {source}",
        report.dir.display(),
        report.count(Status::Ok),
        report.count(Status::Unchecked)
    ));
    Ok(())
}
