//! Times of the stages of prefill and decode (`--profile`) for the JSON line and as a table.

use crate::report::table::Table;
use crate::runtime::{Stage, Stages};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Seconds per stage, in the order of [`Stage::all`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StageTimes {
    /// Stages of prefill.
    pub prefill: Map<String, Value>,
    /// Stages of decode.
    pub decode: Map<String, Value>,
}

impl StageTimes {
    /// Converts stage times to seconds; `sink` is the reported name of [`Stage::Sink`], the work done with each
    /// token.
    pub fn new(prefill: &Stages, decode: &Stages, sink: &str) -> StageTimes {
        let name = |stage: Stage| if stage == Stage::Sink { sink } else { stage.name() };
        let seconds = |stages: &Stages| {
            Stage::all().map(|stage| (name(stage).into(), stages.get(stage).as_secs_f64().into())).collect()
        };
        StageTimes { prefill: seconds(prefill), decode: seconds(decode) }
    }

    /// Returns a table of milliseconds and shares, sorted by decode time, longest first.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&["stage", ">prefill ms", ">%", ">decode ms", ">%"]);
        let seconds = |times: &Map<String, Value>| -> Vec<f64> { times.values().filter_map(Value::as_f64).collect() };
        let (prefill, decode) = (seconds(&self.prefill), seconds(&self.decode));
        let cells = |seconds: f64, all: &[f64]| {
            let share = 100.0 * seconds / all.iter().sum::<f64>().max(f64::MIN_POSITIVE);
            [format!("{:.2}", seconds * 1e3), format!("{share:.1}")]
        };
        let mut rows: Vec<_> = self.prefill.keys().zip(prefill.iter().zip(&decode)).collect();
        rows.sort_by(|a, b| b.1.1.total_cmp(a.1.1));
        for (name, (read, generated)) in rows {
            table.row([vec![name.clone()], cells(*read, &prefill).into(), cells(*generated, &decode).into()].concat());
        }
        table
    }
}
