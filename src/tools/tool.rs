//! Tools of a request: functions with the schemas of their arguments, and whether the model calls one.

use crate::error::{Error, Result};
use serde_json::Value;
use std::collections::HashSet;

/// Largest number of tools of a request.
const TOOLS: usize = 128;
/// Largest number of characters of the name of a function.
const NAME: usize = 64;

/// A function that a model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Name, of letters, digits, `_`, `.` and `-`.
    pub name: String,
    /// Purpose of the function, for the model.
    pub description: Option<String>,
    /// JSON schema of the arguments; `None` = there are no arguments.
    pub parameters: Option<Value>,
    /// Whether the client requires arguments that follow the schema. Without it, they follow the schema as
    /// far as it can be enforced.
    pub strict: Option<bool>,
}

/// Decision whether a model calls a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// It calls none.
    None,
    /// It decides by itself.
    Auto,
    /// It calls at least one.
    Required,
    /// It calls the function of this name.
    Named(String),
}

/// Parses the array `tools` of a request to OpenAI's chat completions.
///
/// # Errors
/// It is not an array of functions, has too many of them, or two of the same name; the error names the entry.
pub fn parse_tools(tools: &Value) -> Result<Vec<Tool>> {
    let Some(entries) = tools.as_array() else { return Err(Error::usage("`tools`: expected an array")) };
    if entries.len() > TOOLS {
        let found = format!("`tools`: found {} entries, expected at most {TOOLS}", entries.len());
        return Err(Error::usage(found).help("leave out the tools that the request does not need"));
    }
    let mut names = HashSet::new();
    let parse = |(i, entry): (usize, &Value)| {
        let tool = Tool::parse(entry, &format!("tools[{i}]"))?;
        match names.insert(tool.name.clone()) {
            true => Ok(tool),
            false => Err(Error::usage(format!("`tools[{i}].function.name`: found `{}` a second time", tool.name))),
        }
    };
    entries.iter().enumerate().map(parse).collect()
}

impl Tool {
    /// Returns whether all of the schema must be enforced.
    pub(super) fn is_strict(&self) -> bool {
        self.strict == Some(true)
    }

    fn parse(entry: &Value, place: &str) -> Result<Tool> {
        if entry["type"] != "function" {
            let found = format!("`{place}.type`: found {}, expected \"function\"", shown(&entry["type"]));
            return Err(Error::unsupported(found).help("only functions are supported"));
        }
        let function = &entry["function"];
        let name = function["name"].as_str().unwrap_or_default();
        if !is_name(name) {
            return Err(Error::usage(format!(
                "`{place}.function.name`: found {}, expected 1 to {NAME} letters, digits, `_`, `.` and `-`",
                shown(&function["name"])
            )));
        }
        let parameters = Some(&function["parameters"]).filter(|parameters| !parameters.is_null()).cloned();
        if parameters.as_ref().is_some_and(|parameters| !parameters.is_object()) {
            return Err(Error::usage(format!("`{place}.function.parameters`: expected an object with a JSON schema")));
        }
        let text = |value: &Value| value.as_str().map(String::from);
        let strict = function["strict"].as_bool();
        Ok(Tool { name: name.into(), description: text(&function["description"]), parameters, strict })
    }
}

impl ToolChoice {
    /// Parses `tool_choice` of a request with these tools: `none`, `auto`, `required`, or an object that names a
    /// function. Without a value, it is `auto` if there are tools.
    ///
    /// # Errors
    /// The value is something else, asks for a call without tools, or names a function that is not among the tools.
    pub fn parse(value: Option<&Value>, tools: &[Tool]) -> Result<ToolChoice> {
        let Some(value) = value.filter(|value| !value.is_null()) else {
            return Ok(if tools.is_empty() { ToolChoice::None } else { ToolChoice::Auto });
        };
        let choice = match (value.as_str(), value["function"]["name"].as_str()) {
            (Some("none"), _) => return Ok(ToolChoice::None),
            (Some("auto"), _) if tools.is_empty() => return Ok(ToolChoice::None),
            (Some("auto"), _) => return Ok(ToolChoice::Auto),
            (Some("required"), _) => ToolChoice::Required,
            (None, Some(name)) if value["type"] == "function" => {
                if !tools.iter().any(|tool| tool.name == name) {
                    return Err(Error::usage(format!("`tool_choice`: found the function `{name}`, which is no tool")));
                }
                ToolChoice::Named(name.into())
            }
            _ => {
                let expected = "expected none, auto, required or {\"type\": \"function\", \"function\": {\"name\": …}}";
                return Err(Error::usage(format!("`tool_choice`: found {}, {expected}", shown(value))));
            }
        };
        match tools.is_empty() {
            true => Err(Error::usage("`tool_choice`: found a required call, but no `tools`")),
            false => Ok(choice),
        }
    }
}

/// Returns true for a name that a function may have.
pub(super) fn is_name(name: &str) -> bool {
    (1..=NAME).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

/// Returns the beginning of a value for a message.
fn shown(value: &Value) -> String {
    value.to_string().chars().take(80).collect()
}
