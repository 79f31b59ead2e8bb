//! A number beside what it is held against. A missed bar is a fact to print, not a failure.

use serde::Serialize;

/// One number beside its bar.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Bar {
    /// The number.
    pub name: String,
    /// Its median.
    pub value: f64,
    /// What it may be at most, or must be at least.
    pub limit: f64,
    /// Median of the rounds' ratios to the floor, where the bar is one.
    pub ratio: Option<f64>,
    /// How the limit comes about.
    pub rule: String,
    /// Whether it holds.
    pub pass: bool,
}
