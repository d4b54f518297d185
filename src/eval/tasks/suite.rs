//! Directory with files of public benchmarks: finds the files, recognizes each by its content, and groups them into
//! tasks. Every other file is listed with the reason why it is not measured.

use super::form::{TaskForm, recognize};
use super::lines::TASK_LIMIT;
use super::mmlu::subject_and_part;
use super::task_file::TaskFile;
use crate::error::{Context, Error, Result};
use crate::files;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::DirEntry;
use std::path::{Path, PathBuf};

/// Largest number of directories between the suite and a file.
const DEPTH: usize = 4;
/// Largest number of files in a suite; the original MMLU has 173.
const FILES: usize = 10_000;

/// Files of a directory.
#[derive(Debug)]
pub struct Suite {
    /// Tasks, in the order of their names.
    pub tasks: Vec<SuiteTask>,
    /// Files that are not measured.
    pub skipped: Vec<SkippedFile>,
}

/// Task with its files: several only of MMLU, one per subject.
#[derive(Debug)]
pub struct SuiteTask {
    /// Path below the suite: that of the file, or that of the directory of several files.
    pub name: String,
    /// Form of the files.
    pub form: TaskForm,
    /// Files with questions.
    pub files: Vec<TaskFile>,
}

impl SuiteTask {
    /// Creates a task of one file.
    pub fn of_file(file: TaskFile) -> SuiteTask {
        SuiteTask { name: file.path.display().to_string(), form: file.form, files: vec![file] }
    }

    /// Returns the number of questions.
    pub fn count(&self) -> usize {
        self.files.iter().map(TaskFile::count).sum()
    }
}

/// File that is not measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SkippedFile {
    /// Path below the suite.
    pub file: String,
    /// Reason why it is not measured.
    pub reason: String,
}

impl Suite {
    /// Reads the files of a directory. Files with programs to be run are measured if `runs_code` is true. Of each file,
    /// at most the first `limit` questions are used.
    ///
    /// # Errors
    /// The directory or a file cannot be read, a line of a recognized file is not as its form requires, or no file is
    /// recognized.
    pub fn read(dir: &Path, limit: Option<usize>, runs_code: bool) -> Result<Suite> {
        let mut reader = SuiteReader { dir, runs_code, found: Vec::new(), examples: Vec::new(), skipped: Vec::new() };
        let mut paths = Vec::new();
        list(dir, DEPTH, &mut paths)?;
        paths.iter().try_for_each(|path| reader.read(path))?;
        let mut suite = reader.group();
        let files = suite.tasks.iter_mut().flat_map(|task| &mut task.files);
        files.for_each(|file| file.truncate(limit.unwrap_or(usize::MAX)));
        if suite.tasks.is_empty() {
            return Err(nothing_found(dir, &suite.skipped));
        }
        Ok(suite)
    }
}

/// Creates the error for a directory without a file that is measured.
fn nothing_found(dir: &Path, skipped: &[SkippedFile]) -> Error {
    let reasons: Vec<String> = skipped.iter().take(4).map(|file| format!("{}: {}", file.file, file.reason)).collect();
    let more = if skipped.len() > reasons.len() { "; …" } else { "" };
    let found = match reasons.is_empty() {
        true => "found no files, expected files of benchmarks".to_string(),
        false => format!("found no file that can be measured: {}{more}", reasons.join("; ")),
    };
    Error::usage(found).at(dir).help("docs/guide/measuring.md lists the files of benchmarks that are read")
}

/// Lists the regular files below a directory in a fixed order, without hidden ones. Links to directories are not
/// followed.
fn list(dir: &Path, depth: usize, paths: &mut Vec<PathBuf>) -> Result<()> {
    let mut entries: Vec<DirEntry> = std::fs::read_dir(dir).at(dir)?.collect::<std::io::Result<_>>().at(dir)?;
    entries.retain(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."));
    entries.sort_by_key(DirEntry::file_name);
    for entry in entries {
        let (path, kind) = (entry.path(), entry.file_type().at(entry.path())?);
        if kind.is_dir() && depth > 0 {
            list(&path, depth - 1, paths)?;
        } else if !kind.is_dir() && files::find(&path)?.is_some_and(|found| found.is_file()) {
            paths.push(path);
        }
        if paths.len() > FILES {
            let found = format!("found more than {FILES} files, expected the files of benchmarks");
            return Err(Error::usage(found).at(dir).help("name a directory that holds only these files"));
        }
    }
    Ok(())
}

/// Files of a suite that are read so far.
struct SuiteReader<'a> {
    dir: &'a Path,
    runs_code: bool,
    found: Vec<TaskFile>,
    /// Solved examples of MMLU.
    examples: Vec<TaskFile>,
    skipped: Vec<SkippedFile>,
}

impl SuiteReader<'_> {
    /// Returns the path of a file below the suite.
    fn name(&self, path: &Path) -> String {
        path.strip_prefix(self.dir).unwrap_or(path).display().to_string()
    }

    fn skip(&mut self, path: &Path, reason: impl Into<String>) {
        let file = self.name(path);
        self.skipped.push(SkippedFile { file, reason: reason.into() });
    }

    /// Reads a file, or lists it with the reason why it is not measured.
    fn read(&mut self, path: &Path) -> Result<()> {
        let size = files::find(path)?.map_or(0, |found| found.len());
        if size > TASK_LIMIT {
            self.skip(path, format!("it has {size} bytes; files of questions have at most {TASK_LIMIT}"));
            return Ok(());
        }
        let bytes = files::read_limited(path, TASK_LIMIT)?;
        let form = match recognize(&bytes) {
            Ok(form) => form,
            Err(reason) => {
                self.skip(path, format!("not recognized: {reason}"));
                return Ok(());
            }
        };
        if form == TaskForm::HumanEval && !self.runs_code {
            self.skip(path, "HumanEval runs code that the model writes; name a command for it with --run-code");
            return Ok(());
        }
        if is_training(path) {
            self.skip(path, format!("{} questions for training, by the name of the file", form.name()));
            return Ok(());
        }
        let file = TaskFile::parse(path, &files::utf8(bytes).at(path)?, form)?;
        match form == TaskForm::Mmlu && subject_and_part(path).1 == "dev" {
            true => self.examples.push(file),
            false => self.found.push(file),
        }
        Ok(())
    }

    /// Combines the subjects of MMLU to one task for each directory, and gives them their examples.
    fn group(mut self) -> Suite {
        let mut tasks: BTreeMap<(TaskForm, String), Vec<TaskFile>> = BTreeMap::new();
        let tested: Vec<String> = self.subjects("test");
        for mut file in std::mem::take(&mut self.found) {
            let (subject, part) = subject_and_part(&file.path);
            if file.form != TaskForm::Mmlu {
                tasks.entry((file.form, self.name(&file.path))).or_default().push(file);
            } else if part == "val" && tested.contains(&subject) {
                self.skip(&file.path, "MMLU questions for validation; those of the test are measured");
            } else {
                if let Some(examples) = self.examples.iter().find(|e| subject_and_part(&e.path).0 == subject) {
                    file.set_examples(examples);
                }
                let folder = file.path.parent().map_or_else(String::new, |folder| self.name(folder));
                tasks.entry((file.form, folder)).or_default().push(file);
            }
        }
        for example in std::mem::take(&mut self.examples) {
            let subject = subject_and_part(&example.path).0;
            let files = tasks.iter().filter(|((form, _), _)| *form == TaskForm::Mmlu).flat_map(|(_, files)| files);
            let is_used = files.into_iter().any(|file| subject_and_part(&file.path).0 == subject);
            let reason = if is_used { "used as the solved examples of MMLU" } else { "MMLU examples without a test" };
            self.skip(&example.path, reason);
        }
        self.skipped.sort_by(|a, b| a.file.cmp(&b.file));
        let tasks = tasks.into_iter().map(|((form, name), files)| SuiteTask { name, form, files });
        Suite { tasks: tasks.collect(), skipped: self.skipped }
    }

    /// Lists the subjects of MMLU that have a file of this part.
    fn subjects(&self, part: &str) -> Vec<String> {
        let mmlu = self.found.iter().filter(|file| file.form == TaskForm::Mmlu);
        let parts = mmlu.map(|file| subject_and_part(&file.path));
        parts.filter(|(_, found)| found == part).map(|(subject, _)| subject).collect()
    }
}

/// Returns true if the name of a file, or of its directory, marks its questions as those for training.
fn is_training(path: &Path) -> bool {
    let words = |text: &std::ffi::OsStr| {
        let text = text.to_string_lossy().to_lowercase();
        text.split(|c: char| !c.is_alphanumeric()).any(|word| word == "train")
    };
    let folder = path.parent().and_then(Path::file_name);
    path.file_name().is_some_and(words) || folder.is_some_and(|folder| folder == "auxiliary_train")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLASWAG: &str = r#"{"ctx": "c", "endings": ["a", "b"], "label": 0}"#;
    const HUMANEVAL: &str = r#"{"task_id": "t", "prompt": "p", "entry_point": "f", "canonical_solution": "",
        "test": ""}"#;

    fn suite(files: &[(&str, &str)], runs_code: bool) -> (tempfile::TempDir, Result<Suite>) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let found = Suite::read(dir.path(), Some(1), runs_code);
        (dir, found)
    }

    #[test]
    fn files_are_grouped_into_tasks_whatever_their_names_are() {
        let files = [
            ("mmlu/test/law_test.csv", "q1,1,2,3,4,A\nq2,1,2,3,4,B\n"),
            ("mmlu/test/art_test.csv", "q3,1,2,3,4,C\n"),
            ("mmlu/dev/law_dev.csv", "example,1,2,3,4,D\n"),
            ("mmlu/dev/gas_dev.csv", "example,1,2,3,4,D\n"),
            ("mmlu/val/law_val.csv", "q4,1,2,3,4,A\n"),
            ("mmlu/auxiliary_train/x.csv", "q5,1,2,3,4,A\n"),
            ("odd name", HELLASWAG),
            ("hellaswag_train.jsonl", HELLASWAG),
            ("code.jsonl", &HUMANEVAL.replace('\n', "")),
            ("code.jsonl.gz", "\u{1f}\u{8b}"),
            ("README.md", "# Data\n"),
            (".hidden", HELLASWAG),
        ];
        let (_dir, found) = suite(&files, false);
        let found = found.unwrap();
        let tasks: Vec<_> = found.tasks.iter().map(|t| (t.form, t.name.as_str(), t.files.len(), t.count())).collect();
        assert_eq!(tasks, [(TaskForm::HellaSwag, "odd name", 1, 1), (TaskForm::Mmlu, "mmlu/test", 2, 2)]);
        assert!(found.tasks[1].files[1].shots.contains("about law.\n\nexample\nA. 1"));
        assert!(found.tasks[1].files[0].shots.ends_with("about art.\n\n"));
        let reasons: Vec<String> = found.skipped.iter().map(|s| format!("{} {}", s.file, s.reason)).collect();
        let expected = [
            ("README.md", "not recognized"),
            ("code.jsonl", "--run-code"),
            ("code.jsonl.gz", "not recognized"),
            ("hellaswag_train.jsonl", "for training"),
            ("mmlu/auxiliary_train/x.csv", "for training"),
            ("mmlu/dev/gas_dev.csv", "without a test"),
            ("mmlu/dev/law_dev.csv", "used as the solved examples"),
            ("mmlu/val/law_val.csv", "for validation"),
        ];
        assert_eq!(reasons.len(), expected.len(), "{reasons:?}");
        for (reason, (file, part)) in reasons.iter().zip(expected) {
            assert!(reason.starts_with(file) && reason.contains(part), "{reason}");
        }
        let (_dir, found) = suite(&files, true);
        assert!(found.unwrap().tasks.iter().any(|task| task.form == TaskForm::HumanEval));
    }

    #[test]
    fn a_directory_without_questions_is_refused() {
        let message = |files: &[(&str, &str)]| suite(files, false).1.unwrap_err().to_string();
        assert!(message(&[]).contains("found no files"));
        let found = message(&[("a.txt", "text"), ("b.jsonl", &HUMANEVAL.replace('\n', ""))]);
        assert!(found.contains("a.txt: not recognized") && found.contains("--run-code"), "{found}");
        let found = message(&[("a.jsonl", &format!("{HELLASWAG}\n{{\"endings\": 3}}"))]);
        assert!(found.contains("a.jsonl: line 2: "), "{found}");
    }
}
