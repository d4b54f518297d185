//! Checks the documentation: links have existing targets, commands are accepted by the program, the README is short,
//! its transcript is what the program prints, and the index of decisions is complete.

use crate::common::iec;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Maximum number of words in the README, counted as `wc -w` does.
const README_WORDS: usize = 1100;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns all Markdown files of the repository except those of fixtures.
fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("docs")];
    let files =
        |folder: &Path| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    found.extend(files(root()));
    while let Some(folder) = folders.pop() {
        for path in files(&folder) {
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    assert!(found.len() > 20, "{found:?}");
    found
}

/// Returns the lines of a document, each with whether it is in a code block.
fn lines(text: &str) -> impl Iterator<Item = (bool, &str)> {
    let mut code = false;
    text.lines().map(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (code || fence, line)
    })
}

/// Returns the anchors that GitHub generates for the headings of a document.
fn anchors(text: &str) -> HashSet<String> {
    let headings = lines(text).filter(|(code, line)| !code && line.starts_with('#')).map(|(_, line)| line);
    let anchor = |heading: &str| -> String {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        kept.chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .collect::<String>()
            .replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// Returns the targets of all links of a document outside code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (_, line) in lines(text).filter(|(code, _)| !code) {
        for (i, _) in line.match_indices("](") {
            let target = &line[i + 2..];
            found.push(target[..target.find(')').unwrap_or(target.len())].to_string());
        }
    }
    found
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let mut broken = Vec::new();
    for path in documents() {
        let text = read(&path);
        for link in links(&text).into_iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (file, anchor) =
                link.split_once('#').map_or((link.as_str(), None), |(file, anchor)| (file, Some(anchor)));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            let found = match anchor {
                Some(anchor) => target.is_file() && anchors(&read(&target)).contains(anchor),
                None => target.exists(),
            };
            if !found {
                broken.push(format!("{}: {link}", path.strip_prefix(root()).unwrap().display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

/// Returns the commands in the code blocks of a document, with continuation lines joined.
fn commands(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut continued = false;
    for (_, line) in lines(text).filter(|(code, _)| *code) {
        let line = line.trim();
        let starts = line.strip_prefix("$ ").unwrap_or(line);
        if continued {
            found.last_mut().unwrap().push_str(&format!(" {line}"));
        } else if starts.starts_with("iec ") {
            found.push(starts.to_string());
        } else {
            continue;
        }
        let last = found.last_mut().unwrap();
        continued = last.ends_with('\\');
        *last = last.trim_end_matches('\\').trim_end().to_string();
    }
    found
}

/// Splits a command into words as a shell would, up to a pipe, redirection or comment.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote, mut started) = (Vec::new(), String::new(), None, false);
    for c in command.chars() {
        match quote {
            Some(q) if c == q => quote = None,
            Some(_) => word.push(c),
            None if c == '"' || c == '\'' => (quote, started) = (Some(c), true),
            None if c.is_whitespace() => {
                if started || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                started = false;
            }
            None if matches!(c, '|' | '#' | ';' | '&') && word.is_empty() => break,
            None => word.push(c),
        }
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
        .truncate(words.iter().position(|word| word.starts_with('>') || word.starts_with("2>")).unwrap_or(words.len()));
    words
}

/// Checks that every option of every command in the documents exists: with `--help` at its end a command is parsed
/// but not run.
#[test]
fn commands_in_documents_are_accepted() {
    let (mut seen, mut refused) = (HashSet::new(), Vec::new());
    for path in documents() {
        if path.ends_with("CHANGELOG.md") {
            continue;
        }
        for command in commands(&read(&path)) {
            let words = words(&command);
            if words.iter().any(|word| word == "..." || word == "…" || word.contains("COMMAND"))
                || !seen.insert(words.clone())
            {
                continue;
            }
            let output = iec().args(&words[1..]).arg("--help").output().unwrap();
            if !output.status.success() {
                let stderr = String::from_utf8_lossy(&output.stderr);
                let first = stderr.lines().next().unwrap_or_default();
                refused.push(format!("{}: {command}\n  {first}", path.strip_prefix(root()).unwrap().display()));
            }
        }
    }
    assert!(seen.len() > 50, "only {} commands found", seen.len());
    assert!(refused.is_empty(), "commands that the program refuses:\n{}", refused.join("\n"));
}

#[test]
fn the_readme_is_short() {
    let words = read(&root().join("README.md")).split_whitespace().count();
    assert!(words <= README_WORDS, "README.md: found {words} words, expected at most {README_WORDS}");
}

/// Checks that the lines of the README's transcript are those that the demo prints, in this order. A line `…` marks
/// commands and lines that are left out. The last two columns of the table are speeds and are not compared.
#[cfg(feature = "reference")]
#[test]
fn the_transcript_of_the_readme_is_what_the_demo_prints() {
    let output = iec().arg("demo").output().unwrap();
    let stable = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let table = words.len() > 4 && matches!(words[0], "fp32" | "int4w" | "int4");
        words[..words.len() - 2 * usize::from(table)].join(" ")
    };
    let filled = |text: &str| text.lines().map(stable).filter(|line| !line.is_empty()).collect::<Vec<_>>();
    let printed = filled(&String::from_utf8(output.stdout).unwrap());
    let readme = read(&root().join("README.md"));
    let block = readme.split("<!-- demo -->\n```\n").nth(1).expect("a transcript").split("```").next().unwrap();
    // The README begins with the first command.
    let (mut rest, mut leaves_out) = (&printed[..], true);
    for line in filled(block) {
        if line == "…" {
            leaves_out = true;
            continue;
        }
        let found = rest.iter().position(|printed| *printed == line);
        let at = found.unwrap_or_else(|| panic!("the demo does not print this line here: {line}\n{}", rest.join("\n")));
        assert!(at == 0 || leaves_out, "lines before `{line}` are left out without a mark: {}", rest[..at].join("\n"));
        (rest, leaves_out) = (&rest[at + 1..], false);
    }
}

/// Checks that files of the repository that documents name exist.
#[test]
fn files_that_documents_name_exist() {
    const FOLDERS: [&str; 9] =
        ["src", "tests", "docs", "scripts", "examples", "benches", "manifests", "dashboards", "assets"];
    let mut gone = Vec::new();
    for path in documents() {
        let text = read(&path);
        for (i, name) in text.split('`').enumerate() {
            let is_path = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "/._-".contains(c));
            let folder = name.split('/').next().unwrap_or_default();
            // Documents may name a source file from `src` on, as `runtime/open.rs`.
            let in_src =
                !FOLDERS.contains(&folder) && name.ends_with(".rs") && root().join("src").join(folder).is_dir();
            let named = i % 2 == 1 && is_path && name.contains('/') && (FOLDERS.contains(&folder) || in_src);
            let file = if in_src { root().join("src").join(name) } else { root().join(name) };
            // Reports and performance.md of the examples of the guide lie in directories of the reader.
            if named && !file.exists() && !path.ends_with("CHANGELOG.md") {
                gone.push(format!("{}: {name}", path.strip_prefix(root()).unwrap().display()));
            }
        }
    }
    assert!(gone.is_empty(), "files that do not exist:\n{}", gone.join("\n"));
}

#[test]
fn the_page_about_gpus_names_every_command_that_has_a_device() {
    let options = read(&root().join("docs/guide/options.md"));
    let sections = options.split("\n## iec ").skip(1).filter(|section| section.contains("| Device that computes: "));
    let having: HashSet<&str> = sections.map(|section| section.lines().next().unwrap()).collect();
    let page = read(&root().join("docs/guide/gpus.md"));
    let sentence = page.split("\n\n").find(|paragraph| paragraph.contains("take these options")).unwrap();
    let sentence = sentence.split("take these options").next().unwrap();
    let named: HashSet<&str> = sentence.split('`').skip(1).step_by(2).collect();
    assert_eq!(having, named);
}

#[test]
fn the_index_of_decisions_lists_each_file_with_its_title_and_status() {
    let folder = root().join("docs/decisions");
    let index = read(&folder.join("README.md"));
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name == "README.md" {
            continue;
        }
        let text = read(&folder.join(&name));
        let (number, title) = text.lines().next().unwrap().trim_start_matches("# ").split_once(". ").expect(&name);
        let status =
            text.lines().find_map(|line| line.strip_prefix("Status: ")).unwrap_or_else(|| panic!("{name}: no status"));
        assert!(name.starts_with(&format!("{:04}-", number.parse::<u32>().unwrap())), "{name}: number {number}");
        assert!(index.contains(&format!("| {number} | [{title}]({name}) | {status} |")), "{name}: not in the index");
        count += 1;
    }
    assert_eq!(
        count,
        index.lines().filter(|line| line.starts_with("| ") && line.contains(".md)")).count(),
        "rows without a file"
    );
}
