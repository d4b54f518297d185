//! Lists of models and adapters, in the form of OpenAI's API or, for requests with the header `anthropic-version`, of
//! Anthropic's.

use super::respond;
use crate::api::error::{ApiError, ApiResult, ApiStatus};
use crate::api::style::Style;
use crate::generate::text::strftime;
use crate::host::model::{Facts, Status};
use crate::serve::app::App;
use crate::serve::caller::Caller;
use crate::serve::rights::Usable;
use axum::Extension;
use axum::extract::{Path as PathPart, RawQuery, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// Largest number of models of a page of Anthropic's list.
const MOST_LISTED: usize = 1000;

/// A model or an adapter that a caller may use.
#[derive(Debug)]
pub struct Listed {
    /// Name in requests.
    pub id: String,
    /// Time of its start or of its addition, in seconds since 1970.
    pub created: u64,
    /// Path of its files, once they are known.
    pub root: Option<String>,
    /// Whether it is an adapter.
    pub is_adapter: bool,
    /// Model of an adapter, if the caller may use it, too.
    pub parent: Option<String>,
    /// Whether it is in memory.
    pub state: &'static str,
    /// Properties, once it is loaded.
    pub facts: Option<Arc<Facts>>,
}

impl Listed {
    /// Returns the largest number of tokens of prompt and answer, once the model is loaded.
    fn context(&self) -> Option<usize> {
        self.facts.as_ref().map(|facts| facts.context)
    }

    fn to_json(&self) -> Value {
        json!({
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "iec",
            "root": self.root,
            "parent": self.parent,
            "max_model_len": self.context(),
            "state": self.state,
        })
    }

    fn to_anthropic(&self) -> Value {
        json!({
            "type": "model",
            "id": self.id,
            "display_name": self.id,
            "created_at": timestamp(self.created),
            "max_input_tokens": self.context(),
            "max_tokens": self.context(),
        })
    }
}

/// Returns all models and adapters that a caller may use. Of their paths, only the last name is shown: the directories
/// are the operator's.
pub fn listed(app: &App, caller: &Caller) -> Vec<Listed> {
    let (key, _) = caller.key();
    let last_name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let object = |usable: &Usable| {
        let status = usable.model.status();
        let state = status.name();
        let facts = match status {
            Status::Ready(facts) => Some(facts),
            _ => None,
        };
        let root = match &usable.adapter {
            Some(adapter) => last_name(&adapter.source.dir),
            None => facts.as_ref().and_then(|facts| last_name(&facts.root)),
        };
        let created = usable.adapter.as_ref().map_or(usable.model.created, |adapter| adapter.created);
        let (is_adapter, parent) = (usable.adapter.is_some(), usable.parent(key).map(String::from));
        Listed { id: usable.name.clone(), created, root, is_adapter, parent, state, facts }
    };
    app.usable(key).iter().map(object).collect()
}

/// Returns a time in seconds since 1970 as a text like `2026-01-31T12:00:00Z`.
pub fn timestamp(seconds: u64) -> String {
    strftime(seconds, "%FT%TZ").unwrap_or_default()
}

/// Lists models and adapters.
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let all = listed(&app, &caller);
    let object = match Style::ByHeader.of(respond::is_anthropic(&headers)) {
        Style::Anthropic => anthropic_page(&all, query.as_deref().unwrap_or_default())?,
        _ => json!({"object": "list", "data": all.iter().map(Listed::to_json).collect::<Vec<_>>()}),
    };
    Ok(respond::json(StatusCode::OK, &object))
}

/// Shows a model or an adapter.
pub async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    PathPart(id): PathPart<String>,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let found = listed(&app, &caller).into_iter().find(|listed| listed.id == id);
    let found = found.ok_or_else(|| {
        ApiError::new(ApiStatus::NOT_FOUND, format!("there is no model `{id}`")).code("model_not_found")
    })?;
    let object = match Style::ByHeader.of(respond::is_anthropic(&headers)) {
        Style::Anthropic => found.to_anthropic(),
        _ => found.to_json(),
    };
    Ok(respond::json(StatusCode::OK, &object))
}

/// Returns the part of the list that a query (`limit`, `after_id`, `before_id`) asks for.
///
/// # Errors
/// The limit is no number, or there is no model of a name.
fn anthropic_page(all: &[Listed], query: &str) -> ApiResult<Value> {
    let (mut limit, mut range) = (MOST_LISTED, 0..all.len());
    let mut from_end = false;
    for (name, value) in self::query(query) {
        let place = || {
            let found = all.iter().position(|listed| listed.id == value);
            found.ok_or_else(|| ApiError::field(name, format!("there is no model `{value}`")))
        };
        match name {
            "limit" => {
                let number = value.parse().ok().filter(|limit| (1..=MOST_LISTED).contains(limit));
                limit = number.ok_or_else(|| {
                    ApiError::field(name, format!("found `{value}`, expected a number from 1 to {MOST_LISTED}"))
                })?;
            }
            "after_id" => range.start = place()? + 1,
            "before_id" => {
                range.end = place()?;
                from_end = true;
            }
            _ => {}
        }
    }
    let inside = all.get(range).unwrap_or_default();
    let has_more = inside.len() > limit;
    let page = match from_end {
        true => &inside[inside.len().saturating_sub(limit)..],
        false => &inside[..inside.len().min(limit)],
    };
    Ok(json!({
        "data": page.iter().map(Listed::to_anthropic).collect::<Vec<_>>(),
        "has_more": has_more,
        "first_id": page.first().map(|listed| &listed.id),
        "last_id": page.last().map(|listed| &listed.id),
    }))
}

/// Returns the names and the decoded values of a query.
pub fn query(text: &str) -> impl Iterator<Item = (&str, String)> {
    text.split('&').filter_map(|pair| pair.split_once('=')).map(|(name, value)| (name, percent_decoded(value)))
}

/// Decodes a value of a query. Bytes that are no UTF-8 are replaced.
fn percent_decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, behind @ ..] = rest {
        let code = behind.get(..2).and_then(|code| std::str::from_utf8(code).ok());
        let code = code.filter(|code| *first == b'%' && code.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let decoded = code.and_then(|code| u8::from_str_radix(code, 16).ok());
        bytes.push(decoded.unwrap_or(if *first == b'+' { b' ' } else { *first }));
        rest = if decoded.is_some() { &behind[2..] } else { behind };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_page_by_page() {
        let listed = |id: &str| Listed {
            id: id.into(),
            created: 0,
            root: None,
            is_adapter: false,
            parent: None,
            state: "loaded",
            facts: None,
        };
        let all = ["a", "b/c", "d"].map(listed);
        struct Case(&'static str, &'static [&'static str], bool);
        let cases = [
            Case("", &["a", "b/c", "d"], false),
            Case("limit=2", &["a", "b/c"], true),
            Case("limit=2&after_id=b%2Fc", &["d"], false),
            Case("after_id=d", &[], false),
            Case("limit=1&before_id=d", &["b/c"], true),
            Case("before_id=d&after_id=a", &["b/c"], false),
            Case("before_id=a&after_id=d", &[], false),
            Case("limit=3&other=x&flag", &["a", "b/c", "d"], false),
        ];
        for Case(query, ids, has_more) in cases {
            let page = anthropic_page(&all, query).unwrap();
            let found: Vec<&str> = page["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
            assert_eq!((found.as_slice(), &page["has_more"]), (ids, &json!(has_more)), "{query}");
            assert_eq!(
                (page["first_id"].as_str(), page["last_id"].as_str()),
                (ids.first().copied(), ids.last().copied())
            );
        }
        for (query, field) in [("limit=0", "limit"), ("limit=x", "limit"), ("after_id=z", "after_id")] {
            assert_eq!(anthropic_page(&all, query).unwrap_err().param.as_deref(), Some(field), "{query}");
        }
    }

    #[test]
    fn values_of_queries_are_decoded() {
        for (text, decoded) in [("a%2Fb+c", "a/b c"), ("%", "%"), ("%2", "%2"), ("%zz%41", "%zzA"), ("%+1", "% 1")] {
            assert_eq!(percent_decoded(text), decoded, "{text}");
        }
        assert_eq!(percent_decoded("%ff"), "\u{fffd}");
    }
}
