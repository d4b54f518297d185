//! Describes an adapter of PEFT or the pack of one.

use super::Options;
use crate::convert::adapter;
pub(super) use crate::convert::adapter::{is_at, is_packed};
use crate::error::{Error, Result};
use crate::units::{human_bytes, human_count};
use serde_json::json;

/// Returns the description of the adapter at the path.
pub(super) fn describe(options: &Options) -> Result<String> {
    if options.stats || options.tensors {
        return Err(Error::usage("--tensors and --stats: found an adapter, for which only a summary is printed")
            .at(&options.path)
            .help(format!("name its file {} to list the tensors", adapter::FILE)));
    }
    let summary = adapter::describe(&options.path)?;
    if options.json {
        return Ok(format!("{}\n", json!({"path": options.path, "kind": "adapter", "adapter": summary})));
    }
    let left_out = adapter::left_out(&summary.unused);
    let targets: Vec<String> = summary.targets.iter().map(|(name, count)| format!("{name} ({count})")).collect();
    let lines = [
        ("method", summary.method.to_string()),
        ("base model", summary.base.unwrap_or_else(|| "not named".into())),
        ("rank", format!("at most {}", summary.rank)),
        ("numbers", format!("{}, {}", human_count(summary.parameters), human_bytes(summary.bytes))),
        ("modules", targets.join(", ")),
    ];
    let left_out = left_out.map(|text| ("note", text));
    let text: String = lines.iter().chain(&left_out).map(|(key, value)| format!("  {key:<14}{value}\n")).collect();
    let kind = if adapter::is_packed(&options.path)? { "packed adapter" } else { "adapter of PEFT" };
    Ok(format!("{}: {kind}\n{text}", options.path.display()))
}
