//! `iec --version -v`: the build of the program and what it finds on this machine.

use iec::runtime::cpu;
use std::ffi::OsString;

/// Features of the crate that change what the program can do.
const FEATURES: &[(&str, bool)] = &[
    ("cli", cfg!(feature = "cli")),
    ("grpc", cfg!(feature = "grpc")),
    ("hub", cfg!(feature = "hub")),
    ("otel", cfg!(feature = "otel")),
    ("reference", cfg!(feature = "reference")),
    ("serve", cfg!(feature = "serve")),
];

/// Returns true if the words of the command line ask for details: `-v` or `--verbose`, also among other letters.
pub fn wants_details(words: impl Iterator<Item = OsString>) -> bool {
    let mut words = words.map(|word| word.to_string_lossy().into_owned());
    words.any(|word| word == "--verbose" || (word.starts_with('-') && !word.starts_with("--") && word.contains('v')))
}

/// Returns the version with commit, compiler, target, features and instruction sets, one per line.
pub fn details() -> String {
    let of = |features: bool| FEATURES.iter().filter(move |(_, is_on)| *is_on == features).map(|(name, _)| *name);
    let list = |names: Vec<&str>| if names.is_empty() { "none".to_string() } else { names.join(", ") };
    format!(
        "iec {}\ncommit: {}\nrustc: {}\ntarget: {}\nprofile: {}\nfeatures: {} (left out: {})\n\
         instruction sets of this machine, best first: {}\n",
        env!("CARGO_PKG_VERSION"),
        option_env!("IEC_COMMIT").unwrap_or("not known (not built from a git checkout, or a development build)"),
        env!("IEC_RUSTC"),
        env!("IEC_TARGET"),
        env!("IEC_PROFILE"),
        list(of(true).collect()),
        list(of(false).collect()),
        cpu::instruction_sets().join(", "),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_wanted_by_any_form_of_the_option() {
        let wants = |line: &str| wants_details(line.split_whitespace().map(OsString::from));
        for line in ["--version -v", "-V -v", "-Vv", "--verbose --version", "-vvV"] {
            assert!(wants(line), "{line}");
        }
        assert!(!wants("--version") && !wants("-V") && !wants("-V --color never"));
    }
}
