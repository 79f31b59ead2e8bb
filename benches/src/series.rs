//! What was measured, by name, once a round.

use serde_json::{Map, Value, json};

use crate::stats::median;

/// One number, as the rounds found it.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// Name with its unit; `/` separates an object from its key.
    pub name: String,
    /// Median of the rounds.
    pub median: f64,
    /// Smallest of the rounds.
    pub min: f64,
    /// Largest of the rounds.
    pub max: f64,
    /// How many rounds.
    pub rounds: usize,
}

/// Numbers in the order in which they were first seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    named: Vec<(String, Vec<f64>)>,
}

impl Series {
    /// Adds what one round found.
    pub(crate) fn add(&mut self, name: impl Into<String>, value: f64) {
        let name = name.into();
        match self.named.iter_mut().find(|(known, _)| *known == name) {
            Some((_, values)) => values.push(value),
            None => self.named.push((name, vec![value])),
        }
    }

    /// What every round found, in order.
    pub(crate) fn values(&self, name: &str) -> &[f64] {
        let found = self.named.iter().find(|(known, _)| known == name);
        found.map_or(&[], |(_, values)| values)
    }

    /// What the last round found.
    pub(crate) fn last(&self, name: &str) -> f64 {
        self.values(name).last().copied().unwrap_or(f64::NAN)
    }

    /// Median and range of every number.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let row = |(name, values): &(String, Vec<f64>)| Row {
            name: name.clone(),
            median: median(values),
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            rounds: values.len(),
        };
        self.named.iter().map(row).collect()
    }
}

/// Puts `value` where `name` says, making the objects on the way.
pub(crate) fn put(into: &mut Map<String, Value>, name: &str, value: Value) {
    match name.split_once('/') {
        None => {
            into.insert(name.to_owned(), value);
        }
        Some((object, rest)) => {
            let inner = into.entry(object).or_insert_with(|| json!({}));
            if let Value::Object(inner) = inner {
                put(inner, rest, value);
            }
        }
    }
}

/// A number as JSON: whole where it is whole, else to four places.
pub(crate) fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 9e15 {
        json!(value as i64)
    } else {
        json!((value * 1e4).round() / 1e4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_become_medians_and_names_become_objects() {
        let mut series = Series::default();
        for value in [5.0, 1.0, 2.5] {
            series.add("one_core/ping_ns_p50", value);
        }
        series.add("polls", 4.0);
        assert_eq!(series.last("one_core/ping_ns_p50"), 2.5);
        let rows = series.rows();
        assert_eq!((rows[0].median, rows[0].min, rows[0].max, rows[0].rounds), (2.5, 1.0, 5.0, 3));
        let mut map = Map::new();
        for row in rows {
            put(&mut map, &row.name, number(row.median));
        }
        assert_eq!(Value::Object(map), json!({"one_core": {"ping_ns_p50": 2.5}, "polls": 4}));
    }
}
