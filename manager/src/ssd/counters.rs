//! What one device has done and is doing, for telemetry: written by its workers, read by anyone.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::IoFault;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Live numbers of one device. Each is exact; together they are no snapshot.
        #[derive(Default, Debug)]
        pub(crate) struct DeviceCounters {
            $($(#[$doc])* pub(crate) $name: AtomicU64,)*
            read_faults: [AtomicU64; IoFault::LABELS.len()],
            write_faults: [AtomicU64; IoFault::LABELS.len()],
        }

        /// Numbers of one device at one moment.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        pub struct DeviceSnapshot {
            $($(#[$doc])* pub $name: u64,)*
            /// Reads that failed, in the order of [`IoFault::LABELS`].
            pub read_faults: [u64; IoFault::LABELS.len()],
            /// Writes that failed, in the order of [`IoFault::LABELS`].
            pub write_faults: [u64; IoFault::LABELS.len()],
        }

        impl DeviceCounters {
            /// Reads every number.
            pub(crate) fn snapshot(&self) -> DeviceSnapshot {
                let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
                DeviceSnapshot {
                    $($name: load(&self.$name),)*
                    read_faults: self.read_faults.each_ref().map(load),
                    write_faults: self.write_faults.each_ref().map(load),
                }
            }
        }
    };
}

counters! {
    /// Pages read and found good. Counter.
    read_pages,
    /// Image bytes of those pages. Counter.
    read_bytes,
    /// Pages written with their footers. Counter.
    written_pages,
    /// Image bytes of those pages. Counter.
    written_bytes,
    /// Pages that are being read or wait for it. Gauge.
    reading,
    /// Pages that are being written or wait for it. Gauge.
    writing,
    /// Image bytes of writes in the kernel's hands. Gauge.
    write_inflight_bytes,
    /// What that is held below at the moment. Gauge.
    write_inflight_limit_bytes,
    /// 98th percentile of small page reads without writes beside them, in nanoseconds. Gauge.
    small_read_alone_ns,
    /// The same with writes beside them. Gauge.
    small_read_beside_ns,
    /// 98th percentile of larger page reads without writes beside them, in nanoseconds. Gauge.
    large_read_alone_ns,
    /// The same with writes beside them. Gauge.
    large_read_beside_ns,
    /// Transfers that moved fewer bytes than asked. Counter.
    short_transfers,
    /// Transfers that were sent again after EAGAIN or EINTR. Counter.
    interrupted_transfers,
    /// Pages that travelled in a transfer together with others. Counter.
    coalesced_pages,
    /// Where a read last failed, in bytes from the start of the file.
    bad_offset,
    /// Superblocks written. Counter.
    superblock_writes,
    /// Superblocks that could not be written. Counter.
    superblock_faults,
    /// Retired slots that found no room in the superblock: used again after a restart. Counter.
    retired_unrecorded,
}

impl DeviceCounters {
    pub(crate) fn count_read(&self, image_bytes: u32, fault: Option<IoFault>) {
        self.reading.fetch_sub(1, Ordering::Relaxed);
        match fault {
            None => {
                self.read_pages.fetch_add(1, Ordering::Relaxed);
                self.read_bytes.fetch_add(image_bytes.into(), Ordering::Relaxed);
            }
            Some(fault) => _ = self.read_faults[fault.index()].fetch_add(1, Ordering::Relaxed),
        }
    }

    pub(crate) fn count_write(&self, image_bytes: u32, fault: Option<IoFault>) {
        self.writing.fetch_sub(1, Ordering::Relaxed);
        match fault {
            None => {
                self.written_pages.fetch_add(1, Ordering::Relaxed);
                self.written_bytes.fetch_add(image_bytes.into(), Ordering::Relaxed);
            }
            Some(fault) => _ = self.write_faults[fault.index()].fetch_add(1, Ordering::Relaxed),
        }
    }
}

/// Raises a counter by one.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
