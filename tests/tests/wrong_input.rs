//! What the other verbs do with input that is wrong: traces, files of a tier, sockets and outputs.
//! Refused with the code that says whose fault it is, in one line, before any work, with nothing
//! left behind.

use std::fs;
use std::io::Write;
use std::path::Path;

use orbitkv_tests::manager::Setup;
use orbitkv_tests::setup;

/// A request of two 512-token blocks.
const REQUEST: &str =
    "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [4, 9]}\n";

/// Every name in the folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Both verbs that read traces refuse this one alike, and leave nothing.
fn both_refuse(setup: &Setup, trace: &str, code: i32, parts: &[&str]) {
    let before = names(setup.folder());
    let json = ["--json", "new.json"];
    let simulate = ["simulate", "--trace", trace, "--dram-pages", "10", json[0], json[1]];
    setup.fails(&simulate, code, parts);
    setup.fails(&["replay", "--trace", trace, json[0], json[1]], code, parts);
    assert_eq!(names(setup.folder()), before, "{trace}");
}

/// Goal: a malformed line ends with 2 and names file, line and field, whatever is wrong with it and
/// however much good comes before.
#[test]
fn a_malformed_trace_names_file_line_and_field() {
    let setup = setup!();
    for (line, field, problem) in [
        ("{\"timestamp\": 1, \"input_length\": -5}", "input_length", "outside 0 to"),
        ("{\"timestamp\": 1, \"input_length\": 600, \"output_length\": 1}", "hash_ids", "missing"),
        (
            "{\"timestamp\": 1, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": 7}",
            "hash_ids",
            "expected",
        ),
        (
            "{\"timestamp\": 1, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [1,2,3]}",
            "hash_ids",
            "600 input tokens",
        ),
        (
            "{\"timestamp\": \"x\", \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [1]}",
            "timestamp",
            "expected",
        ),
        ("{\"timestamp\": 1, ", "line", "not valid JSON"),
        ("[1, 2]", "", "expected"),
        ("null", "", ""),
        ("\u{1f600}", "line", "not valid JSON"),
    ] {
        let text = REQUEST.repeat(3) + line + "\n" + REQUEST;
        fs::write(setup.folder().join("bad.jsonl"), text).unwrap();
        both_refuse(&setup, "bad.jsonl", 2, &["bad.jsonl: line 4: field", field, problem]);
    }
    // What is not asked for is not read.
    let limited = setup.orbitkv(&[
        "simulate",
        "--trace",
        setup.folder().join("bad.jsonl").to_str().unwrap(),
        "--dram-pages",
        "10",
        "--limit",
        "3",
    ]);
    assert_eq!(limited.status.code(), Some(0));
}

/// Goal: a file that is no trace at all is refused by what is wrong with it: 2 when its content
/// shows it, 3 when only the system knew.
#[test]
fn a_file_that_is_no_trace_is_refused_by_cause() {
    let setup = setup!();
    let write = |name: &str, bytes: &[u8]| fs::write(setup.folder().join(name), bytes).unwrap();
    write("empty.jsonl", b"");
    write("blank.jsonl", b"\n \n\n");
    let noise: Vec<u8> =
        (0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    write("noise.jsonl", &noise);
    write("zeros.jsonl", &[0; 5000]);
    write("words.jsonl", b"not a trace at all\n");
    write("other.jsonl", b"{\"some\": \"object\"}\n");
    write("bad.zst", b"\x28\xb5\x2f\xfd and no frame");
    write("bad.gz", b"\x1f\x8b and no header");
    write("long.jsonl", &[b'x'; (16 << 20) + 100]);
    // Good up to a point, then cut off: half of a compressed file.
    let plain = REQUEST.repeat(5000);
    let whole = gzip(plain.as_bytes());
    write("cut.gz", &whole[..whole.len() / 2]);
    let whole = zstd(plain.as_bytes());
    write("cut.zst", &whole[..whole.len() / 2]);
    let mut flipped = whole.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0x40;
    write("flipped.zst", &flipped);
    fs::create_dir(setup.folder().join("folder")).unwrap();
    std::os::unix::fs::symlink("nowhere", setup.folder().join("dangling")).unwrap();
    for (name, code, parts) in [
        ("empty.jsonl", 2, &["line 1", "the file is empty"][..]),
        ("blank.jsonl", 2, &["the file is empty"]),
        ("noise.jsonl", 2, &["line 1", "not UTF-8"]),
        ("zeros.jsonl", 2, &["line 1", "not valid JSON"]),
        ("words.jsonl", 2, &["line 1", "not valid JSON"]),
        ("other.jsonl", 2, &["line 1", "none of the known formats", "Mooncake"]),
        ("bad.zst", 2, &["line 1", "cannot decompress"]),
        ("bad.gz", 2, &["line 1", "cannot decompress"]),
        ("long.jsonl", 2, &["line 1", "longer than 16777216 bytes"]),
        ("cut.gz", 2, &["cannot decompress"]),
        ("cut.zst", 2, &["cannot decompress"]),
        ("flipped.zst", 2, &["line"]),
        ("folder", 3, &["Is a directory"]),
        ("dangling", 3, &["no such file", "ORBITKV_TRACES"]),
        ("absent.jsonl", 3, &["no such file", "ORBITKV_TRACES"]),
    ] {
        both_refuse(&setup, name, code, &[&[name], parts].concat());
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Goal: numbers out of range and flags that contradict each other end with 2 and say what is
/// accepted, before the trace is even opened.
#[test]
fn numbers_out_of_range_are_refused_before_the_trace_is_opened() {
    let setup = setup!();
    let replay = ["replay", "--trace", "absent.jsonl"];
    let simulate = ["simulate", "--trace", "absent.jsonl", "--dram-pages"];
    for (verb, flags, parts) in [
        (&replay[..], &["--engines", "0"][..], &["--engines", "0", "1 to 64"][..]),
        (&replay, &["--engines", "65"], &["--engines", "65", "1 to 64"]),
        (&replay, &["--engines", "two"], &["--engines", "two"]),
        (&replay, &["--concurrency", "0"], &["--concurrency", "1 to 64"]),
        (&replay, &["--limit", "0"], &["--limit", "at least 1"]),
        (&replay, &["--limit", "x"], &["--limit", "\"x\""]),
        (&replay, &["--device-pages", "0"], &["--device-pages", "1 to "]),
        (&replay, &["--device-pages", "16777217"], &["--device-pages", "16777216"]),
        (&replay, &["--time-scale", "-1"], &["--time-scale", "0 to 1000"]),
        (&replay, &["--time-scale", "nan"], &["--time-scale", "0 to 1000"]),
        (&replay, &["--reattach", "5"], &["--reattach", "ms, s or m"]),
        (&replay, &["--page-bytes", "0"], &["--page-bytes", "4KiB to 64MiB"]),
        (&replay, &["--page-bytes", "4095"], &["--page-bytes", "4KiB to 64MiB"]),
        (&replay, &["--page-bytes", "65MiB"], &["--page-bytes", "4KiB to 64MiB"]),
        (&replay, &["--page-bytes", "64K"], &["--page-bytes", "KiB, MiB"]),
        (&replay, &["--page-bytes", ""], &["--page-bytes"]),
        (&replay, &["--socket", "s", "--dram", "1GiB"], &["--dram"]),
        (&replay, &["--socket", "s", "--spawn"], &["--spawn"]),
        (&replay, &["--seed", "-1"], &["-1"]),
        (&simulate, &["0"], &["--dram-pages", "1 to "]),
        (&simulate, &["1,,2"], &["--dram-pages"]),
        (&simulate, &["10", "--limit", "0"], &["--limit", "at least 1"]),
        (&simulate, &["10", "--replacement", "fifo"], &["fifo", "prefix-lru"]),
        (&["verify"], &[], &["--ssd"]),
        (&["evict"], &["--tier", "ssd"], &["ssd", "dram"]),
        (&["evict", "--tier", "dram"], &["--timeout", "30"], &["--timeout", "ms, s or m"]),
        (&["inspect"], &["everything"], &["everything", "sessions"]),
        (&["serv"], &[], &["serv", "serve"]),
    ] {
        setup.fails(&[verb, flags].concat(), 2, parts);
    }
    assert_eq!(names(setup.folder()), [""; 0]);
}

/// Goal: a device smaller than any request is no error: requests go in parts and every byte is right.
#[test]
fn one_device_page_is_enough() {
    let setup = setup!();
    let trace = setup.folder().join("trace.jsonl");
    fs::write(&trace, REQUEST.repeat(4)).unwrap();
    let json = setup.folder().join("out.json");
    let (trace, json) = (trace.to_str().unwrap(), json.to_str().unwrap());
    let flags = [
        "--device-pages",
        "1",
        "--engines",
        "1",
        "--concurrency",
        "1",
        "--dram",
        "16MiB",
        "--page-bytes",
        "5000",
    ];
    let output =
        setup.orbitkv(&[&["replay", "--trace", trace, "--json", json], &flags[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    assert_eq!((&report["requests"], &report["mismatches"]), (&4.into(), &0.into()));
    // One full block each; the second has 88 of its 512 tokens.
    let (hit, verified) = (&report["pages_hit_dram"], &report["pages_verified"]);
    assert_eq!((&report["pages_total"], hit, verified), (&4.into(), &3.into(), &3.into()));
}

/// Goal: an output that cannot be written is refused before any work, an existing one keeps its
/// content until there is something new, and a run that is refused leaves none.
#[test]
fn outputs_are_checked_first_and_written_last() {
    let setup = setup!();
    fs::write(setup.folder().join("trace.jsonl"), REQUEST).unwrap();
    fs::write(setup.folder().join("old.json"), "the former numbers").unwrap();
    fs::write(setup.folder().join("notes"), "not ours\n".repeat(1000)).unwrap();
    fs::create_dir(setup.folder().join("folder")).unwrap();
    let before = names(setup.folder());
    let replay = ["replay", "--trace", "trace.jsonl"];
    for (out, cause) in [
        ("none/out.json", "No such file"),
        ("folder", "Is a directory"),
        ("trace.jsonl/x", "Not a dir"),
    ] {
        for flag in ["--json", "--html"] {
            setup.fails(&[&replay[..], &[flag, out]].concat(), 3, &[flag, out, cause]);
        }
        let simulate = ["simulate", "--trace", "trace.jsonl", "--dram-pages", "1", "--json", out];
        setup.fails(&simulate, 3, &["--json", out, cause]);
        setup.fails(&["verify", "--ssd", "notes", "--json", out], 3, &["--json", out, cause]);
    }
    for out in ["new.json", "old.json"] {
        let wrong: [(&[&str], i32, &str); 4] = [
            (&["--dram", "1KiB"], 2, "1024 bytes (1KiB) is out of range"),
            (&["--dram", "1TiB"], 3, "lower --dram"),
            (&["--ssd", "none/tier", "--ssd-capacity", "64MiB"], 3, "none/tier"),
            (&["--socket", "none.sock"], 3, "none.sock"),
        ];
        for (flags, code, part) in wrong {
            setup.fails(&[&replay[..], flags, &["--json", out]].concat(), code, &[part]);
        }
        setup.fails(&["verify", "--ssd", "notes", "--json", out], 2, &["notes", "not an OrbitKV"]);
    }
    assert_eq!(names(setup.folder()), before);
    let old = fs::read_to_string(setup.folder().join("old.json")).unwrap();
    assert_eq!(old, "the former numbers");
    // A shorter content replaces a longer one whole.
    fs::write(setup.folder().join("old.json"), "x".repeat(1 << 20)).unwrap();
    let out = setup.folder().join("old.json");
    let trace = setup.folder().join("trace.jsonl");
    let (out, trace) = (out.to_str().unwrap(), trace.to_str().unwrap());
    let done = setup.orbitkv(&["simulate", "--trace", trace, "--dram-pages", "1", "--json", out]);
    assert_eq!(done.status.code(), Some(0));
    let rows: serde_json::Value = serde_json::from_slice(&fs::read(out).unwrap()).unwrap();
    assert_eq!(rows[0]["requests"], 1);
}

/// Goal: verbs that need a Manager, or a file of one, say that there is none (3), or that it is not
/// ours (2), and change nothing.
#[test]
fn no_manager_and_foreign_files_are_told_apart() {
    let setup = setup!();
    fs::write(setup.folder().join("notes"), "not ours\n".repeat(10_000)).unwrap();
    fs::write(setup.folder().join("empty"), "").unwrap();
    fs::write(setup.folder().join("zeros"), vec![0; 2 << 20]).unwrap();
    fs::create_dir(setup.folder().join("folder")).unwrap();
    let before = names(setup.folder());
    for socket in ["none.sock", "notes", "folder", "none/m.sock"] {
        setup.fails(&["inspect", "--socket", socket], 3, &[socket]);
        setup.fails(&["inspect", "--json", "--socket", socket], 3, &[socket]);
        setup.fails(&["evict", "--tier", "dram", "--socket", socket], 3, &[socket, "serve"]);
    }
    let long = "x".repeat(104);
    for verb in [&["inspect"][..], &["evict", "--tier", "dram"], &["doctor"]] {
        setup.fails(&[verb, &["--socket", &long]].concat(), 2, &["--socket", &long, "103"]);
    }
    for (file, code, part) in [
        ("notes", 2, "not an OrbitKV SSD file"),
        ("empty", 2, "not an OrbitKV SSD file"),
        ("zeros", 2, "not an OrbitKV SSD file"),
        ("folder", 3, "not a regular file"),
        ("absent", 3, "No such file"),
        ("none/tier", 3, "No such file"),
        ("notes/tier", 3, "Not a directory"),
    ] {
        setup.fails(&["verify", "--ssd", file], code, &[file, part]);
    }
    assert_eq!(names(setup.folder()), before);
    assert_eq!(fs::read(setup.folder().join("notes")).unwrap().len(), 90_000);
}
