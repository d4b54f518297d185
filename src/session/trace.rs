//! Trace files: the tokens of each prompt and of each generated step, one JSON object per line, for `iec verify --trace`.

use crate::error::{Context, Result};
use crate::output::{AtomicFile, Target};
use crate::runtime::generate::Event;
use serde_json::json;
use std::io::{BufWriter, Write};

/// A trace being written; it gets its name when it is complete.
#[derive(Debug)]
pub struct Trace {
    out: BufWriter<AtomicFile>,
}

impl Trace {
    /// Starts the file.
    pub fn create(target: &Target) -> Result<Trace> {
        Ok(Trace { out: BufWriter::new(target.create()?) })
    }

    /// Notes a prompt and its tokens.
    pub fn prompt(&mut self, index: usize, text: &str, ids: &[u32]) -> Result<()> {
        self.line(&json!({"kind": "prompt", "prompt_index": index, "prompt": text, "prompt_token_ids": ids}))
    }

    /// Notes a generated token and the most likely ones with their raw logits.
    pub fn step(&mut self, event: &Event<'_>) -> Result<()> {
        let mut line = json!({
            "kind": "gen_step", "prompt_index": event.request, "step": event.step, "next_id": event.id,
        });
        if let Some((_, top)) = event.likely {
            line["topk_ids"] = top.iter().map(|c| c.id).collect();
            line["topk_logits"] = top.iter().map(|c| c.logit).collect();
        }
        self.line(&line)
    }

    fn line(&mut self, value: &serde_json::Value) -> Result<()> {
        let path = self.out.get_ref().path().to_path_buf();
        writeln!(self.out, "{value}").at(path)
    }

    /// Gives the file its name.
    pub fn commit(self) -> Result<()> {
        let path = self.out.get_ref().path().to_path_buf();
        self.out.into_inner().map_err(|e| e.into_error()).at(path)?.commit()
    }
}
