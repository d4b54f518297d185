//! Results of evaluation tasks: tables of accuracies and of differences between two models, and JSON.

use super::table::Table;
use crate::eval::stats::PairedDifference;
use crate::eval::tasks::{Accuracy, TaskResult};
use serde_json::{Map, Value, json};

/// Smallest p-value that is printed as a number.
const LEAST_P: f64 = 0.0001;

/// Returns a table with a row for each accuracy of each task.
pub fn table(results: &[TaskResult]) -> Table {
    let columns = ["task", "files", "figure", ">questions", ">right", ">± standard error", "95 % interval", ">time"];
    let mut table = Table::new(&columns);
    for result in results {
        for (number, accuracy) in result.accuracies().iter().enumerate() {
            let (share, interval) = (accuracy.share(), accuracy.ci95());
            let time = if number == 0 { format!("{:.1} s", result.seconds()) } else { String::new() };
            table.row([
                result.form.name().into(),
                files(result),
                accuracy.name.into(),
                accuracy.right.len().to_string(),
                format!("{:.2} %", 100.0 * share.value),
                format!("{:.2} %", 100.0 * share.stderr),
                format!("{:.2} to {:.2} %", 100.0 * interval[0], 100.0 * interval[1]),
                time,
            ]);
        }
    }
    table
}

/// Returns the file of a task, or the number of its files.
fn files(result: &TaskResult) -> String {
    match result.files.len() {
        1 => result.name.clone(),
        count => format!("{} ({count} files)", result.name),
    }
}

/// Pairs the accuracies of the same questions by a model and by the reference.
fn pairs<'a>(
    results: &'a [TaskResult],
    reference: &'a [TaskResult],
) -> impl Iterator<Item = (&'a TaskResult, Accuracy, Accuracy)> {
    results.iter().zip(reference).flat_map(|(ours, theirs)| {
        ours.accuracies().into_iter().zip(theirs.accuracies()).map(move |(a, b)| (ours, a, b))
    })
}

/// Returns a table with the difference of each accuracy from that of a reference model.
pub fn differences(results: &[TaskResult], reference: &[TaskResult]) -> Table {
    let columns = ["task", "figure", ">model", ">reference", ">difference", "95 % interval", ">became right"];
    let mut table = Table::new(&[&columns[..], &[">became wrong", ">p (McNemar)"]].concat());
    for (task, ours, theirs) in pairs(results, reference) {
        let PairedDifference { difference, ci95, became_right, became_wrong, p_value } = ours.minus(&theirs);
        table.row([
            format!("{} {}", task.form.name(), files(task)),
            ours.name.into(),
            format!("{:.2} %", 100.0 * ours.share().value),
            format!("{:.2} %", 100.0 * theirs.share().value),
            format!("{:+.2} points", 100.0 * difference.value),
            format!("{:+.2} to {:+.2}", 100.0 * ci95[0], 100.0 * ci95[1]),
            became_right.to_string(),
            became_wrong.to_string(),
            if p_value < LEAST_P { format!("< {LEAST_P}") } else { format!("{p_value:.4}") },
        ]);
    }
    table
}

/// Returns the accuracies of a task, by the names of the figures.
pub fn figures(result: &TaskResult) -> Map<String, Value> {
    let figure = |accuracy: Accuracy| {
        let (share, ci95) = (accuracy.share(), accuracy.ci95());
        let right = accuracy.count();
        (accuracy.key.to_string(), json!({"value": share.value, "stderr": share.stderr, "ci95": ci95, "right": right}))
    };
    result.accuracies().into_iter().map(figure).collect()
}

/// Returns the differences of the accuracies of a task from those of a reference model, by the names of the figures.
pub fn paired(result: &TaskResult, reference: &TaskResult) -> Map<String, Value> {
    let both = result.accuracies().into_iter().zip(reference.accuracies());
    both.map(|(ours, theirs)| (ours.key.to_string(), json!(ours.minus(&theirs)))).collect()
}

/// Returns a task of a suite as JSON, with the comparison with a reference model if there is one.
pub fn json(result: &TaskResult, reference: Option<&TaskResult>) -> Value {
    let files = result.files.iter().map(|(source, answers)| {
        let right = answers.right.iter().filter(|right| **right).count();
        json!({"name": source.name, "bytes": source.bytes, "sha256": source.sha256,
            "questions": answers.right.len(), "right": right})
    });
    let mut object = json!({
        "task": result.form.name(),
        "form": result.form,
        "name": result.name,
        "files": files.collect::<Vec<_>>(),
        "questions": result.questions(),
        "truncated": result.truncated(),
    });
    figures(result).into_iter().for_each(|(key, value)| object[key] = value);
    object["wall_time_s"] = result.seconds().into();
    if let Some(reference) = reference {
        object["reference"] = Value::Object(figures(reference));
        object["difference"] = Value::Object(paired(result, reference));
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::tasks::{TaskAnswers, TaskForm};
    use crate::provenance::SourceFile;

    fn result(right: &[bool]) -> TaskResult {
        let source = SourceFile { name: "f".into(), bytes: 3, sha256: "0".into() };
        let by_length = Some(vec![true; right.len()]);
        let answers = TaskAnswers { right: right.to_vec(), right_by_length: by_length, truncated: 1, seconds: 2.0 };
        TaskResult { name: "arc/f".into(), form: TaskForm::ArcAi2, files: vec![(source, answers)] }
    }

    #[test]
    fn accuracies_and_differences_are_shown_with_their_intervals() {
        let (ours, theirs) = (result(&[true, false, true, true]), result(&[true, true, false, true]));
        let shown = table(std::slice::from_ref(&ours)).to_string();
        assert!(shown.contains("75.00 %") && shown.contains("30.06 to 95.44 %"), "{shown}");
        assert!(shown.contains("100.00 %") && shown.matches("2.0 s").count() == 1, "{shown}");
        let shown = differences(std::slice::from_ref(&ours), std::slice::from_ref(&theirs)).to_string();
        assert!(shown.contains("+0.00 points") && shown.contains("1.0000"), "{shown}");
        let object = json(&ours, Some(&theirs));
        assert_eq!((&object["form"], &object["truncated"]), (&"arc_ai2".into(), &1.into()));
        assert_eq!(object["accuracy"]["right"], 3);
        assert_eq!(object["difference"]["accuracy"]["became_right"], 1);
        assert_eq!(object["difference"]["accuracy"]["value"], 0.0);
        assert_eq!(object["reference"]["accuracy_normalized"]["value"], 1.0);
    }
}
