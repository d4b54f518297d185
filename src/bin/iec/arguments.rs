//! Short forms and aliases of options, and the options that `-h` and `--help` show.
//!
//! `--help` shows every option with its whole description. `-h` shows only the first clause of each description, and
//! for commands with many options only those in [`SHOWN`].

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, Error, ValueHint};
use std::ffi::OsString;

/// Heading of the options that every command takes.
pub const GLOBAL: &str = "Global options";

/// Short forms and hidden names of options, by identifier: the names that similar programs give them. A short form or
/// name applies to every command that has the option.
const SPELLINGS: &[(&str, Option<char>, &[&str])] = &[
    ("model_dir", Some('m'), &["model"]),
    ("prompt", Some('p'), &[]),
    ("max_new", Some('n'), &["max-tokens", "max-new-tokens", "n-predict", "predict", "num-predict"]),
    ("ctx", Some('c'), &["ctx-size", "num-ctx", "context-length", "max-model-len"]),
    ("gpu_layers", None, &["n-gpu-layers", "ngl", "num-gpu"]),
    ("threads", Some('t'), &["num-threads"]),
    ("out_dir", Some('o'), &["output-dir"]),
    ("out", Some('o'), &["output"]),
];

/// Options of llama.cpp with one dash and several letters, and the names that replace them. The parser would read such
/// a word as several short options. Names that no command has get a tip.
const ONE_DASH: [(&str, &str); 8] = [
    ("-ngl", "--gpu-layers"),
    ("-hf", "--hf-repo"),
    ("-sys", "--system-prompt"),
    ("-cnv", "--conversation"),
    ("-md", "--model-draft"),
    ("-fa", "--flash-attn"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
];

/// Headings of the options that commands with a model share, with their identifiers. The order of headings is that of
/// the arguments.
const GROUPS: [(&str, &str); 3] = [
    (
        "Input",
        "model_dir model_json model_bin tokenizer prompt one_prompt prompts_file prompt_len chat system raw \
         chat_template chat_template_kwargs load text kl_ref hf_dir trace hashes key check compare",
    ),
    ("Measurement", "ref_precision windows loglikelihood choices exact_match few_shot limit regex no_bos"),
    (
        "Performance",
        "precision device gpu_layers speculate draft_model_dir ctx kv kv_memory batch prefix_cache state_dir state_disk \
         plan",
    ),
];

/// Heading of the other options of these commands.
const OUTPUT: &str = "Output";

/// Commands whose `-h` shows only some options, with the identifiers of these.
const SHOWN: &[(&str, &str)] = &[
    (
        "run",
        "prompt prompts_file chat max_new stop json seed temperature top_k top_p json_schema precision device ctx \
         plan",
    ),
    (
        "chat",
        "prompt system chat_template load think max_new json seed temperature top_k top_p min_p repeat_penalty \
         precision device ctx",
    ),
    (
        "bench",
        "prompts_file prompt_len max_new runs batch depth profile html json compare precision device gpu_layers ctx kv",
    ),
    (
        "eval",
        "text kl_ref windows choices exact_match loglikelihood few_shot limit details json precision device ctx kv",
    ),
    (
        "verify",
        "hf_dir prompts_file max_new trace hashes key tokenizer_only gate min_agreement out json lora precision device",
    ),
    (
        "ptq",
        "model_dir out overwrite bits scheme group_size method calib rules include_lm_head gate gate_text \
         target_bpw dry_run json",
    ),
    (
        "serve",
        "models config check_only host port api-key-file max-seqs max-queue state-dir adapter-dir lora precision \
         device ctx kv_memory",
    ),
    (
        "simulate",
        "requests rate bursts keys flood prompt_tokens answer_tokens max_tokens seed max_seqs step_ms max_queue \
         queue_timeout ctx pages prefill_rate step_times out overwrite json",
    ),
];

/// Headings whose options `-h` leaves out.
const RARE: [&str; 3] = ["Tuning", "Deduplicated packs", "Long conversions"];

/// Options with the same effect as a positional argument, with the identifier of that argument. `-h` leaves them out.
const SAME_AS_WORD: [(&str, &str); 3] = [("model_dir", "pack"), ("hf_dir", "checkpoint"), ("hf_repo", "checkpoint")];

/// Returns true if `id` is one of the words in `list`.
fn lists(list: &str, id: &str) -> bool {
    list.split(' ').any(|word| word == id)
}

/// Returns the words of the command line with the options of [`ONE_DASH`] replaced. Words after `--` are unchanged.
pub fn words(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut options = true;
    let replaced = words.map(|word| {
        options &= word != "--";
        let long = ONE_DASH.iter().find(|(short, _)| options && word == *short);
        long.map_or(word, |(_, long)| long.into())
    });
    replaced.collect()
}

/// Parts of the names of values that are paths; shells complete these with names of files.
const PATHS: [&str; 10] = ["FILE", "DIR", "PATH", "PACK", "MODEL", "CHECKPOINT", "STATS", "MANIFEST", "BASE", ".jsonl"];

/// Returns the command with short forms, hidden names, and both forms of help.
pub fn arranged(command: Command) -> Command {
    command.mut_args(|arg| spelled(arg, &[])).mut_args(brief).mut_subcommands(|command| {
        let name = command.get_name().to_string();
        let shown = SHOWN.iter().find(|(command, _)| *command == name).map(|(_, shown)| *shown);
        let ids: Vec<String> = command.get_arguments().map(|arg| arg.get_id().to_string()).collect();
        let longs: Vec<String> = command.get_arguments().filter_map(Arg::get_long).map(String::from).collect();
        let has = |id: &str| ids.iter().any(|known| known == id);
        let runs_model = has("precision");
        let arrange = |arg: Arg| {
            let id = arg.get_id().to_string();
            let rare = match shown {
                Some(shown) => !lists(shown, &id) && !arg.is_positional(),
                None => arg.get_help_heading().is_some_and(|heading| RARE.contains(&heading)),
            };
            let rare = rare || SAME_AS_WORD.iter().any(|(option, word)| id == *option && has(word));
            let arg = if runs_model { grouped(arg, &id) } else { arg };
            brief(spelled(arg, &longs)).hide_short_help(rare)
        };
        examples_only(own_help(command.mut_args(arrange)))
    })
}

/// Adds the short form and the hidden names of an option, except those in `longs`, which other options of the command
/// have. A value may be a negative number: its error then names the expected values.
fn spelled(arg: Arg, longs: &[String]) -> Arg {
    let arg = if arg.get_action().takes_values() { with_hint(arg.allow_negative_numbers(true)) } else { arg };
    match SPELLINGS.iter().find(|(id, ..)| arg.get_id() == id && !arg.is_positional()) {
        Some((_, short, names)) => {
            let free = names.iter().filter(|name| !longs.iter().any(|long| long == *name));
            let arg = arg.aliases(free.copied());
            short.map_or(arg.clone(), |short| arg.short(short))
        }
        None => arg,
    }
}

/// Tells shells not to offer files for the value of an option that is no path.
fn with_hint(arg: Arg) -> Arg {
    let names = arg.get_value_names().unwrap_or_default();
    match names.is_empty() || names.iter().any(|name| PATHS.iter().any(|part| name.contains(part))) {
        true => arg,
        false => arg.value_hint(ValueHint::Other),
    }
}

/// Puts an option without a heading under one of [`GROUPS`] or under [`OUTPUT`].
fn grouped(arg: Arg, id: &str) -> Arg {
    if arg.is_positional() || arg.get_help_heading().is_some() {
        return arg;
    }
    let group = GROUPS.iter().find(|(_, ids)| lists(ids, id));
    let arg = arg.help_heading(group.map_or(OUTPUT, |(heading, _)| heading));
    if id == "model_dir" { arg.display_order(0) } else { arg }
}

/// Makes the first clause of the description the one that `-h` shows.
fn brief(arg: Arg) -> Arg {
    let text = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let end = [". ", "; ", " (", " ["].iter().filter_map(|mark| text.find(mark)).min();
    match end {
        Some(end) => arg.help(text[..end].to_string()).long_help(text),
        None => arg,
    }
}

/// Replaces the flags for help and version by ones among the global options.
fn own_help(command: Command) -> Command {
    let help = Arg::new("help").short('h').long("help").action(ArgAction::Help).help_heading(GLOBAL);
    let version = Arg::new("version").short('V').long("version").action(ArgAction::Version).hide(true);
    let help = help.help("Print help: -h the most used options, --help all of them");
    command.disable_help_flag(true).disable_version_flag(true).arg(help).arg(version)
}

/// Makes `-h` end with the examples alone; `--help` keeps all text after the options.
fn examples_only(command: Command) -> Command {
    const EXAMPLES: &str = "Examples:";
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let Some(begin) = text.find(EXAMPLES) else { return command };
    let examples: Vec<&str> = text[begin..].lines().take_while(|line| !line.is_empty()).take(4).collect();
    command.after_help(examples.join("\n")).after_long_help(text)
}

/// Refuses a command line that names the pack twice: as a positional argument and with `--model-dir`. The environment
/// variable of `--model-dir` does not count.
///
/// # Errors
/// Both are given on the command line.
pub fn check_named_once(matches: &ArgMatches, parser: &mut Command) -> Result<(), Error> {
    let Some((name, given)) = matches.subcommand() else { return Ok(()) };
    let is_word = |id: &str| {
        matches!(given.try_contains_id(id), Ok(true)) && given.value_source(id) == Some(ValueSource::CommandLine)
    };
    if !(is_word("pack") && is_word("model_dir")) {
        return Ok(());
    }
    let mut error = Error::new(ErrorKind::ArgumentConflict);
    if let Some(command) = parser.find_subcommand_mut(name) {
        let shown = |id: &str| command.get_arguments().find(|arg| arg.get_id() == id).map(ToString::to_string);
        let (word, option) = (shown("pack"), shown("model_dir"));
        error = error.with_cmd(command);
        error.insert(ContextKind::InvalidArg, ContextValue::String(word.unwrap_or_default()));
        error.insert(ContextKind::PriorArg, ContextValue::String(option.unwrap_or_default()));
    }
    Err(error)
}
