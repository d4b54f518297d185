//! Runs a program under `ptrace` and stops it before each system call that changes files in one directory.
//!
//! A seccomp filter in the program lets all other system calls pass at full speed. Neither `ptrace` nor the filter
//! needs privileges, because a process may trace its own children. An [`Observer`] decides what happens at each call:
//! it is made, it fails, it is skipped, or the program is killed.

#![allow(unsafe_code)]

use crate::arch::{AUDIT_ARCH, CALLS, MORE_CALLS, Registers};
use crate::call::{Call, Kind};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Smallest size of an anonymous mapping that is shown to the observer.
const LARGE: u32 = 1 << 20;

/// Treatment of a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    Make,
    /// It is not made, and the program gets this error number.
    Fail(i32),
    /// It is not made, and the program gets this result.
    Skip(i64),
    /// The program is killed before it is made.
    Kill,
}

/// Decides what happens at each call, and learns its result.
pub trait Observer {
    /// Called before a call is made.
    fn before(&mut self, call: &Call) -> Decision;

    /// Called after a call was made.
    fn after(&mut self, _call: &Call, _result: i64) {}

    /// Called before an anonymous mapping of this many bytes; true refuses it with `ENOMEM`.
    fn refuses_memory(&mut self, _bytes: u64) -> bool {
        false
    }
}

/// Exit status and output of a program.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code; `Err` holds the signal that ended the program.
    pub exit: Result<i32, i32>,
    /// Output on stdout and stderr together.
    pub said: String,
}

/// Runs `command` to its end. Only calls on files below `root` are shown to the observer.
pub fn run(command: &mut Command, root: &Path, observer: &mut dyn Observer) -> Outcome {
    let mut said = tempfile::tempfile().expect("a temporary file");
    command.stdin(std::process::Stdio::null());
    command.stdout(said.try_clone().expect("a second descriptor"));
    command.stderr(said.try_clone().expect("a second descriptor"));
    let filter = filter();
    // SAFETY: the closure makes only system calls, and reads memory that exists before the fork.
    unsafe { command.pre_exec(move || be_traced(&filter)) };
    let child = command.spawn().expect("the program starts").id() as i32;
    let exit = Tracer { root, child, living: BTreeSet::from([child]), pending: BTreeMap::new() }.follow(observer);
    let mut bytes = Vec::new();
    said.rewind().and_then(|()| File::read_to_end(&mut said, &mut bytes)).expect("the output can be read");
    Outcome { exit, said: String::from_utf8_lossy(&bytes).into_owned() }
}

struct Tracer<'a> {
    root: &'a Path,
    child: i32,
    living: BTreeSet<i32>,
    /// Threads that are in a call whose result the observer wants.
    pending: BTreeMap<i32, Call>,
}

impl Tracer<'_> {
    fn follow(mut self, observer: &mut dyn Observer) -> Result<i32, i32> {
        let mut exit = Err(0);
        loop {
            let mut status = 0;
            // SAFETY: `status` is writable for the duration of the call.
            let tid = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
            if tid == -1 {
                match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => continue,
                    _ => return exit,
                }
            }
            if libc::WIFSTOPPED(status) {
                self.stopped(tid, status, observer);
                continue;
            }
            self.living.remove(&tid);
            if tid == self.child {
                exit =
                    if libc::WIFEXITED(status) { Ok(libc::WEXITSTATUS(status)) } else { Err(libc::WTERMSIG(status)) };
            }
        }
    }

    /// Handles the stop of a thread that `waitpid` reported with `status`, and continues the thread.
    fn stopped(&mut self, tid: i32, status: i32, observer: &mut dyn Observer) {
        let (signal, event, is_new) = (libc::WSTOPSIG(status), status >> 16, self.living.insert(tid));
        let (mut request, mut delivered) = (libc::PTRACE_CONT, 0);
        if event == libc::PTRACE_EVENT_SECCOMP {
            request = self.at_call(tid, observer);
        } else if signal == libc::SIGTRAP | 0x80 {
            if let (Some(call), Ok(registers)) = (self.pending.remove(&tid), Registers::read(tid)) {
                observer.after(&call, registers.result());
            }
        } else if signal == libc::SIGTRAP && event == 0 {
            // This is the first stop, after the program was loaded.
            let options = libc::PTRACE_O_EXITKILL
                | libc::PTRACE_O_TRACESECCOMP
                | libc::PTRACE_O_TRACESYSGOOD
                | libc::PTRACE_O_TRACECLONE
                | libc::PTRACE_O_TRACEFORK
                | libc::PTRACE_O_TRACEVFORK
                | libc::PTRACE_O_TRACEEXEC;
            // SAFETY: this request reads no memory of this process.
            unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, tid, 0, options) };
        } else if event == 0 && !(is_new && signal == libc::SIGSTOP) {
            delivered = signal;
        }
        // SAFETY: this request reads no memory of this process. It fails if the thread was killed meanwhile.
        unsafe { libc::ptrace(request, tid, 0, delivered) };
    }

    /// Asks the observer about a call, and returns the request that continues the thread.
    fn at_call(&mut self, tid: i32, observer: &mut dyn Observer) -> libc::c_uint {
        let Ok(registers) = Registers::read(tid) else { return libc::PTRACE_CONT };
        if registers.number() == libc::SYS_mmap {
            if observer.refuses_memory(registers.arguments()[1]) {
                let _ = registers.skip_call(tid, -i64::from(libc::ENOMEM));
            }
            return libc::PTRACE_CONT;
        }
        let kind = CALLS.iter().chain(MORE_CALLS).find(|(number, _)| *number == registers.number());
        let call = kind.and_then(|(_, kind)| Call::decode(*kind, tid, &registers, self.root));
        let Some(call) = call else { return libc::PTRACE_CONT };
        let result = match observer.before(&call) {
            Decision::Make => {
                self.pending.insert(tid, call);
                return libc::PTRACE_SYSCALL;
            }
            Decision::Fail(error) => -i64::from(error),
            Decision::Skip(result) => result,
            Decision::Kill => {
                for tid in &self.living {
                    // SAFETY: the call has no memory arguments; the ids are of processes that this one has not
                    // waited for yet, so they are not in use by others.
                    unsafe { libc::kill(*tid, libc::SIGKILL) };
                }
                return libc::PTRACE_CONT;
            }
        };
        registers.skip_call(tid, result).expect("registers of a stopped thread can be set");
        libc::PTRACE_CONT
    }
}

/// Makes this process, a child before `exec`, a traced one that stops at the calls of the filter.
fn be_traced(filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: these calls read no memory of this process except `program` and the filter, which outlive them.
    let done = unsafe {
        libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) != -1
            && libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != -1
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0) != -1
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the filter: it stops at calls that change files, and at large anonymous mappings.
fn filter() -> Vec<libc::sock_filter> {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const IS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const ANY_BIT: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
    const ABOVE: u32 = libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K;
    let step = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    // Offsets in `struct seccomp_data`; of the arguments, the lower halves.
    let (number, arch, argument) = (0, 4, |n: u32| 16 + 8 * n);
    let allow = step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0);
    let stop = step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_TRACE, 0, 0);
    let changes = (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT) as u32;
    let mut steps = vec![step(LOAD, arch, 0, 0), step(IS, AUDIT_ARCH, 1, 0), allow, step(LOAD, number, 0, 0)];
    for (call, kind) in CALLS.iter().chain(MORE_CALLS) {
        let call = *call as u32;
        let rest = match kind {
            Kind::Open if call == libc::SYS_openat as u32 => {
                vec![step(LOAD, argument(2), 0, 0), step(ANY_BIT, changes, 0, 1), stop, allow]
            }
            // Standard streams are not files of the scenario.
            Kind::Write => vec![step(LOAD, argument(0), 0, 0), step(ABOVE, 2, 0, 1), stop, allow],
            _ => vec![stop],
        };
        steps.push(step(IS, call, 0, rest.len() as u8));
        steps.extend(rest);
    }
    let mapping = [
        step(LOAD, argument(3), 0, 0),
        step(ANY_BIT, libc::MAP_ANONYMOUS as u32, 0, 3),
        step(LOAD, argument(1), 0, 0),
        step(ABOVE, LARGE - 1, 0, 1),
        stop,
        allow,
    ];
    steps.push(step(IS, libc::SYS_mmap as u32, 0, mapping.len() as u8));
    steps.extend(mapping);
    steps.push(allow);
    steps
}
