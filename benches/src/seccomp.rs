//! A filter after which any system call ends the process.
#![allow(unsafe_code, reason = "seccomp has no safe form")]

use std::io;

use rustix::process::{Resource, Rlimit, setrlimit};

/// BPF: return a constant.
const RETURN: u16 = 0x06;

/// From here on every system call of this thread, whichever it is, kills the whole process with
/// SIGSYS. Not even an exit is left: somebody else has to end it.
pub(crate) fn kill_on_any_system_call() -> io::Result<()> {
    // Such a death is expected; no core file may be left behind.
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    let mut filter =
        [libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_KILL_PROCESS }];
    let program = libc::sock_fprog { len: 1, filter: filter.as_mut_ptr() };
    // SAFETY: takes numbers only.
    let ready = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    if ready != 0 {
        return Err(io::Error::last_os_error());
    }
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: the kernel copies the program, which lives until the call returns.
    let installed = unsafe { libc::syscall(libc::SYS_seccomp, mode, 0, &raw const program) };
    if installed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use rustix::process::Signal;

    use super::*;
    use crate::process::Forked;
    use crate::shared::SharedLines;
    use std::sync::atomic::Ordering;

    /// Goal: the proof of "no system call" can fail. Method: a child under the filter that makes
    /// one dies of SIGSYS; one that makes none lives on.
    #[test]
    fn one_system_call_kills_and_none_does_not() {
        let lines = SharedLines::new().unwrap();
        let mut caller = Forked::spawn(|| {
            if kill_on_any_system_call().is_ok() {
                let _parent = rustix::process::getppid();
            }
            0
        })
        .unwrap();
        let status = caller.wait().unwrap().unwrap();
        assert_eq!(status.terminating_signal(), Some(Signal::SYS.as_raw()));
        let mut quiet = Forked::spawn(|| {
            if kill_on_any_system_call().is_err() {
                return 1;
            }
            loop {
                lines.word(0).fetch_add(1, Ordering::Relaxed);
            }
        })
        .unwrap();
        while lines.word(0).load(Ordering::Relaxed) < 1000 {
            assert!(quiet.ended().unwrap().is_none(), "killed without a system call");
            std::thread::yield_now();
        }
        assert!(quiet.ended().unwrap().is_none());
    }
}
