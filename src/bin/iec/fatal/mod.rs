//! Ends the process where no error can be returned: in the allocator and in handlers of signals.
//!
//! Nothing here allocates, locks or unwinds. Outputs get their final names only when they are complete, so an end at
//! any moment leaves no incomplete file under a final name; the next run removes the temporaries.
#![allow(unsafe_code)]

mod abort;
mod allocator;
mod bus;

use libc::{c_int, c_void, siginfo_t};
use std::sync::atomic::{AtomicBool, Ordering};

/// Handler of a signal, called with its number, its cause and the state of the processor.
type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// True once a thread ends the process.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Installs the handlers of signals that mean the end of the process.
pub fn install() {
    abort::install();
    bus::install();
}

/// Calls `handler` when `signal` arrives. The signal keeps its default effect if the system refuses.
fn handle(signal: c_int, handler: Handler) {
    // SAFETY: all bytes zero are a valid `sigaction`: an empty mask and no flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that `SA_SIGINFO` requires, and handlers of this module call only
    // functions that may be called in one.
    unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
}

/// Gives a signal its default effect and raises it again.
fn raise_again(signal: c_int) {
    // SAFETY: both functions may be called in a signal handler. The signal is blocked while its handler runs, so it
    // takes effect when the handler returns.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// Writes the parts of a message to stderr, as far as it takes them, and ends the process. If several threads call
/// this, only the message of the first is written.
fn end_process<const N: usize>(exit_code: c_int, message: [&[u8]; N]) -> ! {
    let parts = message.map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() });
    // SAFETY: the parts describe borrowed bytes, which `writev` only reads; all functions may be called in a signal
    // handler.
    unsafe {
        if ENDING.swap(true, Ordering::Relaxed) {
            // The process ends before this time is over.
            libc::sleep(10);
        }
        libc::writev(libc::STDERR_FILENO, parts.as_ptr(), N as c_int);
        libc::_exit(exit_code)
    }
}

/// Writes a number in decimal digits to the end of `digits`, and returns them.
fn decimal(number: usize, digits: &mut [u8; 20]) -> &[u8] {
    let (mut at, mut rest) = (digits.len(), number);
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            return &digits[at..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_decimal_digits() {
        assert_eq!(decimal(0, &mut [0; 20]), b"0");
        assert_eq!(decimal(usize::MAX, &mut [0; 20]), b"18446744073709551615");
    }
}
