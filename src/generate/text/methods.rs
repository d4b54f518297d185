//! Methods of Python's texts and lists that templates call and `minijinja_contrib` does not have.

use super::jinja::Result;
use minijinja::value::{Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};

/// Bytes of a padded text for each step.
const BYTES_PER_STEP: usize = 64;

/// Calls a method; returns `None` if it is none of these.
pub(super) fn call(state: &State, value: &Value, name: &str, arguments: &[Value]) -> Result<Option<Value>> {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => of_text(state, text, name, arguments),
        (None, ValueKind::Seq) if name == "index" => {
            let (wanted,): (&Value,) = from_args(arguments)?;
            let found = value.try_iter()?.position(|item| item == *wanted);
            found.map(|place| Some(place.into())).ok_or_else(|| refused("index finds no such item"))
        }
        _ => Ok(None),
    }
}

fn refused(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

fn of_text(state: &State, text: &str, name: &str, arguments: &[Value]) -> Result<Option<Value>> {
    let part = || from_args::<(&str,)>(arguments).map(|(part,)| part);
    Ok(Some(match name {
        "removeprefix" => text.strip_prefix(part()?).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(part()?).unwrap_or(text).into(),
        "partition" => match text.split_once(separator(part()?)?) {
            Some((before, after)) => triple(before, part()?, after),
            None => triple(text, "", ""),
        },
        "rpartition" => match text.rsplit_once(separator(part()?)?) {
            Some((before, after)) => triple(before, part()?, after),
            None => triple("", "", text),
        },
        "rsplit" => rsplit(state, text, arguments)?,
        "swapcase" => text.chars().map(swapped).collect::<String>().into(),
        "index" => {
            let place = text.find(part()?).ok_or_else(|| refused("index finds no such text"))?;
            text[..place].chars().count().into()
        }
        "center" | "ljust" | "rjust" | "zfill" => padded(state, text, name, arguments)?.into(),
        _ => return Ok(None),
    }))
}

fn triple(before: &str, separator: &str, after: &str) -> Value {
    Value::from(Tuple::from([before, separator, after].map(Value::from)))
}

fn separator(text: &str) -> Result<&str> {
    if text.is_empty() { Err(refused("found an empty separator")) } else { Ok(text) }
}

fn swapped(c: char) -> String {
    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
}

/// Splits from the end, at most as often as the second argument says.
fn rsplit(state: &State, text: &str, arguments: &[Value]) -> Result<Value> {
    let (at, most): (Option<&str>, Option<i64>) = from_args(arguments)?;
    let limit = most.and_then(|most| usize::try_from(most).ok()).map_or(usize::MAX, |most| most.saturating_add(1));
    // A part takes many times the memory of its text.
    state.consume_fuel(at.map_or(text.len(), |at| text.matches(at).count()).min(limit) as u64)?;
    let mut parts: Vec<&str> = Vec::new();
    match at {
        Some(at) => parts.extend(text.rsplitn(limit, separator(at)?)),
        None => {
            let mut rest = text.trim_end();
            while !rest.is_empty() {
                match rest.rfind(char::is_whitespace).filter(|_| parts.len() + 1 < limit) {
                    Some(place) => {
                        parts.push(rest[place..].trim_start());
                        rest = rest[..place].trim_end();
                    }
                    None => {
                        parts.push(rest.trim_start());
                        break;
                    }
                }
            }
        }
    }
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Fills a text up to a width in characters.
fn padded(state: &State, text: &str, name: &str, arguments: &[Value]) -> Result<String> {
    let (width, fill): (usize, Option<char>) = from_args(arguments)?;
    state.consume_fuel((width / BYTES_PER_STEP) as u64)?;
    let missing = width.saturating_sub(text.chars().count());
    let fill = |count: usize, usual: char| fill.unwrap_or(usual).to_string().repeat(count);
    Ok(match name {
        "ljust" => format!("{text}{}", fill(missing, ' ')),
        "rjust" => format!("{}{text}", fill(missing, ' ')),
        "zfill" => {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            format!("{sign}{}{digits}", fill(missing, '0'))
        }
        // Python puts the odd character before the text if the width is odd.
        _ => {
            let before = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", fill(before, ' '), fill(missing - before, ' '))
        }
    })
}
