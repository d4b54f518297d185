//! Entry point of the fuzzer, which fuzzes one target per process: the environment variable `IEC_FUZZ_TARGET` names
//! the target, libFuzzer generates inputs, and [`guard`] limits memory and time.
//!
//! Half of the mutations are structural ([`mutate`]), the others are those of libFuzzer. Structural mutations copy
//! parts of other inputs. libFuzzer passes only one input to its mutator, so some of the recent ones are kept.

#![no_main]

mod guard;
mod mutate;
mod targets;

use iec::rng::Rng;
use std::sync::{LazyLock, Mutex};

#[global_allocator]
static ALLOCATOR: guard::Counting = guard::Counting;

static TARGET: LazyLock<&targets::Target> = LazyLock::new(|| {
    let name = std::env::var("IEC_FUZZ_TARGET").expect("IEC_FUZZ_TARGET names the target");
    let found = targets::TARGETS.iter().find(|target| target.name == name);
    found.unwrap_or_else(|| panic!("no target `{name}`"))
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(offence) = guard::watch(&TARGET, data, 1) {
        panic!("{}: {offence}", TARGET.name);
    }
});

/// Number of recent inputs that are kept.
const RECENT: usize = 64;

/// Up to [`RECENT`] inputs that the mutator has received; a new one is added, or replaces a random one.
static OTHERS: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let mut rng = Rng::new(seed.into());
    let mut others = OTHERS.lock().expect("one thread");
    let at = mutate::below(&mut rng, RECENT);
    if at < others.len() { others[at] = data[..size].to_vec() } else { others.push(data[..size].to_vec()) }
    let other = &others[mutate::below(&mut rng, others.len())];
    let structural = rng.next_u64() & 1 == 0;
    match structural.then(|| mutate::mutate(TARGET.name, &data[..size], other, &mut rng, max_size)).flatten() {
        Some(output) => {
            data[..output.len()].copy_from_slice(&output);
            output.len()
        }
        None => libfuzzer_sys::fuzzer_mutate(data, size, max_size),
    }
});
