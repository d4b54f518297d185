//! The `iec` command: parses arguments, runs one command, turns errors into messages and exit codes.

#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod advice;
mod arguments;
mod bench;
mod calib;
mod chat;
mod compat;
mod completions;
mod console;
mod constraint_args;
mod dedup;
mod demo;
mod device_args;
mod devices;
mod dry_run;
mod eval;
mod export_gguf;
mod export_hf;
mod fatal;
mod global;
mod harmless;
mod import_gguf;
mod inspect;
mod job;
mod list;
mod man;
mod merge;
mod model;
#[cfg(feature = "serve")]
mod models_dir;
mod names;
mod pack;
mod pack_arg;
mod progress_display;
mod ptq;
mod pull;
mod q4;
mod recipes;
mod report_args;
mod rm;
mod run;
mod sampling;
#[cfg(feature = "serve")]
mod serve;
mod show;
mod sign;
mod simulate;
mod source;
mod synth;
mod tensor_map;
mod tips;
mod tuning;
mod unpack;
mod variables;
mod verify;
mod verify_source;
mod version;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use global::Global;
use iec::error::{Cause, Error};
use iec::session::template::RENDER_TEMPLATE;
use std::process::ExitCode;

/// Converts, quantizes and runs Hugging Face checkpoints on your own machine.
#[derive(Debug, Parser)]
#[command(name = "iec", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Defines the enum of commands for the parser, and the call of each command. A command is a module with a function
/// `run` and a struct `Args`. If the field `json` of `Args` is true, results and errors are printed as JSON on stdout.
macro_rules! commands {
    ($($(#[doc = $help:literal])+ $(#[cfg($feature:meta)])? $name:ident => $module:ident,)+) => {
        #[derive(Debug, Subcommand)]
        enum Command {
            $($(#[doc = $help])+ $(#[cfg($feature)])? $name(Box<$module::Args>),)+
        }

        impl Command {
            fn run(self, global: &Global) -> iec::Result<()> {
                match self {
                    $($(#[cfg($feature)])? Command::$name(args) => $module::run(*args, global),)+
                }
            }

            fn json(&self) -> bool {
                match self {
                    $($(#[cfg($feature)])? Command::$name(args) => args.json,)+
                }
            }
        }
    };
}

commands! {
    /// Packs a Hugging Face checkpoint into model.ie.json + model.ie.bin
    Pack => pack,
    /// Collects activation statistics by which ptq weights quantization errors
    Calib => calib,
    /// Chooses and checks a quantization, and writes its manifest for pack
    Ptq => ptq,
    /// Quantizes weights into q4 files, which pack copies without recomputing
    Q4 => q4,
    /// Merges the parts of a conversion or calibration that was divided with --part
    Merge => merge,
    /// Compresses and deduplicates a pack, losslessly
    Dedup => dedup,
    /// Writes tensor_map.json: name, dtype, shape and byte range of every tensor
    TensorMap => tensor_map,
    /// Shows the content of a checkpoint, pack, GGUF file, manifest or report
    Inspect => inspect,
    /// Converts a GGUF file to a pack
    ImportGguf => import_gguf,
    /// Writes a pack as a GGUF file for llama.cpp
    ExportGguf => export_gguf,
    /// Writes a pack as a quantized checkpoint for vLLM, SGLang and transformers
    ExportHf => export_hf,
    /// Generates text
    Run => run,
    /// Holds a conversation with a model
    Chat => chat,
    /// Serves models over HTTP, with the API of OpenAI and Anthropic
    #[cfg(feature = "serve")]
    Serve => serve,
    /// Lists the packs in the cache
    List => list,
    /// Describes a pack, checkpoint, GGUF file or entry of the cache
    Show => show,
    /// Removes packs from the cache
    Rm => rm,
    /// Checks that a pack gives the tokens of its Hugging Face checkpoint
    Verify => verify,
    /// Measures perplexity, KL divergence and accuracy of a pack
    Eval => eval,
    /// Measures the speed of prefill and decode
    Bench => bench,
    /// Simulates the scheduler under a load of requests, to choose its limits
    Simulate => simulate,
    /// Lists NVIDIA GPUs, and checks their kernels against the CPU
    Devices => devices,
    /// Downloads a checkpoint from the Hugging Face Hub
    Pull => pull,
    /// Checks a downloaded checkpoint against the hashes of the Hugging Face Hub, offline
    VerifySource => verify_source,
    /// Converts a pack back to a checkpoint of safetensors
    Unpack => unpack,
    /// Lists and prints the quantization recipes of the program
    Recipes => recipes,
    /// Signs a pack with a key from a file
    Sign => sign,
    /// Creates a checkpoint with the shapes of a real model and random weights
    Synth => synth,
    /// Runs the whole pipeline on the embedded model
    Demo => demo,
    /// Prints the completion script for a shell
    Completions => completions,
    /// Prints or writes the manual pages
    Man => man,
}

/// Returns the parser of command lines.
fn parser() -> clap::Command {
    arguments::arranged(variables::connected(Cli::command()))
}

fn main() -> ExitCode {
    fatal::install();
    if std::env::args_os().nth(1).is_some_and(|word| word == RENDER_TEMPLATE) {
        return match iec::session::template::answer(std::io::stdin(), console::Stdout) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => report(&e, false, false),
        };
    }
    let mut parser = parser().color(global::color_choice());
    let parsed = parser.try_get_matches_from_mut(arguments::words(std::env::args_os())).and_then(|matches| {
        arguments::check_named_once(&matches, &mut parser)?;
        Cli::from_arg_matches(&matches)
    });
    let cli = match parsed {
        Ok(cli) => cli,
        Err(answer) if answer.kind() == ErrorKind::DisplayVersion && version::wants_details(std::env::args_os()) => {
            return match console::print(version::details()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(e) => report(&e, false, false),
            };
        }
        Err(answer) => return console::parser_answer(&variables::name_variable(tips::name_meant(answer), &mut parser)),
    };
    let (json, colors) = (cli.command.json(), cli.global.colors());
    match cli.global.apply().and_then(|()| cli.command.run(&cli.global)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => report(&e, json, colors),
    }
}

/// Parses a command line that this program wrote itself, as the demo does. Variables set its options, too.
fn parse_line<'a>(words: impl Iterator<Item = &'a str>) -> iec::Result<Cli> {
    let mut parser = parser();
    let matches = parser.try_get_matches_from_mut(std::iter::once("iec").chain(words));
    matches.and_then(|matches| Cli::from_arg_matches(&matches)).map_err(|e| {
        let (message, help) = console::parser_words(&variables::name_variable(e, &mut parser));
        let tip = help.split("\n\n").next().unwrap_or_default();
        Error::usage(message).help(tip.trim_start_matches("tip: "))
    })
}

/// Prints `error:` and `help:` lines on stderr (and a JSON object on stdout with `--json`), and picks the exit code.
fn report(error: &Error, json: bool, colors: bool) -> ExitCode {
    if let Cause::Io(io) = error.cause()
        && io.kind() == std::io::ErrorKind::BrokenPipe
    {
        // The reader has closed stdout, as `head` does; that is no failure of this command.
        return ExitCode::SUCCESS;
    }
    let [red, cyan] = if colors { [console::RED, console::CYAN] } else { [""; 2] };
    console::note_with_label(red, "error:", error);
    if let Some(name) = error.file().and_then(variables::naming) {
        console::note(format_args!("note: this path comes from the environment variable {name}"));
    }
    let help = advice::of(error);
    if let Some(help) = help {
        console::note_with_label(cyan, "help:", help);
    }
    if json {
        let object = serde_json::json!({"error": {
            "kind": error.cause().kind(),
            "message": error.to_string(),
            "file": error.file().map(|p| p.display().to_string()),
            "tensor": error.tensor_name(),
            "help": help,
        }});
        // The exit code reports the failure even if stdout is closed.
        let _ = console::print_json(&object);
    }
    ExitCode::from(error.cause().exit_code())
}
