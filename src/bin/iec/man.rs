//! `iec man`: the manual as pages for `man`, made from the texts of `--help`.

use crate::console;
use crate::global::Global;
use clap_mangen::Man;
use iec::error::{Context, Result};
use iec::output::{Inputs, Rules, Together, make_dir};
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `iec man`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec man | man -l -
  iec man --out-dir ~/.local/share/man/man1
  man iec-run

Without --out-dir the page of the program itself is printed. With it, a page is written for every command.")]
pub struct Args {
    /// Directory for iec.1 and a page for each command; created if it is missing
    #[arg(long, value_name = "DIR")]
    out_dir: Option<PathBuf>,
    /// Replace pages that are there
    #[arg(long, requires = "out_dir")]
    overwrite: bool,
    /// Print the names of the files as JSON on stdout
    #[arg(long, requires = "out_dir")]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let mut parser = crate::parser();
    parser.build();
    let Some(dir) = &args.out_dir else { return console::print_data(String::from_utf8_lossy(&page(parser)?)) };
    make_dir(dir)?;
    let commands = parser.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help");
    let (inputs, mut paths, mut pages) = (Inputs::default(), Vec::new(), Vec::new());
    for command in [&parser].into_iter().chain(commands) {
        // The pages of commands have names such as `iec-run`.
        let name = command.get_display_name().unwrap_or(command.get_name());
        paths.push(dir.join(format!("{name}.1")));
        pages.push(page(command.clone())?);
    }
    let rules = Rules { inputs: &inputs, overwrite: args.overwrite, stdout: false };
    let outputs: Vec<_> = paths.iter().map(|path| (path.as_path(), rules)).collect();
    Together::check(&outputs)?.write(&pages)?;
    global.summarize(format_args!("{}: {} pages", dir.display(), paths.len()), args.json, &json!({"files": paths}))
}

/// Returns the page of a command in the language of `troff`.
fn page(command: clap::Command) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    Man::new(command).render(&mut text).at("manual page")?;
    Ok(text)
}
