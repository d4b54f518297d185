//! Tells the program what it was built from: the compiler, the target and, in a release build from a git checkout, the
//! commit.
//!
//! A development build does not contain the commit, because each commit would make everything compile again. Nothing
//! here needs a network, and a source tree without git builds as well.

use std::path::Path;
use std::process::Command;

fn main() {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=IEC_TARGET={}", variable("TARGET"));
    println!("cargo:rustc-env=IEC_PROFILE={}", variable("PROFILE"));
    let rustc = output(Command::new(variable("RUSTC")).arg("--version"));
    println!("cargo:rustc-env=IEC_RUSTC={}", rustc.unwrap_or_else(|| "not known".into()));
    let root = variable("CARGO_MANIFEST_DIR");
    let is_repository = git(&root, &["rev-parse", "--show-cdup"]).is_some_and(|up| up.is_empty());
    if variable("PROFILE") != "release" || !is_repository {
        return;
    }
    if let Some(log) = git(&root, &["rev-parse", "--git-path", "logs/HEAD"]) {
        let log = Path::new(&root).join(log);
        println!("cargo:rerun-if-changed={}", log.display());
    }
    println!("cargo:rerun-if-changed=src");
    let changed = git(&root, &["status", "--porcelain", "--untracked-files=no"]).is_some_and(|files| !files.is_empty());
    if let Some(commit) = git(&root, &["rev-parse", "HEAD"]) {
        println!("cargo:rustc-env=IEC_COMMIT={commit}{}", if changed { ", with changes" } else { "" });
    }
}

fn git(root: &str, arguments: &[&str]) -> Option<String> {
    output(Command::new("git").args(["-C", root]).args(arguments))
}

/// Returns what a program prints, without the line end; `None` if it cannot be run or fails.
fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_string())
}
