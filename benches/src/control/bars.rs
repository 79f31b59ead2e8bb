//! What the numbers are held against. A missed bar is a fact to print, not a failure.

use crate::bar::Bar;
use crate::series::Series;
use crate::stats::median;

enum Rule {
    /// At most so many times another number.
    Times(f64, &'static str),
    AtMost(f64),
    AtLeast(f64),
}

const BARS: [(&str, Rule, &str); 12] = [
    ("ping_ns_p50", Rule::Times(4.0, "floor_two_line_ns"), "<= 4 x floor_two_line_ns"),
    ("query1_ns_p50", Rule::Times(10.0, "floor_two_line_ns"), "<= 10 x floor_two_line_ns"),
    (
        "query_each_further_page_ns_128",
        Rule::Times(3.0, "hashmap_lookup_ns_128"),
        "<= 3 x hashmap_lookup_ns_128",
    ),
    (
        "query_each_further_page_ns_1024",
        Rule::Times(3.0, "hashmap_lookup_ns"),
        "<= 3 x hashmap_lookup_ns",
    ),
    (
        "one_chain/query_each_further_page_ns_1024",
        Rule::Times(3.0, "one_chain/hashmap_lookup_ns"),
        "<= 3 x one_chain/hashmap_lookup_ns",
    ),
    ("poll_empty_ns", Rule::AtMost(2.0), "<= 2"),
    ("poll_empty_syscalls", Rule::AtMost(0.0), "<= 0"),
    ("poll_empty_allocations", Rule::AtMost(0.0), "<= 0"),
    (
        "one_core/ping_ns_p50",
        Rule::Times(5.0, "one_core/floor_futex_ns"),
        "<= 5 x one_core/floor_futex_ns",
    ),
    (
        "one_core/query1_ns_p50",
        Rule::Times(5.0, "one_core/floor_futex_ns"),
        "<= 5 x one_core/floor_futex_ns",
    ),
    ("idle_manager_cpu_ratio", Rule::AtMost(0.005), "<= 0.005"),
    ("eight_clients/queries_per_second", Rule::AtLeast(250_000.0), ">= 250000"),
];

/// Every bar beside what was measured. A number that is missing passes nothing.
///
/// Against a floor each round is compared with itself, since the speed of a shared machine drifts:
/// the median of the rounds' ratios decides.
pub(super) fn compare(series: &Series) -> Vec<Bar> {
    let bar = |(name, rule, text): &(&'static str, Rule, &'static str)| {
        let values = series.values(name);
        let value = if values.is_empty() { f64::NAN } else { median(values) };
        let (limit, ratio, pass) = match rule {
            Rule::Times(factor, floor) => {
                let floors = series.values(floor);
                let ratios: Vec<f64> =
                    values.iter().zip(floors).map(|(value, floor)| value / floor).collect();
                let ratio = median(&ratios);
                (factor * median(floors), Some(ratio), !ratios.is_empty() && ratio <= *factor)
            }
            Rule::AtMost(limit) => (*limit, None, value <= *limit),
            Rule::AtLeast(limit) => (*limit, None, value >= *limit),
        };
        let (name, rule) = ((*name).to_owned(), (*text).to_owned());
        Bar { name, value, limit, ratio, rule, pass }
    };
    BARS.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(series: &Series, name: &str) -> bool {
        compare(series).into_iter().find(|bar| bar.name == name).unwrap().pass
    }

    #[test]
    fn a_bar_is_met_and_missed_where_it_stands() {
        for (ping, rate, expected) in [(400.0, 250_000.0, true), (400.1, 249_999.0, false)] {
            let mut series = Series::default();
            series.add("floor_two_line_ns", 100.0);
            series.add("ping_ns_p50", ping);
            series.add("eight_clients/queries_per_second", rate);
            assert_eq!(pass(&series, "ping_ns_p50"), expected);
            assert_eq!(pass(&series, "eight_clients/queries_per_second"), expected);
            assert!(!pass(&series, "poll_empty_syscalls"), "what is missing passes nothing");
            assert!(!pass(&series, "query1_ns_p50"), "what is missing passes nothing");
        }
    }

    #[test]
    fn each_round_is_compared_with_its_own_floor() {
        let mut series = Series::default();
        for (floor, ping) in [(100.0, 390.0), (300.0, 1000.0), (310.0, 1100.0)] {
            series.add("floor_two_line_ns", floor);
            series.add("ping_ns_p50", ping);
        }
        let bar = compare(&series).into_iter().find(|bar| bar.name == "ping_ns_p50").unwrap();
        assert_eq!((bar.value, bar.limit, bar.pass), (1000.0, 1200.0, true));
        assert!((bar.ratio.unwrap() - 1100.0 / 310.0).abs() < 1e-9);
    }
}
