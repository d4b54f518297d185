//! Objects within the body of a request, read member by member. Errors name the place of the member.

use super::body::expected;
use super::error::{ApiError, ApiResult};
use serde_json::{Map, Value};

/// An object within a body, such as an element of a list.
#[derive(Debug)]
pub struct Object {
    members: Map<String, Value>,
    place: String,
}

impl Object {
    /// Begins to read the object at `place`.
    ///
    /// # Errors
    /// The value is no object.
    pub fn read(value: Value, place: String) -> ApiResult<Object> {
        match value {
            Value::Object(members) => Ok(Object { members, place }),
            other => Err(expected(&place, "an object", &other)),
        }
    }

    /// Returns the place of a member.
    pub fn place(&self, name: &str) -> String {
        format!("{}.{name}", self.place)
    }

    /// Takes a member; `None` if it is absent or null.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.members.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Takes a text.
    ///
    /// # Errors
    /// The member is something else.
    pub fn text(&mut self, name: &str) -> ApiResult<Option<String>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(expected(&self.place(name), "a text", &other)),
        }
    }

    /// Takes a text that must be there.
    ///
    /// # Errors
    /// The member is absent or something else.
    pub fn required(&mut self, name: &str) -> ApiResult<String> {
        self.text(name)?.ok_or_else(|| ApiError::field(&self.place(name), "found none, expected a text"))
    }

    /// Takes a truth value; false if it is absent.
    ///
    /// # Errors
    /// The member is something else.
    pub fn flag(&mut self, name: &str) -> ApiResult<bool> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(other) => Err(expected(&self.place(name), "true or false", &other)),
        }
    }

    /// Builds the error for an object whose `type` this server does not support.
    pub fn unsupported(&self, kind: &str, help: &str) -> ApiError {
        let kind: String = kind.chars().take(80).collect();
        let found = format!("found `{kind}`, which this server does not support; {help}");
        ApiError::field(&self.place("type"), found).code("unsupported_value")
    }
}

/// Reads a list of at most `most` elements.
///
/// # Errors
/// The value is no list, or has more elements.
pub fn list(value: Value, place: &str, most: usize) -> ApiResult<Vec<Value>> {
    match value {
        Value::Array(list) if list.len() <= most => Ok(list),
        Value::Array(list) => {
            Err(ApiError::field(place, format!("found {} elements, expected at most {most}", list.len())))
        }
        other => Err(expected(place, "a list", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn errors_name_the_place_of_a_member() {
        let read = |value| Object::read(value, "input[3]".into());
        let param = |error: ApiError| error.param.unwrap();
        assert_eq!(param(read(json!([])).unwrap_err()), "input[3]");
        let mut object = read(json!({"a": 1, "b": "x", "c": null, "d": true})).unwrap();
        assert_eq!(param(object.text("a").unwrap_err()), "input[3].a");
        assert_eq!((object.required("b").unwrap(), object.text("c").unwrap()), ("x".into(), None));
        assert_eq!(param(object.required("c").unwrap_err()), "input[3].c");
        assert!(object.flag("d").unwrap() && !object.flag("e").unwrap());
        assert_eq!(param(list(json!([1, 2]), "tools", 1).unwrap_err()), "tools");
        assert_eq!(param(list(json!({}), "tools", 1).unwrap_err()), "tools");
        assert_eq!(list(json!([1, 2]), "tools", 2).unwrap().len(), 2);
    }
}
