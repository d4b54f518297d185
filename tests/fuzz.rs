//! Runs the fuzz targets on every seed, on every input that the fuzzer has found, and on random mutations of these,
//! with the memory limits of the fuzzer.
//!
//! `IEC_FUZZ_INPUTS` sets the number of mutated inputs per parser; docs/FUZZING.md describes how to fuzz with
//! coverage.

#![allow(clippy::disallowed_methods)]

#[path = "../fuzz/src/guard.rs"]
mod guard;
#[path = "../fuzz/src/targets.rs"]
mod targets;

use iec::rng::Rng;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use targets::{TARGETS, Target};

#[global_allocator]
static ALLOCATOR: guard::Counting = guard::Counting;

/// Factor by which an unoptimized build on a busy machine may be slower than the fuzzer.
const SLOWNESS: u64 = 10;

/// Maximum bytes of memory per byte of input, see `memory_grows_with_the_file_whatever_it_is_made_of`.
const GROWTH: usize = 24;

fn files(kind: &str, target: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(kind).join(target);
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Runs a target on an input and returns a description of the failure, if any.
fn offence(target: &Target, data: &[u8]) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(|| guard::watch(target, data, SLOWNESS))) {
        Ok(Ok(())) => None,
        Ok(Err(why)) => Some(why),
        Err(_) => Some("panicked".into()),
    }
}

#[test]
fn every_seed_and_regression_is_survived() {
    let mut failures = Vec::new();
    for target in TARGETS {
        let seeds = files("corpus", target.name);
        assert!(!seeds.is_empty(), "{} has no seeds", target.name);
        for path in seeds.into_iter().chain(files("regressions", target.name)) {
            let why = offence(target, &std::fs::read(&path).unwrap());
            failures.extend(why.map(|why| format!("{}: {why}", path.display())));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn inputs_around_the_seeds_are_survived() {
    let count = std::env::var("IEC_FUZZ_INPUTS").map_or(1000, |n| n.parse().expect("a number"));
    for target in TARGETS {
        let read = |path: &PathBuf| std::fs::read(path).unwrap();
        let known: Vec<Vec<u8>> =
            [files("corpus", target.name), files("regressions", target.name)].concat().iter().map(read).collect();
        let mut rng = Rng::new(7);
        for number in 0..count {
            let input = mutated(&known, &mut rng);
            if let Some(why) = offence(target, &input) {
                let found = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{number}", target.name));
                std::fs::write(&found, &input).unwrap();
                panic!("{}: {why}; the input is {}", target.name, found.display());
            }
        }
    }
}

/// Checks the memory per byte of input on files that consist only of the smallest entries, which have the highest
/// ratio: measured 8 (safetensors) to 22 (model.ie.json) bytes per byte.
#[test]
fn memory_grows_with_the_file_whatever_it_is_made_of() {
    let many = |entry: &dyn Fn(usize) -> String| (0..20_000).map(entry).collect::<Vec<_>>().join(",");
    let cases = [
        (
            "safetensors",
            format!("{{{}}}", many(&|i| format!(r#""{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#))),
        ),
        ("index", format!(r#"{{"weight_map":{{{}}}}}"#, many(&|i| format!(r#""{i}":"a""#)))),
        (
            "ie_json",
            format!(
                r#"{{"tensors":[{}]}}"#,
                many(&|i| format!(r#"{{"name":"{i}","dtype":"u8","shape":[0],"offset":0}}"#))
            ),
        ),
        (
            "manifest",
            format!(r#"{{"version":1,"tensors":{{{}}}}}"#, many(&|i| format!(r#""{i}":{{"rows":1,"cols":1}}"#))),
        ),
        ("config", format!("[{}]", many(&|i| format!("\"{i:012}\"")))),
        ("config", format!("[{}]", ["0"; 400_000].join(","))),
    ];
    let mut failures = Vec::new();
    for (name, text) in cases {
        let target = TARGETS.iter().find(|target| target.name == name).unwrap();
        let factor = guard::peak(target, text.as_bytes()) / text.len();
        if factor > GROWTH {
            failures.push(format!("{name}: {factor} times its {} bytes", text.len()));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Mutates a random input of `known` in a few places.
fn mutated(known: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    let mut input = known[below(rng, known.len())].clone();
    for _ in 0..=below(rng, 4) {
        let at = below(rng, input.len() + 1);
        let end = input.len().min(at + 1 + below(rng, 24));
        match below(rng, 6) {
            0 if at < input.len() => input[at] = rng.next_u64() as u8,
            1 if at < input.len() => input[at] ^= 1 << below(rng, 8),
            2 => drop(input.drain(at..end)),
            3 => {
                let part = input[at..end].to_vec();
                let to = below(rng, input.len() + 1);
                input.splice(to..to, part);
            }
            4 => {
                let numbers = ["-1", "18446744073709551615", "4294967296", "9e99", "null", "[]", "{}", "\"\"", "0"];
                input.splice(at..end, numbers[below(rng, numbers.len())].bytes());
            }
            _ => {
                let other = &known[below(rng, known.len())];
                let from = below(rng, other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
        }
    }
    input
}

fn below(rng: &mut Rng, n: usize) -> usize {
    (rng.next_u64() % n.max(1) as u64) as usize
}
