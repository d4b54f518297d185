//! Fault injection: at each system call with which a command changes files, the command is killed, or the call fails.
//! After that, every output must be in its old or its new state, the inputs unchanged, and a rerun must succeed.
//!
//! By default, a part of these runs is made; `IEC_FAULTS=all cargo test --test faults -- --nocapture` makes every run
//! and prints a table of counts. docs/RELIABILITY.md describes the method and the results.
//!
//! | module | what it does |
//! |---|---|
//! | `arch`, `call` | registers, numbers and paths of system calls |
//! | `tracer` | runs the program under ptrace and stops it at the calls |
//! | `scenario`, `stage` | the commands, and the directories in which they run |
//! | `state` | the files that readers find, and which states of them are allowed |
//! | `trial` | a disturbed run and its check |
//! | `power` | simulated power cuts |
//! | `races` | pairs of commands that change the same files |
//! | `memory` | refused allocations of large memory mappings |
//! | `planted` | mistakes that are planted in the program, which the checks must report |

#![allow(clippy::disallowed_methods, clippy::print_stdout)]
#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

mod arch;
mod call;
mod memory;
mod planted;
mod power;
mod races;
mod scenario;
mod stage;
mod state;
mod tracer;
mod trial;

use scenario::{LEFT_OUT, READ_ONLY, READ_PATHS, SCENARIOS};
use stage::Prepared;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use trial::Fault;

/// Number of disturbed runs of each kind and scenario, unless every run is wanted.
const SLICE: usize = 16;

/// Returns true if every run is wanted.
fn all() -> bool {
    std::env::var("IEC_FAULTS").is_ok_and(|value| value == "all")
}

/// Returns the scenarios whose name contains the value of `IEC_FAULTS_ONLY`.
fn scenarios() -> impl Iterator<Item = scenario::Scenario> {
    let only = std::env::var("IEC_FAULTS_ONLY").unwrap_or_default();
    SCENARIOS.iter().filter(move |scenario| scenario.name.contains(&only)).copied()
}

/// Numbers of system calls and disturbed runs of one scenario, and the violations found.
#[derive(Debug, Default)]
struct Counts {
    calls: usize,
    kills: usize,
    errors: usize,
    power_cuts: usize,
    violations: Vec<String>,
}

/// Calls `work` for every number below `count` on all processors.
fn in_parallel(count: usize, work: impl Fn(usize) + Sync) {
    let (next, threads) = (AtomicUsize::new(0), std::thread::available_parallelism().map_or(1, usize::from));
    std::thread::scope(|scope| {
        for _ in 0..threads.min(count) {
            scope.spawn(|| {
                while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|i| *i < count) {
                    work(i);
                }
            });
        }
    });
}

/// Returns the calls at which a scenario is disturbed: all, or some at equal distances.
fn points(calls: usize) -> Vec<usize> {
    if all() || calls <= SLICE { (0..calls).collect() } else { (0..SLICE).map(|i| i * calls / SLICE).collect() }
}

/// Kills a scenario, lets its calls fail and cuts its power, at the calls that [`points`] selects.
fn disturb(scenario: scenario::Scenario) -> Counts {
    let prepared = Prepared::new(scenario);
    let mut counts = Counts { calls: prepared.calls.len(), ..Counts::default() };
    for at in points(counts.calls) {
        for fault in [Fault::Kill, Fault::Error] {
            let Some(wrong) = trial::disturbed(&prepared, at, fault) else { continue };
            *(if fault == Fault::Kill { &mut counts.kills } else { &mut counts.errors }) += 1;
            counts.violations.extend(wrong);
        }
    }
    let cuts = power::cut(&prepared, if all() { usize::MAX } else { SLICE }, |recorder, root| {
        power::undisturbed(&prepared, recorder, root);
    });
    counts.power_cuts = cuts.states;
    counts.violations.extend(cuts.wrong);
    counts
}

#[test]
fn interrupted_commands_leave_the_old_or_the_new_state_and_can_be_repeated() {
    let scenarios: Vec<_> = scenarios().collect();
    let counts: Vec<Mutex<Counts>> = scenarios.iter().map(|_| Mutex::default()).collect();
    in_parallel(scenarios.len(), |i| *counts[i].lock().unwrap() = disturb(scenarios[i]));
    let mut violations = Vec::new();
    println!("| scenario | calls | kills | errors | power cuts | violations |\n|---|---|---|---|---|---|");
    for (scenario, counts) in scenarios.iter().zip(counts) {
        let Counts { calls, kills, errors, power_cuts, violations: found } = counts.into_inner().unwrap();
        println!("| {} | {calls} | {kills} | {errors} | {power_cuts} | {} |", scenario.name, found.len());
        violations.extend(found);
    }
    assert!(violations.is_empty(), "{} violations:\n{}", violations.len(), violations.join("\n"));
}

#[test]
fn two_commands_give_what_they_give_one_after_the_other() {
    let races: Vec<Mutex<races::Races>> = races::PAIRS.iter().map(|_| Mutex::default()).collect();
    in_parallel(races.len(), |i| *races[i].lock().unwrap() = races::race(races::PAIRS[i], points));
    let races: Vec<races::Races> = races.into_iter().map(|races| races.into_inner().unwrap()).collect();
    println!("{} races of {} pairs", races.iter().map(|races| races.races).sum::<usize>(), races.len());
    let wrong: Vec<String> = races.into_iter().flat_map(|races| races.wrong).collect();
    assert!(wrong.is_empty(), "{} violations:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_command_has_a_scenario_or_a_reason() {
    let help = stage::run("--help", std::path::Path::new("."));
    let lines = help.said.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let listed: BTreeSet<&str> = lines.filter_map(|line| line.split_whitespace().next()).collect();
    let reasons = READ_ONLY.iter().chain(LEFT_OUT).map(|(name, _)| *name);
    let known: BTreeSet<&str> = SCENARIOS.iter().map(scenario::Scenario::command).chain(reasons).collect();
    assert!(!listed.is_empty(), "{}", help.said);
    assert_eq!(listed, known, "each command needs a scenario in tests/faults/scenario.rs, or a reason there");
}

/// Returns the options of a command that take a path, from its help.
fn options_with_paths(command: &str) -> Vec<String> {
    let help = stage::run(&format!("{command} --help"), std::path::Path::new("."));
    let option = |line: &str| {
        let (name, rest) = line.trim_start().split_once("--")?.1.split_once([' ', '=']).unwrap_or_default();
        let begins = line.trim_start().starts_with('-');
        let value = rest.strip_prefix('<')?.split('>').next()?;
        let is_path = ["FILE", "DIR", "PATH", "STATS", "PACK", "MANIFEST"].iter().any(|word| value.contains(word));
        (begins && is_path).then(|| name.to_string())
    };
    help.said.lines().filter_map(option).collect()
}

#[test]
fn every_option_that_writes_a_file_is_in_a_scenario() {
    let commands: BTreeSet<&str> = SCENARIOS.iter().map(scenario::Scenario::command).collect();
    let (mut unknown, mut read) = (Vec::new(), BTreeSet::new());
    for command in commands {
        let options = options_with_paths(command);
        assert!(!options.is_empty() || ["rm", "simulate"].contains(&command), "`{command}` has no option with a path");
        for option in options {
            let word = format!(" --{option}");
            let lines = SCENARIOS.iter().filter(|scenario| scenario.command() == command);
            let is_run = lines.flat_map(|scenario| scenario.line.split(' ')).any(|part| part == &word[1..]);
            match READ_PATHS.contains(&&*option) {
                true => drop(read.insert(option)),
                false if is_run => {}
                false => unknown.push(format!("{command}{word}")),
            }
        }
    }
    assert!(unknown.is_empty(), "each needs a scenario in tests/faults/scenario.rs, or is only read: {unknown:?}");
    let idle: Vec<_> = READ_PATHS.iter().filter(|option| !read.contains(**option)).collect();
    assert!(idle.is_empty(), "no command has these options: {idle:?}");
}

#[test]
fn commands_that_only_read_write_nothing() {
    let pack = scenario::Scenario { before: &[], ..SCENARIOS[0] };
    for (name, line) in READ_ONLY {
        let before = &["pack --hf-dir source --out-dir pack"];
        let prepared = Prepared::new(scenario::Scenario { name, line, before, ..pack });
        assert!(prepared.calls.is_empty() && prepared.old == prepared.new, "{line}: {:?}", prepared.calls);
    }
}
