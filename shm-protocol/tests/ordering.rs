//! Goal: every access to shared memory that is not relaxed carries the name of its sync point, and
//! the tables that explain the names are complete.
//!
//! Method: the sources are read as text. An access is named by a comment in its own paragraph (the
//! lines up to the last blank one); names are those of the tables in `lib.rs` and `telemetry.rs`.
//! `memory` itself is left out: it passes on what is asked of it.
#![cfg(not(loom))]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What an access that orders something looks like.
const ACCESSES: [&str; 8] = [
    ".load_acquire(",
    ".store_release(",
    "full_fence(",
    " fence(Ordering::",
    ".swap(",
    ".increment(",
    ".compare_exchange",
    ".fetch_",
];

fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            sources(&path, into);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            into.push(path);
        }
    }
}

/// The code of a file in front of its unit tests.
fn code(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().take_while(|line| !line.starts_with("mod tests {")).map(str::to_owned).collect()
}

/// First cells of the table of sync points in the documentation of a crate or module.
fn names_of(path: &Path) -> Vec<String> {
    let lines = code(path).into_iter().skip_while(|line| !line.starts_with("//! | sync point "));
    let names = lines.map_while(|line| line.strip_prefix("//! |").map(str::to_owned));
    let names = names.filter_map(|line| {
        let row = line.strip_prefix(" `")?;
        row.split('`').next().map(str::to_owned)
    });
    names.collect()
}

#[test]
fn every_access_that_orders_carries_its_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut names = names_of(&root.join("lib.rs"));
    names.extend(names_of(&root.join("telemetry.rs")));
    let mut files = Vec::new();
    sources(&root, &mut files);
    files.retain(|path| !path.starts_with(root.join("memory")) && *path != root.join("memory.rs"));
    let mut seen: BTreeMap<&str, usize> = names.iter().map(|name| (name.as_str(), 0)).collect();
    let mut unnamed = Vec::new();
    for file in &files {
        let lines = code(file);
        for (number, line) in lines.iter().enumerate() {
            let is_comment = line.trim_start().starts_with("//");
            let is_import = line.starts_with("use ");
            if is_comment || is_import || !ACCESSES.iter().any(|access| line.contains(access)) {
                continue;
            }
            let paragraph = lines[..=number].iter().rev().take_while(|line| !line.is_empty());
            let comments = paragraph.filter(|line| line.trim_start().starts_with("//"));
            let text: Vec<&str> = comments.map(String::as_str).collect();
            let named = names.iter().filter(|name| {
                let quoted = format!("`{name}`");
                text.iter().any(|line| line.contains(&quoted))
            });
            let mut is_named = false;
            for name in named {
                is_named = true;
                *seen.get_mut(name.as_str()).unwrap() += 1;
            }
            if !is_named {
                unnamed.push(format!("{}:{}: {}", file.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(unnamed.is_empty(), "no sync point named at\n{}", unnamed.join("\n"));
    // What one end does through the kernel or a driver is not seen here.
    let other_end = ["header-version"];
    for (name, accesses) in seen {
        let needed = if other_end.contains(&name) { 1 } else { 2 };
        assert!(accesses >= needed, "{name} is in a table but named at {accesses} accesses");
    }
}
