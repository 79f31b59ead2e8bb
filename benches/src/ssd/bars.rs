//! What the numbers are held against.

use crate::bar::Bar;
use crate::series::Series;
use crate::stats::median;

/// Pages up to this length are small: a read of one is shorter than most writes that it meets.
const SMALL_PAGE_BYTES_MAX: u32 = 256 << 10;

/// The bars of one page size. A number that is missing passes nothing.
pub(super) fn compare(series: &Series, page_bytes: u32) -> Vec<Bar> {
    let limit = if page_bytes <= SMALL_PAGE_BYTES_MAX { 1.5 } else { 1.25 };
    let mut read_p99 = bar(series, page_bytes, "read_p99_ratio", limit, false);
    // What the device does to plain reads beside as many plain writes.
    if let floor @ [_, ..] = series.values(&format!("{page_bytes}/raw_p99_ratio")) {
        read_p99.rule += &format!("; plain {:.2}", median(floor));
    }
    let at_least = |name, limit| bar(series, page_bytes, name, limit, true);
    vec![
        at_least("read_ratio", 0.95),
        at_least("write_ratio", 0.9),
        read_p99,
        at_least("write_under_read_ratio", 0.1),
    ]
}

fn bar(series: &Series, page_bytes: u32, name: &str, limit: f64, at_least: bool) -> Bar {
    let name = format!("{page_bytes}/{name}");
    let values = series.values(&name);
    let value = if values.is_empty() { f64::NAN } else { median(values) };
    let pass = if at_least { value >= limit } else { value <= limit };
    let rule = format!("{} {limit}", if at_least { ">=" } else { "<=" });
    Bar { name, value, limit, ratio: Some(value), rule, pass }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_met_and_missed_where_it_stands() {
        let passes = |page_bytes: u32, name: &str, value: Option<f64>| {
            let mut series = Series::default();
            if let Some(value) = value {
                series.add(format!("{page_bytes}/{name}"), value);
            }
            let bars = compare(&series, page_bytes);
            let name = format!("{page_bytes}/{name}");
            bars.into_iter().find(|bar| bar.name == name).unwrap().pass
        };
        for (page_bytes, name, value, expected) in [
            (1 << 20, "read_ratio", Some(0.95), true),
            (1 << 20, "read_ratio", Some(0.949), false),
            (1 << 20, "read_ratio", None, false),
            (9 << 20, "write_ratio", Some(0.89), false),
            (128 << 10, "read_p99_ratio", Some(1.5), true),
            (1 << 20, "read_p99_ratio", Some(1.26), false),
            (1 << 20, "read_p99_ratio", None, false),
            (9 << 20, "write_under_read_ratio", Some(0.1), true),
            (9 << 20, "write_under_read_ratio", Some(0.09), false),
        ] {
            assert_eq!(passes(page_bytes, name, value), expected, "{name} {value:?}");
        }
    }

    #[test]
    fn what_the_plain_loop_has_is_said_beside_the_bar_and_moves_it_nowhere() {
        let mut series = Series::default();
        series.add("1048576/read_p99_ratio", 1.4);
        for plain in [1.3, 1.9, 1.45] {
            series.add("1048576/raw_p99_ratio", plain);
        }
        let bars = compare(&series, 1 << 20);
        let bar = bars.iter().find(|bar| bar.name.ends_with("read_p99_ratio")).unwrap();
        assert_eq!((bar.rule.as_str(), bar.limit, bar.pass), ("<= 1.25; plain 1.45", 1.25, false));
    }
}
