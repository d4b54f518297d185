//! Advice for errors that bring none of their own: the next step that their cause suggests.

use iec::error::{Cause, Error};
use std::io::ErrorKind;

/// Returns the advice for the user: that of the error, otherwise that of its cause. An interrupt needs none.
pub fn of(error: &Error) -> Option<&str> {
    error.help_text().or_else(|| by_cause(error.cause()))
}

fn by_cause(cause: &Cause) -> Option<&'static str> {
    Some(match cause {
        Cause::Io(e) => match e.kind() {
            ErrorKind::NotFound => "check the path: nothing has this name",
            ErrorKind::PermissionDenied => "check who may read or write this path, or name another one",
            ErrorKind::NotADirectory => "check the path: a part of it is a file",
            ErrorKind::IsADirectory => "name a file in this directory",
            ErrorKind::AlreadyExists => "choose another path, or remove what is there",
            ErrorKind::ReadOnlyFilesystem => "choose a path on a file system that can be written to",
            _ => "check the file and the disk it lies on, and run the command again",
        },
        Cause::Corrupt(_) => "correct the file, or get it again from where it came",
        Cause::Unsupported(_) => "docs/guide/checkpoints.md lists what is supported",
        Cause::Usage(_) => "correct the value; `iec help COMMAND` describes every option",
        Cause::Model(_) => {
            "name a pack, a checkpoint directory, a GGUF file or ORG/NAME of a downloaded model; `iec list` shows the \
             packed ones"
        }
        Cause::Refused(_) => "make the file again, or ask for less with the options that `iec help COMMAND` describes",
        Cause::Engine(_) => "choose another --precision or --device, or make a pack that suits them",
        Cause::OutOfMemory(_) => "use a smaller --ctx, --batch or model, or a machine with more memory",
        Cause::Interrupted { .. } => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use iec::error::Signal;

    #[test]
    fn every_cause_but_an_interrupt_has_a_next_step() {
        let io = |kind: ErrorKind| Cause::Io(kind.into());
        let causes = [
            io(ErrorKind::NotFound),
            io(ErrorKind::Other),
            Cause::Corrupt(String::new()),
            Cause::Unsupported(String::new()),
            Cause::Usage(String::new()),
            Cause::Model(String::new()),
            Cause::Refused(String::new()),
            Cause::Engine(String::new()),
            Cause::OutOfMemory(String::new()),
        ];
        for cause in causes {
            let error = Error::new(cause);
            assert!(of(&error).is_some(), "{error:?}");
        }
        assert_eq!(of(&Error::corrupt("x").help("own")), Some("own"));
        let interrupted = Cause::Interrupted { signal: Signal::Interrupt, resumable: false };
        assert_eq!(of(&Error::new(interrupted)), None);
    }
}
