//! `iec pull`: downloads a checkpoint. The only command that talks to a network, and only in builds with the feature
//! `hub`.

use crate::global::Global;
use iec::convert::source::hub::RepoSpec;
use iec::error::Result;
use std::path::PathBuf;

/// Arguments of `iec pull`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec pull openai/gpt-oss-20b
  iec pull TinyLlama/TinyLlama-1.1B-Chat-v1.0 --local-dir models/tinyllama
  iec pull my-org/my-model@v2 --json

Downloads the configuration, the tokenizer and the weights (safetensors if there are any) and compares each file with
its hash. Interrupted downloads continue. HF_ENDPOINT names another Hub, HF_TOKEN is the token for private and gated models,
HF_HUB_CACHE or HF_HOME names the cache.")]
pub struct Args {
    /// Repository id, with a branch, tag or commit other than main after @
    #[arg(value_name = "ORG/NAME[@REV]")]
    repo: RepoSpec,
    /// Write the files into this directory instead of the Hugging Face cache
    #[arg(long, value_name = "DIR")]
    local_dir: Option<PathBuf>,
    /// Print what was downloaded as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
#[cfg(feature = "hub")]
pub fn run(args: Args, global: &Global) -> Result<()> {
    use iec::convert::source::hub::pull::{How, PulledFile, pull};
    use iec::units::human_bytes;
    let pulled = pull(&args.repo, args.local_dir.as_deref(), &crate::global::non_empty_variable)?;
    let (there, new): (Vec<_>, Vec<_>) = pulled.files.iter().partition(|f| f.how == How::Present);
    let bytes = |files: &[&PulledFile]| human_bytes(files.iter().map(|f| f.bytes).sum());
    global.note(format_args!(
        "{}: {} files of {} at {}, {} downloaded, {} already there",
        pulled.dir.display(),
        pulled.files.len(),
        pulled.repo,
        &pulled.commit[..12],
        bytes(&new),
        bytes(&there),
    ));
    let option = match args.local_dir {
        Some(dir) => format!("--hf-dir {}", dir.display()),
        None => format!("--hf-repo {}", args.repo),
    };
    global.summarize(format_args!("use it with {option}"), args.json, &pulled)
}

/// Refuses the command and says how to build it in: this build has no feature `hub`.
#[cfg(not(feature = "hub"))]
pub fn run(args: Args, _: &Global) -> Result<()> {
    let target = args.local_dir.map_or(String::new(), |dir| format!(" --local-dir {}", dir.display()));
    Err(iec::error::Error::unsupported("this build of iec has no network code (feature `hub`)").help(format!(
        "build it with `cargo build --release --features hub`, or use `hf download {} --revision {}{target}`",
        args.repo.id, args.repo.revision
    )))
}
