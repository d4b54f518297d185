//! Stub.
use crate::error::Result;
use crate::runtime::constraint::ConstraintSource;
use crate::runtime::text::{ChatTemplate, Tokenizer};
use serde_json::Value;
/// Tool.
#[derive(Debug)]
pub struct Tool {
    /// Name.
    pub name: String,
}
/// Tools.
pub fn parse_tools(_tools: &Value) -> Result<Vec<Tool>> {
    Ok(vec![])
}
/// Choice.
#[derive(Debug, PartialEq)]
pub enum ToolChoice {
    /// n
    None,
    /// a
    Auto,
    /// r
    Required,
    /// n
    Named(String),
}
impl ToolChoice {
    /// p
    pub fn parse(_v: &Value, _t: &[Tool]) -> Result<ToolChoice> {
        Ok(ToolChoice::Auto)
    }
}
/// F
#[derive(Clone, Copy, Debug)]
pub struct Format;
impl Format {
    /// of
    pub fn of(_t: &ChatTemplate, _k: &Tokenizer) -> Option<Format> {
        None
    }
}
/// c
pub fn constraint(
    _f: Format,
    _t: &Tokenizer,
    _p: &[u32],
    _tools: &[Tool],
    _c: &ToolChoice,
    _par: bool,
) -> Result<Option<ConstraintSource>> {
    Ok(None)
}
/// e
#[derive(Debug, Clone)]
pub enum OutputEvent {
    /// c
    Content(String),
    /// r
    Reasoning(String),
    /// b
    CallBegin {
        /// i
        index: usize,
        /// i
        id: String,
        /// n
        name: String,
    },
    /// a
    CallArguments {
        /// i
        index: usize,
        /// t
        text: String,
    },
}
/// p
#[derive(Debug)]
pub struct OutputParser;
impl OutputParser {
    /// n
    pub fn new(_f: Option<Format>, _t: &Tokenizer, _p: &[u32], _s: u64) -> OutputParser {
        OutputParser
    }
    /// p
    pub fn push(&mut self, _id: u32, text: &str, out: &mut Vec<OutputEvent>) {
        if !text.is_empty() {
            out.push(OutputEvent::Content(text.into()))
        }
    }
    /// f
    pub fn finish(&mut self, _out: &mut Vec<OutputEvent>) {}
    /// c
    pub fn calls(&self) -> usize {
        0
    }
}
