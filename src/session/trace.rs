//! Writes trace files for `iec verify --trace`: the tokens of each prompt and of each generated step, one JSON object
//! per line.

use crate::error::Result;
use crate::generate::Event;
use crate::output::{JsonLines, Target};
use serde_json::json;

/// Trace file being written; it gets its final name when it is complete.
#[derive(Debug)]
pub struct Trace(JsonLines);

impl Trace {
    /// Creates the file under a temporary name.
    pub fn create(target: &Target) -> Result<Trace> {
        JsonLines::create(target).map(Trace)
    }

    /// Writes a prompt and its tokens.
    pub fn prompt(&mut self, index: usize, text: &str, ids: &[u32]) -> Result<()> {
        self.0.line(&json!({"kind": "prompt", "prompt_index": index, "prompt": text, "prompt_token_ids": ids}))
    }

    /// Writes a generated token, and the most likely tokens with their raw logits if they were requested.
    pub fn step(&mut self, event: &Event<'_>) -> Result<()> {
        let mut line = json!({
            "kind": "gen_step", "prompt_index": event.request, "step": event.step, "next_id": event.id,
        });
        if let Some((_, top)) = event.likely {
            line["topk_ids"] = top.iter().map(|c| c.id).collect();
            line["topk_logits"] = top.iter().map(|c| c.logit).collect();
        }
        self.0.line(&line)
    }

    /// Renames the complete file to its final name.
    pub fn commit(self) -> Result<()> {
        self.0.commit()
    }
}
