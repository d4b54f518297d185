//! Commands of a conversation: lines that begin with a slash. A line that begins with two is a message without the
//! first.

use crate::error::{Error, Result};
use crate::similar::nearest;
use std::path::PathBuf;

/// Input of the user.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// Text for the model.
    Message(String),
    /// Command to the program.
    Command(Command),
}

/// A command.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Lists the commands.
    Help,
    /// Shows the system text, or sets it; an empty text removes it.
    System(Option<String>),
    /// Sets a setting by its name, or lists all.
    Set(Option<(String, String)>),
    /// Shows one subject, or a summary.
    Show(Option<String>),
    /// Writes the conversation to a file, by default the last one.
    Save {
        /// Path of the file.
        path: Option<PathBuf>,
        /// Replace a file that exists.
        overwrite: bool,
    },
    /// Continues the conversation of a file, or goes on with another model.
    Load(PathBuf),
    /// Writes a message in the editor of the user, beginning with a text.
    Edit(Option<String>),
    /// Answers the last message again.
    Regenerate,
    /// Removes the last message and its answer.
    Undo,
    /// Removes all messages; the system text stays.
    Clear,
    /// Adapters of the next answers, with their scales; `None` = list them.
    Adapters(Option<Vec<(String, f32)>>),
    /// Ends the conversation.
    Exit,
}

/// Row of the table of commands.
#[derive(Debug)]
pub struct CommandRow {
    /// Names, the first of which is shown.
    pub names: &'static [&'static str],
    /// Arguments for the help.
    pub arguments: &'static str,
    /// Purpose for the help.
    pub about: &'static str,
    make: fn(&str) -> Result<Command>,
}

/// All commands.
pub const COMMANDS: &[CommandRow] = &[
    CommandRow {
        names: &["help", "?"],
        arguments: "",
        about: "list the commands",
        make: |text| bare(text, Command::Help),
    },
    CommandRow {
        names: &["system"],
        arguments: "[TEXT]",
        about: "show or set the system text; \"\" removes it",
        make: |text| Ok(Command::System(some(text).map(|text| if text == "\"\"" { String::new() } else { text }))),
    },
    CommandRow { names: &["set"], arguments: "[NAME VALUE]", about: "list the settings, or change one", make: set },
    CommandRow {
        names: &["show"],
        arguments: "[WHAT]",
        about: "model, context, settings, stats, history or template",
        make: |text| Ok(Command::Show(some(text))),
    },
    CommandRow {
        names: &["save"],
        arguments: "[--overwrite] [FILE]",
        about: "write the conversation to a file",
        make: save,
    },
    CommandRow {
        names: &["load"],
        arguments: "FILE|MODEL",
        about: "continue the conversation of a file, or go on with another model",
        make: load,
    },
    CommandRow {
        names: &["edit"],
        arguments: "[TEXT]",
        about: "write a message in the editor of VISUAL or EDITOR",
        make: |text| Ok(Command::Edit(some(text))),
    },
    CommandRow {
        names: &["regen", "regenerate", "retry"],
        arguments: "",
        about: "answer the last message again",
        make: |text| bare(text, Command::Regenerate),
    },
    CommandRow {
        names: &["undo"],
        arguments: "",
        about: "remove the last message and its answer",
        make: |text| bare(text, Command::Undo),
    },
    CommandRow {
        names: &["clear", "reset", "new"],
        arguments: "",
        about: "forget all messages; the system text stays",
        make: |text| bare(text, Command::Clear),
    },
    CommandRow {
        names: &["adapter"],
        arguments: "[NAME[:SCALE]…|none]",
        about: "list the adapters of --lora, or choose those of the next answers",
        make: adapters,
    },
    CommandRow {
        names: &["exit", "quit", "bye"],
        arguments: "",
        about: "leave (also Ctrl-D)",
        make: |text| bare(text, Command::Exit),
    },
];

/// Parses one input of the user.
///
/// # Errors
/// The command is unknown, or its arguments are wrong.
pub fn parse(text: &str) -> Result<Input> {
    let Some(rest) = text.trim_start().strip_prefix('/') else { return Ok(Input::Message(text.into())) };
    if rest.starts_with('/') {
        return Ok(Input::Message(rest.into()));
    }
    let (name, arguments) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    match COMMANDS.iter().find(|row| row.names.contains(&name)) {
        Some(row) => (row.make)(arguments.trim()).map(Input::Command),
        None => Err(unknown(name)),
    }
}

fn unknown(name: &str) -> Error {
    let names = COMMANDS.iter().flat_map(|row| row.names).copied();
    let hint = nearest(name, names).map_or(String::new(), |known| format!("; did you mean /{known}?"));
    Error::usage(format!("there is no command /{}{hint}", excerpt(name)))
        .help("/help lists the commands; to send a message that begins with `/`, type `//`")
}

/// Returns the beginning of a text for a message.
fn excerpt(text: &str) -> String {
    let short: String = text.chars().take(40).collect();
    if short.len() < text.len() { format!("{short}…") } else { short }
}

fn some(text: &str) -> Option<String> {
    Some(text.to_string()).filter(|text| !text.is_empty())
}

fn bare(text: &str, command: Command) -> Result<Command> {
    if text.is_empty() {
        return Ok(command);
    }
    Err(Error::usage(format!("found `{}` after the command, expected nothing", excerpt(text))))
}

fn set(text: &str) -> Result<Command> {
    match text.split_once(char::is_whitespace) {
        Some((name, value)) => Ok(Command::Set(Some((name.into(), value.trim().into())))),
        None if text.is_empty() => Ok(Command::Set(None)),
        None => {
            Err(Error::usage(format!("{}: found no value, expected one", excerpt(text))).help("write /set NAME VALUE"))
        }
    }
}

fn adapters(text: &str) -> Result<Command> {
    if text.is_empty() || text == "none" {
        return Ok(Command::Adapters((!text.is_empty()).then(Vec::new)));
    }
    let one = |word: &str| match word.split_once(':') {
        None => Ok((word.to_string(), 1.0)),
        Some((name, scale)) => match scale.parse::<f32>().ok().filter(|scale| scale.is_finite()) {
            Some(scale) => Ok((name.to_string(), scale)),
            None => Err(Error::usage(format!("{}: found `{}`, expected a scale", excerpt(name), excerpt(scale)))
                .help("write /adapter NAME:SCALE")),
        },
    };
    Ok(Command::Adapters(Some(text.split_whitespace().map(one).collect::<Result<_>>()?)))
}

fn save(text: &str) -> Result<Command> {
    let (overwrite, path) = match text.strip_prefix("--overwrite") {
        Some(rest) if rest.is_empty() || rest.starts_with(char::is_whitespace) => (true, rest.trim()),
        _ => (false, text),
    };
    Ok(Command::Save { path: some(path).map(PathBuf::from), overwrite })
}

fn load(text: &str) -> Result<Command> {
    match some(text) {
        Some(path) => Ok(Command::Load(path.into())),
        None => Err(Error::usage("/load: found no file name, expected one").help("write /load FILE or /load MODEL")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(text: &str) -> Command {
        match parse(text).unwrap() {
            Input::Command(command) => command,
            Input::Message(text) => panic!("{text} is a message"),
        }
    }

    #[test]
    fn lines_with_a_slash_are_commands() {
        let set = |name: &str, value: &str| Command::Set(Some((name.into(), value.into())));
        let save = |path: Option<&str>, overwrite| Command::Save { path: path.map(PathBuf::from), overwrite };
        let cases = [
            ("/help", Command::Help),
            ("/?", Command::Help),
            (" /bye ", Command::Exit),
            ("/quit", Command::Exit),
            ("/reset", Command::Clear),
            ("/retry", Command::Regenerate),
            ("/set temperature  0.5", set("temperature", "0.5")),
            ("/set system two words", set("system", "two words")),
            ("/set", Command::Set(None)),
            ("/show", Command::Show(None)),
            ("/show stats", Command::Show(Some("stats".into()))),
            ("/system", Command::System(None)),
            ("/system Be brief.\nTwo lines.", Command::System(Some("Be brief.\nTwo lines.".into()))),
            ("/system \"\"", Command::System(Some(String::new()))),
            ("/save", save(None, false)),
            ("/save a b.json", save(Some("a b.json"), false)),
            ("/save --overwrite a", save(Some("a"), true)),
            ("/save --overwriter", save(Some("--overwriter"), false)),
            ("/load a", Command::Load("a".into())),
            ("/adapter", Command::Adapters(None)),
            ("/adapter none", Command::Adapters(Some(Vec::new()))),
            ("/adapter x  y:0.5", Command::Adapters(Some(vec![("x".into(), 1.0), ("y".into(), 0.5)]))),
        ];
        for (text, expected) in cases {
            assert_eq!(command(text), expected, "{text}");
        }
    }

    #[test]
    fn other_lines_are_messages_and_two_slashes_are_one() {
        for (text, expected) in [("Hi", "Hi"), (" a/b", " a/b"), ("//etc", "/etc"), ("///", "//"), ("", "")] {
            assert_eq!(parse(text).unwrap(), Input::Message(expected.into()), "{text}");
        }
    }

    #[test]
    fn unknown_commands_name_the_nearest_one_and_never_reach_the_model() {
        let cases = [
            ("/hlep", "/help?"),
            ("/svae x", "/save?"),
            ("/regenrate", "/regenerate?"),
            ("/xyzzy", "no command /xyzzy"),
            ("/", "no command /"),
            ("/help me", "`me`"),
            ("/set temperature", "no value"),
            ("/load", "no file"),
        ];
        for (text, expected) in cases {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(!parse("/xyzzy").unwrap_err().to_string().contains("mean"));
    }
}
