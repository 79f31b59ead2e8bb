//! Goal: the demo shows what it promises and leaves nothing behind. Method: run it.

use std::fs;
use std::process::Command;

use serde_json::Value;

#[test]
fn the_demo_compares_a_thousand_pages_some_of_them_from_ssd() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (json, html) = (folder.path().join("demo.json"), folder.path().join("demo.html"));
    let cache = folder.path().join("cache");
    let output = Command::new(env!("CARGO_BIN_EXE_orbitkv"))
        .arg("demo")
        .arg("--json")
        .arg(&json)
        .arg("--html")
        .arg(&html)
        .env("XDG_CACHE_HOME", &cache)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let json: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let number = |key: &str| json[key].as_u64().unwrap();
    assert!(number("pages_verified") >= 1000);
    assert!(number("pages_hit_ssd") > 0);
    assert_eq!(number("mismatches"), 0);
    assert_eq!(number("leaked_bytes") + number("leaked_leases"), 0);
    assert!(json["spill"]["written"].as_u64().unwrap() > 0, "the queue was put to use");
    assert_eq!(number("ssd_write_queue_full"), 0);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("0 wrong"), "{table}");
    assert!(fs::read_to_string(html).unwrap().starts_with("<!doctype html>"));
    assert_eq!(fs::read_dir(cache.join("orbitkv")).unwrap().count(), 0);
}
