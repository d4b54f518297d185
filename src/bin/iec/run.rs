//! `iec run`.

use crate::global::Global;
use iec::error::{Error, Result};

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Machine output on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(_args: Args, _global: &Global) -> Result<()> {
    Err(Error::unsupported("`iec run` is being built"))
}
