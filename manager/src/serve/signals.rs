//! Signals by which the kernel answers a system call.

#![allow(unsafe_code, reason = "no safe call ignores a signal")]

/// From here on a file that would grow beyond `RLIMIT_FSIZE` is an error (EFBIG) of the call that
/// did it and no longer the end of the process: a client chooses how long its segments are.
pub(super) fn ignore_file_size() {
    // SAFETY: ignoring a signal runs no code of ours, and nobody else handles this one.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    debug_assert_ne!(before, libc::SIG_ERR, "the signal exists");
}
