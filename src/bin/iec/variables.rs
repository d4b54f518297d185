//! Environment variables that set options.
//!
//! An option names its variable with `env`; this module adds the other names of the same setting. Scripts of the
//! predecessor set variables without a prefix, such as `THREADS` and `BATCH`. Those are common words that job scripts
//! set for other programs, too, so they act on `iec bench` only; every other command reads names with a prefix.

use crate::global::non_empty_variable;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command, Error};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Variables of one setting; the first one that is set counts. One of the names is the `env` of the option.
const SETTINGS: &[&[&str]] = &[
    &["THREADS", "IE_THREADS"],
    &["MODEL_DIR", "IE_MODEL_DIR", "MODEL"],
    &["IE_PRECISION", "PRECISION"],
    &["IEC_DEVICE", "IE_DEVICE", "DEVICE"],
    &["AFFINITY", "IEC_AFFINITY"],
    &["PREFETCH", "IEC_PREFETCH"],
    &["REPORT_ROOT", "IEC_REPORT_ROOT"],
    &["IEC_HF_DIR", "HF_DIR"],
    &["VERIFY", "VERIFY_HF_IDS"],
];

/// Prefixes of names that no other program uses.
const PREFIXES: [&str; 3] = ["IE_", "IEC_", "HF_"];
/// Names without such a prefix that act on every command all the same.
const EVERYWHERE: [&str; 2] = ["MODEL_DIR", "CHUNK_ROWS"];
/// Name of the command on which variables without a prefix act.
const BENCH: &str = "bench";
/// True if the command line is one of `iec bench`.
static IS_BENCH: AtomicBool = AtomicBool::new(false);

/// Returns `command` with the variables of all options set up, and each listed in the help of its option.
pub fn connected(command: Command) -> Command {
    // Options are set up before the command is known, so its name is searched among the words.
    let names: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
    let mut words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let is_bench = words.find(|word| names.contains(&word.as_str())).is_some_and(|word| word == BENCH);
    IS_BENCH.store(is_bench, Ordering::Relaxed);
    command.mut_args(with_variables).mut_subcommands(|command| command.mut_args(with_variables))
}

fn with_variables(arg: Arg) -> Arg {
    let Some(own) = arg.get_env().map(|name| name.to_string_lossy().into_owned()) else { return arg };
    let setting = SETTINGS.iter().find(|names| names.contains(&own.as_str()));
    let names = setting.map_or_else(|| vec![own.as_str()], |names| names.to_vec());
    let names: Vec<&str> = names.into_iter().filter(|name| acts(name)).collect();
    let set = names.iter().find(|name| non_empty_variable(name).is_some());
    let arg = match (setting.and_then(|names| names.iter().find(|name| Some(*name) == set)), set) {
        (Some(name), _) => arg.env(*name),
        (None, Some(_)) => arg,
        (None, None) => arg.env(None::<&'static str>),
    };
    if names.is_empty() {
        return arg;
    }
    let about = arg.get_help().map(ToString::to_string).unwrap_or_default();
    arg.help(format!("{about} [env: {}]", names.join(", "))).hide_env(true)
}

/// Returns true if the command reads the variable `name`.
pub fn acts(name: &str) -> bool {
    let prefixed = name != "HF_DIR" && PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    prefixed || EVERYWHERE.contains(&name) || IS_BENCH.load(Ordering::Relaxed)
}

/// Adds to an error of the parser the variable that holds the refused value, if it is not a word of the command line.
pub fn name_variable(mut error: Error, parser: &mut Command) -> Error {
    let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) else { return error };
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return error };
    let is_value =
        |word: &str| word.strip_suffix(value.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('='));
    if std::env::args_os().skip(1).any(|word| is_value(&word.to_string_lossy())) {
        return error;
    }
    // Only after `Command::build` does clap format an option as it does in its error messages (`--ctx <N>`).
    parser.build();
    let arguments = parser.get_arguments().chain(parser.get_subcommands().flat_map(Command::get_arguments));
    let name = arguments.filter(|arg| arg.to_string() == *option).find_map(|arg| {
        let name = arg.get_env()?.to_string_lossy().into_owned();
        (std::env::var(&name).as_ref() == Ok(value)).then_some(name)
    });
    if let Some(name) = name {
        let tip = format!("the value comes from the environment variable {name}");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// Returns the variable that names `path` or a directory above it, if the command line does not.
pub fn naming(path: &Path) -> Option<&'static str> {
    if std::env::args_os().skip(1).any(|word| word.as_os_str() != "." && path.starts_with(Path::new(&word))) {
        return None;
    }
    let names = SETTINGS.iter().copied().flatten().chain(&["PROMPTS", "EXPECTED_TOKENS"]);
    names.copied().find(|name| non_empty_variable(name).is_some_and(|value| path.starts_with(value)))
}

#[cfg(test)]
mod tests {
    use crate::Cli;
    use clap::CommandFactory;
    use std::collections::BTreeMap;

    /// Variables that are read without an option.
    const WITHOUT_OPTION: [&str; 4] = ["IEC_LOG", "IEC_CACHE", "IEC_CACHE_MAX", "IEC_API_KEY"];

    #[test]
    fn a_variable_sets_one_thing_in_each_command() {
        let command = Cli::command();
        for subcommand in command.get_subcommands() {
            let mut seen: BTreeMap<&str, String> =
                WITHOUT_OPTION.iter().map(|name| (*name, "no option".to_string())).collect();
            for arg in command.get_arguments().chain(subcommand.get_arguments()) {
                let Some(own) = arg.get_env().and_then(|name| name.to_str()) else { continue };
                let names = super::SETTINGS.iter().find(|names| names.contains(&own)).copied();
                for name in names.unwrap_or(&[own]) {
                    let other = seen.insert(name, arg.get_id().to_string());
                    assert_eq!(other, None, "{}: {name} sets {}, too", subcommand.get_name(), arg.get_id());
                }
            }
        }
    }
}
