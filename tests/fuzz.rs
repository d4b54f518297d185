//! Runs the fuzz targets on every seed, on every input with which the fuzzer has found a fault, and on random mutations
//! of these, with the memory limits of the fuzzer and ten times its time limits.
//!
//! `IEC_FUZZ_INPUTS` sets the number of mutated inputs per parser; docs/FUZZING.md describes how to fuzz with
//! coverage.

#![allow(clippy::disallowed_methods)]

#[path = "../fuzz/src/guard.rs"]
mod guard;
#[path = "../fuzz/src/mutate/mod.rs"]
mod mutate;
#[path = "../fuzz/src/targets.rs"]
mod targets;

use iec::rng::Rng;
use mutate::below;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use targets::{TARGETS, Target};

#[global_allocator]
static ALLOCATOR: guard::Counting = guard::Counting;

/// Factor by which an unoptimized build on a busy machine may be slower than the fuzzer.
const SLOWNESS: u64 = 10;

/// Maximum bytes of memory per byte of input, see `memory_grows_with_the_file_whatever_it_is_made_of`.
const GROWTH: usize = 24;

/// Maximum length in bytes of a structurally mutated input.
const LONGEST: usize = 8192;

fn files(kind: &str, target: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(kind).join(target);
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn known(target: &Target, kinds: &[&str]) -> Vec<Vec<u8>> {
    kinds.iter().flat_map(|kind| files(kind, target.name)).map(|path| std::fs::read(path).unwrap()).collect()
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
        let known = known(target, &["corpus", "regressions"]);
        let mut rng = Rng::new(7);
        for number in 0..count {
            let structural = if number % 2 == 0 { structural(target, &known, &mut rng) } else { None };
            let input = structural.unwrap_or_else(|| noise(&known, &mut rng));
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

/// Mutates a random input of `known` by the rules of its format.
fn structural(target: &Target, known: &[Vec<u8>], rng: &mut Rng) -> Option<Vec<u8>> {
    let (input, other) = (&known[below(rng, known.len())], &known[below(rng, known.len())]);
    mutate::mutate(target.name, input, other, rng, LONGEST)
}

/// Mutates the bytes of a random input of `known` in a few places.
fn noise(known: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
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

/// Returns true if the outer structure of an input is correct: it is JSON, has a header, is an archive, or compiles.
fn has_structure(target: &Target, input: &[u8]) -> bool {
    match target.name {
        "gguf" => iec::convert::source::gguf::header::parse(&input, 0).is_ok(),
        "pickle" => {
            let refused = iec::convert::source::shard::list(&input, 0).err().map(|e| e.to_string());
            !refused.is_some_and(|why| why.contains("zip archive"))
        }
        "safetensors" | "adapter" => {
            let length = input.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
            let header = usize::try_from(length).ok().and_then(|n| input.get(8..n.checked_add(8)?));
            serde_json::from_slice::<serde_json::Value>(header.unwrap_or(input)).is_ok()
        }
        "template" => std::str::from_utf8(input).is_ok_and(|source| {
            let source = source.replace("endgeneration", "endif").replace("generation", "if true");
            minijinja::Environment::new().template_from_str(&source).is_ok()
        }),
        #[cfg(feature = "serve")]
        "api_keys" | "serve_config" => toml::from_slice::<toml::Table>(input).is_ok(),
        "prefix_page" | "gbnf" => true,
        "tokenizer_files" => input.contains(&b'\n'),
        "dedup" => serde_json::from_slice::<serde_json::Value>(&[input, b"}"].concat()).is_ok(),
        _ => serde_json::Deserializer::from_slice(input).into_iter::<serde_json::Value>().all(|text| text.is_ok()),
    }
}

/// Mutates each target's seeds 400 times. With random changes of bytes, at most a quarter (100) of the inputs would
/// keep their outer structure; with structural mutations, at least 150 must.
#[test]
fn structural_mutations_change_inputs_and_keep_their_outer_structure() {
    for target in TARGETS {
        let (seeds, mut rng) = (known(target, &["corpus"]), Rng::new(3));
        let outputs: HashSet<_> = (0..400).filter_map(|_| structural(target, &seeds, &mut rng)).collect();
        let changed = outputs.iter().filter(|output| !seeds.contains(output)).count();
        let kept = outputs.iter().filter(|output| has_structure(target, output)).count();
        assert!(changed >= 300 && kept >= 150, "{}: {changed} changed, {kept} kept", target.name);
    }
}
