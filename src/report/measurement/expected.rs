//! Reads expected tokens from a file in one of three forms: the trace of `iec run --trace-ids` (JSON lines), a JSON
//! array with one array of ids (or null) per prompt, or a JSON object from `prompt_id` to ids.

use super::line::prompt_id;
use crate::error::{Context, Error, Result};
use crate::files::{self, TEXT_LIMIT};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Advice about the file.
const FORMS: &str = "name a trace of `iec run --trace-ids`, or a JSON file with a list of ids per prompt or an object \
     {\"prompt_id\": [ids]}";

/// Forms that are one JSON value.
#[derive(Deserialize)]
#[serde(untagged)]
enum Whole {
    ByIndex(Vec<Option<Vec<u32>>>),
    ById(HashMap<String, Vec<u32>>),
}

/// Line of a trace; prompt lines have no `next_id`.
#[derive(Deserialize)]
struct TraceLine {
    prompt_index: usize,
    step: Option<usize>,
    next_id: Option<u32>,
}

/// Reads the expected tokens of each prompt; `None` for prompts that the file does not contain.
///
/// # Errors
/// The file cannot be read or has none of the forms.
pub fn read(path: &Path, prompts: &[String]) -> Result<Vec<Option<Vec<u32>>>> {
    let text = files::read_text(path, TEXT_LIMIT).help(FORMS)?;
    match serde_json::from_str::<Whole>(&text) {
        Ok(Whole::ByIndex(mut ids)) => {
            ids.resize(prompts.len(), None);
            Ok(ids)
        }
        Ok(Whole::ById(mut ids)) => Ok(prompts.iter().map(|prompt| ids.remove(&prompt_id(prompt))).collect()),
        Err(_) => trace(&text, prompts.len()).at(path).help(FORMS),
    }
}

fn trace(text: &str, prompts: usize) -> Result<Vec<Option<Vec<u32>>>> {
    let mut steps: Vec<BTreeMap<usize, u32>> = vec![BTreeMap::new(); prompts];
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let line: TraceLine = serde_json::from_str(line)
            .map_err(|e| Error::corrupt(format!("not a trace, and no JSON with token ids: {e}")))
            .tensor(&format!("line {}", i + 1))?;
        if let (Some(steps), Some(step), Some(id)) = (steps.get_mut(line.prompt_index), line.step, line.next_id) {
            steps.insert(step, id);
        }
    }
    let ids =
        |steps: BTreeMap<usize, u32>| Some(steps.into_values().collect()).filter(|ids: &Vec<u32>| !ids.is_empty());
    Ok(steps.into_iter().map(ids).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_names_the_tokens_of_each_prompt() {
        let prompts = ["a".to_string(), "foobar".to_string()];
        let cases = [
            "[[1, 2], null]",
            "[[1, 2]]",
            r#"{"af63dc4c8601ec8c": [1, 2]}"#,
            "{\"kind\":\"prompt\",\"prompt_index\":0}\n{\"kind\":\"gen_step\",\"prompt_index\":0,\"step\":1,\"next_id\":2}\n\
             {\"kind\":\"gen_step\",\"prompt_index\":0,\"step\":0,\"next_id\":1}\n",
        ];
        let file = tempfile::NamedTempFile::new().unwrap();
        for text in cases {
            std::fs::write(file.path(), text).unwrap();
            assert_eq!(read(file.path(), &prompts).unwrap(), [Some(vec![1, 2]), None], "{text}");
        }
        std::fs::write(file.path(), "[1]").unwrap();
        assert!(read(file.path(), &prompts).unwrap_err().to_string().contains("line 1"));
    }
}
