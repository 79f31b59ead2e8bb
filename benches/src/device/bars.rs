//! What the numbers of a GPU are held against.

use crate::bar::Bar;
use crate::series::Row;

/// Shapes that wait for a few hundred microseconds at most: times of the raw copy.
const SHORT: [&str; 3] = ["9m_page", "18m_contiguous", "18m_split"];
/// Most of it.
const SHORT_RATIO: f64 = 1.15;
/// The same for 576 MiB: 0.95 of the speed of the raw copy.
const LARGE_RATIO: f64 = 1.0 / 0.95;
/// Both ways at once: 0.9 of the raw copy of the same bytes both ways at once.
const BOTH_RATIO: f64 = 1.0 / 0.9;
/// 4 KiB, submit to observed.
const RESTORE_4K_US: f64 = 15.0;
/// Done word seen, behind the Manager's own sight of the copy's end: median and 99th percentile.
const DELIVERY_NS: (f64, f64) = (1e3, 5e3);

/// The bars of what was measured. `delivery_p99` is none where nothing was restored.
pub(super) fn compare(rows: &[Row], delivery_p99: Option<f64>) -> Vec<Bar> {
    let mut bars: Vec<Bar> = rows.iter().filter_map(of_row).collect();
    bars.extend(delivery_p99.map(|p99| at_most("delivery_ns/p99", p99, DELIVERY_NS.1, "ns")));
    bars
}

fn of_row(row: &Row) -> Option<Bar> {
    let name = row.name.as_str();
    let mut parts = name.split('/');
    let (shape, op, what) = (parts.next()?, parts.next(), parts.next());
    match (shape, op, what) {
        ("delivery_ns", None, _) => Some(at_most(name, row.median, DELIVERY_NS.0, "ns")),
        ("4k" | "4k_again", Some("restore"), Some("ours_us")) => {
            Some(at_most(name, row.median, RESTORE_4K_US, "us"))
        }
        (shape, Some(op), Some("ratio")) => {
            let limit = match op {
                "both" => BOTH_RATIO,
                _ if shape.starts_with("576m_") => LARGE_RATIO,
                _ if SHORT.contains(&shape) => SHORT_RATIO,
                _ => return None,
            };
            let bar = at_most(name, row.median, limit, "of the best raw copy's time");
            Some(Bar { ratio: Some(row.median), ..bar })
        }
        _ => None,
    }
}

/// A number that is none passes nothing.
fn at_most(name: &str, value: f64, limit: f64, unit: &str) -> Bar {
    let rule = format!("<= {limit:.3} {unit}");
    Bar { name: name.to_owned(), value, limit, ratio: None, rule, pass: value <= limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(name: &str, median: f64) -> Option<bool> {
        let row = Row { name: name.to_owned(), median, min: median, max: median, rounds: 1 };
        compare(&[row], None).pop().map(|bar| bar.pass)
    }

    #[test]
    fn a_bar_is_met_and_missed_where_it_stands() {
        for (name, met, missed) in [
            ("9m_page/save/ratio", 1.15, 1.151),
            ("18m_split/restore/ratio", 1.15, 1.48),
            ("576m_72x128k/restore/ratio", 1.052, 1.053),
            ("576m_72x128k/both/ratio", 1.111, 1.112),
            ("18m_contiguous/both/ratio", 1.111, 1.112),
            ("4k_again/restore/ours_us", 15.0, 15.1),
            ("delivery_ns", 1000.0, 1001.0),
        ] {
            assert_eq!(pass(name, met), Some(true), "{name}");
            assert_eq!(pass(name, missed), Some(false), "{name}");
            assert_eq!(pass(name, f64::NAN), Some(false), "{name}");
        }
    }

    #[test]
    fn what_has_no_bar_gets_none() {
        for name in ["4k/save/ratio", "9m_page/save/gb_per_s", "18m_split_shuffled/save/ratio"] {
            assert_eq!(pass(name, 1.0), None, "{name}");
        }
        assert_eq!(pass("beside_busy/18m_split/save/ours_us", 1.0), None);
        let bars = compare(&[], Some(5001.0));
        assert_eq!(bars.iter().map(|bar| bar.pass).collect::<Vec<_>>(), [false]);
    }
}
