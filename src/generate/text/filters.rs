//! Filters, tests and functions of Jinja2 that the engine of templates does not have.

use super::jinja::Result;
use super::{methods, python};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, State};
use minijinja_contrib::{filters as contrib, globals};

/// Adds them to the environment of a template.
pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_filter("string", python::text);
    environment.add_filter("center", |state: &State, value: &Value, width: Option<usize>| -> Result<Value> {
        let text = Value::from(python::text(state, value)?);
        Ok(methods::call(state, &text, "center", &[width.unwrap_or(80).into()])?.unwrap_or(text))
    });
    environment.add_filter("wordcount", |state: &State, value: &Value| -> Result<usize> {
        let text = python::text(state, value)?;
        Ok(text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).count())
    });
    environment.add_filter("wordwrap", wordwrap);
    environment.add_filter("truncate", truncate);
    environment.add_filter("filesizeformat", contrib::filesizeformat);
    environment.add_filter("striptags", |text: String| {
        contrib::striptags(text).split_whitespace().collect::<Vec<_>>().join(" ")
    });
    environment.add_filter("urlencode", |state: &State, value: &Value| -> Result<String> {
        let text = python::text(state, value)?;
        state.consume_fuel(text.len() as u64 / 16)?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-~/".contains(&byte);
        let shown = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
        Ok(text.bytes().map(shown).collect())
    });
    environment.add_function("cycler", |items: Rest<Value>| globals::cycler(items.0));
    environment.add_function("joiner", globals::joiner);
    environment.add_test("callable", |value: &Value| {
        // A macro is a map of its properties for the engine.
        matches!(value.kind(), ValueKind::Plain)
            || value.as_object().is_some() && value.to_string().starts_with("<macro ")
    });
}

/// Shortens a text that is more than `leeway` characters too long, between words unless `killwords` is set.
fn truncate(
    text: &str,
    length: Option<usize>,
    killwords: Option<bool>,
    end: Option<String>,
    options: Kwargs,
) -> Result<String> {
    let length = options.get::<Option<usize>>("length")?.or(length).unwrap_or(255);
    let killwords = options.get::<Option<bool>>("killwords")?.or(killwords).unwrap_or(false);
    let end = options.get::<Option<String>>("end")?.or(end).unwrap_or_else(|| "...".into());
    let leeway = options.get::<Option<usize>>("leeway")?.unwrap_or(5);
    options.assert_all_used()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.into());
    }
    let kept: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    let kept = if killwords { &kept } else { kept.rsplit_once(' ').map_or(kept.as_str(), |(words, _)| words) };
    Ok(format!("{kept}{end}"))
}

/// Wraps lines at a width between words, and long words within them.
fn wordwrap(state: &State, text: &str, width: Option<usize>, options: Kwargs) -> Result<String> {
    let width = options.get::<Option<usize>>("width")?.or(width).unwrap_or(79).max(1);
    let breaks = options.get::<Option<bool>>("break_long_words")?.unwrap_or(true);
    let separator = options.get::<Option<String>>("wrapstring")?.unwrap_or_else(|| "\n".into());
    options.assert_all_used()?;
    let mut lines: Vec<String> = Vec::new();
    for line in text.lines() {
        let mut current = String::new();
        for word in line.split_whitespace() {
            let mut word: Vec<char> = word.chars().collect();
            state.consume_fuel(1 + word.len() as u64 / 16)?;
            let used = current.chars().count();
            if used > 0 && used + 1 + word.len() > width {
                lines.push(std::mem::take(&mut current));
            }
            while breaks && word.len() > width {
                lines.push(word.drain(..width).collect());
            }
            if !current.is_empty() {
                current.push(' ');
            }
            current.extend(word);
        }
        lines.push(current);
    }
    state.consume_fuel((lines.len() * separator.len()) as u64 / 16)?;
    Ok(lines.join(&separator))
}
