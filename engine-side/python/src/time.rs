//! Seconds of Python as the ring client's times.

use std::time::Duration;

use orbitkv_engine::Deadline;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// `seconds`, at least 0; beyond what a duration holds, infinity included, its largest.
pub(crate) fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        let words = format!("{name} is {seconds} s; give 0 or more");
        return Err(PyValueError::new_err(words));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// `None` is the Manager's own deadline.
pub(crate) fn deadline(seconds: Option<f64>) -> PyResult<Deadline> {
    match seconds {
        None => Ok(Deadline::DEFAULT),
        Some(seconds) => duration("deadline", seconds).map(Deadline::after),
    }
}
