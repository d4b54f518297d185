//! `iec completions`: prints the script with which a shell completes commands, options and their values.

use crate::console;
use crate::global::Global;
use clap_complete::Shell;
use iec::error::Result;

/// Arguments of `iec completions`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec completions bash > ~/.local/share/bash-completion/completions/iec
  iec completions zsh > ~/.zfunc/_iec
  iec completions fish > ~/.config/fish/completions/iec.fish")]
pub struct Args {
    /// Shell for which the script is printed
    #[arg(value_enum)]
    shell: Shell,
    #[arg(skip)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, _global: &Global) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::parser(), "iec", &mut script);
    console::print_data(String::from_utf8_lossy(&script))
}
