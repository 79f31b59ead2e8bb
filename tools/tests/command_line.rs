//! Goal: every verb keeps its exit codes, and every error is one line that names the culprit.
//! Method: run the program.

use std::fs;
use std::process::{Command, Output};

fn orbitkv(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_orbitkv"))
        .args(arguments)
        .env("ORBITKV_TRACES", env!("CARGO_TARGET_TMPDIR"))
        .output()
        .unwrap()
}

/// Asserts the exit code and that standard error is one line that holds all of `words`.
fn refused(arguments: &[&str], exit: i32, words: &[&str]) {
    let output = orbitkv(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(exit), "{arguments:?}: {text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{arguments:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{arguments:?}: {word:?} is not in {text}");
    }
}

#[test]
fn asked_for_help_is_no_error() {
    for arguments in [&["--help"][..], &["--version"], &["replay", "--help"]] {
        let output = orbitkv(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty());
    }
}

/// Goal: `orbitkv … | head` never ends in a panic. Method: a pipe whose reader is gone before the
/// program starts.
#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (trace, json) = (folder.path().join("t.jsonl"), folder.path().join("out.json"));
    fs::write(&trace, mooncake(3)).unwrap();
    let (trace, json) = (trace.to_str().unwrap(), json.to_str().unwrap());
    let closed = || std::io::pipe().unwrap().1;
    for (arguments, exit) in [
        (&["--help"][..], 0),
        (&["serve", "--print-config"], 0),
        (&["simulate", "--trace", trace, "--dram-pages", "10"], 0),
        (&["replay", "--trace", trace, "--page-bytes", "4KiB", "--json", json], 0),
        (&["bogus"], 2),
        (&["serve", "--bogus"], 2),
        (&["verify", "--ssd", trace], 2),
    ] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_orbitkv"))
            .args(arguments)
            .stdout(closed())
            .stderr(closed())
            .spawn()
            .unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(exit), "{arguments:?}");
    }
    assert!(fs::read_to_string(json).unwrap().contains("\"mismatches\": 0"));
}

#[test]
fn wrong_usage_is_2_in_one_line() {
    refused(&[], 2, &["demo", "inspect"]);
    refused(&["bogus"], 2, &["bogus", "replay"]);
    refused(&["replay"], 2, &["--trace"]);
    refused(&["replay", "--trace", "x", "--engine", "2"], 2, &["--engine", "--engines"]);
    refused(&["replay", "--trace", "x", "--engines", "0"], 2, &["--engines", "0", "1 to 64"]);
    refused(
        &["replay", "--trace", "x", "--page-bytes", "1e30"],
        2,
        &["--page-bytes", "1e30", "GiB"],
    );
    refused(
        &["replay", "--trace", "x", "--page-bytes", "1KiB"],
        2,
        &["--page-bytes", "1KiB", "4KiB"],
    );
    refused(&["replay", "--trace", "x", "--time-scale", "-1"], 2, &["--time-scale"]);
    refused(&["replay", "--trace", "x", "--reattach", "5"], 2, &["--reattach", "ms"]);
    refused(&["replay", "--trace", "x", "--socket", "/s", "--dram", "1GiB"], 2, &["--dram"]);
    refused(&["replay", "--trace", "x", "--socket", "/s", "--spawn"], 2, &["--spawn"]);
    refused(&["simulate", "--trace", "x"], 2, &["--dram-pages"]);
    refused(&["simulate", "--trace", "x", "--dram-pages", "1,0"], 2, &["--dram-pages", "0"]);
    refused(
        &["simulate", "--trace", "x", "--dram-pages", "1,many"],
        2,
        &["--dram-pages", "many", "whole number, 1 to 268435456"],
    );
    refused(&["replay", "--trace", "x", "--limit", "0"], 2, &["--limit", "at least 1"]);
    refused(&["simulate", "--trace", "x", "--dram-pages", "-1"], 2, &["-1"]);
    refused(
        &["simulate", "--trace", "x", "--dram-pages", "1", "--replacement", "fifo"],
        2,
        &["fifo", "prefix-lru"],
    );
    refused(&["evict"], 2, &["--tier"]);
    refused(&["evict", "--tier", "ssd"], 2, &["ssd", "dram"]);
    refused(&["inspect", "everything"], 2, &["everything"]);
}

#[test]
fn what_only_the_system_knows_is_3() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let socket = folder.path().join("s");
    let socket = socket.to_str().unwrap();
    refused(&["inspect", "--socket", socket], 3, &[socket]);
    refused(&["evict", "--tier", "dram", "--socket", socket], 3, &[socket, "serve"]);
    refused(&["replay", "--trace", "no_such_trace"], 3, &["no_such_trace", "ORBITKV_TRACES"]);
    refused(&["simulate", "--trace", "/no/such", "--dram-pages", "1"], 3, &["/no/such"]);
    let trace = folder.path().join("t.jsonl");
    fs::write(&trace, mooncake(3)).unwrap();
    let trace = trace.to_str().unwrap();
    let json = ["--json", "/no/such/folder/out.json"];
    let simulate = ["simulate", "--trace", trace, "--dram-pages", "1", json[0], json[1]];
    refused(&simulate, 3, &["--json", json[1]]);
    refused(&["replay", "--trace", trace, json[0], json[1]], 3, &["--json", json[1]]);
}

#[test]
fn verify_tells_a_foreign_file_from_a_missing_one() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("notes.txt");
    fs::write(&file, "not ours\n".repeat(10_000)).unwrap();
    let file = file.to_str().unwrap();
    refused(&["verify", "--ssd", file], 2, &[file]);
    assert_eq!(fs::read(file).unwrap().len(), 90_000);
    let missing = folder.path().join("none").join("x");
    refused(&["verify", "--ssd", missing.to_str().unwrap()], 3, &[missing.to_str().unwrap()]);
    refused(&["verify"], 2, &["--ssd"]);
}

#[test]
fn a_malformed_trace_is_2_before_anything_starts() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let trace = folder.path().join("t.jsonl");
    fs::write(&trace, mooncake(3) + "{\"timestamp\": 1, \"input_length\": -5}\n").unwrap();
    let trace = trace.to_str().unwrap();
    let words = [trace, "line 4", "input_length"];
    refused(&["replay", "--trace", trace], 2, &words);
    refused(&["simulate", "--trace", trace, "--dram-pages", "10"], 2, &words);
    // What is not asked for is not read.
    let limited = ["simulate", "--trace", trace, "--dram-pages", "10", "--limit", "3"];
    assert_eq!(orbitkv(&limited).status.code(), Some(0));
}

#[test]
fn simulate_writes_a_row_for_each_size() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::write(folder.path().join("small.jsonl"), mooncake(4)).unwrap();
    let json = folder.path().join("out.json");
    let output = Command::new(env!("CARGO_BIN_EXE_orbitkv"))
        .args(["simulate", "--trace", "small", "--dram-pages", "1,2,8", "--ssd-pages", "8"])
        .arg("--json")
        .arg(&json)
        .env("ORBITKV_TRACES", folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0));
    let rows: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!(row["requests"], 4);
        assert_eq!(row["accesses"], 8);
        assert_eq!(row["replacement"], "prefix-lru");
        assert_eq!(row["ssd_pages"], 8);
    }
    // Each request after the first hits both blocks, the second of which has 88 tokens.
    assert_eq!(rows[2]["dram_pages"], 8);
    assert_eq!(rows[2]["hit_pages_dram"], 6);
    assert_eq!(rows[2]["hit_tokens"], 3 * 600);
}

/// Requests for the same two blocks.
fn mooncake(requests: usize) -> String {
    "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [4, 9]}\n"
        .repeat(requests)
}
