//! What a number was measured on, without its name.

use std::fs;

use serde::Serialize;

/// The machine that the numbers belong to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Machine {
    /// Model of the CPU.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// Kernel release.
    pub kernel: String,
    /// Memory, in bytes.
    pub memory_bytes: u64,
}

impl Machine {
    /// Reads what the kernel says; unknown stays "unknown".
    pub fn read(cpus: usize) -> Self {
        let file = |path| fs::read_to_string(path).unwrap_or_default();
        let value = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key))?;
            line.split_once(':').map(|(_, value)| value.trim().to_owned())
        };
        let or_unknown = |text: String| if text.is_empty() { "unknown".to_owned() } else { text };
        let memory = value(&file("/proc/meminfo"), "MemTotal");
        let kib = memory.and_then(|text| text.trim_end_matches(" kB").parse::<u64>().ok());
        Self {
            cpu: or_unknown(value(&file("/proc/cpuinfo"), "model name").unwrap_or_default()),
            cpus,
            kernel: or_unknown(file("/proc/sys/kernel/osrelease").trim().to_owned()),
            memory_bytes: kib.unwrap_or(0) * 1024,
        }
    }
}

/// The commit that this program was built from, `+changes` when it was not exactly that.
pub(crate) const COMMIT: &str = env!("ORBITKV_BENCH_COMMIT");
