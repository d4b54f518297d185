//! Constraints under which a model writes calls that its tools accept.
//!
//! Free text costs nothing. From the marker of a call on, the name is that of a tool and the arguments
//! follow its schema. A required call may be preceded by reasoning only.

use super::format::Format;
use super::reasoning;
use super::rules::CallRules;
use super::tool::{Tool, ToolChoice};
use crate::error::{Error, Result};
use crate::runtime::constraint::{ConstraintSource, schema_in_grammar};
use crate::runtime::text::Tokenizer;
use serde_json::{Value, json};

/// Largest depth of a schema.
const DEPTH: usize = 64;
/// Largest schema in bytes.
const BYTES: usize = 256 << 10;
/// Largest number of bytes of all schemas together.
const ALL_BYTES: usize = 512 << 10;

/// Returns the constraint of an output in this format that follows `prompt`; `None` if no call is allowed. With
/// `parallel`, the model may call several functions.
///
/// # Errors
/// The schema of a tool is not supported or too large; the error names the tool.
pub fn constraint(
    format: Format,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    tools: &[Tool],
    choice: &ToolChoice,
    parallel: bool,
) -> Result<Option<ConstraintSource>> {
    let tools: Vec<&Tool> = match choice {
        ToolChoice::None => return Ok(None),
        ToolChoice::Auto | ToolChoice::Required => tools.iter().collect(),
        ToolChoice::Named(name) => tools.iter().filter(|tool| tool.name == *name).collect(),
    };
    if tools.is_empty() {
        return Ok(None);
    }
    let rules = CallRules {
        tokenizer,
        schemas: schemas(&tools)?,
        tools,
        forced: *choice != ToolChoice::Auto,
        parallel,
        in_reasoning: reasoning::is_open(tokenizer, prompt),
        reasoned: !format.reasons() || reasoning::is_over(tokenizer, prompt),
    };
    Ok(Some(ConstraintSource::Phases((format.row().phases)(&rules))))
}

/// Returns the schemas of the arguments of tools, as parts of a grammar.
fn schemas(tools: &[&Tool]) -> Result<Vec<String>> {
    let schema = |tool: &&Tool| {
        let fail = |e: Error| e.tensor(format!("parameters of the tool `{}`", tool.name));
        let schema = arguments_schema(tool.parameters.as_ref()).map_err(fail)?;
        let bytes = schema.to_string().len();
        if bytes > BYTES {
            return Err(fail(Error::unsupported(format!("found a schema of {bytes} bytes, expected at most {BYTES}"))));
        }
        schema_in_grammar(&schema, DEPTH).map_err(fail)
    };
    let schemas = tools.iter().map(schema).collect::<Result<Vec<_>>>()?;
    let bytes: usize = schemas.iter().map(String::len).sum();
    match bytes > ALL_BYTES {
        true => {
            Err(Error::unsupported(format!("found tools with {bytes} bytes of schemas, expected at most {ALL_BYTES}"))
                .help("leave out the tools that the request does not need"))
        }
        false => Ok(schemas),
    }
}

/// Returns the schema of arguments: they are always an object.
fn arguments_schema(parameters: Option<&Value>) -> Result<Value> {
    let mut schema = match parameters {
        Some(Value::Object(schema)) => schema.clone(),
        _ => return Ok(json!({"type": "object", "properties": {}, "additionalProperties": false})),
    };
    let is_object = match schema.get("type") {
        None => true,
        Some(Value::Array(types)) => types.iter().any(|kind| kind == "object"),
        Some(kind) => kind == "object",
    };
    if !is_object {
        return Err(Error::usage(format!("found the type {}, expected \"object\"", schema["type"])));
    }
    schema.insert("type".into(), "object".into());
    Ok(Value::Object(schema))
}
