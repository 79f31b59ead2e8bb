//! The plain loop at its best: how long its requests are and how many are in the kernel is chosen
//! by measurement, for each page size and direction, so that the floor is no weak one.

use std::time::Duration;

use super::Options;
use super::field::{Buffers, Field, Walk};
use super::raw::{Op, Raw, Way};
use super::slice::Slice;
use crate::error::BenchError;
use crate::stats::median;

/// Requests in the kernel that are tried.
const DEPTHS: [u16; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Request lengths that are tried beside that of a whole page.
const REQUEST_BYTES: [u32; 2] = [512 << 10, 1 << 20];
/// Bytes in the kernel at most, at least one request: no candidate needs more for its best.
const IN_KERNEL_BYTES_MAX: u64 = 32 << 20;
/// Times that every candidate is tried at most, in turn with all others.
const TRIES_MAX: u32 = 5;
/// Longest try.
const TRY_MAX: Duration = Duration::from_millis(100);

/// The fastest way of all candidates.
///
/// Each round of tries is compared with itself, since the device's speed drifts; the median over
/// the rounds decides.
pub(super) fn choose(
    raw: &mut Raw,
    (field, buffers): (&mut Field, &Buffers),
    (walk, op): (&mut Walk, Op),
    options: &Options,
) -> Result<Way, BenchError> {
    let ways = candidates(field.page_bytes);
    let mut shares = vec![Vec::new(); ways.len()];
    let length = options.slice.min(TRY_MAX);
    for _ in 0..options.pairs.min(TRIES_MAX) {
        let mut speeds = Vec::new();
        for way in &ways {
            let slice = raw.slice(field, buffers, (walk, op, *way), length)?;
            speeds.push(speed(&slice, op));
        }
        let best = speeds.iter().copied().fold(0.0, f64::max);
        for (share, speed) in shares.iter_mut().zip(&speeds) {
            share.push(speed / best);
        }
    }
    let medians: Vec<f64> = shares.iter().map(|shares| median(shares)).collect();
    let best = (0..ways.len()).max_by(|a, b| medians[*a].total_cmp(&medians[*b]));
    best.map(|index| ways[index]).ok_or_else(|| BenchError::Wrong("no way to try".into()))
}

/// Bytes a second in one direction, in units of 10^9.
pub(super) fn speed(slice: &Slice, op: Op) -> f64 {
    match op {
        Op::Read => slice.read_gb_per_s(),
        Op::Write => slice.write_gb_per_s(),
    }
}

fn candidates(page_bytes: u32) -> Vec<Way> {
    let shorter = REQUEST_BYTES.into_iter().filter(|bytes| *bytes < page_bytes);
    let lengths = shorter.chain([page_bytes]);
    let with_depths = lengths.flat_map(|request_bytes| {
        let depths = DEPTHS.into_iter().filter(move |depth| {
            *depth == 1 || u64::from(*depth) * u64::from(request_bytes) <= IN_KERNEL_BYTES_MAX
        });
        depths.map(move |depth| Way { request_bytes, depth })
    });
    with_depths.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_are_whole_pages_and_pieces_of_long_ones() {
        let small = candidates(128 << 10);
        assert!(small.iter().all(|way| way.request_bytes == 128 << 10));
        assert_eq!(small.len(), 7);
        let large = candidates(9 << 20);
        for way in [
            Way { request_bytes: 1 << 20, depth: 32 },
            Way { request_bytes: 512 << 10, depth: 64 },
            Way { request_bytes: 9 << 20, depth: 2 },
        ] {
            assert!(large.contains(&way), "{way:?}");
        }
        assert!(!large.contains(&Way { request_bytes: 9 << 20, depth: 8 }));
    }
}
