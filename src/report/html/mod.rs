//! HTML reports: one file each, without scripts and without external resources.

pub mod charts;

/// Colors of the parts of charts, in order; part `i` has the CSS class `c{i}`, and line `i` the class `l{i}`.
const COLORS: [&str; 12] = [
    "#94a3b8", "#64748b", "#3b82f6", "#8b5cf6", "#10b981", "#f59e0b", "#ec4899", "#06b6d4", "#84cc16", "#ef4444",
    "#b8b3a9", "#a16207",
];
const STYLE: &str = include_str!("page.css");

/// Contents of a page.
pub struct Page<'a> {
    /// Command that created the page.
    pub command: &'a str,
    /// Headline.
    pub title: &'a str,
    /// Facts shown below the headline in one line.
    pub facts: &'a [&'a str],
    /// Sections of the page as HTML.
    pub body: &'a str,
    /// Last line of the page.
    pub footer: &'a str,
}

/// Returns the whole HTML file.
pub fn document(page: &Page<'_>) -> String {
    let colors: String = COLORS
        .iter()
        .enumerate()
        .map(|(i, c)| format!(".c{i}{{fill:{c};background:{c}}}.l{i}{{stroke:{c}}}\n"))
        .collect();
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

/// Returns a section of the page; an empty string if there is no content. Its charts have its title as their name. It
/// can be focused, because it scrolls sideways if a table is wider than the window.
pub fn section(title: &str, content: &str) -> String {
    if content.is_empty() {
        return String::new();
    }
    let name = escape(title);
    let named = content.replace(charts::IMAGE, &format!("{} aria-label=\"{name}\"", charts::IMAGE));
    format!("<section tabindex=\"0\" aria-label=\"{name}\"><h2>{name}</h2>\n{named}</section>\n")
}

/// Returns an HTML table; columns whose cells are all numbers are right-aligned.
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

/// Formats a number with about three significant digits, and with all digits before the decimal point.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// Returns the first `most` characters of a text, without line breaks.
pub fn shorten(text: &str, most: usize) -> String {
    let mut chars = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut short: String = chars.by_ref().take(most).collect();
    if chars.next().is_some() {
        short.push('…');
    }
    short
}

/// Escapes text for HTML; control characters, which XML cannot represent, become replacement characters.
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
    fn charts_have_names_and_sections_can_be_focused() {
        let bar = || Bar { label: "a".into(), value: 1.0, note: String::new() };
        let html = section("Time & tokens", &(bars(&[bar()], number) + &bars(&[bar()], number)));
        assert_eq!(html.matches("<svg").count(), html.matches("role=\"img\" aria-label=\"Time &amp; tokens\"").count());
        assert!(html.starts_with("<section tabindex=\"0\" aria-label=\"Time &amp; tokens\"><h2>"), "{html}");
    }

    #[test]
    fn texts_of_strangers_stay_text() {
        let hostile = "<script>alert('x')</script>\u{1b}[2J";
        let svg = bars(&[Bar { label: hostile.into(), value: 1.0, note: hostile.into() }], number);
        assert!(!svg.contains("<script") && !svg.contains('\u{1b}'));
        assert_eq!(escape("a & \"b\""), "a &amp; &quot;b&quot;");
        assert_eq!(shorten("ab\ncd", 3), "ab …");
    }
}
