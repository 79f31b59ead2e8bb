//! What this machine allows the Manager to do: every promise of the kernel that the product rests
//! on, tried where trying is harmless, else read. Nothing that is examined is changed; files that a
//! probe makes are removed.
//!
//! A line is `fail` when a default start would not work or lose a tier, `warn` when it works with
//! less, else `ok`.

mod device;
mod disk;
mod kernel;
mod memory;
mod runtime;
mod wake;

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

pub use device::Target;

use crate::config::{Config, HugePages};
use crate::units::rounded as size;

/// How good a finding is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// As it should be.
    Ok,
    /// It works, with less.
    Warn,
    /// A default start fails, or a tier is lost.
    Fail,
}

impl Status {
    /// As printed.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How good it is.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What to do; empty when there is nothing to do.
    pub fix: String,
}

impl Check {
    fn ok(name: &'static str, found: impl fmt::Display) -> Self {
        Self { name, status: Status::Ok, found: found.to_string(), fix: String::new() }
    }

    fn warn(name: &'static str, found: impl fmt::Display, fix: impl fmt::Display) -> Self {
        Self { name, status: Status::Warn, found: found.to_string(), fix: fix.to_string() }
    }

    fn fail(name: &'static str, found: impl fmt::Display, fix: impl fmt::Display) -> Self {
        Self { name, status: Status::Fail, found: found.to_string(), fix: fix.to_string() }
    }
}

/// What is to be examined.
#[derive(Debug)]
pub struct Patient {
    /// What `serve` would do with the same flags.
    pub config: Config,
    /// Folder that would hold the SSD file.
    pub ssd_folder: PathBuf,
    /// Another process of this user that offers a word of its memory, as an engine would; the error
    /// says why there is none.
    pub target: Result<Target, String>,
}

/// Examines everything, a second or two long.
pub fn examine(patient: &Patient) -> Vec<Check> {
    let config = &patient.config;
    let dram_bytes = config.dram.capacity_bytes;
    let cores = kernel::cores();
    let mut checks = vec![
        kernel::version(),
        kernel::futex_waitv(),
        kernel::peer_pidfd(),
        kernel::check_cores(cores),
        wake::check(cores),
        kernel::descriptors(&config.limits),
        kernel::user_namespace(),
        memory::available(dram_bytes),
        memory::huge_pages(config.dram.huge_pages == HugePages::Require),
        memory::reserved_huge_pages(),
        memory::nodes(),
        memory::locked(dram_bytes),
        memory::shared_memory(),
        disk::io_uring(),
        disk::registered_buffers(),
    ];
    checks.extend(disk::folder(&patient.ssd_folder));
    checks.push(device::process_vm(patient.target.as_ref()));
    checks.push(device::cuda_driver());
    checks.push(device::cuda_ipc());
    checks.push(runtime::folder(&config.socket));
    checks.push(runtime::manager(&config.socket.path));
    checks
}

/// Text of a small file of the kernel, without the blanks around it.
fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The value of `Name:` in the text of /proc/…/status.
fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Whether this process holds a capability, by its number.
fn has_capability(number: u32) -> bool {
    let status = read("/proc/self/status").unwrap_or_default();
    let effective = status_field(&status, "CapEff").unwrap_or_default();
    u64::from_str_radix(effective, 16).is_ok_and(|set| set >> number & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let status = "Name:\tx\nCapEffective:\t1\nCapEff:\t0000000000004000\nSeccomp:\t2\n";
        assert_eq!(status_field(status, "CapEff"), Some("0000000000004000"));
        assert_eq!(status_field(status, "Seccomp"), Some("2"));
        assert_eq!(status_field(status, "Cap"), None);
    }
}
