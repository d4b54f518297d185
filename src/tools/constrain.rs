//! Constraints under which a model writes calls that its tools accept.
//!
//! Free text costs nothing. From the marker of a call on, the name is that of a tool and the arguments
//! follow its schema. A required call may be preceded by reasoning only, and so may an answer that follows a
//! constraint.
//!
//! A schema that is not `strict` describes the arguments for the model; the client did not ask that it is
//! enforced. What can be enforced is, and the rest is left out by name, up to the whole schema.

use super::harmony;
use super::rules::{CallRules, TextCalls};
use super::style::OutputStyle;
use super::tool::{Tool, ToolChoice};
use crate::error::{Error, Result};
use crate::generate::constraint::{ConstraintSource, SchemaOptions, SchemaRules, schema_rules};
use crate::generate::text::Tokenizer;
use serde_json::{Value, json};

/// Largest depth of a schema.
const DEPTH: usize = 64;
/// Largest schema in bytes.
const BYTES: usize = 256 << 10;
/// Largest number of bytes of the rules of all schemas together, which take about a second to compile.
const ALL_BYTES: usize = 1 << 20;

/// Constraint on the calls of an output.
#[derive(Debug, Clone, PartialEq)]
pub struct CallConstraint {
    /// Free text, and the grammar of calls.
    pub source: ConstraintSource,
    /// Parts of schemas to which calls are not held: the number of the tool, and a JSON pointer into its schema.
    pub ignored: Vec<(usize, String)>,
}

/// Schemas to which calls are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enforced {
    /// All, as far as it is possible.
    All,
    /// Strict ones. The arguments of other tools are any object.
    Strict,
}

/// Parts that an output may or must have.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Whether functions are called.
    pub choice: &'a ToolChoice,
    /// Whether the model may call several functions, unless one is named.
    pub parallel: bool,
    /// Schemas to which calls are held.
    pub enforced: Enforced,
    /// Constraint of an answer without calls.
    pub answer: Option<&'a ConstraintSource>,
}

/// Returns the constraint of an output in this style that follows `prompt`; `None` if everything is allowed.
///
/// # Errors
/// The style has no format of calls; or the schema of a strict tool is not supported or too large, and the place of the
/// error names the tool, as `tools[0]`.
pub fn constraint(
    style: &OutputStyle,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    tools: &[Tool],
    wanted: Wanted<'_>,
) -> Result<Option<CallConstraint>> {
    let is_chosen = |tool: &Tool| match wanted.choice {
        ToolChoice::None => false,
        ToolChoice::Auto | ToolChoice::Required => true,
        ToolChoice::Named(name) => tool.name == *name,
    };
    let numbered: Vec<(usize, &Tool)> = tools.iter().enumerate().filter(|(_, tool)| is_chosen(tool)).collect();
    if numbered.is_empty() {
        let answer = wanted.answer.map(|answer| answer_constraint(style, tokenizer, prompt, answer));
        return Ok(answer.map(|source| CallConstraint { source, ignored: Vec::new() }));
    }
    let Some(format) = style.format else {
        return Err(Error::unsupported("the chat template of the model has no known format of tool calls"));
    };
    let (schemas, ignored) = schemas(&numbered, wanted.enforced)?;
    let forced = *wanted.choice != ToolChoice::Auto;
    let rules = CallRules {
        tokenizer,
        prompt,
        tags: &style.tags,
        schemas,
        tools: numbered.into_iter().map(|(_, tool)| tool).collect(),
        forced,
        parallel: wanted.parallel && !matches!(wanted.choice, ToolChoice::Named(_)),
        answer: wanted.answer.filter(|_| !forced),
    };
    Ok(Some(CallConstraint { source: ConstraintSource::Phases((format.row().phases)(&rules)), ignored }))
}

/// Returns the constraint of an output in this style that follows `prompt`, and whose answer follows a constraint: the
/// answer begins behind the reasoning of the model, or in the channel for the user.
pub fn answer_constraint(
    style: &OutputStyle,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    answer: &ConstraintSource,
) -> ConstraintSource {
    if let Some(phases) = harmony::answer_phases(tokenizer, prompt, answer, None) {
        return ConstraintSource::Phases(phases);
    }
    if !style.tags.reasons() {
        return answer.clone();
    }
    let (tools, schemas) = (Vec::new(), Vec::new());
    let (tags, answer) = (&style.tags, Some(answer));
    let rules = CallRules { tokenizer, prompt, tags, tools, schemas, forced: false, parallel: false, answer };
    ConstraintSource::Phases(rules.text_phases(TextCalls::default()))
}

/// Parts of a grammar, one for each tool, and what they do not enforce.
type Schemas = (Vec<String>, Vec<(usize, String)>);

/// Returns the schemas of the arguments of tools.
fn schemas(tools: &[(usize, &Tool)], enforced: Enforced) -> Result<Schemas> {
    let mut rules = Vec::with_capacity(tools.len());
    for (number, tool) in tools {
        let made = match tool.is_strict() || enforced == Enforced::All {
            true => arguments(tool),
            false => Ok(free()),
        };
        rules.push(made.map_err(|e| e.tensor(format!("tools[{number}]")))?);
    }
    // The largest schemas that are not strict give way until the others fit.
    let bytes = |rules: &[SchemaRules]| rules.iter().map(|rules| rules.lark.len()).sum::<usize>();
    let mut by_size: Vec<usize> = (0..rules.len()).filter(|i| !tools[*i].1.is_strict()).collect();
    by_size.sort_by_key(|i| rules[*i].lark.len());
    while bytes(&rules) > ALL_BYTES {
        let Some(largest) = by_size.pop() else {
            let found = bytes(&rules);
            let found =
                format!("found tools with {found} bytes of rules for their schemas, expected at most {ALL_BYTES}");
            return Err(Error::unsupported(found).help("leave out the tools that the request does not need"));
        };
        rules[largest] = free();
    }
    let ignored = tools
        .iter()
        .zip(&rules)
        .flat_map(|((number, _), rules)| rules.ignored.iter().map(|place| (*number, place.clone())));
    Ok((rules.iter().map(SchemaRules::embedded).collect(), ignored.collect()))
}

/// Returns the rules of the arguments of a tool. They are those of any object if nothing of its schema can be used.
fn arguments(tool: &Tool) -> Result<SchemaRules> {
    let made = arguments_schema(tool.parameters.as_ref()).and_then(|schema| {
        let bytes = schema.to_string().len();
        if bytes > BYTES {
            return Err(Error::unsupported(format!("found a schema of {bytes} bytes, expected at most {BYTES}")));
        }
        let strict = tool.is_strict();
        schema_rules(&schema, SchemaOptions { depth: DEPTH, lenient: !strict, closed: strict })
    });
    match made {
        Err(_) if !tool.is_strict() => Ok(free()),
        made => made,
    }
}

/// Returns the rules of any object, in place of a schema of which nothing is used.
fn free() -> SchemaRules {
    let any = schema_rules(&json!({"type": "object"}), SchemaOptions::strict(DEPTH));
    SchemaRules { ignored: vec!["#".into()], ..any.expect("a plain schema") }
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

/// Returns the schema of an argument as a part of a grammar, as far as it can be enforced; `root` is the schema of all
/// arguments.
pub(super) fn value_schema(schema: &Value, root: &Value) -> String {
    let mut whole = schema.clone();
    for name in ["$defs", "definitions"] {
        if let (Some(object), Some(definitions)) = (whole.as_object_mut(), root.get(name)) {
            object.entry(name).or_insert_with(|| definitions.clone());
        }
    }
    let options = SchemaOptions { depth: DEPTH, lenient: true, closed: false };
    let any = || schema_rules(&true.into(), options).expect("a plain schema");
    schema_rules(&whole, options).unwrap_or_else(|_| any()).embedded()
}
