//! How the pages of engines can be reached: through the kernel, and through a CUDA driver.

use std::path::Path;
use std::sync::Arc;

use orbitkv_shm_protocol::bootstrap::message::MemorySpec;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{Check, has_capability, read};
use crate::device::{Gpu, Gpus, HostMemory, NoCuda, PeerHandle};

/// Number of the capability that Yama's stricter settings ask for.
const CAP_SYS_PTRACE: u32 = 19;
/// Where the driver's library lies; the loader may know more places.
const LIBRARY_FOLDERS: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
];
const LIBRARY: &str = "libcuda.so.1";
/// PyTorch's variable that makes its allocator use memory that classic IPC cannot export.
const ALLOCATOR_VARIABLES: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// A word of another process's memory that may be read.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its process id.
    pub pid: u32,
    /// Address of eight bytes.
    pub address: u64,
    /// What they hold.
    pub nonce: u64,
}

/// Tried on a child process, by the code that registers an engine's memory.
pub(super) fn process_vm(target: Result<&Target, &String>) -> Check {
    let scope = read("/proc/sys/kernel/yama/ptrace_scope").and_then(|text| text.parse().ok());
    let probed = target.map_err(String::to_string).and_then(probe);
    judge_process_vm(&probed, scope, has_capability(CAP_SYS_PTRACE))
}

fn probe(target: &Target) -> Result<(), String> {
    let raw = i32::try_from(target.pid).map_err(|error| error.to_string())?;
    let pid = Pid::from_raw(raw).ok_or("a child without process id")?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| errno.to_string())?;
    let peer = PeerHandle { pid: raw, pidfd: Arc::new(pidfd) };
    let (address, nonce_address, nonce) = (target.address, target.address, target.nonce);
    let spec = MemorySpec::Process { address, bytes: 8, nonce_address, nonce };
    HostMemory::import(&spec, None, &peer).map(drop).map_err(|error| error.to_string())
}

fn judge_process_vm(probed: &Result<(), String>, scope: Option<u32>, capable: bool) -> Check {
    let name = "process_vm";
    let yama = match scope {
        None => "no Yama".to_owned(),
        Some(scope) => format!("kernel.yama.ptrace_scope {scope}"),
    };
    let sealed = "engines can register a sealed memfd, which needs no permission";
    match (probed, scope) {
        (Err(error), _) => Check::warn(
            name,
            format!("memory of a child cannot be read ({yama}): {error}"),
            format!(
                "{sealed}; else allow process_vm_readv and process_vm_writev in the container's \
                 seccomp profile"
            ),
        ),
        (Ok(()), Some(2..)) if !capable => Check::warn(
            name,
            format!("a child's memory can be read, an engine's not ({yama})"),
            format!("{sealed}; else sysctl -w kernel.yama.ptrace_scope=1"),
        ),
        (Ok(()), Some(1)) if !capable => Check::ok(
            name,
            format!("memory of a child was read ({yama}; engines allow the Manager by prctl)"),
        ),
        (Ok(()), _) => Check::ok(name, format!("memory of a child was read ({yama})")),
    }
}

/// Looked for; loaded and asked for its GPUs only where it is whole. No context is opened.
pub(super) fn cuda_driver() -> Check {
    let module = read("/proc/driver/nvidia/version");
    let module = module.as_deref().and_then(|text| text.lines().next());
    let variable = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let named = std::env::split_paths(&variable);
    let known = LIBRARY_FOLDERS.iter().map(std::path::PathBuf::from);
    let library = named.chain(known).map(|folder| folder.join(LIBRARY)).find(|path| path.exists());
    let device = Path::new("/dev/nvidiactl").exists();
    let gpus = || {
        let named = |gpu: &Arc<Gpu>| format!("{} ({})", gpu.name(), gpu.id());
        Gpus::find().map(|gpus| gpus.list().iter().map(named).collect())
    };
    judge_driver(module, library.as_deref(), device, gpus)
}

fn judge_driver(
    module: Option<&str>,
    library: Option<&Path>,
    device: bool,
    gpus: impl FnOnce() -> Result<Vec<String>, NoCuda>,
) -> Check {
    let name = "cuda driver";
    match (module, library, device) {
        (None, None, false) => Check::ok(
            name,
            "none: engines with pages in host memory only (looked for the kernel module, its \
             device node and libcuda.so.1, loaded nothing)",
        ),
        (Some(module), Some(_), true) => match gpus() {
            Ok(gpus) => Check::ok(name, format!("{}; {module}", gpus.join(", "))),
            Err(error) => Check::warn(
                name,
                format!("{module}, and no GPU can be used: {error}"),
                "look at nvidia-smi; engines with pages in host memory are served all the same",
            ),
        },
        _ => {
            let there = |is: bool| if is { "there" } else { "missing" };
            Check::warn(
                name,
                format!(
                    "in part: kernel module {}, device node {}, libcuda.so.1 {}",
                    there(module.is_some()),
                    there(device),
                    there(library.is_some())
                ),
                "install the driver whole; in a container pass the GPU through (docker run --gpus \
                 all)",
            )
        }
    }
}

/// What can be said without a context: what the engines' allocator is told to do.
pub(super) fn cuda_ipc() -> Check {
    let told = ALLOCATOR_VARIABLES
        .into_iter()
        .find_map(|name| Some((name, std::env::var(name).ok()?)))
        .filter(|(_, value)| value.replace(' ', "").contains("expandable_segments:True"));
    judge_ipc(told.as_ref().map(|(name, value)| (*name, value.as_str())))
}

fn judge_ipc(expandable: Option<(&str, &str)>) -> Check {
    let name = "cuda ipc";
    match expandable {
        Some((variable, value)) => Check::warn(
            name,
            format!("{variable}={value}: such memory cannot be exported by a classic IPC handle"),
            "start engines with expandable_segments:False, or without that variable",
        ),
        None => Check::ok(
            name,
            "not tried: it takes a CUDA context. Engine and Manager need one IPC and process-id \
             namespace and the same visible devices",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn yama_counts_for_those_without_the_capability() {
        let judge = |scope, capable| judge_process_vm(&Ok(()), scope, capable).status;
        assert_eq!(judge(None, false), Status::Ok);
        assert_eq!(judge(Some(1), false), Status::Ok);
        assert_eq!(judge(Some(2), false), Status::Warn);
        assert_eq!(judge(Some(2), true), Status::Ok);
        let refused = judge_process_vm(&Err("EPERM".into()), Some(0), true);
        assert!(refused.status == Status::Warn && refused.fix.contains("memfd"), "{refused:?}");
    }

    #[test]
    fn a_driver_is_whole_absent_or_in_part() {
        let path = Path::new("/usr/lib/libcuda.so.1");
        let none = || -> Result<Vec<String>, NoCuda> { panic!("asked without a whole driver") };
        assert_eq!(judge_driver(None, None, false, none).status, Status::Ok);
        let two = || Ok(vec!["H200 (ab)".to_owned(), "H200 (cd)".to_owned()]);
        let whole = judge_driver(Some("NVRM 550"), Some(path), true, two);
        assert_eq!(whole.status, Status::Ok);
        assert!(whole.found.contains("H200 (ab), H200 (cd)"), "{whole:?}");
        let blind = judge_driver(Some("NVRM 550"), Some(path), true, || Err(NoCuda::NoGpu));
        assert_eq!(blind.status, Status::Warn);
        assert!(blind.found.contains("CUDA_VISIBLE_DEVICES"), "{blind:?}");
        let part = judge_driver(Some("NVRM 550"), None, true, none);
        assert_eq!(part.status, Status::Warn);
        assert!(part.found.contains("libcuda.so.1 missing"), "{part:?}");
    }

    #[test]
    fn expandable_segments_are_named() {
        let variable = Some(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"));
        let told = judge_ipc(variable);
        assert!(told.status == Status::Warn && told.found.contains("ALLOC_CONF"), "{told:?}");
        assert_eq!(judge_ipc(None).status, Status::Ok);
    }

    /// The word is in this process; reading oneself is always allowed.
    #[test]
    fn a_word_is_proved_by_what_it_holds() {
        let word = Box::new(0x0102_0304_0506_0708_u64);
        let address = std::ptr::from_ref(&*word).addr() as u64;
        let target = Target { pid: std::process::id(), address, nonce: *word };
        assert_eq!(probe(&target), Ok(()));
        let wrong = Target { nonce: 1, ..target };
        assert!(probe(&wrong).unwrap_err().contains("nonce"));
        std::hint::black_box(&word);
    }
}
