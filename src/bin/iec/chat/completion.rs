//! Completion of commands, settings, subjects and file names.

use iec::chat::command::COMMANDS;
use iec::chat::settings;
use std::path::Path;

/// Subjects of `/show`.
pub const SUBJECTS: &[&str] = &["model", "context", "settings", "stats", "history", "template"];
/// Largest number of file names that are offered.
const MOST_FILES: usize = 200;

/// Returns the offset of the word before the cursor, and what may replace it.
pub fn candidates(line: &str) -> (usize, Vec<String>) {
    let Some(rest) = line.strip_prefix('/') else { return (0, Vec::new()) };
    let Some((command, arguments)) = rest.split_once(' ') else {
        let names = COMMANDS.iter().map(|row| row.names[0]).filter(|name| name.starts_with(rest));
        return (0, names.map(|name| format!("/{name}")).collect());
    };
    let starting =
        |names: &[&str]| names.iter().filter(|n| n.starts_with(arguments)).map(ToString::to_string).collect();
    let at = line.len() - arguments.len();
    match command {
        "set" if !arguments.contains(' ') => {
            let names: Vec<&str> = settings::NAMES.iter().map(|(name, _)| *name).chain(["system"]).collect();
            (at, starting(&names))
        }
        "show" => (at, starting(SUBJECTS)),
        "save" | "load" => {
            let path = arguments.strip_prefix("--overwrite ").unwrap_or(arguments);
            (line.len() - path.len(), files(path))
        }
        _ => (line.len(), Vec::new()),
    }
}

/// Returns the paths that begin with `path`; directories end with a slash.
fn files(path: &str) -> Vec<String> {
    let (dir, name) = path.rsplit_once('/').map_or(("", path), |(dir, name)| (&path[..=dir.len()], name));
    let shown = if dir.is_empty() { Path::new(".") } else { Path::new(dir) };
    let Ok(entries) = std::fs::read_dir(shown) else { return Vec::new() };
    let named = entries.flatten().filter_map(|entry| {
        let found = entry.file_name().into_string().ok()?;
        let hidden = found.starts_with('.') && !name.starts_with('.');
        let plain = found.starts_with(name) && !hidden && !found.contains(char::is_control);
        let slash = if entry.file_type().is_ok_and(|kind| kind.is_dir()) { "/" } else { "" };
        plain.then(|| format!("{dir}{found}{slash}"))
    });
    let mut paths: Vec<String> = named.take(MOST_FILES).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_settings_subjects_and_files_are_completed() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().display().to_string();
        std::fs::create_dir(dir.path().join("talks")).unwrap();
        for name in ["talk.json", "other", ".hidden"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let cases = [
            ("/he".to_string(), 0, vec!["/help".to_string()]),
            ("/s".into(), 0, ["/system", "/set", "/show", "/save"].map(String::from).into()),
            ("/set top".into(), 5, ["top_k", "top_p"].map(String::from).into()),
            ("/set sys".into(), 5, vec!["system".into()]),
            ("/set seed ".into(), 10, vec![]),
            ("/show con".into(), 6, vec!["context".into()]),
            (format!("/load {base}/ta"), 6, vec![format!("{base}/talk.json"), format!("{base}/talks/")]),
            (format!("/save --overwrite {base}/o"), 18, vec![format!("{base}/other")]),
            (format!("/load {base}/.h"), 6, vec![format!("{base}/.hidden")]),
            ("/load /nonexistent/".into(), 6, vec![]),
            ("hello".into(), 0, vec![]),
        ];
        for (line, at, expected) in cases {
            assert_eq!(candidates(&line), (at, expected), "{line}");
        }
    }
}
