//! Goal: no bytes that come from others break a promise. Method: the fuzz targets, on stable and in
//! every test run: their seeds, what fuzzing once found (`tests/fuzz/found/TARGET/`), everything cut
//! at each length, each byte changed, and random mixtures. Mixtures follow PROPTEST_CASES, 256
//! unless set, times ten; the random seed is printed. `tests/scripts/fuzz.sh` goes deeper.

#[path = "../fuzz/targets.rs"]
mod targets;

use std::path::Path;

use fastrand::Rng;

const SEED: u64 = 0x0b17_f022;
/// Bytes of an input that are changed one by one.
const CHANGED_MAX: usize = 768;

fn explore(name: &str, run: fn(&[u8]), seeds: Vec<Vec<u8>>) {
    println!("seed {SEED:#x}");
    let mut inputs = seeds;
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/found").join(name);
    for entry in std::fs::read_dir(found).into_iter().flatten() {
        inputs.push(std::fs::read(entry.unwrap().path()).unwrap());
    }
    assert!(!inputs.is_empty());
    run(&[]);
    for input in &inputs {
        run(input);
        for cut in 0..input.len().min(CHANGED_MAX) {
            run(&input[..cut]);
            let mut changed = input.clone();
            for byte in [!input[cut], 0, 0xff, input[cut] ^ 1] {
                changed[cut] = byte;
                run(&changed);
            }
        }
    }
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let mut random = Rng::with_seed(SEED);
    for _ in 0..cases.unwrap_or(256_u64) * 10 {
        run(&mixture(&inputs, &mut random));
    }
}

/// A seed with pieces of others, changed bytes and numbers that are often at an edge.
fn mixture(inputs: &[Vec<u8>], random: &mut Rng) -> Vec<u8> {
    let mut input = inputs[random.usize(..inputs.len())].clone();
    for _ in 0..random.usize(1..6) {
        let at = random.usize(..=input.len());
        match random.u8(..6) {
            0 => input.truncate(at),
            1 => {
                let other = &inputs[random.usize(..inputs.len())];
                let from = random.usize(..=other.len());
                let to = random.usize(from..=other.len());
                input.splice(at..at, other[from..to].iter().copied());
            }
            2 => input.insert(at, random.u8(..)),
            3 => {
                let number = (1_u64 << random.u32(..64)).wrapping_sub(random.u64(..3));
                for (byte, new) in input[at..].iter_mut().zip(number.to_le_bytes()) {
                    *byte = new;
                }
            }
            4 => {
                let digits = random.u64(..).to_string();
                input.splice(at..at, digits.bytes());
            }
            _ if at < input.len() => input[at] = random.u8(..),
            _ => {}
        }
    }
    input
}

#[test]
fn bootstrap_messages() {
    explore("bootstrap", targets::bootstrap::run, targets::bootstrap::seeds());
}

#[test]
fn request_records() {
    explore("request", targets::request::run, targets::request::seeds());
}

#[test]
fn completion_records() {
    explore("completion", targets::completion::run, targets::completion::seeds());
}

#[test]
fn telemetry_segments() {
    explore("telemetry", targets::telemetry::run, targets::telemetry::seeds());
}

#[test]
fn ssd_blocks() {
    explore("ssd", targets::ssd::run, targets::ssd::seeds());
}
