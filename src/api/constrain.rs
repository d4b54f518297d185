//! Constraint of an answer: that of the client, or the one that keeps calls of tools valid.
//!
//! A schema that is not strict is a hint: it is followed as far as it can be enforced, and the parts that are not are
//! named in the header `x-iec-ignored` by their path in the request.

use super::error::{ApiError, ApiResult};
use super::prepare::{Conversation, Plan, PromptSource, no_template};
use crate::error::Error;
use crate::generate::constraint::{Constraint, ConstraintSource};
use crate::session::Encoder;
use crate::tools::{self, CallConstraint, Enforced, OutputStyle, ToolChoice, Wanted};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Largest number of paths that are named.
const MOST_NAMED: usize = 40;

/// A compiled constraint.
#[derive(Default)]
pub struct Constrained {
    /// The constraint, if there is one.
    pub constraint: Option<Arc<Constraint>>,
    /// Paths of the parts of schemas that it does not enforce.
    pub ignored: Vec<String>,
    /// Time that it took to compile.
    pub spent: Duration,
}

/// Returns the constraint of an answer to a prompt of these tokens.
///
/// # Errors
/// It cannot be compiled, or contradicts the tools.
pub fn constraint(encoder: &Encoder<'_>, source: &PromptSource, ids: &[u32], plan: &Plan) -> ApiResult<Constrained> {
    let begin = Instant::now();
    let mut made = uncounted(encoder, source, ids, plan)?;
    made.spent = begin.elapsed();
    Ok(made)
}

fn uncounted(encoder: &Encoder<'_>, source: &PromptSource, ids: &[u32], plan: &Plan) -> ApiResult<Constrained> {
    let settings = &plan.settings;
    let compile = |source: ConstraintSource| plan.facts.constraints.get(source, |source| encoder.constraint(source));
    let done = |constraint, ignored| {
        Ok(Constrained { constraint: Some(constraint), ignored: named(ignored), ..Constrained::default() })
    };
    let of_answer = |constraint: &Constraint| -> Vec<String> {
        constraint.ignored().iter().map(|pointer| path(settings.schema_field, pointer)).collect()
    };
    let conversation = source.chat(&plan.facts);
    let chat = conversation.filter(|chat| !chat.tools.is_empty() && chat.choice != ToolChoice::None);
    let Some(conversation) = conversation else {
        let Some(own) = &settings.constraint else { return Ok(Constrained::default()) };
        let constraint = compile(own.clone()).map_err(|e| ApiError::of_field("response_format", &e))?;
        let ignored = of_answer(&constraint);
        return done(constraint, ignored);
    };
    let (style, tokenizer) = (style_of(encoder, conversation, plan)?, encoder.tokenizer()?);
    // An answer that must be a call has no text that could have a form.
    let own = settings.constraint.as_ref().filter(|_| chat.is_none_or(|chat| chat.choice == ToolChoice::Auto));
    if let Some(own) = own.filter(|_| chat.is_none() || style.format().is_none()) {
        let source = tools::answer_constraint(&style, tokenizer, ids, own);
        let constraint = compile(source).map_err(|e| ApiError::of_field("response_format", &e))?;
        let ignored = of_answer(&constraint);
        return done(constraint, ignored);
    }
    let Some(chat) = chat else { return Ok(Constrained::default()) };
    let calls = |enforced| {
        let wanted = Wanted { choice: &chat.choice, parallel: chat.parallel, enforced, answer: own };
        tools::constraint(&style, tokenizer, ids, &chat.tools, wanted).map_err(|e| of_tool(chat, &e))
    };
    let Some(CallConstraint { source, ignored }) = calls(Enforced::All)? else { return Ok(Constrained::default()) };
    let (compiled, ignored) = match compile(source) {
        Ok(compiled) => (compiled, ignored),
        // The schemas together may exceed what the compiler can do, although each alone does not.
        Err(error) => match calls(Enforced::Strict)? {
            Some(calls) if calls.ignored != ignored => {
                (compile(calls.source).map_err(|e| ApiError::of_field("tools", &e))?, calls.ignored)
            }
            _ => return Err(ApiError::of_field("tools", &error)),
        },
    };
    let field = |tool: usize| format!("tools[{tool}].{}", chat.schema_field);
    let of_tools = ignored.iter().map(|(tool, pointer)| path(&field(*tool), pointer));
    let ignored = of_answer(&compiled).into_iter().chain(of_tools).collect();
    done(compiled, ignored)
}

/// Returns the style of the output of the model.
///
/// # Errors
/// The model has no chat template.
pub fn style_of(encoder: &Encoder<'_>, chat: &Conversation, plan: &Plan) -> ApiResult<OutputStyle> {
    let template = plan.facts.template.as_ref().ok_or_else(|| no_template(chat))?;
    Ok(OutputStyle::of(&template.template.template, encoder.tokenizer()?))
}

/// Converts an error about the schema of a tool.
fn of_tool(chat: &Conversation, error: &Error) -> ApiError {
    match error.tensor_name() {
        Some(tool) => {
            let message = ApiError::from(error).message;
            ApiError::field(&format!("{tool}.{}", chat.schema_field), message)
        }
        None => ApiError::of_field("tools", error),
    }
}

/// Returns the path of a part of a schema in the request.
fn path(field: &str, pointer: &str) -> String {
    let mut path = String::from(field);
    for segment in pointer.trim_start_matches('#').split('/').skip(1) {
        let segment = segment.replace("~1", "/").replace("~0", "~");
        // A comma divides the paths in the header.
        let shown: String = segment.chars().map(|c| if c.is_ascii_graphic() && c != ',' { c } else { '?' }).collect();
        match segment.parse::<usize>() {
            Ok(number) => path += &format!("[{number}]"),
            Err(_) => path = path + "." + &shown,
        }
    }
    path
}

/// Shortens a list of paths to one that a header can hold.
fn named(mut paths: Vec<String>) -> Vec<String> {
    let more = paths.len().saturating_sub(MOST_NAMED);
    paths.truncate(MOST_NAMED);
    for path in &mut paths {
        if path.len() > 200 {
            path.truncate(200);
            path.push_str("...");
        }
    }
    if more > 0 {
        paths.push(format!("{more} more"));
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_schemas_are_named_by_their_path_in_the_request() {
        let cases = [
            ("#/properties/x/uniqueItems", "tools[2].function.parameters.properties.x.uniqueItems"),
            ("#/anyOf/1/pattern", "tools[2].function.parameters.anyOf[1].pattern"),
            ("#/properties/a~1b, c/not", "tools[2].function.parameters.properties.a/b??c.not"),
            ("#/$defs/é/not", "tools[2].function.parameters.$defs.?.not"),
            ("#", "tools[2].function.parameters"),
        ];
        for (pointer, expected) in cases {
            assert_eq!(path("tools[2].function.parameters", pointer), expected);
        }
        let many = named(vec!["x".repeat(300); 50]);
        assert_eq!((many.len(), many[0].len(), many[40].as_str()), (41, 203, "10 more"));
    }
}
