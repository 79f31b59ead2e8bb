//! Prometheus text from a snapshot.
//!
//! The set of series is fixed by the build and the number of SSD devices: no id, key, path or
//! name of a user is ever a label value.

use std::fmt::Write as _;

use DeviceValue::{Seconds, Whole};
use orbitkv_shm_protocol::inspect::{DeviceView, Numbers, Snapshot, Value};
use orbitkv_shm_protocol::telemetry::{
    LATENCY_HELP, LATENCY_NAME, Latency, MetricKind, SsdRecovery, bucket_end, families,
};

/// Upper ends of the buckets in the text, as powers of two in nanoseconds: 4 µs to 17 s, each four
/// times the one before. The segment has finer ones.
const TEXT_BUCKET_BITS: [u32; 12] = [12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34];

/// A metric with one series for each SSD device, labelled by its number in configuration order.
#[derive(Clone, Copy, Debug)]
pub struct DeviceFamily {
    /// Name.
    pub name: &'static str,
    /// One line for a person.
    pub help: &'static str,
    value: DeviceValue,
}

/// What a metric reads of a device.
#[derive(Clone, Copy, Debug)]
enum DeviceValue {
    Whole(fn(&DeviceView) -> u64),
    /// Nanoseconds there, seconds in the text.
    Seconds(fn(&DeviceView) -> u64),
}

impl DeviceValue {
    fn of(self, device: &DeviceView) -> Value {
        match self {
            Self::Whole(read) => Value::Whole(read(device)),
            Self::Seconds(read) => Value::Seconds(read(device) as f64 / 1e9),
        }
    }
}

/// The table of these metrics; all are gauges.
pub const DEVICE_FAMILIES: [DeviceFamily; 18] = [
    DeviceFamily {
        name: "orbitkv_ssd_device_capacity_bytes",
        help: "Bytes that slots of the device may take.",
        value: Whole(|device| device.capacity_bytes),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_used_bytes",
        help: "Bytes of its slots that hold a page.",
        value: Whole(|device| device.used_bytes),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_reading_pages",
        help: "Page reads queued or in the kernel.",
        value: Whole(|device| device.reading),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_writing_pages",
        help: "Page writes queued or in the kernel.",
        value: Whole(|device| device.writing),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_write_inflight_bytes",
        help: "Image bytes of writes in the kernel.",
        value: Whole(|device| device.write_inflight_bytes),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_write_inflight_limit_bytes",
        help: "What these are held below at the moment.",
        value: Whole(|device| device.write_inflight_limit_bytes),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_small_read_alone_seconds",
        help: "98th percentile of reads of pages up to 256 KiB without writes beside them.",
        value: Seconds(|device| device.small_read_ns[0]),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_small_read_beside_seconds",
        help: "The same with writes beside them.",
        value: Seconds(|device| device.small_read_ns[1]),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_large_read_alone_seconds",
        help: "98th percentile of reads of larger pages without writes beside them.",
        value: Seconds(|device| device.large_read_ns[0]),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_large_read_beside_seconds",
        help: "The same with writes beside them.",
        value: Seconds(|device| device.large_read_ns[1]),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_direct",
        help: "1 when the device bypasses the page cache.",
        value: Whole(|device| device.direct.into()),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_registered",
        help: "1 when the DRAM arenas are registered with its rings.",
        value: Whole(|device| device.registered.into()),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_readable",
        help: "1 while pages are read from the device: after a start not before its slots are known.",
        value: Whole(|device| (device.health != "off" && !is_searched(device)).into()),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_writable",
        help: "1 while pages are written to the device: after a start not before what was found is \
               taken over.",
        value: Whole(|device| (device.health == "healthy" && !device.is_recovering()).into()),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_recovering",
        help: "1 while its pages are being found again after a start.",
        value: Whole(|device| device.is_recovering().into()),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_scan_slots",
        help: "Slots of the device at the start.",
        value: Whole(|device| device.scan_slots),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_scanned_slots",
        help: "Those that were looked at since.",
        value: Whole(|device| device.scanned_slots),
    },
    DeviceFamily {
        name: "orbitkv_ssd_device_scan_read_bytes",
        help: "Bytes that were read for that.",
        value: Whole(|device| device.scan_read_bytes),
    },
];

/// The text of `/metrics`, format version 0.0.4.
pub fn render(snapshot: &Snapshot) -> String {
    let mut text = String::with_capacity(64 * 1024);
    write_families(&mut text, &snapshot.counters);
    write_latencies(&mut text, &snapshot.counters);
    for family in DEVICE_FAMILIES {
        write_head(&mut text, family.name, family.help, "gauge");
        for (number, device) in snapshot.ssd.iter().enumerate() {
            let labels = format_args!("{{device=\"{number}\"}}");
            write_value(&mut text, family.name, labels, family.value.of(device));
        }
    }
    text
}

fn write_families(text: &mut String, numbers: &Numbers) {
    let mut series = numbers.series();
    for (family, _) in families() {
        let kind: MetricKind = family.kind;
        write_head(text, family.name, family.help(), kind.label());
        for (family, position, value) in series.by_ref().take(family.series()) {
            let labels = family.label_text(position);
            write_value(text, family.name, format_args!("{labels}"), value);
        }
    }
}

fn write_latencies(text: &mut String, numbers: &Numbers) {
    write_head(text, LATENCY_NAME, LATENCY_HELP, "histogram");
    for &latency in Latency::ALL {
        let labels = format!("kind=\"{}\",stage=\"{}\"", latency.kind(), latency.stage());
        let (sum_ns, _, buckets) = numbers.histogram(latency);
        let mut fine = buckets.iter().enumerate();
        let mut below = 0_u64;
        for bits in TEXT_BUCKET_BITS {
            let end = 1_u64 << bits;
            for (bucket, &times) in fine.by_ref() {
                below = below.saturating_add(times);
                if bucket_end(bucket).is_none_or(|bucket_end| bucket_end >= end) {
                    break;
                }
            }
            let le = end as f64 / 1e9;
            line(text, LATENCY_NAME, format_args!("_bucket{{{labels},le=\"{le}\"}} {below}"));
        }
        let count = fine.fold(below, |sum, (_, &times)| sum.saturating_add(times));
        line(text, LATENCY_NAME, format_args!("_bucket{{{labels},le=\"+Inf\"}} {count}"));
        line(text, LATENCY_NAME, format_args!("_sum{{{labels}}} {}", sum_ns as f64 / 1e9));
        line(text, LATENCY_NAME, format_args!("_count{{{labels}}} {count}"));
    }
}

fn write_head(text: &mut String, name: &str, help: &str, kind: &str) {
    line(text, "# HELP ", format_args!("{name} {help}"));
    line(text, "# TYPE ", format_args!("{name} {kind}"));
}

fn write_value(text: &mut String, name: &str, labels: std::fmt::Arguments<'_>, value: Value) {
    match value {
        Value::Whole(value) => line(text, name, format_args!("{labels} {value}")),
        Value::Seconds(value) => line(text, name, format_args!("{labels} {value}")),
    }
}

/// Writing to a `String` cannot fail.
fn line(text: &mut String, start: &str, rest: std::fmt::Arguments<'_>) {
    let _ = writeln!(text, "{start}{rest}");
}

/// Until all of it is known no page of it is found.
fn is_searched(device: &DeviceView) -> bool {
    device.recovery == SsdRecovery::Scanning.label()
}
