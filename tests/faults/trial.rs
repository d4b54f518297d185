//! One disturbed run of a scenario, and its check: every output is completely in its old or in its new state; a rerun
//! succeeds and gives the bytes of an undisturbed run; no temporary file of the program is left behind.

use crate::call::{Call, Kind};
use crate::stage::{self, Prepared};
use crate::state::{self, Allowed, State};
use crate::tracer::{self, Decision, Observer, Outcome};
use std::path::Path;

/// Disturbance of a run at one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed before the call.
    Kill,
    /// The call fails: `ENOSPC` where bytes are written, else `EIO`.
    Error,
}

/// Counts calls, and disturbs call number `at` (from 0).
pub struct Injector {
    pub at: usize,
    pub fault: Fault,
    pub seen: usize,
    pub hit: Option<Call>,
    /// True if [`Call::gives_up`] is true for the last call.
    in_cleanup: bool,
}

impl Injector {
    pub fn new(at: usize, fault: Fault) -> Injector {
        Injector { at, fault, seen: 0, hit: None, in_cleanup: false }
    }
}

impl Observer for Injector {
    fn before(&mut self, call: &Call) -> Decision {
        self.seen += 1;
        let in_cleanup = std::mem::replace(&mut self.in_cleanup, call.gives_up());
        if self.seen != self.at + 1 {
            return Decision::Make;
        }
        self.hit = Some(Call { in_cleanup, ..call.clone() });
        match self.fault {
            Fault::Kill => Decision::Kill,
            Fault::Error => Decision::Fail(error_of(call.kind)),
        }
    }
}

/// Returns the error with which a call of this kind fails.
pub fn error_of(kind: Kind) -> i32 {
    if [Kind::Write, Kind::Allocate, Kind::Copy].contains(&kind) { libc::ENOSPC } else { libc::EIO }
}

/// Runs a scenario with one disturbance and returns what is wrong. `None` means that the run ended before that call.
pub fn disturbed(prepared: &Prepared, at: usize, fault: Fault) -> Option<Vec<String>> {
    let place = prepared.fresh();
    let mut injector = Injector::new(at, fault);
    let outcome = tracer::run(&mut stage::program(prepared.scenario.line, &place), &place, &mut injector);
    let call = injector.hit?;
    let name = |line: String| {
        let path = call.path.strip_prefix(&place).unwrap_or(&call.path).display();
        format!("{}, {fault:?} at call {at} ({:?} {path}): {line}", prepared.scenario.name, call.kind)
    };
    Some(wrong(prepared, &place, &outcome, fault, &call).into_iter().map(name).collect())
}

/// Checks everything after a run that was disturbed at `call`.
pub fn wrong(prepared: &Prepared, root: &Path, outcome: &Outcome, fault: Fault, call: &Call) -> Vec<String> {
    let mut wrong = wrong_end(prepared, root, outcome, fault, call);
    wrong.extend(wrong_state(prepared, root));
    wrong.extend(wrong_rerun(prepared, root));
    wrong
}

/// Checks how the disturbed run ended.
fn wrong_end(prepared: &Prepared, root: &Path, outcome: &Outcome, fault: Fault, call: &Call) -> Vec<String> {
    let said = || outcome.said.lines().take(3).collect::<Vec<_>>().join(" / ");
    match (fault, outcome.exit) {
        (Fault::Kill, Err(libc::SIGKILL)) => Vec::new(),
        (Fault::Kill, exit) => vec![format!("the killed program ended with {exit:?}: {}", said())],
        (Fault::Error, Ok(0)) => {
            let mut wrong = Vec::new();
            let is_note = prepared.scenario.noted_in.iter().any(|dir| call.path.starts_with(root.join(dir)));
            if !call.may_be_ignored() && !is_note {
                wrong.push("the error was not reported".to_string());
            }
            if prepared.scenario.after.is_empty() && State::read(root).files != prepared.new.files {
                wrong.push("exit code 0, but the output is not the new one".to_string());
            }
            wrong
        }
        (Fault::Error, Ok(1..=6)) if !outcome.said.contains("panicked") => Vec::new(),
        (Fault::Error, exit) => vec![format!("ended with {exit:?}: {}", said())],
    }
}

/// Checks that every output is in its old or its new state, and that readers can open a pack whose files are being
/// moved to their names.
pub fn wrong_state(prepared: &Prepared, root: &Path) -> Vec<String> {
    let found = State::read(root);
    let mut wrong = Allowed { states: prepared.states(), units: prepared.scenario.units }.violations(&found);
    for unit in found.swapped().filter(|unit| found.files.contains_key(&unit.join("model.ie.json"))) {
        let outcome = stage::run(&format!("inspect {}", unit.display()), root);
        if outcome.exit != Ok(0) {
            wrong.push(format!("{} cannot be read during its swap: {}", unit.display(), outcome.said.trim()));
        }
    }
    wrong
}

/// Runs the command again and checks its result. If the output is complete, the command may refuse, as it does after an
/// undisturbed run, but must then remove what the interrupted run has left.
pub fn wrong_rerun(prepared: &Prepared, root: &Path) -> Vec<String> {
    let found = State::read(root);
    let is_complete = found.files == prepared.new.files && found.swapped().next().is_none();
    let mut wrong = Vec::new();
    for (step, line) in
        std::iter::once(prepared.scenario.line).chain(prepared.scenario.after.iter().copied()).enumerate()
    {
        let outcome = stage::run(line, root);
        if outcome.exit != Ok(0) && !(step == 0 && is_complete && outcome.exit == prepared.again) {
            wrong.push(format!(
                "`{line}` after the disturbed run ended with {:?}: {}",
                outcome.exit,
                outcome.said.trim()
            ));
        }
    }
    let found = State::read(root);
    if found.files != prepared.new.files {
        let shown = Allowed { states: vec![&prepared.new], units: prepared.scenario.units }.violations(&found);
        wrong.push(format!("the rerun did not give the new state: {shown:?}"));
    }
    let mut remains = state::remains(root);
    remains.retain(|path| !prepared.scenario.noted_in.iter().any(|dir| path.starts_with(root.join(dir))));
    if !remains.is_empty() {
        let names = remains.iter().map(|path| path.strip_prefix(root).unwrap_or(path));
        wrong.push(format!("left after the rerun: {:?}", names.collect::<Vec<_>>()));
    }
    wrong
}
