//! Mutates TOML as tables of lines with a name and a value, which covers the files of a server: values on several lines
//! are not changed inside.

use super::{below, edit, edit_text, number, one_in, pick};
use iec::rng::Rng;

/// Values that replace others; random numbers are used as well.
const VALUES: &[&str] = &[
    "true",
    "false",
    "\"\"",
    "\"on\"",
    "\"10s\"",
    "\"8M\"",
    "\"*\"",
    "[]",
    "[\"\"]",
    "[[]]",
    "{}",
    "{ a = 1 }",
    "-1",
    "0",
    "0x7fffffffffffffff",
    "-9223372036854775808",
    "1e400",
    "-0.0",
    "inf",
    "nan",
    "1979-05-27T07:32:00Z",
    "\"\\u0000\"",
    "'''\n'''",
];

/// Table: the lines from its header on. The first one has no header.
type Table = Vec<String>;

/// Mutates a file in one to four places. The text must have a line with a value.
pub(super) fn mutate(input: &[u8], other: &[u8], rng: &mut Rng) -> Option<Vec<u8>> {
    let mut tables = parse(std::str::from_utf8(input).ok()?);
    let others = std::str::from_utf8(other).map(parse).unwrap_or_default();
    tables.iter().flatten().find(|line| line.contains('='))?;
    for _ in 0..=below(rng, 3) {
        let at = below(rng, tables.len());
        let donor = others.get(below(rng, others.len())).cloned().unwrap_or_default();
        match (below(rng, 8), tables.get_mut(at)) {
            (0, _) | (_, None) => edit(&mut tables, &others, rng),
            (1 | 2, Some(table)) => edit(table, &donor, rng),
            (_, Some(table)) => change_line(table, &donor, rng),
        }
    }
    let text: String = tables.concat().iter().flat_map(|line| [line, "\n"]).collect();
    Some(text.into_bytes())
}

/// Splits a text into tables.
fn parse(text: &str) -> Vec<Table> {
    let mut tables = vec![Table::new()];
    for line in text.lines() {
        if line.starts_with('[') {
            tables.push(Table::new());
        }
        if let Some(table) = tables.last_mut() {
            table.push(line.to_string());
        }
    }
    tables.retain(|table| !table.is_empty());
    tables
}

/// Changes the name or the value of a line.
fn change_line(table: &mut Table, donor: &[String], rng: &mut Rng) {
    let with_value: Vec<usize> = (0..table.len()).filter(|at| table[*at].contains('=')).collect();
    let Some(at) = with_value.get(below(rng, with_value.len())).copied() else { return };
    let Some((name, value)) = table[at].split_once('=') else { return };
    let (name, value) = (name.trim().to_string(), value.trim().to_string());
    let other = donor.get(below(rng, donor.len())).and_then(|line| line.split_once('='));
    let (other_name, other_value) = other.map_or((name.as_str(), value.as_str()), |(n, v)| (n.trim(), v.trim()));
    table[at] = match below(rng, 6) {
        0 => format!("{other_name} = {value}"),
        1 => format!("{name} = {other_value}"),
        2 => format!("{name} = {}", pick(VALUES, rng)),
        _ => format!("{name} = {}", changed(&value, other_value, rng)),
    };
}

/// Changes a value and keeps its type, mostly.
fn changed(value: &str, other: &str, rng: &mut Rng) -> String {
    if let Ok(n) = value.parse::<u64>() {
        return number(n, rng).to_string();
    }
    if let Some(text) = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        let mut bytes = text.as_bytes().to_vec();
        edit_text(&mut bytes, &[other.trim_matches(['"', '[', ']'])], rng);
        return format!("\"{}\"", String::from_utf8_lossy(&bytes).replace(['"', '\\'], "_"));
    }
    match value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(list) if !one_in(4, rng) => format!("[{list}, {other}]"),
        _ => (*pick(VALUES, rng)).to_string(),
    }
}
