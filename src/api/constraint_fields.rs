//! Constraints on the answer, in the fields in which clients of different servers give them.

use super::body::{Body, expected};
use super::error::{ApiError, ApiResult};
use super::gbnf;
use super::settings::{of_format, of_structured};
use crate::generate::constraint::ConstraintSource;
use serde_json::Value;

/// Fields that vLLM had before `structured_outputs`, and fields of llama.cpp and ollama, with what they hold.
pub const SHORT: [(&str, &str); 7] = [
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("json_schema", "json"),
    ("grammar", "grammar"),
    ("format", "format"),
];

/// Takes the constraint of a body, and records by which name the client knows it. The second value is the path of the
/// schema in `response_format`.
///
/// # Errors
/// A field has another form, or there are two.
pub fn take(body: &mut Body) -> ApiResult<(Option<ConstraintSource>, &'static str)> {
    let mut found: Option<(String, ConstraintSource)> = None;
    let mut add = |name: String, source: ConstraintSource| match &found {
        Some((other, _)) => Err(ApiError::field(&name, format!("found it together with `{other}`, expected one"))),
        None => {
            found = Some((name, source));
            Ok(())
        }
    };
    let mut schema_field = "response_format.json_schema.schema";
    if let Some(format) = body.object("response_format")? {
        if format.get("type").and_then(Value::as_str) == Some("json_object") {
            schema_field = "response_format.schema";
        }
        if let Some(source) = of_format(&format)? {
            add("response_format".into(), source)?;
        }
    }
    if let Some((kind, source)) = body.object("structured_outputs")?.map(of_structured).transpose()? {
        add(format!("structured_outputs.{kind}"), source)?;
    }
    for (name, kind) in SHORT {
        let Some(value) = body.take(name) else { continue };
        if let Some(source) = of_value(name, kind, value)? {
            add(name.into(), source)?;
        }
    }
    let source = found.map(|(name, source)| {
        body.names.call("response_format", name);
        source
    });
    Ok((source, schema_field))
}

/// Reads a constraint of a kind: `json` (a schema), `regex`, `grammar`, `choice`, or `format` (a schema or `json`).
///
/// # Errors
/// The value has another form.
pub fn of_value(name: &str, kind: &str, value: Value) -> ApiResult<Option<ConstraintSource>> {
    Ok(Some(match (kind, value) {
        ("format", Value::String(text)) if text.is_empty() => return Ok(None),
        ("format", Value::String(text)) if text == "json" => {
            ConstraintSource::JsonSchema(r#"{"type": "object"}"#.into())
        }
        ("json", Value::String(text)) => ConstraintSource::JsonSchema(text),
        ("json" | "format", schema @ Value::Object(_)) | ("json", schema @ Value::Bool(_)) => {
            ConstraintSource::JsonSchema(schema.to_string())
        }
        ("regex", Value::String(text)) => ConstraintSource::Regex(text),
        ("grammar", Value::String(text)) if gbnf::is_gbnf(&text) => {
            ConstraintSource::Regex(gbnf::to_regex(&text).map_err(|e| ApiError::field(name, e))?)
        }
        ("grammar", Value::String(text)) => ConstraintSource::Grammar(text),
        ("choice", value) => {
            let text = |value: &Value| value.as_str().map(String::from);
            let texts: Option<Vec<String>> = value.as_array().and_then(|list| list.iter().map(text).collect());
            ConstraintSource::Choice(texts.ok_or_else(|| expected(name, "a list of texts", &value))?)
        }
        ("json", value) => return Err(expected(name, "a JSON schema", &value)),
        ("format", value) => return Err(expected(name, "`json` or a JSON schema", &value)),
        (_, value) => return Err(expected(name, "a text", &value)),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: &Value) -> ApiResult<(Option<ConstraintSource>, Body)> {
        let mut body = Body::parse(body.to_string().as_bytes()).unwrap();
        take(&mut body).map(|(source, _)| (source, body))
    }

    #[test]
    fn every_form_of_a_constraint_is_taken_and_errors_name_its_field() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let of_schema = ConstraintSource::JsonSchema(schema.to_string());
        let of_hint = ConstraintSource::JsonSchemaHint(schema.to_string());
        let of_text = |text: &str| ConstraintSource::JsonSchema(text.into());
        let any_object = of_text(r#"{"type": "object"}"#);
        let choice = ConstraintSource::Choice(vec!["yes".into(), "no".into()]);
        let regex = ConstraintSource::Regex("[0-9]+".into());
        let of_gbnf = ConstraintSource::Regex("(?:yes|no)".into());
        let lark = ConstraintSource::Grammar("start: \"a\"".into());
        struct Case(Value, &'static str, ConstraintSource);
        let cases = [
            Case(json!({"guided_json": schema}), "guided_json", of_schema.clone()),
            Case(json!({"guided_json": "{}"}), "guided_json", of_text("{}")),
            Case(json!({"guided_regex": "[0-9]+"}), "guided_regex", regex.clone()),
            Case(json!({"guided_choice": ["yes", "no"]}), "guided_choice", choice.clone()),
            Case(json!({"guided_grammar": "start: \"a\""}), "guided_grammar", lark.clone()),
            Case(json!({"grammar": "start: \"a\""}), "grammar", lark.clone()),
            Case(json!({"grammar": "root ::= \"yes\" | \"no\""}), "grammar", of_gbnf.clone()),
            Case(json!({"guided_grammar": "root ::= \"yes\" | \"no\""}), "guided_grammar", of_gbnf),
            Case(json!({"json_schema": schema}), "json_schema", of_schema.clone()),
            Case(json!({"format": schema}), "format", of_schema.clone()),
            Case(json!({"format": "json"}), "format", any_object.clone()),
            Case(json!({"response_format": {"type": "json_object"}}), "response_format", any_object),
            Case(
                json!({"response_format": {"type": "json_object", "schema": schema}}),
                "response_format",
                of_hint.clone(),
            ),
            Case(
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
                "response_format",
                of_hint.clone(),
            ),
            Case(json!({"structured_outputs": {"json": schema}}), "structured_outputs.json", of_schema),
            Case(json!({"structured_outputs": {"regex": "[0-9]+"}}), "structured_outputs.regex", regex),
            Case(json!({"structured_outputs": {"choice": ["yes", "no"]}}), "structured_outputs.choice", choice),
            Case(json!({"structured_outputs": {"grammar": "start: \"a\""}}), "structured_outputs.grammar", lark),
        ];
        for Case(body, name, expected) in cases {
            let (source, read) = read(&body).unwrap_or_else(|e| panic!("{body}: {e:?}"));
            assert_eq!(source, Some(expected), "{body}");
            assert_eq!(
                read.names.shown(ApiError::field("response_format", "x")).param.as_deref(),
                Some(name),
                "{body}"
            );
            assert_eq!(read.rest(true), Ok(Vec::new()), "{body}");
        }
        for free in [json!({}), json!({"format": ""}), json!({"response_format": {"type": "text"}, "grammar": null})] {
            assert_eq!(read(&free).unwrap().0, None, "{free}");
        }
    }

    #[test]
    fn wrong_forms_and_two_constraints_are_refused_by_their_field() {
        let cases = [
            (json!({"guided_json": 1}), "guided_json"),
            (json!({"guided_choice": "yes"}), "guided_choice"),
            (json!({"guided_choice": [1]}), "guided_choice"),
            (json!({"guided_regex": {}}), "guided_regex"),
            (json!({"format": "xml"}), "format"),
            (json!({"json_schema": []}), "json_schema"),
            (json!({"grammar": "root ::= root"}), "grammar"),
            (json!({"guided_grammar": "root ::= root"}), "guided_grammar"),
            (json!({"structured_outputs": {"grammar": "root ::= root"}}), "structured_outputs.grammar"),
            (json!({"guided_json": {}, "guided_regex": "a"}), "guided_regex"),
            (json!({"response_format": {"type": "json_object"}, "grammar": "start: \"a\""}), "grammar"),
        ];
        for (body, field) in cases {
            assert_eq!(read(&body).unwrap_err().param.as_deref(), Some(field), "{body}");
        }
    }
}
