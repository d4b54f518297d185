//! Times and hardware events of the stages of prefill and decode (`--profile`) for the JSON line and as a table.

use crate::report::table::Table;
use crate::runtime::{Stage, Stages};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Seconds per stage, in the order of [`Stage::all`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StageTimes {
    /// Stages of prefill.
    pub prefill: Map<String, Value>,
    /// Stages of decode.
    pub decode: Map<String, Value>,
    /// Instructions, cycles and cache misses per stage of prefill, where they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_counters: Option<Map<String, Value>>,
    /// Instructions, cycles and cache misses per stage of decode, where they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_counters: Option<Map<String, Value>>,
}

impl StageTimes {
    /// Converts stage times to seconds; `sink` is the reported name of [`Stage::Sink`], the work done with each
    /// token.
    pub fn new(prefill: &Stages, decode: &Stages, sink: &str) -> StageTimes {
        let name = |stage: Stage| if stage == Stage::Sink { sink } else { stage.name() };
        let seconds = |stages: &Stages| {
            Stage::all().map(|stage| (name(stage).into(), stages.get(stage).as_secs_f64().into())).collect()
        };
        let counters = |stages: &Stages| {
            let counts = |stage: Stage| {
                let counts = stages.counts(stage)?;
                let events = json!({
                    "instructions": counts.instructions,
                    "cycles": counts.cycles,
                    "cache_misses": counts.cache_misses,
                });
                Some((name(stage).into(), events))
            };
            Stage::all().map(counts).collect::<Option<Map<String, Value>>>()
        };
        StageTimes {
            prefill: seconds(prefill),
            decode: seconds(decode),
            prefill_counters: counters(prefill),
            decode_counters: counters(decode),
        }
    }

    /// Returns a table of milliseconds and shares, sorted by decode time, longest first. Where events were counted, it
    /// also has the instructions per cycle and the cache misses per 1000 instructions of decode.
    pub fn table(&self) -> Table {
        let mut head = vec!["stage", ">prefill ms", ">%", ">decode ms", ">%"];
        if self.decode_counters.is_some() {
            head.extend([">instr/cycle", ">misses/1000"]);
        }
        let mut table = Table::new(&head);
        let seconds = |times: &Map<String, Value>| -> Vec<f64> { times.values().filter_map(Value::as_f64).collect() };
        let (prefill, decode) = (seconds(&self.prefill), seconds(&self.decode));
        let cells = |seconds: f64, all: &[f64]| {
            let share = 100.0 * seconds / all.iter().sum::<f64>().max(f64::MIN_POSITIVE);
            [format!("{:.2}", seconds * 1e3), format!("{share:.1}")]
        };
        let mut rows: Vec<_> = self.prefill.keys().zip(prefill.iter().zip(&decode)).collect();
        rows.sort_by(|a, b| b.1.1.total_cmp(a.1.1));
        for (name, (read, generated)) in rows {
            let events = self.decode_counters.as_ref().map_or(Vec::new(), |counters| events(counters.get(name)));
            let times = [vec![name.clone()], cells(*read, &prefill).into(), cells(*generated, &decode).into()];
            table.row([times.concat(), events].concat());
        }
        table
    }
}

/// Returns the cells of a stage's events: instructions per cycle, and cache misses per 1000 instructions.
fn events(counts: Option<&Value>) -> Vec<String> {
    let count = |name: &str| counts.and_then(|counts| counts[name].as_f64()).unwrap_or(0.0);
    let ratio = |a: f64, b: f64| if b > 0.0 { format!("{:.2}", a / b) } else { "-".to_string() };
    let instructions = count("instructions");
    vec![ratio(instructions, count("cycles")), ratio(1e3 * count("cache_misses"), instructions)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cpu::counters::Counts;
    use std::time::Duration;

    #[test]
    fn events_are_shown_only_where_they_were_counted() {
        let mut stages = Stages::default();
        stages.add(Stage::Mlp, Duration::from_millis(2));
        let plain = StageTimes::new(&stages, &stages, "touch");
        assert!(serde_json::to_value(&plain).unwrap().get("decode_counters").is_none());
        assert!(!plain.table().to_string().contains("instr/cycle"));
        stages.add_counts(Stage::Mlp, &Counts { instructions: 3000, cycles: 2000, cache_misses: 6 });
        let counted = StageTimes::new(&Stages::default(), &stages, "touch");
        let json = serde_json::to_value(&counted).unwrap();
        assert_eq!(json["decode_counters"]["mlp"], json!({"instructions": 3000, "cycles": 2000, "cache_misses": 6}));
        assert!(json["decode_counters"]["touch"].is_object() && json.get("prefill_counters").is_none());
        let table = counted.table().to_string();
        let row = table.lines().find(|line| line.contains("mlp")).unwrap();
        assert!(row.contains("1.50") && row.contains("2.00"), "{table}");
        assert_eq!(serde_json::from_value::<StageTimes>(json).unwrap().decode_counters, counted.decode_counters);
    }
}
