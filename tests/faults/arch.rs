//! Registers of a stopped process, and the numbers of the system calls that change files, on x86-64 and aarch64.

#![allow(unsafe_code)]

use crate::call::Kind;
use std::io;

/// Registers at a system call.
#[derive(Clone, Copy)]
pub struct Registers(libc::user_regs_struct);

impl Registers {
    /// Reads the registers of a stopped thread.
    pub fn read(tid: i32) -> io::Result<Registers> {
        // SAFETY: all fields are integers, for which zero is a valid value.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        let mut part =
            libc::iovec { iov_base: (&raw mut registers).cast(), iov_len: size_of::<libc::user_regs_struct>() };
        // SAFETY: `part` describes `registers`, which outlives the call.
        let done = unsafe { libc::ptrace(libc::PTRACE_GETREGSET, tid, libc::NT_PRSTATUS, &raw mut part) };
        if done == -1 { Err(io::Error::last_os_error()) } else { Ok(Registers(registers)) }
    }

    fn write(&self, tid: i32) -> io::Result<()> {
        let mut registers = self.0;
        let mut part =
            libc::iovec { iov_base: (&raw mut registers).cast(), iov_len: size_of::<libc::user_regs_struct>() };
        // SAFETY: `part` describes `registers`, which outlives the call.
        let done = unsafe { libc::ptrace(libc::PTRACE_SETREGSET, tid, libc::NT_PRSTATUS, &raw mut part) };
        if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

#[cfg(target_arch = "x86_64")]
mod cpu {
    use super::{Kind, Registers, io};

    /// `AUDIT_ARCH_X86_64` of linux/audit.h.
    pub const AUDIT_ARCH: u32 = 0xc000_003e;

    impl Registers {
        /// Returns the number of the system call.
        pub fn number(&self) -> i64 {
            self.0.orig_rax as i64
        }

        /// Returns the arguments of the system call.
        pub fn arguments(&self) -> [u64; 6] {
            [self.0.rdi, self.0.rsi, self.0.rdx, self.0.r10, self.0.r8, self.0.r9]
        }

        /// Returns the result of a completed system call; below 0, it is a negated error number.
        pub fn result(&self) -> i64 {
            self.0.rax as i64
        }

        /// Makes the thread, which is stopped before a system call, skip it; the program gets `result`.
        pub fn skip_call(mut self, tid: i32, result: i64) -> io::Result<()> {
            self.0.orig_rax = -1_i64 as u64;
            self.0.rax = result as u64;
            self.write(tid)
        }
    }

    /// System calls that only this architecture has.
    pub const MORE_CALLS: &[(libc::c_long, Kind)] = &[
        (libc::SYS_open, Kind::Open),
        (libc::SYS_creat, Kind::Open),
        (libc::SYS_rename, Kind::Rename),
        (libc::SYS_unlink, Kind::Unlink),
        (libc::SYS_rmdir, Kind::Unlink),
        (libc::SYS_link, Kind::Link),
        (libc::SYS_symlink, Kind::Symlink),
        (libc::SYS_mkdir, Kind::Mkdir),
        (libc::SYS_chmod, Kind::Chmod),
    ];
}

#[cfg(target_arch = "aarch64")]
mod cpu {
    use super::{Kind, Registers, io};

    /// `AUDIT_ARCH_AARCH64` of linux/audit.h.
    pub const AUDIT_ARCH: u32 = 0xc000_00b7;
    /// Register set that holds the number of the system call.
    const NT_ARM_SYSTEM_CALL: libc::c_int = 0x404;

    impl Registers {
        /// Returns the number of the system call.
        pub fn number(&self) -> i64 {
            self.0.regs[8] as i64
        }

        /// Returns the arguments of the system call.
        pub fn arguments(&self) -> [u64; 6] {
            std::array::from_fn(|i| self.0.regs[i])
        }

        /// Returns the result of a completed system call; below 0, it is a negated error number.
        pub fn result(&self) -> i64 {
            self.0.regs[0] as i64
        }

        /// Makes the thread, which is stopped before a system call, skip it; the program gets `result`.
        pub fn skip_call(mut self, tid: i32, result: i64) -> io::Result<()> {
            let mut number: libc::c_int = -1;
            let mut part = libc::iovec { iov_base: (&raw mut number).cast(), iov_len: size_of::<libc::c_int>() };
            // SAFETY: `part` describes `number`, which outlives the call.
            let done = unsafe { libc::ptrace(libc::PTRACE_SETREGSET, tid, NT_ARM_SYSTEM_CALL, &raw mut part) };
            if done == -1 {
                return Err(io::Error::last_os_error());
            }
            self.0.regs[0] = result as u64;
            self.write(tid)
        }
    }

    /// System calls that only this architecture has.
    pub const MORE_CALLS: &[(libc::c_long, Kind)] = &[];
}

pub use cpu::{AUDIT_ARCH, MORE_CALLS};

/// System calls that change files, with their kinds.
pub const CALLS: &[(libc::c_long, Kind)] = &[
    (libc::SYS_openat, Kind::Open),
    (libc::SYS_write, Kind::Write),
    (libc::SYS_pwrite64, Kind::Write),
    (libc::SYS_writev, Kind::Write),
    (libc::SYS_pwritev, Kind::Write),
    (libc::SYS_copy_file_range, Kind::Copy),
    (libc::SYS_sendfile, Kind::Copy),
    (libc::SYS_fsync, Kind::Sync),
    (libc::SYS_fdatasync, Kind::Sync),
    (libc::SYS_renameat, Kind::Rename),
    (libc::SYS_renameat2, Kind::Rename),
    (libc::SYS_unlinkat, Kind::Unlink),
    (libc::SYS_linkat, Kind::Link),
    (libc::SYS_symlinkat, Kind::Symlink),
    (libc::SYS_mkdirat, Kind::Mkdir),
    (libc::SYS_ftruncate, Kind::Truncate),
    (libc::SYS_fallocate, Kind::Allocate),
    (libc::SYS_flock, Kind::Lock),
    (libc::SYS_fchmod, Kind::Chmod),
    (libc::SYS_fchmodat, Kind::Chmod),
];
