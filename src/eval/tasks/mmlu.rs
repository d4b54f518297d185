//! MMLU as published: a CSV file per subject without a header, with the columns question, A, B, C, D and answer.
//!
//! Prompts are those of the original evaluation and of lm-evaluation-harness: a line that names the subject, solved
//! examples from the file of the same subject in `dev`, and the question with its four choices. The continuations that
//! are scored are the letters.

use super::choices::ChoiceQuestion;
use super::csv::{self, CsvRecord};
use super::form::TaskForm;
use super::lines::FORMS;
use crate::error::{Context, Error, Result};
use std::path::Path;

/// Letters of the choices.
const LETTERS: [&str; 4] = ["A", "B", "C", "D"];
/// Number of solved examples before a question.
const EXAMPLES: usize = 5;

/// Returns true if the fields of a record are those of a question.
pub(super) fn is_question(fields: &[String]) -> bool {
    fields.len() == 6 && LETTERS.contains(&fields[5].trim())
}

/// Reads the questions of a file.
///
/// # Errors
/// A record does not have six fields, or its answer is not a letter from A to D.
pub(super) fn questions(text: &str, path: &Path) -> Result<Vec<ChoiceQuestion>> {
    let records = csv::records(text).at(path).help(FORMS)?;
    records.iter().map(|record| question(record).tensor(&format!("line {}", record.line)).at(path)).collect()
}

fn question(record: &CsvRecord) -> Result<ChoiceQuestion> {
    let fields: &[String; 6] = record.fields.as_slice().try_into().map_err(|_| {
        let found = format!("found {} fields, expected 6: question, A, B, C, D, answer", record.fields.len());
        Error::corrupt(found).help(FORMS)
    })?;
    let [question, choices @ .., letter] = fields;
    let answer = LETTERS
        .iter()
        .position(|known| *known == letter.trim())
        .ok_or_else(|| Error::corrupt(format!("answer: found `{letter:.20}`, expected A, B, C or D")).help(FORMS))?;
    let mut context = question.trim().to_string();
    for (letter, choice) in LETTERS.iter().zip(choices) {
        context += &format!("\n{letter}. {choice}");
    }
    context += "\nAnswer:";
    let choices = LETTERS.map(String::from).to_vec();
    Ok(ChoiceQuestion { form: TaskForm::Mmlu, context, choices, answer })
}

/// Returns the text before every question of a subject: its name, and up to five solved examples.
pub(super) fn shots(subject: &str, examples: &[ChoiceQuestion]) -> String {
    let subject = subject.replace('_', " ");
    let mut shots = format!("The following are multiple choice questions (with answers) about {subject}.\n\n");
    for example in examples.iter().take(EXAMPLES) {
        shots += &format!("{} {}\n\n", example.context, LETTERS[example.answer % LETTERS.len()]);
    }
    shots
}

/// Divides the name of a file, without directories, into its subject and its part: `anatomy_test.csv` into `anatomy`
/// and `test`.
pub(super) fn subject_and_part(path: &Path) -> (String, String) {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    match stem.rsplit_once('_') {
        Some((subject, part @ ("test" | "dev" | "val" | "train"))) => (subject.to_string(), part.to_string()),
        _ => (stem, String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_have_the_prompts_of_the_harness() {
        let text = "\"Where, then?\",here,there,\"a \"\"b\"\"\",none,B\nSecond?,1,2,3,4,D\n";
        let found = questions(text, Path::new("x.csv")).unwrap();
        assert_eq!(found[0].context, "Where, then?\nA. here\nB. there\nC. a \"b\"\nD. none\nAnswer:");
        assert_eq!((found[0].answer, found[1].answer, found[0].choices.len()), (1, 3, 4));
        let shots = shots("high_school_physics", &found);
        let head = "The following are multiple choice questions (with answers) about high school physics.\n\n";
        let expected = format!("{head}{} B\n\n{} D\n\n", found[0].context, found[1].context);
        assert_eq!(shots, expected);
    }

    #[test]
    fn broken_records_name_file_line_and_field() {
        let cases = [
            ("a,b,c,d,e,A\nq,1,2,3,A\n", "x.csv: line 2: found 5 fields, expected 6"),
            ("\"a\nb\",b,c,d,e,A\nq,1,2,3,4,E\n", "x.csv: line 3: answer: found `E`, expected A, B, C or D"),
            ("\"a", "x.csv: line 1: found a quote that is not closed"),
        ];
        for (text, expected) in cases {
            let found = questions(text, Path::new("x.csv")).unwrap_err().to_string();
            assert!(found.starts_with(expected), "{found}");
        }
    }

    #[test]
    fn names_state_subject_and_part() {
        let parts = |name: &str| subject_and_part(Path::new(name));
        assert_eq!(parts("d/high_school_physics_test.csv"), ("high_school_physics".into(), "test".into()));
        assert_eq!(parts("physics.csv"), ("physics".into(), String::new()));
    }
}
