//! Which engine runs, and what to say when io_uring is forbidden.

use std::sync::Arc;

use rustix::io::Errno;

use super::blocking::{BLOCKING_THREADS, BlockingEngine};
use super::error::SsdError;
use super::file::SsdFile;
use super::io::{Engine, EngineKind, EngineMode, TaskRun};
use super::uring::UringEngine;
use super::wake::Wake;
use crate::image::ImageMemory;

/// Requests of a scan that are out at once.
const SCAN_DEPTH: u16 = 128;
/// Threads that do so where io_uring is forbidden.
const SCAN_THREADS: u16 = 64;

/// Which engine the operator wants.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum EngineChoice {
    /// io_uring where it is allowed, else threads.
    #[default]
    Auto,
    /// io_uring or no start.
    Uring,
    /// `preadv` and `pwritev` on threads.
    Blocking,
}

/// The engine that was decided on for this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Resolved {
    Uring,
    Blocking,
}

/// Decides once a start, with one line in the log when io_uring is forbidden.
pub(crate) fn resolve(choice: EngineChoice) -> Result<Resolved, SsdError> {
    if choice == EngineChoice::Blocking {
        return Ok(Resolved::Blocking);
    }
    let probed = UringEngine::probe();
    match probed {
        Ok(TaskRun::Deferred) | Err(_) => {}
        Ok(task_run) => tracing::info!(
            mode = %EngineMode { kind: EngineKind::Uring(task_run), ..EngineMode::UNREGISTERED },
            "this kernel does not know the newest set-up of io_uring (Linux 6.1): an older one is \
             used, which costs a little CPU"
        ),
    }
    decide(choice, probed.err())
}

fn decide(choice: EngineChoice, refused: Option<Errno>) -> Result<Resolved, SsdError> {
    match refused {
        None => Ok(Resolved::Uring),
        Some(errno) if choice == EngineChoice::Uring => Err(SsdError::NoUring { errno }),
        Some(errno) => {
            tracing::warn!(
                %errno,
                "io_uring is refused: a seccomp profile (containers) or the sysctl \
                 kernel.io_uring_disabled forbids it; the SSD tier runs on preadv/pwritev threads, \
                 which cost more CPU with small pages"
            );
            Ok(Resolved::Blocking)
        }
    }
}

/// What an engine is made of.
#[derive(Clone)]
pub(crate) struct EngineSpec {
    pub(crate) resolved: Resolved,
    pub(crate) file: Arc<SsdFile>,
    pub(crate) memory: Arc<dyn ImageMemory>,
    pub(crate) wake: Arc<Wake>,
    pub(crate) depth: u16,
    /// Sizes of the arenas to register; empty for none.
    pub(crate) arenas: Arc<[u64]>,
    /// Threads of a blocking engine.
    pub(crate) threads: u16,
}

impl EngineSpec {
    /// Makes the engine on the calling thread, which must be the one that uses it.
    pub(crate) fn build(self) -> Result<Box<dyn Engine>, Errno> {
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
        if self.resolved == Resolved::Uring {
            let (file, memory, wake) = (self.file.clone(), self.memory.clone(), self.wake.clone());
            match UringEngine::new(file, memory, wake, self.depth, &self.arenas) {
                Ok(engine) => return Ok(Box::new(engine)),
                // The probe got one, so this is a shortage: slower beats not at all.
                Err(error) => tracing::warn!(%error, "no ring: preadv/pwritev threads instead"),
            }
        }
        let engine =
            BlockingEngine::new(self.file, self.memory, self.wake, self.depth, self.threads);
        Ok(Box::new(engine.map_err(errno)?))
    }

    /// An engine on this thread that reads much at once into `memory`.
    pub(crate) fn for_scan(
        resolved: Resolved,
        file: Arc<SsdFile>,
        memory: Arc<dyn ImageMemory>,
    ) -> Result<Box<dyn Engine>, SsdError> {
        let system = |operation, errno| SsdError::System { operation, errno };
        let wake = Wake::new().map_err(|errno| system("eventfd", errno))?;
        let spec = Self {
            resolved,
            file,
            memory,
            wake: Arc::new(wake),
            depth: SCAN_DEPTH,
            arenas: Arc::new([]),
            threads: SCAN_THREADS,
        };
        spec.build().map_err(|errno| system("start of the I/O engine", errno))
    }

    /// Threads of an engine that carries page images.
    pub(crate) const THREADS: u16 = BLOCKING_THREADS;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_ring_is_an_error_only_when_it_was_demanded_and_both_causes_are_named() {
        for errno in [Errno::PERM, Errno::NOSYS] {
            assert_eq!(decide(EngineChoice::Auto, Some(errno)).unwrap(), Resolved::Blocking);
            let text = decide(EngineChoice::Uring, Some(errno)).unwrap_err().to_string();
            assert!(
                text.contains("seccomp") && text.contains("kernel.io_uring_disabled"),
                "{text}"
            );
        }
        assert_eq!(decide(EngineChoice::Uring, None).unwrap(), Resolved::Uring);
        assert_eq!(resolve(EngineChoice::Blocking).unwrap(), Resolved::Blocking);
    }
}
