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

    /// Removes columns that have the same cell in all rows or, if the table is still wider than `most`, any of
    /// `optional`, in their order, until it fits. Names of columns are those of the header.
    #[must_use]
    pub fn within(mut self, most: usize, optional: &[&str]) -> Table {
        let uniform = |table: &Table, column: usize| {
            let cells = || table.rows[1..].iter().map(|row| &row[column]);
            cells().next().is_some_and(|first| cells().all(|cell| cell == first))
        };
        for only_uniform in [true, false] {
            for name in optional {
                let Some(column) = self.rows[0].iter().position(|header| header == name) else { continue };
                if self.width() > most && (!only_uniform || uniform(&self, column)) {
                    self.right.remove(column);
                    self.rows.iter_mut().for_each(|row| drop(row.remove(column)));
                }
            }
        }
        self
    }

    /// Returns the number of columns of the terminal that the table takes.
    fn width(&self) -> usize {
        (0..self.right.len()).map(|column| 2 + self.column_width(column)).sum()
    }

    fn column_width(&self, column: usize) -> usize {
        self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
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
        let widths: Vec<usize> = (0..self.right.len()).map(|column| self.column_width(column)).collect();
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
    fn a_table_that_is_too_wide_loses_optional_columns_without_news_first() {
        let table = || {
            let mut table = Table::new(&["role", ">weights", ">error", "verdict"]);
            table.row(["attention", "12", "0.5", "accepted"]);
            table.row(["mlp", "34", "0.25", "accepted"]);
            table
        };
        let optional = ["weights", "verdict"];
        let head = |most: usize| table().within(most, &optional).to_string().lines().next().unwrap().to_string();
        assert_eq!(head(40), "  role       weights  error  verdict");
        assert_eq!(head(36), "  role       weights  error");
        assert_eq!(head(20), "  role       error");
    }

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
