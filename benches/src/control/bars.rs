//! What the numbers are held against. A missed bar is a fact to print, not a failure.

use serde::Serialize;

use super::series::Row;

/// One number beside its bar.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Bar {
    /// The number.
    pub name: &'static str,
    /// Its median.
    pub value: f64,
    /// What it may be at most, or must be at least.
    pub limit: f64,
    /// How the limit comes about.
    pub rule: &'static str,
    /// Whether it holds.
    pub pass: bool,
}

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
pub(super) fn compare(rows: &[Row]) -> Vec<Bar> {
    let median =
        |name: &str| rows.iter().find(|row| row.name == name).map_or(f64::NAN, |row| row.median);
    let bar = |(name, rule, text): &(&'static str, Rule, &'static str)| {
        let value = median(name);
        let (limit, pass) = match rule {
            Rule::Times(factor, floor) => {
                let limit = factor * median(floor);
                (limit, value <= limit)
            }
            Rule::AtMost(limit) => (*limit, value <= *limit),
            Rule::AtLeast(limit) => (*limit, value >= *limit),
        };
        Bar { name, value, limit, rule: text, pass }
    };
    BARS.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_held_met_and_missed_where_it_stands() {
        let row = |name: &str, median: f64| Row {
            name: name.to_owned(),
            median,
            min: median,
            max: median,
            rounds: 1,
        };
        let pass = |rows: &[Row], name: &str| {
            compare(rows).into_iter().find(|bar| bar.name == name).unwrap().pass
        };
        let mut rows = vec![row("floor_two_line_ns", 100.0), row("ping_ns_p50", 400.0)];
        rows.push(row("eight_clients/queries_per_second", 250_000.0));
        assert!(pass(&rows, "ping_ns_p50"));
        assert!(pass(&rows, "eight_clients/queries_per_second"));
        rows[1].median = 400.1;
        rows[2].median = 249_999.0;
        assert!(!pass(&rows, "ping_ns_p50"));
        assert!(!pass(&rows, "eight_clients/queries_per_second"));
        assert!(!pass(&rows, "poll_empty_syscalls"), "what is missing passes nothing");
    }
}
