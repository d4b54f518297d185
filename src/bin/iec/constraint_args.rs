//! Options that constrain the generated text.

use iec::error::{Context, Result};
use iec::files;
use iec::generate::constraint::ConstraintSource;
use iec::session::Session;
use std::path::{Path, PathBuf};

/// Heading of these options in the help.
const HEADING: &str = "Structured output (at most one of these options)";
/// Largest accepted file in bytes; the library has a lower limit for each kind of constraint.
const FILE_LIMIT: u64 = 1 << 20;

/// Options that constrain the generated text; at most one of them is given.
#[derive(Debug, clap::Args)]
#[group(multiple = false)]
pub struct ConstraintArgs {
    /// Generate JSON that is valid against a JSON schema (a file, or the schema itself if it begins
    /// with `{`)
    #[arg(help_heading = HEADING, long, value_name = "FILE|JSON")]
    json_schema: Option<String>,
    /// Generate a text that a grammar accepts: a file in the Lark dialect of llguidance whose start rule is `start`
    #[arg(help_heading = HEADING, long, value_name = "FILE")]
    grammar: Option<PathBuf>,
    /// Generate a text that a regular expression matches as a whole, such as '[0-9]{3}'
    #[arg(help_heading = HEADING, long, value_name = "RE")]
    regex: Option<String>,
    /// Generate one of these texts; separate them with commas, or repeat the option
    #[arg(help_heading = HEADING, long, value_name = "TEXT", value_delimiter = ',')]
    choice: Vec<String>,
}

impl ConstraintArgs {
    /// Returns the files that are read.
    pub fn files(&self) -> Vec<PathBuf> {
        let schema = self.json_schema.as_ref().filter(|text| !is_inline(text));
        schema.map(PathBuf::from).into_iter().chain(self.grammar.clone()).collect()
    }

    /// Reads the source of the constraint, if there is one.
    pub fn source(&self) -> Result<Option<ConstraintSource>> {
        Ok(Some(match self {
            ConstraintArgs { json_schema: Some(text), .. } if is_inline(text) => {
                ConstraintSource::JsonSchema(text.clone())
            }
            ConstraintArgs { json_schema: Some(path), .. } => ConstraintSource::JsonSchema(read(Path::new(path))?),
            ConstraintArgs { grammar: Some(path), .. } => ConstraintSource::Grammar(read(path)?),
            ConstraintArgs { regex: Some(pattern), .. } => ConstraintSource::Regex(pattern.clone()),
            ConstraintArgs { choice, .. } if !choice.is_empty() => ConstraintSource::Choice(choice.clone()),
            _ => return Ok(None),
        }))
    }

    /// Checks the constraint, if there is one, before prompts are read.
    pub fn check(&self, source: Option<&ConstraintSource>, session: &Session) -> Result<()> {
        let checked = source.map_or(Ok(()), |source| session.constraint(source).map(drop));
        // An error in the content of a file gets the path of that file.
        match self.files().first() {
            Some(file) => checked.at(file),
            None => checked,
        }
    }
}

fn is_inline(schema: &str) -> bool {
    schema.trim_start().starts_with('{')
}

fn read(path: &Path) -> Result<String> {
    files::utf8(files::read_limited(path, FILE_LIMIT)?).at(path)
}
