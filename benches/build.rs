//! Records the commit that the benchmarks were built from: a number without it says nothing.

use std::process::Command;

/// Sources whose changes make a build differ from its commit.
const SOURCES: [&str; 7] = [
    "../shm-protocol/src",
    "../manager/src",
    "../engine-side/src",
    "../tools/src",
    "src",
    "kernels",
    "build.rs",
];

fn main() {
    for source in SOURCES {
        println!("cargo::rerun-if-changed={source}");
    }
    // Every commit appends to this file, also in a linked worktree.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]);
    let mark = if changed.is_some_and(|files| !files.is_empty()) { "+changes" } else { "" };
    println!("cargo::rustc-env=ORBITKV_BENCH_COMMIT={commit}{mark}");
}

/// What git prints; none without git or outside a repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
