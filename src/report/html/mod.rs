//! Pages for a browser: one file without scripts and without anything fetched from elsewhere.

pub mod charts;

/// Colors of parts, in their order: class `c{i}`.
const COLORS: [&str; 11] = [
    "#94a3b8", "#64748b", "#3b82f6", "#8b5cf6", "#10b981", "#f59e0b", "#ec4899", "#06b6d4", "#84cc16", "#ef4444",
    "#b8b3a9",
];
const STYLE: &str = include_str!("page.css");

/// What a page consists of.
pub struct Page<'a> {
    /// The command that made it.
    pub command: &'a str,
    /// The headline.
    pub title: &'a str,
    /// Below it, in one line.
    pub facts: &'a [&'a str],
    /// Its parts, as HTML.
    pub body: &'a str,
    /// The last line.
    pub footer: &'a str,
}

/// The whole file.
pub fn document(page: &Page<'_>) -> String {
    let colors: String =
        COLORS.iter().enumerate().map(|(i, c)| format!(".c{i}{{fill:{c};background:{c}}}\n")).collect();
    let facts: String = page.facts.iter().map(|fact| format!("<span>{}</span>", escape(fact))).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>{name} · iec {command}</title>\n<style>\n{STYLE}{colors}</style></head>\n<body><header><p>iec {command}</p>\
         <h1>{name}</h1><p class=\"facts\">{facts}</p></header>\n<main>\n{body}</main>\n<footer>{footer}</footer></body></html>\n",
        name = escape(page.title),
        command = escape(page.command),
        body = page.body,
        footer = escape(page.footer),
    )
}

/// A part of the page; nothing where there is nothing to show.
pub fn section(title: &str, content: &str) -> String {
    if content.is_empty() { String::new() } else { format!("<section><h2>{title}</h2>\n{content}</section>\n") }
}

/// A table; columns whose cells are all numbers lean right.
pub fn table<const N: usize>(head: &[&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<[String; N]> = rows.collect();
    let is_number = |cell: &str| cell == "–" || cell.strip_suffix(" %").unwrap_or(cell).parse::<f64>().is_ok();
    let numeric = |column: usize| rows.iter().all(|row| is_number(&row[column]));
    let classes: Vec<&str> = (0..N).map(|column| if numeric(column) { " class=\"n\"" } else { "" }).collect();
    let line = |tag: &str, cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&classes).map(|(cell, class)| format!("<{tag}{class}>{}</{tag}>", escape(cell)));
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    let body: String = rows.iter().map(|row| line("td", &mut row.iter().map(String::as_str))).collect();
    format!("<table>{}{body}</table>\n", line("th", &mut head.iter().copied()))
}

/// Three digits, more before the point.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// The beginning of a text, on one line.
pub fn shorten(text: &str, most: usize) -> String {
    let mut chars = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut short: String = chars.by_ref().take(most).collect();
    if chars.next().is_some() {
        short.push('…');
    }
    short
}

/// Text as a page shows it; what XML cannot hold becomes a replacement character.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && !"\n\t".contains(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::charts::{Bar, bars};
    use super::*;

    #[test]
    fn texts_of_strangers_stay_text() {
        let hostile = "<script>alert('x')</script>\u{1b}[2J";
        let svg = bars(&[Bar { label: hostile.into(), value: 1.0, note: hostile.into() }], number);
        assert!(!svg.contains("<script") && !svg.contains('\u{1b}'));
        assert_eq!(escape("a & \"b\""), "a &amp; &quot;b&quot;");
        assert_eq!(shorten("ab\ncd", 3), "ab …");
    }
}
