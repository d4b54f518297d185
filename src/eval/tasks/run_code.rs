//! Runs generated programs with a command of the user, which is the sandbox: `iec` starts it in an empty temporary
//! directory with the program on standard input, waits for at most a time limit, and kills its whole process group
//! afterwards. A program has passed if the command exits with status 0.
//!
//! The command gets few environment variables, so that a program cannot read tokens and keys from them. What it writes
//! is discarded.

use crate::error::{Context, Error, Result};
use crate::interrupt;
use crate::resources::child_refused;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Time between two looks at a running command.
const INTERVAL: Duration = Duration::from_millis(5);

/// Command that runs a program, and its limit of time.
#[derive(Debug, Clone)]
pub struct CodeRunner {
    /// Command line for `sh`.
    pub command: String,
    /// Largest time that a program may take.
    pub timeout: Duration,
    /// Environment variables of the caller; those that [`CodeRunner::VARIABLES`] lists are passed on.
    pub environment: Vec<(String, String)>,
}

/// Result of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeResult {
    /// The command ended with status 0.
    Passed,
    /// The command ended with another status, or by the signal whose negative number this is.
    Failed(i32),
    /// The time limit was exceeded.
    TimedOut,
}

impl CodeResult {
    /// Describes the result in a word or two.
    pub fn describe(self) -> String {
        match self {
            CodeResult::Passed => "passed".into(),
            CodeResult::Failed(status) if status < 0 => format!("signal {}", -status),
            CodeResult::Failed(status) => format!("status {status}"),
            CodeResult::TimedOut => "timeout".into(),
        }
    }
}

impl CodeRunner {
    /// Environment variables that the command may see.
    pub const VARIABLES: &[&str] = &["PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR"];

    /// Runs a program.
    ///
    /// # Errors
    /// The temporary files cannot be written, the shell cannot be started, or the user interrupts.
    pub fn run(&self, program: &str) -> Result<CodeResult> {
        let dir = tempfile::tempdir()?;
        let mut input = tempfile::tempfile()?;
        input.write_all(program.as_bytes())?;
        input.seek(SeekFrom::Start(0))?;
        let mut command = Command::new("sh");
        command.arg("-c").arg(&self.command).current_dir(dir.path()).env_clear();
        let passed_on = self.environment.iter().filter(|(name, _)| CodeRunner::VARIABLES.contains(&name.as_str()));
        command.envs(passed_on.map(|(name, value)| (name, value)));
        command.stdin(input).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(child_refused).at("sh")?;
        let mut group = ProcessGroup { child, is_reaped: false };
        let deadline = Instant::now() + self.timeout;
        while !group.has_ended()? {
            interrupt::check()?;
            if Instant::now() >= deadline {
                return Ok(CodeResult::TimedOut);
            }
            std::thread::sleep(INTERVAL);
        }
        let status = group.end()?;
        Ok(match (status.code(), status.signal()) {
            (Some(0), _) => CodeResult::Passed,
            (Some(code), _) => CodeResult::Failed(code),
            (None, signal) => CodeResult::Failed(-signal.unwrap_or(0)),
        })
    }
}

/// Command in a process group of its own. All processes of the group are killed when it is dropped.
struct ProcessGroup {
    child: Child,
    /// True once the status was read; from then on the number may belong to another process.
    is_reaped: bool,
}

impl ProcessGroup {
    fn pid(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }

    /// Returns true if the command has ended. Its status is not read, so its number still belongs to the group.
    fn has_ended(&self) -> Result<bool> {
        let Some(pid) = self.pid() else { return Ok(true) };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(pid), options) {
            Err(rustix::io::Errno::INTR) => Ok(false),
            found => Ok(found.map_err(std::io::Error::from)?.is_some()),
        }
    }

    /// Kills all processes of the group, and returns how the command ended.
    fn end(&mut self) -> std::io::Result<ExitStatus> {
        if let (Some(pid), false) = (self.pid(), self.is_reaped) {
            // Fails only if the group has no process that may be killed.
            let _ = kill_process_group(pid, Signal::KILL);
        }
        self.is_reaped = true;
        self.child.wait()
    }
}

/// Leaves no process behind, also after an error.
impl Drop for ProcessGroup {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Creates the error for a command that does not even accept a correct program.
pub(super) fn unusable(runner: &CodeRunner, task: &str, result: CodeResult) -> Error {
    let found = format!("the canonical solution of {task} does not pass ({}), expected status 0", result.describe());
    Error::usage(found).setting("--run-code").help(format!(
        "name a command that runs the program on its standard input, such as 'python3 -I' (found `{}`), with absolute \
         paths of its files, or raise --code-timeout",
        runner.command
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runner(command: &str, timeout_ms: u64) -> CodeRunner {
        let environment = ["PATH", "SECRET"].map(|name| (name.to_string(), "/usr/bin:/bin".to_string())).to_vec();
        CodeRunner { command: command.into(), timeout: Duration::from_millis(timeout_ms), environment }
    }

    #[test]
    fn the_exit_status_decides() {
        assert_eq!(runner("sh", 20_000).run("exit 0\n").unwrap(), CodeResult::Passed);
        assert_eq!(runner("sh", 20_000).run("exit 3\n").unwrap(), CodeResult::Failed(3));
        assert_eq!(runner("exec sh", 20_000).run("kill -KILL $$\n").unwrap(), CodeResult::Failed(-9));
        assert_eq!(runner("no-such-program", 20_000).run("").unwrap(), CodeResult::Failed(127));
        assert_eq!(runner("grep -q needle", 20_000).run(&"hay\n".repeat(100_000)).unwrap(), CodeResult::Failed(1));
    }

    #[test]
    fn a_program_sees_neither_secrets_nor_files() {
        assert_eq!(
            runner("sh", 20_000).run("test -z \"$SECRET\" && test -z \"$(ls -A)\"").unwrap(),
            CodeResult::Passed
        );
    }

    #[test]
    fn nothing_of_a_program_is_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let ended = |program: &str, expected: CodeResult, timeout_ms: u64| {
            let program = format!("sleep 1000 & echo $! > {}; {program}", pid.display());
            assert_eq!(runner("sh", timeout_ms).run(&program).unwrap(), expected);
            let id: i32 = crate::files::read_to_string(&pid).unwrap().trim().parse().unwrap();
            // The process that adopts the orphan may take a moment to reap it.
            (0..500).any(|_| {
                std::thread::sleep(Duration::from_millis(10));
                let state = crate::files::read_to_string(std::path::Path::new(&format!("/proc/{id}/stat")));
                state.map_or(true, |state| state.contains(") Z "))
            })
        };
        assert!(ended("exit 0", CodeResult::Passed, 20_000), "a process survived the end of its program");
        assert!(ended("sleep 1000", CodeResult::TimedOut, 3000), "a process survived the time limit");
    }
}
