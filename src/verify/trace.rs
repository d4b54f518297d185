//! Reads traces of another program: JSON lines of kind `prompt` and `gen_step`, as `iec run --trace-ids` writes them.

use crate::error::{Context, Error, Result};
use crate::files::{self, TEXT_LIMIT};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Texts of a trace, in the order of their indices.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Trace {
    /// One text per prompt.
    pub texts: Vec<TracedText>,
}

/// Prompt of a trace with its generated tokens.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TracedText {
    /// Index of the prompt in the trace.
    pub index: usize,
    /// Text of the prompt.
    pub prompt: String,
    /// Tokens of the prompt.
    pub ids: Vec<u32>,
    /// Generated tokens.
    pub steps: Vec<TracedStep>,
}

/// Generated token with the logits of its step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TracedStep {
    /// Token id.
    pub id: u32,
    /// Logits of the most likely tokens; may be empty.
    pub top: Vec<(u32, f32)>,
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum TraceLine {
    Prompt {
        prompt_index: usize,
        prompt: String,
        prompt_token_ids: Vec<u32>,
    },
    GenStep {
        prompt_index: usize,
        step: usize,
        next_id: u32,
        #[serde(default)]
        topk_ids: Vec<u32>,
        #[serde(default)]
        topk_logits: Vec<f32>,
    },
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    /// The file cannot be read, a line is malformed, or a prompt or a step is duplicated or missing.
    pub fn read(path: &Path) -> Result<Trace> {
        Trace::parse(&files::read_text(path, TEXT_LIMIT)?)
            .at(path)
            .help("make the trace with `iec run --trace-ids FILE`")
    }

    /// Parses the text of a trace.
    ///
    /// # Errors
    /// The same as for [`Trace::read`].
    pub fn parse(text: &str) -> Result<Trace> {
        let mut texts: BTreeMap<usize, TracedText> = BTreeMap::new();
        let mut steps: BTreeMap<(usize, usize), TracedStep> = BTreeMap::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let place = format!("line {}", number + 1);
            let line = serde_json::from_str(line).map_err(|e| Error::corrupt(format!("not a line of a trace: {e}")));
            let twice = || Error::corrupt("found this prompt or step twice").tensor(&place);
            match line.tensor(&place)? {
                TraceLine::Prompt { prompt_index: index, prompt, prompt_token_ids: ids } => {
                    let text = TracedText { index, prompt, ids, steps: Vec::new() };
                    texts.insert(index, text).map_or(Ok(()), |_| Err(twice()))?;
                }
                TraceLine::GenStep { prompt_index, step, next_id, topk_ids, topk_logits } => {
                    if topk_ids.len() != topk_logits.len() {
                        let found = format!(
                            "found {} topk_ids and {} topk_logits, expected the same number",
                            topk_ids.len(),
                            topk_logits.len()
                        );
                        return Err(Error::corrupt(found).tensor(&place));
                    }
                    let step = steps.insert(
                        (prompt_index, step),
                        TracedStep { id: next_id, top: topk_ids.into_iter().zip(topk_logits).collect() },
                    );
                    step.map_or(Ok(()), |_| Err(twice()))?;
                }
            }
        }
        for ((prompt, step), traced) in steps {
            let text = texts.get_mut(&prompt).filter(|text| text.steps.len() == step);
            let missing =
                || Error::corrupt(format!("found step {step} of prompt {prompt} without the lines before it"));
            text.ok_or_else(missing)?.steps.push(traced);
        }
        let texts: Vec<TracedText> = texts.into_values().collect();
        match texts.iter().find(|text| text.ids.is_empty()) {
            Some(text) => Err(Error::corrupt(format!("prompt {} has no tokens", text.index))),
            None if texts.is_empty() => Err(Error::corrupt("found no prompt")),
            None => Ok(Trace { texts }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: &str = r#"{"kind":"prompt","prompt_index":3,"prompt":"a","prompt_token_ids":[1,2]}"#;
    const STEP: &str =
        r#"{"kind":"gen_step","prompt_index":3,"step":0,"next_id":7,"topk_ids":[7],"topk_logits":[1.5]}"#;
    const NEXT: &str = r#"{"kind":"gen_step","prompt_index":3,"step":1,"next_id":8}"#;

    #[test]
    fn lines_may_come_in_any_order() {
        let trace = Trace::parse(&[NEXT, STEP, "", PROMPT].join("\n")).unwrap();
        let text = &trace.texts[0];
        assert_eq!((text.index, text.ids.as_slice(), text.steps.len()), (3, &[1, 2][..], 2));
        assert_eq!(text.steps[0], TracedStep { id: 7, top: vec![(7, 1.5)] });
        assert!(text.steps[1].top.is_empty());
    }

    #[test]
    fn a_broken_trace_is_refused() {
        let cases = [
            (String::new(), "found no prompt"),
            ("{}".into(), "line 1"),
            ([PROMPT, PROMPT].join("\n"), "line 2: found this prompt or step twice"),
            ([PROMPT, STEP, STEP].join("\n"), "line 3: found this prompt or step twice"),
            ([PROMPT, NEXT].join("\n"), "step 1 of prompt 3 without the lines before it"),
            (STEP.into(), "without the lines before it"),
            (PROMPT.replace("1,2", ""), "no tokens"),
            ([PROMPT, &STEP.replace("[1.5]", "[]")].join("\n"), "1 topk_ids and 0 topk_logits"),
            (PROMPT.replace("[1,2]", "[-1]"), "line 1"),
        ];
        for (text, expected) in cases {
            let error = Trace::parse(&text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
