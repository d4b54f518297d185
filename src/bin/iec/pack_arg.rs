//! The argument that names the pack a command works on.

use iec::error::{Cause, Error, Result};
use iec::files;
use iec::iebin::JSON_NAME;
use std::path::{Path, PathBuf};

/// The pack: the first positional argument, or `--model-dir`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct PackArg {
    /// Directory of the pack [default: the current directory, if it holds a pack]
    #[arg(value_name = "PACK", index = 1)]
    pack: Option<PathBuf>,
    /// Directory of the pack, as an option instead of the first argument
    #[arg(long, value_name = "DIR", env = "MODEL_DIR")]
    model_dir: Option<PathBuf>,
}

impl PackArg {
    /// Returns the directory of the pack.
    ///
    /// # Errors
    /// None is named, and the current directory holds no pack.
    pub fn dir(&self) -> Result<PathBuf> {
        match first_named([&self.pack, &self.model_dir]) {
            Some(dir) => Ok(dir.to_path_buf()),
            None if files::exists(Path::new(JSON_NAME))? => Ok(PathBuf::from(".")),
            None => Err(Error::new(Cause::Model(format!("no pack named, and no {JSON_NAME} in this directory")))
                .help("name a pack after the command, or with --model-dir DIR or MODEL_DIR")),
        }
    }

    /// Returns the pack that the command line names; the environment variable does not count.
    pub fn on_command_line(&self) -> Option<&Path> {
        let from_variable =
            |path: &&PathBuf| std::env::var_os("MODEL_DIR").is_some_and(|value| value == path.as_os_str());
        self.pack.as_deref().or(self.model_dir.as_ref().filter(|path| !from_variable(path)).map(PathBuf::as_path))
    }
}

/// Returns the path given as the positional argument, by the option or by its environment variable. The argument takes
/// precedence over the variable; the parser refuses the argument together with the option.
pub fn first_named(given: [&Option<PathBuf>; 2]) -> Option<&Path> {
    given.into_iter().flatten().find(|path| !path.as_os_str().is_empty()).map(PathBuf::as_path)
}
