//! Errors of bodies that are no valid JSON: the field and the position in which the fault lies.

use super::error::ApiError;
use serde_json::error::Category;

/// Messages of serde_json about the value of a field, and not about marks between fields.
const OF_VALUES: [&str; 7] = [
    "expected value",
    "invalid number",
    "number out of range",
    "invalid escape",
    "invalid unicode code point",
    "control character",
    "invalid type",
];

/// Converts the error of a body.
pub fn of(text: &[u8], error: &serde_json::Error) -> ApiError {
    let at = offset(text, error.line(), error.column());
    let place = format!("line {} column {}", error.line(), error.column());
    let found = error.to_string();
    let found = found.strip_suffix(&format!(" at {place}")).unwrap_or(&found);
    let (path, is_value) = path(&text[..at]);
    if found.contains("hex escape") && has_surrogate(&text[..at]) {
        let message =
            format!("found half of a surrogate pair (`\\ud800` to `\\udfff`) at {place}, expected characters");
        return match path.filter(|_| is_value) {
            Some(path) => ApiError::field(&path, message),
            None => ApiError::invalid(message),
        };
    }
    let of_value = error.classify() == Category::Data || OF_VALUES.iter().any(|start| found.starts_with(start));
    match path.filter(|_| of_value) {
        Some(path) => ApiError::field(&path, format!("{found} at {place}")),
        None => ApiError::invalid(format!("the body is not a valid JSON object: {found} at {place}")),
    }
}

/// Returns the index of the byte at a line and column, which count from one and from zero.
fn offset(text: &[u8], line: usize, column: usize) -> usize {
    let before: usize = text.split_inclusive(|byte| *byte == b'\n').take(line.saturating_sub(1)).map(<[u8]>::len).sum();
    (before + column).min(text.len())
}

/// Returns true if the text ends with an escaped half of a surrogate pair, perhaps with the beginning of what follows.
fn has_surrogate(text: &[u8]) -> bool {
    let tail = &text[text.len().saturating_sub(16)..];
    let is_half = |four: &[u8]| {
        let (first, second) = (four[0].to_ascii_lowercase(), four[1].to_ascii_lowercase());
        first == b'd' && matches!(second, b'8' | b'9' | b'a'..=b'f')
    };
    tail.windows(6).any(|window| window.starts_with(b"\\u") && is_half(&window[2..]))
}

/// Object or list in which a position lies.
enum Level {
    /// Name of the current member; `None` before the first one.
    Object(Option<String>),
    /// Index of the current element.
    List(usize),
}

/// Returns the path of the value at the end of the beginning of a JSON text, such as `messages[0].content`; `None`
/// outside of all members. The second value is false at the end of a name, before its value.
fn path(text: &[u8]) -> (Option<String>, bool) {
    let (mut levels, mut at, mut expects_name, mut is_value) = (Vec::new(), 0, false, true);
    while at < text.len() {
        let byte = text[at];
        at += 1;
        match byte {
            b'"' => {
                let end = end_of_text(text, at);
                // A name that has not ended is that of no value.
                if expects_name
                    && end < text.len()
                    && let Some(Level::Object(name)) = levels.last_mut()
                {
                    *name = Some(String::from_utf8_lossy(&text[at..end]).into_owned());
                    (expects_name, is_value) = (false, false);
                }
                at = end + 1;
            }
            b':' => is_value = true,
            b'{' | b'[' => {
                expects_name = byte == b'{';
                levels.push(if expects_name { Level::Object(None) } else { Level::List(0) });
            }
            b'}' | b']' => {
                levels.pop();
                expects_name = false;
            }
            b',' => match levels.last_mut() {
                Some(Level::List(index)) => *index += 1,
                Some(Level::Object(name)) => {
                    *name = None;
                    expects_name = true;
                }
                None => {}
            },
            _ => {}
        }
    }
    let mut path = String::new();
    for level in &levels {
        match level {
            Level::Object(Some(name)) if path.is_empty() => path += &shortened(name),
            Level::Object(Some(name)) => path += &format!(".{}", shortened(name)),
            Level::Object(None) => {}
            Level::List(index) => path += &format!("[{index}]"),
        }
    }
    // The body itself may be a list.
    ((!path.is_empty() && !path.starts_with('[')).then_some(path), is_value)
}

/// Returns the index of the quotation mark that ends a text, or the end of the bytes.
fn end_of_text(text: &[u8], begin: usize) -> usize {
    let mut at = begin;
    while at < text.len() && text[at] != b'"' {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    at.min(text.len())
}

fn shortened(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::body::Body;
    use proptest::prelude::*;

    #[test]
    fn a_fault_in_a_value_names_its_field_and_its_position() {
        struct Case {
            body: &'static str,
            param: Option<&'static str>,
            said: &'static str,
        }
        let case = |body, param, said| Case { body, param, said };
        let cases = [
            case(r#"{"prompt": "\ud800"}"#, Some("prompt"), "half of a surrogate pair"),
            case(r#"{"prompt": "\ud83d x"}"#, Some("prompt"), "line 1 column 1"),
            case(r#"{"a": 1, "prompt": "\udc00"}"#, Some("prompt"), "half of a surrogate pair"),
            case(r#"{"prompt": "\ud800\ud800"}"#, Some("prompt"), "half of a surrogate pair"),
            case(r#"{"prompt": "\ud800\u0041"}"#, Some("prompt"), "half of a surrogate pair"),
            case(r#"{"stop": ["a", "\uD83D"]}"#, Some("stop[1]"), "half of a surrogate pair"),
            case(r#"{"messages": [{"role": "user", "content": "x\udead"}]}"#, Some("messages[0].content"), "half"),
            case(
                r#"{"messages": [{}, {"content": [{"text": "\ud800"}]}]}"#,
                Some("messages[1].content[0].text"),
                "half",
            ),
            case(r#"{"\ud800": 1}"#, None, "half of a surrogate pair"),
            case(r#"{"user": "x", "\ud800": 1}"#, None, "half of a surrogate pair"),
            case(r#"{"temperature": NaN}"#, Some("temperature"), "expected value at line 1 column 17"),
            case(r#"{"temperature": 1e999}"#, Some("temperature"), "number out of range"),
            case(r#"{"user": "a\x"}"#, Some("user"), "invalid escape"),
            case("{\"user\":\n \"a\tb\"}", Some("user"), "line 2"),
            case(r#"{"prompt": "x", "prompt": "y"}"#, Some("prompt"), "twice"),
            case(r#"{"a": {"b": 1, "b": 2}}"#, Some("a.b"), "twice"),
            case(r#"{"prompt": "x",}"#, None, "not a valid JSON object: trailing comma at line 1 column 16"),
            case(r#"{"prompt": "x" "y": 1}"#, None, "at line 1 column 16"),
            case(r#"{"prompt": "x"#, None, "at line 1 column 13"),
            case("[]", None, "not a valid JSON object"),
            case("", None, "line 1 column 0"),
            case(r#"{"prompt": "x"} {}"#, None, "trailing characters"),
        ];
        for Case { body, param, said } in cases {
            let error = Body::parse(body.as_bytes()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, param), "{body}: {}", error.message);
            assert!(error.message.contains(said), "{body}: {}", error.message);
        }
    }

    proptest! {
        #[test]
        fn every_beginning_has_a_path_or_none(text in "[\\[\\]{}\":,a0\\\\ u\\n]{0,60}") {
            let _ = path(text.as_bytes());
            let _ = has_surrogate(text.as_bytes());
        }
    }
}
