//! Entry point of the fuzzer, which fuzzes one target per process: the environment variable `IEC_FUZZ_TARGET` names
//! the target, libFuzzer generates inputs, and [`guard`] limits memory and time.

#![no_main]

mod guard;
mod targets;

use std::sync::LazyLock;

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
