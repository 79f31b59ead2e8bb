//! Latency histograms: which there are, and how a time finds its bucket.

/// Sub-buckets of each doubling: a bucket is at most a quarter wider than it is low.
const STEPS: u64 = 4;
/// Times below 2^8 ns share the first bucket.
const FLOOR_BITS: u32 = 8;
/// Times of 2^37 ns (137 s) and more share the last bucket.
const CEILING_BITS: u32 = 37;

/// Buckets of one histogram.
pub const BUCKETS: usize = (CEILING_BITS - FLOOR_BITS) as usize * STEPS as usize + 2;
/// Words of one histogram: sum and maximum in nanoseconds, then the buckets.
pub const HISTOGRAM_WORDS: usize = BUCKETS + 2;

/// The bucket of a time in nanoseconds.
pub const fn bucket_of(nanos: u64) -> usize {
    if nanos < 1 << FLOOR_BITS {
        return 0;
    }
    let bits = nanos.ilog2();
    if bits >= CEILING_BITS {
        return BUCKETS - 1;
    }
    let step = (nanos >> (bits - 2)) & (STEPS - 1);
    1 + (bits - FLOOR_BITS) as usize * STEPS as usize + step as usize
}

/// First time past `bucket`, in nanoseconds; `None` for the last one.
pub const fn bucket_end(bucket: usize) -> Option<u64> {
    if bucket + 1 >= BUCKETS {
        return None;
    }
    let octave = FLOOR_BITS + (bucket as u32) / STEPS as u32;
    let step = (bucket as u64) % STEPS;
    Some((STEPS + step) << (octave - 2))
}

macro_rules! latencies {
    ($($(#[$meta:meta])* $variant:ident => $kind:literal $stage:literal,)+) => {
        /// One histogram of the segment.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum Latency { $($(#[$meta])* $variant,)+ }

        impl Latency {
            /// Every histogram, in segment order.
            pub const ALL: &'static [Latency] = &[$(Latency::$variant,)+];

            /// Kind of operation that it times.
            pub const fn kind(self) -> &'static str {
                match self { $(Self::$variant => $kind,)+ }
            }

            /// Part of the operation that it times.
            pub const fn stage(self) -> &'static str {
                match self { $(Self::$variant => $stage,)+ }
            }
        }
    };
}

latencies! {
    /// Query: taken until resident and leased.
    QueryPrepare => "query" "prepare",
    /// Query: taken until published.
    QueryTotal => "query" "total",
    /// Prepare: taken until published; it is only a hint, its reads come later.
    PrepareTotal => "prepare" "total",
    /// Restore: taken until its first page can be copied.
    RestorePrepare => "restore" "prepare",
    /// Restore: from there until the last byte is in the device pages.
    RestoreCopy => "restore" "copy",
    /// Restore: from there until published.
    RestorePublish => "restore" "publish",
    /// Restore: taken until published.
    RestoreTotal => "restore" "total",
    /// Save: taken until memory is there.
    SavePrepare => "save" "prepare",
    /// Save: from there until the last byte is in DRAM.
    SaveCopy => "save" "copy",
    /// Save: from there until published.
    SavePublish => "save" "publish",
    /// Save: taken until published.
    SaveTotal => "save" "total",
}

/// Name of the metric that all histograms are series of.
pub const LATENCY_NAME: &str = "orbitkv_operation_latency_seconds";
/// Help line of [`LATENCY_NAME`].
pub const LATENCY_HELP: &str = "Time of operations inside the Manager, by kind and stage.";
/// Words of all histograms.
pub const LATENCY_WORDS: usize = Latency::ALL.len() * HISTOGRAM_WORDS;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_tile_the_line() {
        let mut start = 0;
        for bucket in 0..BUCKETS {
            assert_eq!(bucket_of(start), bucket, "start {start}");
            match bucket_end(bucket) {
                Some(end) => {
                    assert!(end > start);
                    assert_eq!(bucket_of(end - 1), bucket, "end {end}");
                    assert!(bucket == 0 || (end - start) * STEPS <= start, "at most a quarter");
                    start = end;
                }
                None => assert_eq!(bucket, BUCKETS - 1),
            }
        }
        assert_eq!(start, 1 << CEILING_BITS);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }
}
