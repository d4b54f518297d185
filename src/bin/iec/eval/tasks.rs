//! Tasks of `iec eval`: reads the files of questions, lets one or two models answer them, and prints the results.

use super::{Args, about};
use crate::console;
use crate::global::Global;
use iec::error::{Context, Error, Result};
use iec::eval::tasks::{Answerer, Answers, CodeRunner, SkippedFile, Suite, SuiteTask, TaskFile, TaskResult};
use iec::files::{self, TEXT_LIMIT};
use iec::output::{JsonLines, Rules, Target};
use iec::report::tasks;
use iec::session::{Session, Speculation};
use serde_json::{Value, json};
use std::time::Duration;

/// Model that has answered all tasks.
struct AnsweredTasks {
    /// Description of the model and of how it was run.
    about: Value,
    results: Vec<TaskResult>,
}

/// Measures the tasks that the arguments name.
pub(super) fn run(args: &Args, global: &Global) -> Result<()> {
    let details = args.target()?;
    let suite = args.suite()?;
    args.note_files(&suite, global);
    if let Some(runner) = args.runner() {
        // Before the work, because the models may take hours.
        suite.tasks.iter().flat_map(|task| &task.files).try_for_each(|file| file.check_runner(&runner))?;
    }
    let mut details = details.as_ref().map(JsonLines::create).transpose()?;
    let model = args.measure_tasks(args.model.open(global, Speculation::Off)?, &suite.tasks, &mut details)?;
    // The first model is closed, so that only one engine is in memory at a time.
    let reference = args.against.as_deref().map(|other| {
        let other = args.model.other(other, global, Speculation::Off)?.open()?;
        args.measure_tasks(other, &suite.tasks, &mut details)
    });
    let reference = reference.transpose()?;
    details.map_or(Ok(()), JsonLines::commit)?;
    args.print(&model, reference.as_ref(), &suite.skipped)?;
    let questions: usize = model.results.iter().map(TaskResult::questions).sum();
    let seconds: f64 = model.results.iter().chain(reference.iter().flat_map(|r| &r.results)).map(|r| r.seconds()).sum();
    let truncated: usize = model.results.iter().map(TaskResult::truncated).sum();
    if truncated > 0 {
        global.note(format_args!(
            "note: {truncated} questions are longer than the context of the model; the beginning of their text was \
             left out"
        ));
    }
    let unit = if args.exact_match.is_some() { "tasks" } else { "questions" };
    global.note(format_args!("{questions} {unit} in {seconds:.1} s"));
    Ok(())
}

impl Args {
    /// Reads the files of questions.
    fn suite(&self) -> Result<Suite> {
        if let Some(dir) = &self.suite {
            return Suite::read(dir, self.limit, self.run_code.is_some());
        }
        let mut file = match (&self.choices, &self.exact_match) {
            (Some(path), _) => TaskFile::of_choices(path)?,
            (_, Some(path)) => TaskFile::of_exact_match(path, self.regex.as_deref())?,
            _ => return Err(Error::usage("found nothing to measure").help("give --suite, --choices or --exact-match")),
        };
        file.truncate(self.limit.unwrap_or(usize::MAX));
        if let Some(path) = &self.few_shot {
            file.shots = files::read_text(path, TEXT_LIMIT)?;
        }
        Ok(Suite { tasks: vec![SuiteTask::of_file(file)], skipped: Vec::new() })
    }

    /// Prints which files were read as what, and which are not measured.
    fn note_files(&self, suite: &Suite, global: &Global) {
        if self.suite.is_none() {
            return;
        }
        for task in &suite.tasks {
            let files = if task.files.len() == 1 { String::new() } else { format!(", {} files", task.files.len()) };
            let (name, form, questions) = (&task.name, task.form.description(), task.count());
            global.note(format_args!("{name}{files}: read as {form}, {questions} questions"));
        }
        for SkippedFile { file, reason } in &suite.skipped {
            global.note(format_args!("{file}: skipped; {reason}"));
        }
        if let Some(command) = self.run_code.as_deref() {
            global.note(format_args!("note: `{command}` executes programs that the model writes"));
        }
    }

    /// Lets a model answer all tasks, and closes it.
    fn measure_tasks(
        &self,
        mut model: Session,
        tasks: &[SuiteTask],
        details: &mut Option<JsonLines>,
    ) -> Result<AnsweredTasks> {
        model.tokenizer()?;
        let about = about(&model);
        let answers = match self.exact_match {
            Some(_) => Answers { max_new: self.max_new, stop: self.stop.clone(), batch: self.batch },
            None => Answers { batch: self.batch, ..Answers::default() },
        };
        let runner = self.runner();
        let Session { engine, speculator, tokenizer, .. } = &mut model;
        let tokenizer = tokenizer.as_ref().expect("just found");
        let mut answerer = Answerer { engine, speculator, tokenizer, bos: !self.no_bos };
        // The lines of a single task of a single model need no names.
        let is_named = self.suite.is_some() || self.against.is_some();
        let results = tasks.iter().map(|task| {
            TaskResult::measure(&mut answerer, task, &answers, runner.as_ref(), |file, mut answer| {
                let Some(details) = details.as_mut() else { return Ok(()) };
                if is_named {
                    answer["model"] = about["model"].clone();
                    answer["file"] = file.name.clone().into();
                }
                details.line(&answer)
            })
        });
        let results = results.collect::<Result<_>>()?;
        Ok(AnsweredTasks { about, results })
    }

    /// Returns the command that runs programs, if one is named.
    fn runner(&self) -> Option<CodeRunner> {
        let environment = CodeRunner::VARIABLES.iter();
        let environment = environment.filter_map(|name| Some((name.to_string(), std::env::var(name).ok()?)));
        Some(CodeRunner {
            command: self.run_code.clone()?,
            timeout: Duration::from_secs(self.code_timeout),
            environment: environment.collect(),
        })
    }

    /// Checks that the file of --details may be written.
    fn target(&self) -> Result<Option<Target>> {
        let read = [&self.choices, &self.exact_match, &self.few_shot].into_iter().flatten();
        let inputs = match &self.against {
            Some(other) => self.model.inputs_with(other),
            None => self.model.inputs(),
        };
        let inputs = inputs.files(read);
        let rules = Rules { inputs: &inputs, overwrite: self.overwrite, stdout: false };
        let target = self.details.as_deref().map(|path| Target::check(path, rules)).transpose()?;
        if let (Some(path), Some(dir)) = (&self.details, &self.suite) {
            let folder = path.parent().unwrap_or(path);
            let [folder, dir] = [folder, dir].map(|path| std::fs::canonicalize(path).ok());
            if dir.is_some() && folder.is_some_and(|folder| dir.is_some_and(|dir| folder.starts_with(dir))) {
                return Err(Error::usage("found a file below the directory of --suite, expected one outside it"))
                    .at(path)
                    .help("name another file with --details");
            }
        }
        Ok(target)
    }

    fn print(&self, model: &AnsweredTasks, reference: Option<&AnsweredTasks>, skipped: &[SkippedFile]) -> Result<()> {
        match self.json {
            true => console::print_json(&self.line(model, reference, skipped)),
            false => self.print_tables(model, reference),
        }
    }

    fn print_tables(&self, model: &AnsweredTasks, reference: Option<&AnsweredTasks>) -> Result<()> {
        if let Some(reference) = reference {
            let names = [model, reference].map(|measured| {
                let word = |key: &str| measured.about[key].as_str().unwrap_or_default().to_string();
                format!("{} ({})", word("model"), word("precision"))
            });
            console::print_line(format_args!("model {}, reference {}", names[0], names[1]))?;
            return console::print(tasks::differences(&model.results, &reference.results));
        }
        if self.suite.is_some() {
            return console::print(tasks::table(&model.results));
        }
        model.results.iter().flat_map(TaskResult::accuracies).try_for_each(|accuracy| {
            let (share, name) = (accuracy.share(), accuracy.name);
            let (value, error) = (100.0 * share.value, 100.0 * share.stderr);
            console::print_line(format_args!("{name:<20} {value:>6.2} % ± {error:.2} %"))
        })
    }

    /// Returns the JSON line: fractions under the names of the figures.
    fn line(&self, model: &AnsweredTasks, reference: Option<&AnsweredTasks>, skipped: &[SkippedFile]) -> Value {
        let mut line = model.about.clone();
        if let Some(reference) = reference {
            line["against"] = reference.about.clone();
        }
        let pairs = model.results.iter().enumerate().map(|(at, result)| (result, reference.map(|r| &r.results[at])));
        if let Some(dir) = &self.suite {
            line["suite"] = dir.display().to_string().into();
            line["tasks"] = pairs.map(|(result, other)| tasks::json(result, other)).collect();
            line["skipped"] = json!(skipped);
            return line;
        }
        for (result, other) in pairs {
            line["task"] = if self.choices.is_some() { "choices" } else { "exact-match" }.into();
            line["file"] = result.name.clone().into();
            line["questions"] = result.questions().into();
            tasks::figures(result).into_iter().for_each(|(key, value)| line[key] = value);
            line["wall_time_s"] = result.seconds().into();
            if let Some(other) = other {
                line["reference"] = Value::Object(tasks::figures(other));
                line["difference"] = Value::Object(tasks::paired(result, other));
            }
        }
        line
    }
}
