//! Shows the entries of the cache of packs: `iec list`, `iec show` and `iec rm`.

use super::table::{Column, Table};
use crate::generate::text::strftime;
use crate::models::{Description, Entry, ModelKind, Removed};
use crate::units::human_bytes;
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// Largest width of the table in columns.
const WIDTH: usize = 80;
/// Width of the columns weights, size and last used, and of the gaps between columns.
const OTHERS: usize = 10 + 8 + 10 + 5 * 2;
/// Smallest width of the column source.
const LEAST: usize = 8;

/// Returns a table of all entries, which fits 80 columns.
pub fn table(entries: &[Entry], now: SystemTime) -> Table {
    let names = entries.iter().map(|entry| entry.name.chars().count()).max().unwrap_or(0);
    let room = WIDTH.saturating_sub(OTHERS + names).max(LEAST);
    let columns: [Column<'_, &Entry>; 5] = [
        ("name", &|entry| entry.name.clone()),
        ("source", &|entry| shortened(source(entry), room)),
        ("weights", &|entry| weights(entry)),
        (">size", &|entry| human_bytes(entry.bytes)),
        (">last used", &|entry| age(entry.last_used, now)),
    ];
    Table::of(entries, &columns)
}

/// Returns all entries as JSON.
pub fn json(entries: &[Entry]) -> Value {
    let bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
    json!({"models": entries.iter().map(entry_json).collect::<Vec<_>>(), "bytes": bytes})
}

/// Returns an entry as JSON.
pub fn entry_json(entry: &Entry) -> Value {
    let record = entry.record.as_ref();
    json!({
        "name": entry.name,
        "dir": entry.dir,
        "state": if record.is_some() { "complete" } else { "incomplete" },
        "kind": record.map(|record| &record.kind),
        "source": record.map(|record| &record.source),
        "repo": record.and_then(|record| record.repo.as_ref()),
        "weights": record.map(|record| &record.weights),
        "dtype": record.and_then(|record| record.dtype.as_ref()),
        "bytes": entry.bytes,
        "created": record.map(|record| &record.created),
        "created_by": record.map(|record| &record.created_by),
        "last_used": timestamp(entry.last_used),
    })
}

/// Returns the lines of `iec show` that precede those of `iec inspect`.
pub fn description(found: &Description, now: SystemTime) -> String {
    let mut text = format!("{}: {}\n", found.spec.display(), found.kind.shown());
    let mut line = |key: &str, value: &str| text.push_str(&format!("  {key:<14}{value}\n"));
    match &found.entry {
        Some(entry) => {
            line("cache entry", &entry.name);
            if let Some(record) = &entry.record {
                let repo = record.repo.as_ref().map(|repo| format!("{repo}, ")).unwrap_or_default();
                line("source", &format!("{} {repo}{}", record.kind, record.source));
                line("packed", &format!("{} by {}", record.created, record.created_by));
            }
            line("last used", &age(entry.last_used, now));
        }
        None if found.kind != ModelKind::Pack => line("cache entry", "none; `iec run` packs it"),
        None => {}
    }
    if let Some(has_template) = found.has_template {
        line("chat template", if has_template { "yes" } else { "none" });
    }
    text
}

/// Describes the removed entries.
pub fn removed(removed: &Removed) -> String {
    let lines = removed.names.iter().map(|name| format!("removed {name}\n")).collect::<String>();
    let entries = if removed.names.len() == 1 { "entry" } else { "entries" };
    format!("{lines}{} {entries}, {} freed", removed.names.len(), human_bytes(removed.bytes))
}

fn source(entry: &Entry) -> &str {
    entry.record.as_ref().map_or("-", |record| record.shown_source())
}

fn weights(entry: &Entry) -> String {
    match &entry.record {
        None => "incomplete".to_string(),
        Some(record) => record.stored_weights().to_ascii_lowercase(),
    }
}

/// Shortens a text to `width` characters; its end is kept, which tells paths apart.
fn shortened(text: &str, width: usize) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    let count = text.chars().count();
    if count <= width {
        return text;
    }
    format!("…{}", text.chars().skip(count + 1 - width).collect::<String>())
}

/// Formats the time since `then` in the largest unit that fits.
fn age(then: SystemTime, now: SystemTime) -> String {
    let seconds = now.duration_since(then).unwrap_or_default().as_secs();
    match seconds {
        0..60 => "now".to_string(),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..86_400 => format!("{} h ago", seconds / 3600),
        _ if then == UNIX_EPOCH => "-".to_string(),
        _ => format!("{} d ago", (seconds / 86_400).min(9999)),
    }
}

fn timestamp(time: SystemTime) -> Option<String> {
    strftime(time.duration_since(UNIX_EPOCH).ok()?.as_secs(), "%FT%TZ").ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::time::Duration;

    fn entry(name: &str) -> Entry {
        let last_used = UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        Entry {
            name: name.into(),
            dir: PathBuf::from("/cache").join(name),
            record: None,
            origin: None,
            bytes: 1 << 30,
            last_used,
        }
    }

    #[test]
    fn the_table_fits_80_columns() {
        let mut long = entry(&format!("{}-01234567", "n".repeat(24)));
        let text = format!(
            r#"{{"schema_version":1,"source":"/{}/llama","repo":null,"kind":"checkpoint","weights":"source",
                "dtype":"mxfp4","origin":"","fingerprint":"","created":"","created_by":"iec","files":{{}}}}"#,
            "models/".repeat(20)
        );
        long.record = Some(serde_json::from_str(&text).unwrap());
        long.bytes = 999 << 30;
        let shown = table(&[long.clone(), entry("b-2")], SystemTime::now()).to_string();
        assert!(shown.lines().all(|line| line.chars().count() <= WIDTH), "{shown}");
        assert!(shown.contains("/llama  mxfp4") && shown.contains("incomplete"), "{shown}");
        let json = json(&[long, entry("b-2")]);
        assert_eq!(json["models"][0]["last_used"], "2001-09-09T01:46:40Z");
        assert_eq!((&json["models"][1]["state"], &json["bytes"]), (&json!("incomplete"), &json!(1000u64 << 30)));
    }

    #[test]
    fn ages_have_one_unit() {
        let then = UNIX_EPOCH + Duration::from_secs(1);
        for (seconds, expected) in [
            (0, "now"),
            (59, "now"),
            (60, "1 min ago"),
            (7199, "1 h ago"),
            (86_400, "1 d ago"),
            (86_400 * 99_999, "9999 d ago"),
        ] {
            assert_eq!(age(then, then + Duration::from_secs(seconds)), expected);
        }
        assert_eq!((age(then, UNIX_EPOCH), age(UNIX_EPOCH, SystemTime::now())), ("now".into(), "-".into()));
    }

    #[test]
    fn a_removal_names_every_entry() {
        let one = Removed { names: vec!["a-1".into()], bytes: 1024 };
        assert_eq!(removed(&one), "removed a-1\n1 entry, 1.00 KiB freed");
        let none = Removed::default();
        assert_eq!(removed(&none), "0 entries, 0 B freed");
    }
}
