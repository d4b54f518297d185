//! Pairs of commands that change the same files: one is stopped before its n-th call while the other one runs. The
//! result must be that of one of them alone, or one that both can give one after the other, in either order.

use crate::call::Call;
use crate::scenario::{SCENARIOS, Scenario};
use crate::stage::{self, Prepared};
use crate::state::{self, Allowed, State};
use crate::tracer::{self, Decision, Observer, Outcome};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Time after which the first command continues, because the second one seems to wait for it.
const WAITS: Duration = Duration::from_millis(80);
/// Time after which a command counts as hanging.
const HANGS: Duration = Duration::from_secs(60);

/// Two commands that run at the same time, and the commands that are run before them.
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    first: &'static str,
    second: &'static str,
    before: &'static [&'static str],
}

const PACK: &str = "pack --hf-dir source --out-dir out";
const PACK_OTHER: &str = "pack --hf-dir other --out-dir out";
const OVERWRITE: &str = "pack --hf-dir source --out-dir out --overwrite";
const DEDUP: &str = "dedup --even-if-larger --model-dir out";
const REMOVE_ORIGINAL: &str = "dedup --even-if-larger --remove-original --model-dir out";
const APPEND: &str = "q4 --append-attn --model-dir out";
const REMOVE: &str = "dedup --remove --model-dir out";

/// All pairs that are raced.
pub const PAIRS: &[Pair] = &[
    Pair { first: PACK, second: PACK_OTHER, before: &[] },
    Pair { first: PACK, second: PACK, before: &[] },
    Pair { first: OVERWRITE, second: "pack --hf-dir other --out-dir out --overwrite", before: &[PACK_OTHER] },
    Pair { first: OVERWRITE, second: REMOVE_ORIGINAL, before: &[PACK_OTHER] },
    Pair { first: REMOVE_ORIGINAL, second: OVERWRITE, before: &[PACK_OTHER] },
    Pair { first: APPEND, second: REMOVE_ORIGINAL, before: &[PACK] },
    Pair { first: REMOVE_ORIGINAL, second: APPEND, before: &[PACK] },
    Pair { first: OVERWRITE, second: APPEND, before: &[PACK_OTHER] },
    Pair { first: DEDUP, second: REMOVE, before: &[PACK] },
    Pair { first: REMOVE, second: OVERWRITE, before: &[PACK_OTHER] },
    Pair { first: "dedup --restore --model-dir out", second: OVERWRITE, before: &[PACK_OTHER, REMOVE_ORIGINAL] },
    Pair {
        first: "unpack --model-dir one --out-dir out --overwrite",
        second: "unpack --model-dir two --out-dir out --overwrite --max-shard-size 30K",
        before: &["pack --hf-dir source --out-dir one", "pack --hf-dir other --out-dir two"],
    },
    Pair {
        first: "synth --config source/config.json --seed 3 --out-dir out",
        second: "synth --config source/config.json --seed 4 --out-dir out",
        before: &[],
    },
    Pair {
        first: "export-gguf --model-dir one --out model.gguf",
        second: "export-gguf --model-dir two --out model.gguf",
        before: &["pack --hf-dir source --out-dir one", "pack --hf-dir other --out-dir two"],
    },
    Pair {
        first: "calib --hf-dir source --text text --window 64 --out statistics",
        second: "calib --hf-dir source --text more --window 64 --out statistics",
        before: &[],
    },
    Pair {
        first: "ptq --hf-dir source --bits 8 --out map.json",
        second: "ptq --hf-dir other --bits 8 --out map.json",
        before: &[],
    },
];

/// Starts the second command before the n-th call of the first one.
struct Meeting {
    at: usize,
    seen: usize,
    line: &'static str,
    root: PathBuf,
    second: Option<Receiver<Outcome>>,
    outcome: Option<Outcome>,
}

impl Observer for Meeting {
    fn before(&mut self, _: &Call) -> Decision {
        if self.seen == self.at {
            let (send, receive) = channel();
            let (line, root) = (self.line, self.root.clone());
            // The tracer waits for all children of its thread, so another thread starts the second command.
            std::thread::spawn(move || send.send(stage::run(line, &root)));
            self.outcome = receive.recv_timeout(WAITS).ok();
            self.second = Some(receive);
        }
        self.seen += 1;
        Decision::Make
    }
}

/// Number of races of a pair, and what is wrong after them.
#[derive(Debug, Default)]
pub struct Races {
    pub races: usize,
    pub wrong: Vec<String>,
}

/// Races a pair at `points` of the calls of its first command.
pub fn race(pair: Pair, points: impl FnOnce(usize) -> Vec<usize>) -> Races {
    let scenario = Scenario { name: pair.first, line: pair.first, before: pair.before, ..SCENARIOS[0] };
    let prepared = Prepared::new(scenario);
    let in_turn = |lines: &[&str]| {
        let root = prepared.fresh();
        lines.iter().for_each(|line| drop(stage::run(line, &root)));
        State::read(&root)
    };
    let (first, second) = (pair.first, pair.second);
    let orders: [&[&str]; 4] = [&[first], &[second], &[first, second], &[second, first]];
    let results = orders.map(in_turn);
    let mut races = Races::default();
    for at in points(prepared.calls.len()) {
        let root = prepared.fresh();
        let mut meeting = Meeting { at, seen: 0, line: pair.second, root: root.clone(), second: None, outcome: None };
        let first = tracer::run(&mut stage::program(pair.first, &root), &root, &mut meeting);
        let Some(second) = meeting.second else { continue };
        let second = match meeting.outcome {
            Some(outcome) => Ok(outcome),
            None => second.recv_timeout(HANGS),
        };
        races.races += 1;
        let name = |line| format!("`{}` and, before call {at}, `{}`: {line}", pair.first, pair.second);
        races.wrong.extend(wrong(&root, &first, second, &results).into_iter().map(name));
    }
    races
}

fn wrong(root: &Path, first: &Outcome, second: Result<Outcome, RecvTimeoutError>, results: &[State]) -> Vec<String> {
    let Ok(second) = second else { return vec!["the second command hangs".to_string()] };
    let mut wrong = Vec::new();
    for outcome in [first, &second] {
        if !matches!(outcome.exit, Ok(0..=6)) || outcome.said.contains("panicked") {
            wrong.push(format!("ended with {:?}: {}", outcome.exit, outcome.said));
        }
    }
    if first.exit != Ok(0) && second.exit != Ok(0) {
        wrong.push(format!("both failed: {} / {}", first.said.trim(), second.said.trim()));
    }
    let found = State::read(root);
    let allowed = Allowed { states: results.iter().collect(), units: &["out"] };
    let exits = (first.exit, second.exit);
    wrong.extend(allowed.violations(&found).into_iter().map(|line| format!("{exits:?} {line}")));
    let mut remains = state::remains(root);
    // A command that is refused at the end keeps its partial work, so that it can continue with --overwrite.
    remains.retain(|path| exits == (Ok(0), Ok(0)) || path.extension().is_none_or(|kind| kind != "partial"));
    if !remains.is_empty() {
        wrong.push(format!("{exits:?} {remains:?} are left"));
    }
    wrong
}
