//! Terminal for tests: runs the program on a pseudo-terminal, types keys, and shows what a user would see.

// `pre_exec` is unsafe, and there is no other way to give a child its controlling terminal.
#![allow(unsafe_code)]

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio, read, write};
use rustix::process::{Pid, Signal, ioctl_tiocsctty, kill_process, setsid};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Time after which a screen that does not appear fails the test.
const LONG: Duration = Duration::from_secs(60);

/// Program on a pseudo-terminal.
pub struct Terminal {
    master: OwnedFd,
    /// Kept open, so that the settings of the terminal can be read after the program has ended.
    slave: OwnedFd,
    child: Child,
    parser: vt100::Parser,
    /// Everything that the program wrote.
    pub written: Vec<u8>,
}

fn size(n: u16) -> NonZeroU16 {
    NonZeroU16::new(n).expect("a terminal has rows and columns")
}

fn window(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Terminal {
    /// Starts a command on a terminal of this size.
    pub fn start(mut command: Command, rows: u16, columns: u16) -> Terminal {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        // A signal character discards output that `poll` has announced, and a read would then wait for ever.
        ioctl_fionbio(&master, true).unwrap();
        let slave = ioctl_tiocgptpeer(&master, flags).unwrap();
        tcsetwinsize(&slave, window(rows, columns)).unwrap();
        let stream = || slave.try_clone().unwrap();
        command.stdin(stream()).stdout(stream()).stderr(stream()).env("TERM", "xterm-256color");
        let become_leader = || {
            setsid()?;
            ioctl_tiocsctty(rustix::stdio::stdin())?;
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes two system calls and touches no memory of the parent.
        let child = unsafe { command.pre_exec(become_leader) }.spawn().unwrap();
        let parser = vt100::Parser::new(size(rows), size(columns), 1000);
        Terminal { master, slave, child, parser, written: Vec::new() }
    }

    /// Types text; `\r` is Enter, `\x03` is Ctrl-C.
    pub fn type_keys(&mut self, keys: &str) {
        let mut rest = keys.as_bytes();
        while !rest.is_empty() {
            match write(&self.master, rest) {
                Ok(count) => rest = &rest[count..],
                Err(Errno::AGAIN) => drop(self.advance()),
                Err(e) => panic!("the terminal takes no keys: {e}"),
            }
        }
    }

    /// Changes the size of the window.
    pub fn resize(&mut self, rows: u16, columns: u16) {
        tcsetwinsize(&self.slave, window(rows, columns)).unwrap();
        self.parser.set_size(size(rows), size(columns));
    }

    /// Sends a signal to the program.
    pub fn signal(&mut self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Reads what the program has written; returns false at the end.
    pub fn advance(&mut self) -> bool {
        let timeout = Timespec::try_from(Duration::from_millis(20)).unwrap();
        let mut fds = [PollFd::new(&self.master, PollFlags::IN)];
        if poll(&mut fds, Some(&timeout)) == Ok(0) {
            return true;
        }
        let mut bytes = [0; 4096];
        match read(&self.master, &mut bytes) {
            Ok(0) | Err(Errno::IO) => false,
            Ok(count) => {
                self.parser.process(&bytes[..count]);
                self.written.extend(&bytes[..count]);
                true
            }
            Err(_) => true,
        }
    }

    /// Waits until the text on the screen meets a condition.
    #[track_caller]
    pub fn wait(&mut self, what: &str, condition: impl Fn(&str) -> bool) {
        let begin = Instant::now();
        while !condition(&self.screen()) {
            assert!(begin.elapsed() < LONG, "{what} did not appear:\n{}", self.screen());
            self.advance();
        }
    }

    /// Waits until everything that the program wrote meets a condition.
    #[track_caller]
    pub fn wait_until(&mut self, what: &str, condition: impl Fn(&[u8]) -> bool) {
        let begin = Instant::now();
        while !condition(&self.written) {
            assert!(begin.elapsed() < LONG, "{what} did not appear:\n{}", self.screen());
            self.advance();
        }
    }

    /// Waits until the text is on the screen.
    #[track_caller]
    pub fn wait_for(&mut self, text: &str) {
        self.wait(text, |screen| screen.contains(text));
    }

    /// Waits until the last line of the screen is an empty prompt.
    #[track_caller]
    pub fn wait_for_prompt(&mut self) {
        let begin = Instant::now();
        loop {
            let column = self.parser.screen().cursor_position().1;
            let at_prompt = self.screen().lines().last() == Some(">") && column == 2;
            if at_prompt && self.parser.screen().bracketed_paste() {
                return;
            }
            assert!(begin.elapsed() < LONG, "no prompt:\n{}", self.screen());
            self.advance();
        }
    }

    /// Returns the lines of the screen without trailing spaces and empty lines.
    pub fn screen(&self) -> String {
        let text = self.parser.screen().contents();
        text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_end().to_string()
    }

    /// Returns the emulated screen.
    pub fn cells(&self) -> &vt100::Screen {
        self.parser.screen()
    }

    /// Waits for the end of the program and returns its exit code.
    pub fn end(&mut self) -> Option<i32> {
        let begin = Instant::now();
        loop {
            self.advance();
            if let Some(status) = self.child.try_wait().unwrap() {
                while poll(&mut [PollFd::new(&self.master, PollFlags::IN)], Some(&Timespec::default())) != Ok(0) {
                    self.advance();
                }
                return status.code();
            }
            assert!(begin.elapsed() < LONG, "the program does not end:\n{}", self.screen());
        }
    }

    /// Returns true if the terminal shows typed keys and edits lines, as before the program.
    pub fn is_restored(&self) -> bool {
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        modes.contains(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG) && !self.cells().bracketed_paste()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
