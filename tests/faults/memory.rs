//! Refused memory: the n-th large anonymous mapping of a command fails with `ENOMEM`. The command must succeed without
//! it or end with exit code 6, and its files must then pass the checks for a failed command.

use crate::call::Call;
use crate::scenario::SCENARIOS;
use crate::stage::{self, Prepared};
use crate::tracer::{self, Decision, Observer};
use crate::trial::{wrong_rerun, wrong_state};

/// Counts large mappings, and refuses mapping number `at` (from 0).
struct Refusal {
    at: usize,
    seen: usize,
}

impl Observer for Refusal {
    fn before(&mut self, _: &Call) -> Decision {
        Decision::Make
    }

    fn refuses_memory(&mut self, _: u64) -> bool {
        self.seen += 1;
        self.seen == self.at + 1
    }
}

#[test]
fn refused_memory_ends_in_success_or_exit_code_6() {
    let (mut wrong, mut runs) = (Vec::new(), 0);
    for scenario in SCENARIOS {
        let prepared = Prepared::new(*scenario);
        for at in 0.. {
            let root = prepared.fresh();
            let mut refusal = Refusal { at, seen: 0 };
            let outcome = tracer::run(&mut stage::program(scenario.line, &root), &root, &mut refusal);
            if refusal.seen <= at {
                break;
            }
            runs += 1;
            let mut found = wrong_state(&prepared, &root);
            found.extend(wrong_rerun(&prepared, &root));
            if !matches!(outcome.exit, Ok(0 | 6)) {
                found.push(format!("ended with {:?}: {}", outcome.exit, outcome.said.trim()));
            }
            wrong.extend(found.into_iter().map(|line| format!("{}, mapping {at}: {line}", scenario.name)));
        }
    }
    println!("{runs} mappings refused");
    assert!(wrong.is_empty(), "{} violations:\n{}", wrong.len(), wrong.join("\n"));
}
