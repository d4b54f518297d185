//! Tests of outputs divided into parts, and helpers for tests of answers.

use super::*;
use crate::generate::speculate::DraftCounts;
use crate::generate::{Completion, Finish};
use crate::host::reply::Done;
use proptest::prelude::*;
use serde_json::Value;
use std::time::Instant;

/// Returns the end of a text with five tokens from the prefix cache.
pub fn done(finish: Finish, stopped_by: Option<&str>) -> Done {
    let completion = Completion {
        index: 0,
        ids: Vec::new(),
        text: String::new(),
        finish,
        prompt_tokens: 7,
        reused_tokens: 5,
        started: Instant::now(),
        marks: Vec::new(),
        drafts: DraftCounts::default(),
        constraint_met: None,
        stopped_by: stopped_by.map(String::from),
        scores: Vec::new(),
        prefix: None,
        error: None,
    };
    Done {
        choice: 0,
        completion,
        #[cfg(feature = "otel")]
        arrived: std::time::Instant::now(),
        #[cfg(feature = "otel")]
        admitted: None,
    }
}

/// Parses events with their names.
pub fn sse(text: &str) -> Vec<(String, Value)> {
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        (name.strip_prefix("event: ").unwrap().to_string(), data)
    };
    text.split_terminator("\n\n").map(event).collect()
}

/// Generates pieces of outputs, those of each token together.
pub fn any_pieces() -> impl Strategy<Value = Vec<Vec<Piece>>> {
    let piece = prop_oneof![
        "[ab]{0,2}".prop_map(Piece::Content),
        "[ab]{0,2}".prop_map(Piece::Reasoning),
        Just(Piece::CallBegin { index: 0, id: "1".into(), name: "f".into() }),
        (0usize..3, "[ab]{0,2}").prop_map(|(index, text)| Piece::CallArguments { index, text }),
    ];
    prop::collection::vec(prop::collection::vec(piece, 0..4), 0..6)
}

#[test]
fn neighbouring_pieces_of_a_kind_are_one_part() {
    let mut parts = Parts::new(None);
    let text = |text: &str| Piece::Content(text.into());
    let mut changes = parts.apply(vec![Piece::Reasoning("r".into()), text("a")]);
    changes.extend(parts.apply(vec![text("b"), Piece::CallBegin { index: 0, id: "1".into(), name: "f".into() }]));
    changes.extend(parts.apply(vec![Piece::CallArguments { index: 0, text: "{}".into() }]));
    changes.extend(parts.finish(false));
    let texts: Vec<&str> = parts.list().iter().map(|part| part.text.as_str()).collect();
    assert_eq!(texts, ["r", "ab", "{}"]);
    assert!(parts.has_calls());
    let kinds: String = changes
        .iter()
        .map(|change| match change {
            Change::Begin(part) => format!("<{part}"),
            Change::Add(_, text) => text.clone(),
            Change::End(part) => format!("{part}>"),
        })
        .collect();
    assert_eq!(kinds, "<0r0><1ab1><2{}2>");
}

#[test]
fn tokens_count_for_the_piece_that_shows_them() {
    let mut parts = Parts::new(None);
    for (tokens, piece) in [(3, Piece::Reasoning("r".into())), (2, Piece::Content("c".into()))] {
        parts.held_tokens += tokens;
        parts.apply(vec![piece]);
    }
    assert_eq!(parts.reasoning_tokens(), 3);
    assert_eq!(parts.push(1, "x"), [Change::Add(1, "x".into())]);
}

proptest! {
    #[test]
    fn changes_rebuild_the_list(batches in any_pieces()) {
        let mut parts = Parts::new(None);
        let mut changes: Vec<Change> = batches.into_iter().flat_map(|batch| parts.apply(batch)).collect();
        changes.extend(parts.finish(false));
        let (mut texts, mut open) = (Vec::<String>::new(), None);
        for change in changes {
            match change {
                Change::Begin(part) => {
                    prop_assert_eq!((open, part), (None, texts.len()));
                    open = Some(part);
                    texts.push(String::new());
                }
                Change::Add(part, text) => {
                    prop_assert_eq!(open, Some(part));
                    texts[part] += &text;
                }
                Change::End(part) => prop_assert_eq!(open.take(), Some(part)),
            }
        }
        prop_assert_eq!(open, None);
        let list: Vec<String> = parts.list().iter().map(|part| part.text.clone()).collect();
        prop_assert_eq!(texts, list);
    }
}
