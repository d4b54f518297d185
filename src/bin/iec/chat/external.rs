//! The editor that the user prefers, for messages of many lines.

use crate::global::non_empty_variable;
use iec::error::{Context, Error, Result};
use iec::files::{self, TEXT_LIMIT};
use std::io::Write;
use std::process::Command;

/// Variables that name the editor; the first one that is set counts.
const VARIABLES: [&str; 2] = ["VISUAL", "EDITOR"];

/// Opens the editor with `text` and returns what was saved, without the line break at its end.
///
/// # Errors
/// No editor is named, it cannot be started, it ends with a failure, or what it saved is no text.
pub fn edit(text: &str) -> Result<String> {
    let editor = VARIABLES.into_iter().find_map(non_empty_variable).ok_or_else(|| {
        Error::usage("/edit: found neither VISUAL nor EDITOR, expected the command of an editor in one of them")
            .help("set one of them before `iec chat`, as in `EDITOR=nano`; \"\"\" begins a text of several lines here")
    })?;
    let mut file = tempfile::Builder::new().prefix("iec-message-").suffix(".md").tempfile()?;
    file.write_all(text.as_bytes()).at(file.path())?;
    // The variable may have arguments, as in `code --wait`, so a shell divides it into words.
    let mut shell = Command::new("sh");
    shell.args(["-c", "$IEC_EDITOR \"$1\"", "sh"]).arg(file.path()).env("IEC_EDITOR", &editor);
    let name = editor.to_string_lossy();
    let status = shell.status().at("sh")?;
    if !status.success() {
        return Err(Error::usage(format!("/edit: `{name}` ended with {status}, expected success"))
            .help("nothing was sent; check VISUAL and EDITOR"));
    }
    let mut saved = files::read_text(file.path(), TEXT_LIMIT)?;
    saved.truncate(saved.trim_end_matches(['\n', '\r']).len());
    Ok(saved)
}
