//! Where fixtures lie and how the binary is run.

use std::path::{Path, PathBuf};

/// A checkpoint of the repository: the embedded model or one under tests/fixtures.
#[allow(dead_code)]
pub fn fixture(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let asset = root.join("assets").join(name);
    if asset.is_dir() { asset } else { root.join("tests/fixtures").join(name) }
}

/// The real binary, in an environment free of the variables it reads.
#[allow(dead_code)]
pub fn iec() -> assert_cmd::Command {
    let mut command = assert_cmd::Command::cargo_bin("iec").expect("the binary is built with the tests");
    command
        .env_clear()
        .envs(std::env::vars().filter(|(k, _)| matches!(k.as_str(), "PATH" | "HOME" | "TMPDIR" | "LD_LIBRARY_PATH")));
    command
}
