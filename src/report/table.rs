//! Text tables: aligned columns and a rule under the header.

use std::fmt;

/// Table with a header; every row has as many cells as the header.
#[derive(Debug)]
pub struct Table {
    /// For each column, whether its cells are right-aligned, as numbers are.
    right: Vec<bool>,
    /// Rows of cells; the first row is the header.
    rows: Vec<Vec<String>>,
}

/// Column: its name, and a function that returns the cell of an item.
pub type Column<'a, T> = (&'static str, &'a dyn Fn(&T) -> String);

impl Table {
    /// Creates an empty table. A column whose name starts with `>` is right-aligned.
    pub fn new(columns: &[&'static str]) -> Table {
        let names = columns.iter().map(|name| name.trim_start_matches('>').to_string()).collect();
        Table { right: columns.iter().map(|name| name.starts_with('>')).collect(), rows: vec![names] }
    }

    /// Creates a table with a row for each item.
    pub fn of<T>(items: impl IntoIterator<Item = T>, columns: &[Column<'_, T>]) -> Table {
        let mut table = Table::new(&columns.iter().map(|(name, _)| *name).collect::<Vec<_>>());
        items.into_iter().for_each(|item| table.row(columns.iter().map(|(_, cell)| cell(&item))));
        table
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        assert_eq!(cells.len(), self.right.len(), "one cell per column");
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.right.len()).map(width).collect();
        let line = |f: &mut fmt::Formatter<'_>, cells: &[String]| {
            let mut text = String::new();
            for ((cell, width), right) in cells.iter().zip(&widths).zip(&self.right) {
                text += &if *right { format!("  {cell:>width$}") } else { format!("  {cell:<width$}") };
            }
            writeln!(f, "{}", text.trim_end())
        };
        line(f, &self.rows[0])?;
        line(f, &widths.iter().map(|width| "─".repeat(*width)).collect::<Vec<_>>())?;
        self.rows[1..].iter().try_for_each(|row| line(f, row))
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
