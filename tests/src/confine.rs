//! What a test takes away from the processes that it starts: mounts, system calls, capabilities.
//!
//! All of it belongs to one thread and to what that thread starts, so tests can run side by side.
//! Needs root, as the whole crate does where it says so.
#![allow(unsafe_code, reason = "unshares mounts and filters system calls, for one thread")]

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use rustix::io::Errno;
use rustix::thread::UnshareFlags;

/// Runs `body` on a thread whose mounts nobody else sees; the processes that it starts see them.
///
/// # Panics
/// When the mounts cannot be unshared (that takes root), and when `body` does.
pub fn in_private_mounts<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    on_own_thread(|| {
        // SAFETY: the thread is new and ends here: nobody relies on its root, its working folder or
        // its mounts being those of the process.
        let unshared = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) };
        unshared.expect("root may have mounts of its own");
        run("mount", ["--make-rprivate", "/"]);
        body()
    })
}

/// Runs `body` on a thread on which, and in whose processes, the system calls numbered `calls` end
/// with `errno`.
///
/// # Panics
/// When the kernel takes no filter, and when `body` does.
pub fn without_calls<T: Send>(
    calls: &[libc::c_long],
    errno: Errno,
    body: impl FnOnce() -> T + Send,
) -> T {
    on_own_thread(|| {
        filter(calls, errno);
        body()
    })
}

/// Keeps a process, its children and its memory from transparent huge pages.
pub fn without_huge_pages(command: &mut Command) {
    let disable = || {
        // SAFETY: this option takes plain numbers.
        let rc = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
        if rc == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec the closure makes one system call and touches no memory.
    let _command = unsafe { command.pre_exec(disable) };
}

fn on_own_thread<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    let ended = thread::scope(|scope| scope.spawn(body).join());
    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn filter(calls: &[libc::c_long], errno: Errno) {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let answer = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    // The number of the call is the first word of `seccomp_data`.
    let mut steps = vec![step(load, 0, 0)];
    for (done, call) in calls.iter().enumerate() {
        let to_refusal = (calls.len() - done) as u8;
        steps.push(step(equal, to_refusal, *call as u32));
    }
    steps.push(step(answer, 0, libc::SECCOMP_RET_ALLOW));
    steps.push(step(answer, 0, libc::SECCOMP_RET_ERRNO | errno.raw_os_error() as u32));
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: this option takes plain numbers.
    let promised = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(promised, 0);
    // SAFETY: the program and its steps outlive the call; the kernel copies and checks them.
    let set =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// A file system that this thread sees somewhere. Taken away when dropped.
#[derive(Debug)]
pub struct Mount(PathBuf);

impl Mount {
    /// `mount ARGUMENTS PATH`, only inside [`in_private_mounts`].
    ///
    /// # Panics
    /// When `mount` fails.
    pub fn new(arguments: &[&str], at: &Path) -> Self {
        run("mount", arguments.iter().map(OsStr::new).chain([at.as_os_str()]));
        Self(at.to_owned())
    }

    /// A tmpfs of at most `bytes`.
    pub fn tmpfs(bytes: u64, at: &Path) -> Self {
        Self::new(&["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"], at)
    }

    /// A folder that can only be read.
    ///
    /// # Panics
    /// When it cannot be made so.
    pub fn read_only(folder: &Path) -> Self {
        let bound = Self::new(&["--bind", folder.to_str().unwrap()], folder);
        run("mount", [OsStr::new("-o"), OsStr::new("remount,bind,ro"), folder.as_os_str()]);
        bound
    }

    /// A disk of `bytes` in the file `image`, with ext4 made with `options` of `mkfs.ext4`.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn disk(image: &Path, bytes: u64, options: &[&str], at: &Path) -> Self {
        let file = std::fs::File::create(image).unwrap();
        file.set_len(bytes).unwrap();
        let quiet = ["-q", "-F", "-m", "0"].iter().chain(options).map(OsStr::new);
        run("mkfs.ext4", quiet.chain([image.as_os_str()]));
        Self::new(&["-o", "loop", image.to_str().unwrap()], at)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let gone = Command::new("umount").arg(&self.0).status();
        if !gone.is_ok_and(|status| status.success()) {
            let _last = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
}

fn run<A: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = A>) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {words}");
}
