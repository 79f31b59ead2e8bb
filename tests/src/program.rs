//! A program where another user may run it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Copies of this process.
static COPIES: AtomicU32 = AtomicU32::new(0);

/// A copy in the temporary folder: the folder of a build may be closed to others. Removed when
/// dropped.
#[derive(Debug)]
pub struct Program(PathBuf);

impl Program {
    /// Copies a program with its mode.
    ///
    /// # Panics
    /// When it cannot be copied.
    pub fn copy(program: &Path) -> Self {
        let number = COPIES.fetch_add(1, Ordering::Relaxed);
        let name = format!("orbitkv-program-{}-{number}", std::process::id());
        let copy = std::env::temp_dir().join(name);
        // Not by this process: a child that another thread forks meanwhile would hold the copy open
        // for writing, and nobody could run it.
        let copied = Command::new("cp").arg("--").arg(program).arg(&copy).status().unwrap();
        assert!(copied.success(), "cp {program:?} {copy:?}: {copied}");
        Self(copy)
    }

    /// Where the copy is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.0);
    }
}
