//! Tables for people: aligned columns, a rule under the header, nothing else.

use std::fmt;

/// Which side of a column its cells lean on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows under a header; every row has as many cells as the header.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table. A column whose name starts with `>` leans right.
    pub fn new(columns: &[&'static str]) -> Table {
        let column = |name: &&'static str| match name.strip_prefix('>') {
            Some(name) => (name, Align::Right),
            None => (*name, Align::Left),
        };
        Table { columns: columns.iter().map(column).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        assert_eq!(cells.len(), self.columns.len(), "one cell per column");
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.columns[column].0.chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let line = |f: &mut fmt::Formatter<'_>, cells: &[&str]| {
            let mut text = String::new();
            for ((cell, width), (_, align)) in cells.iter().zip(&widths).zip(&self.columns) {
                let padding = " ".repeat(width - cell.chars().count());
                text.push_str("  ");
                match align {
                    Align::Left => text.extend([cell, padding.as_str()]),
                    Align::Right => text.extend([padding.as_str(), cell]),
                }
            }
            writeln!(f, "{}", text.trim_end())
        };
        line(f, &self.columns.iter().map(|(name, _)| *name).collect::<Vec<_>>())?;
        let rules: Vec<String> = widths.iter().map(|w| "─".repeat(*w)).collect();
        line(f, &rules.iter().map(String::as_str).collect::<Vec<_>>())?;
        for row in &self.rows {
            line(f, &row.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["role", ">bytes"]);
        table.row(["norm", "12"]);
        table.row(["embedding", "3"]);
        assert_eq!(
            table.to_string(),
            "  role       bytes\n  ─────────  ─────\n  norm          12\n  embedding      3\n"
        );
    }
}
