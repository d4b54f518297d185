//! Formats the contents of calibration statistics as a table.

use super::table::Table;
use crate::calibration::Calibration;

/// Returns a table with a line per kind of site (a place in the model whose values are the inputs of matrices): the
/// number of sites, of input channels, of rows summed per matrix at the first site, and of experts without a row.
pub fn table(stats: &Calibration) -> Table {
    let mut table = Table::new(&["inputs of", ">sites", ">channels", ">rows each", ">never routed"]);
    let mut kinds: Vec<(String, usize, usize, f64, usize)> = Vec::new();
    for site in stats.sites() {
        let kind = site.name.rsplit('.').next().unwrap_or_default().to_string();
        let counts = stats.counts(&site.name);
        let (rows, unseen) =
            (counts.iter().sum::<f64>() / counts.len() as f64, counts.iter().filter(|n| **n == 0.0).count());
        match kinds.iter_mut().find(|(name, ..)| *name == kind) {
            Some((_, sites, _, _, never)) => (*sites, *never) = (*sites + 1, *never + unseen),
            None => kinds.push((kind, 1, site.cols, rows, unseen)),
        }
    }
    for (kind, sites, cols, rows, never) in kinds {
        table.row([kind, sites.to_string(), cols.to_string(), format!("{rows:.0}"), never.to_string()]);
    }
    table
}
