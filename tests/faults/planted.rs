//! Faults that are planted in the program in order to test the harness: the tracer changes what system calls do, as if
//! the program made other calls. The checks must report each of them.

use crate::call::{Call, Kind};
use crate::power;
use crate::scenario::SCENARIOS;
use crate::stage::{self, Prepared};
use crate::state::{self, State};
use crate::tracer::{self, Decision, Observer};
use crate::trial::{self, Fault, Injector};
use std::fs;
use std::path::{Path, PathBuf};

/// A mistake of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plant {
    /// Files are not synced before they get their names.
    NoFileSync,
    /// Directories are not synced after names were changed in them.
    NoDirectorySync,
    /// A file is removed before another one gets its name.
    RemoveBeforeRename,
    /// A failed write is treated as a complete one.
    SwallowedError,
    /// A write is not made, but counts as done.
    LostWrite,
    /// Temporary files and directories are not removed.
    LeftTemporary,
    /// The old file is emptied before the new one is complete.
    TruncateOld,
    /// An input is changed.
    ChangedInput,
    /// The new file gets its name before it is complete.
    EarlyName,
    /// The last file does not get its name.
    NoRename,
    /// A file is left that the next run takes for an output of the user.
    ForeignRemains,
}

/// Kind of runs in which a planted fault must be noticed.
#[derive(Debug, Clone, Copy)]
enum Search {
    /// The command is killed at each call.
    Kill,
    /// Each call fails in one run.
    Error,
    /// The command runs to its end.
    Complete,
    /// The power is cut.
    PowerCut,
}

/// All planted faults, the scenario in which each is planted, and the kind of runs that must report it.
const PLANTS: &[(Plant, &str, Search)] = &[
    (Plant::NoFileSync, "export-gguf", Search::PowerCut),
    (Plant::NoFileSync, "pack --overwrite", Search::PowerCut),
    (Plant::NoDirectorySync, "tensor-map", Search::PowerCut),
    (Plant::NoDirectorySync, "pack", Search::PowerCut),
    (Plant::RemoveBeforeRename, "export-gguf --overwrite", Search::Kill),
    (Plant::RemoveBeforeRename, "pack --overwrite", Search::Kill),
    (Plant::SwallowedError, "pack", Search::Error),
    (Plant::SwallowedError, "synth", Search::Error),
    (Plant::LostWrite, "import-gguf", Search::Complete),
    (Plant::LeftTemporary, "unpack", Search::Complete),
    (Plant::TruncateOld, "verify --out --overwrite", Search::Kill),
    (Plant::ChangedInput, "dedup", Search::Complete),
    (Plant::EarlyName, "calib", Search::Kill),
    (Plant::NoRename, "q4", Search::Complete),
    (Plant::ForeignRemains, "pack", Search::Kill),
];

/// Makes the mistake at the calls, and passes the others on to another observer.
struct Faulty<'a> {
    plant: Plant,
    root: PathBuf,
    inner: &'a mut dyn Observer,
    /// Number of writes so far.
    writes: usize,
}

impl Faulty<'_> {
    /// Makes the mistake at a call. Returns a decision if the mistake is to skip the call; otherwise, the call is made.
    fn mistake(&mut self, call: &Call) -> Option<Decision> {
        let skipped = Some(Decision::Skip(0));
        let is_write = call.kind == Kind::Write;
        self.writes += usize::from(is_write);
        match self.plant {
            Plant::NoFileSync if call.kind == Kind::Sync && !call.path.is_dir() => return skipped,
            Plant::NoDirectorySync if call.kind == Kind::Sync && call.path.is_dir() => return skipped,
            Plant::RemoveBeforeRename if call.kind == Kind::Rename && call.from.as_ref() != Some(&call.path) => {
                drop(fs::remove_file(&call.path));
            }
            Plant::LostWrite if is_write && self.writes == 3 => {
                return Some(Decision::Skip(call.bytes as i64));
            }
            Plant::LeftTemporary if call.kind == Kind::Rename && call.may_be_ignored() => return skipped,
            Plant::LeftTemporary if call.kind == Kind::Unlink => return skipped,
            Plant::TruncateOld if is_write => {
                let old = fs::File::options().write(true).open(self.root.join("report.json"));
                old.and_then(|file| file.set_len(10)).expect("the old report exists");
            }
            Plant::ChangedInput if is_write && self.writes == 1 => {
                fs::write(self.root.join("out/tokenizer_config.json"), "{}").expect("an input");
            }
            Plant::EarlyName if is_write => {
                fs::write(self.root.join("statistics"), "half").expect("writable");
            }
            Plant::NoRename if call.kind == Kind::Rename && call.path.ends_with("model.q4.bin") => return skipped,
            Plant::ForeignRemains if is_write => {
                fs::write(self.root.join("out/config.json"), "{}").expect("writable");
            }
            _ => {}
        }
        None
    }
}

impl Observer for Faulty<'_> {
    fn before(&mut self, call: &Call) -> Decision {
        if let Some(decision) = self.mistake(call) {
            return decision;
        }
        match self.inner.before(call) {
            Decision::Fail(_) if self.plant == Plant::SwallowedError && call.kind == Kind::Write => {
                Decision::Skip(call.bytes as i64)
            }
            decision => decision,
        }
    }

    fn after(&mut self, call: &Call, result: i64) {
        self.inner.after(call, result);
    }
}

/// Runs a scenario with a mistake and another observer.
fn run(prepared: &Prepared, plant: Plant, root: &Path, inner: &mut dyn Observer) -> tracer::Outcome {
    let mut faulty = Faulty { plant, root: root.to_path_buf(), inner, writes: 0 };
    tracer::run(&mut stage::program(prepared.scenario.line, root), root, &mut faulty)
}

/// Returns what the checks report about a scenario with a planted fault.
fn reports(prepared: &Prepared, plant: Plant, search: Search) -> Vec<String> {
    let interrupted = |fault: Fault| {
        let mut found = Vec::new();
        for at in 0..prepared.calls.len() {
            let root = prepared.fresh();
            let mut injector = Injector::new(at, fault);
            let outcome = run(prepared, plant, &root, &mut injector);
            let Some(call) = injector.hit else { continue };
            found.extend(trial::wrong(prepared, &root, &outcome, fault, &call));
        }
        found
    };
    match search {
        Search::Kill => interrupted(Fault::Kill),
        Search::Error => interrupted(Fault::Error),
        Search::Complete => {
            let root = prepared.fresh();
            let outcome = run(prepared, plant, &root, &mut Injector::new(usize::MAX - 1, Fault::Kill));
            let (found, remains) = (State::read(&root), state::remains(&root));
            let is_wrong = outcome.exit != Ok(0) || found.files != prepared.new.files || !remains.is_empty();
            if is_wrong { vec![format!("{:?} {remains:?}", outcome.exit)] } else { Vec::new() }
        }
        Search::PowerCut => {
            let cuts = power::cut(prepared, 200, |recorder, root| drop(run(prepared, plant, root, recorder)));
            cuts.wrong
        }
    }
}

#[test]
fn every_planted_fault_is_reported() {
    let missed: Vec<_> = PLANTS
        .iter()
        .filter(|(plant, name, search)| {
            let scenario = SCENARIOS.iter().find(|scenario| scenario.name == *name).expect("a scenario");
            let found = reports(&Prepared::new(*scenario), *plant, *search);
            println!("{plant:?} in {name}: {} reports, such as {:?}", found.len(), found.first());
            found.is_empty()
        })
        .collect();
    assert!(missed.is_empty(), "not reported: {missed:?}");
}
