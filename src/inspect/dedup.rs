//! Describes a deduplicated pack: the encodings of its bytes, and the sizes of the packs that share bytes with it.

use crate::dedup::family::{self, Member};
use crate::dedup::{EncodingBytes, JSON_NAME, Shared, Summary};
use crate::error::Result;
use crate::files;
use crate::iebin::dependants::LIST_NAME;
use crate::report::table::{Column, Table};
use crate::units::human_bytes;
use serde_json::{Value, json};
use std::path::Path;

/// Pack that was deduplicated, or that other packs are rebuilt from.
pub struct Deduplicated {
    /// Encodings of its own bytes; `None` for a base pack that still has its binary.
    summary: Option<Summary>,
    /// The pack and all packs that share bytes with it.
    family: Vec<Member>,
}

impl Deduplicated {
    /// Reads the pack in `dir`; `None` unless it was deduplicated or other packs are rebuilt from it.
    pub fn at(dir: &Path) -> Result<Option<Deduplicated>> {
        if !files::is_dir(dir)? {
            return Ok(None);
        }
        let reduced = files::is_file(&dir.join(JSON_NAME))?;
        if !reduced && !files::is_file(&dir.join(LIST_NAME))? {
            return Ok(None);
        }
        let summary = if reduced { Some(family::summary(dir)?) } else { None };
        Ok(Some(Deduplicated { summary, family: Member::family(dir)? }))
    }

    /// Adds the fields `dedup`, `family` and `family_total` to a JSON object.
    pub fn add_to(&self, object: &mut Value) {
        object["dedup"] = json!(self.summary);
        object["family"] = json!(self.family);
        object["family_total"] = json!({
            "original_bytes": self.sum(|m| m.original_bytes), "kept_bytes": self.sum(Member::kept_bytes),
        });
    }

    /// Returns the tables of encodings and of packs.
    pub fn text(&self) -> String {
        let mut text = String::new();
        if let Some(summary) = &self.summary {
            text.push_str(&format!("\n{}", encodings(summary)));
        }
        text.push_str(&format!("\n{}", self.packs()));
        text
    }

    fn packs(&self) -> Table {
        let mut table =
            Table::new(&["pack", ">before", ">binary", ">dedup", ">ratio", ">copies", ">differences", "rebuilt with"]);
        let ratio = |kept: u64, original: u64| format!("{:.4}", kept as f64 / original.max(1) as f64);
        for member in &self.family {
            let shared = |of: fn(&Shared) -> u64| human_bytes(member.bases.iter().map(of).sum());
            let bases: Vec<String> = member.bases.iter().map(|base| base.dir.display().to_string()).collect();
            table.row([
                member.dir.display().to_string(),
                human_bytes(member.original_bytes),
                human_bytes(member.binary_bytes),
                human_bytes(member.store_bytes),
                ratio(member.kept_bytes(), member.original_bytes),
                shared(|base| base.same_bytes),
                shared(|base| base.delta_bytes),
                bases.join(", "),
            ]);
        }
        let (original, kept) = (self.sum(|m| m.original_bytes), self.sum(Member::kept_bytes));
        table.row([
            "total".to_string(),
            human_bytes(original),
            human_bytes(self.sum(|m| m.binary_bytes)),
            human_bytes(self.sum(|m| m.store_bytes)),
            ratio(kept, original),
            String::new(),
            String::new(),
            String::new(),
        ]);
        table
    }

    fn sum(&self, of: fn(&Member) -> u64) -> u64 {
        self.family.iter().map(of).sum()
    }
}

fn encodings(summary: &Summary) -> Table {
    let columns: [Column<'_, &EncodingBytes>; 6] = [
        ("encoding", &|part| part.encoding.clone()),
        ("stored as", &|part| part.kind.clone()),
        (">units", &|part| part.units.to_string()),
        (">before", &|part| human_bytes(part.original_bytes)),
        (">after", &|part| human_bytes(part.stored_bytes)),
        (">ratio", &|part| format!("{:.4}", part.stored_bytes as f64 / part.original_bytes.max(1) as f64)),
    ];
    Table::of(&summary.parts, &columns)
}
