//! The engine of chat templates: Jinja with the filters, tests, functions and methods of `transformers`, all of whose
//! work counts as steps.

use super::chat::STEPS;
use super::datetime::strftime;
use super::tojson::tojson;
use super::{filters, methods, python};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::{Captures, Regex};
use std::io::Write;
use std::sync::{Arc, LazyLock};

pub(super) type Result<T> = std::result::Result<T, Error>;

/// Bytes that a value takes as text for each step: lists within lists become text slowly.
const BYTES_PER_STEP: usize = 4;
/// Parts of a text for each step: a part takes up to 100 bytes.
const PARTS_PER_STEP: u64 = 2;

/// Creates the environment with the filters, tests and functions that templates may use. `now` is the time in seconds
/// since 1970.
pub(super) fn environment(now: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the usual delimiters"));
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            out.write_str(&python::text(state, value)?).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    });
    filters::add(&mut environment);
    environment.add_filter("tojson", tojson);
    environment.add_filter("e", escape);
    environment.add_filter("escape", escape);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("split", |state: &State, text: &Value, separator: Option<Arc<str>>, most: Option<i64>| {
        count_parts(state, text, separator.as_deref())?;
        minijinja::filters::split(text, separator, most)
    });
    environment.add_filter("lines", |state: &State, text: &Value| {
        count_parts(state, text, Some("\n"))?;
        minijinja::filters::lines(text)
    });
    // In minijinja `none is iterable` is true, in Jinja2 it is false, and templates test `tools is iterable`.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |state: &State, format: String| {
        state.consume_fuel(format.len() as u64)?;
        strftime(now, &format).map_err(|why| Error::new(ErrorKind::InvalidOperation, why))
    });
    environment
}

/// Matches the tags `{% generation %}` and `{% endgeneration %}`, between which templates put the text that a model is
/// trained on.
static GENERATION: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a constant pattern"));

/// Replaces the tags of [`GENERATION`], which minijinja does not know, by an `if` block that is always true and so
/// renders the same text. As in Jinja, all ends of lines become line feeds.
pub(super) fn plain_blocks(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let plain = GENERATION.replace_all(&source, |tag: &Captures| {
        let statement = if tag.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {statement} {}%}}", &tag[1], &tag[3])
    });
    plain.into_owned()
}

/// Replaces the characters that have a meaning in HTML.
fn escape(state: &State, value: &Value) -> Result<Value> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let mut out = Counted { text: Vec::new(), state };
    for c in value.to_string().chars() {
        let written = match c {
            '&' => write!(out, "&amp;"),
            '<' => write!(out, "&lt;"),
            '>' => write!(out, "&gt;"),
            '\'' => write!(out, "&#39;"),
            '"' => write!(out, "&#34;"),
            c => write!(out, "{c}"),
        };
        if written.is_err() {
            break;
        }
    }
    // A write error means too many steps.
    state.consume_fuel(0)?;
    Ok(Value::from_safe_string(String::from_utf8_lossy(&out.text).into_owned()))
}

/// Returns the length of a value; as in Jinja, an undefined value has length 0.
fn length(value: &Value) -> Result<usize> {
    match value.len() {
        Some(length) => Ok(length),
        None if value.is_undefined() => Ok(0),
        None => {
            let found = format!("a value of type {} has no length", value.kind());
            Err(Error::new(ErrorKind::InvalidOperation, found))
        }
    }
}

/// Counts the parts into which a text will be split as steps. The engine counts the list of them only when it is made,
/// and a list takes many times the memory of its text.
fn count_parts(state: &State, text: &Value, separator: Option<&str>) -> Result<()> {
    let Some(text) = text.as_str() else { return Ok(()) };
    let parts = match separator {
        None => text.split_whitespace().count(),
        Some(separator) => text.matches(separator).count(),
    };
    state.consume_fuel(parts as u64 / PARTS_PER_STEP)
}

/// Calls a method as in Python. The engine counts only the result of a method as steps, so the methods that make much
/// text or long lists of small arguments are counted here before they are called.
fn method(state: &mut State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value> {
    if let (Some(text), "join" | "format") = (value.as_str(), name) {
        let mut out = Counted { text: Vec::new(), state };
        // A write error means too many steps, which the next line reports.
        let _ = arguments.iter().try_for_each(|argument| write!(out, "{argument}"));
        let fields = text.split('{').skip(1).filter_map(|field| field.split('}').next());
        let numbers = fields.flat_map(|field| field.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty()));
        let widths = numbers.map(|n| n.parse().unwrap_or(STEPS)).fold(0, u64::saturating_add);
        state.consume_fuel(if name == "format" { widths } else { 0 })?;
    }
    match name {
        "split" => count_parts(state, value, arguments.first().and_then(Value::as_str))?,
        "splitlines" => count_parts(state, value, Some("\n"))?,
        _ => {}
    }
    match methods::call(state, value, name, arguments)? {
        Some(found) => Ok(found),
        None => unknown_method_callback(state, value, name, arguments),
    }
}

/// Text of a value, which counts as steps while it grows: a list that contains others many times is much longer as
/// text.
pub(super) struct Counted<'a> {
    pub(super) text: Vec<u8>,
    pub(super) state: &'a State<'a, 'a>,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let before = self.text.len() / BYTES_PER_STEP;
        let steps = (self.text.len() + bytes.len()) / BYTES_PER_STEP - before;
        self.state.consume_fuel(steps as u64).map_err(std::io::Error::other)?;
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
