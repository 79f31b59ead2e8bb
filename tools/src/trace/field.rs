//! Typed access to the fields of a parsed line; every failure names its field.

use serde_json::{Map, Value};

use super::error::Problem;

/// A field and what is wrong with it.
pub(super) type FieldError = (&'static str, Problem);

/// Largest arrival time, in milliseconds: 10,000 years, so that sums never overflow.
pub(super) const TIME_MS_MAX: u64 = 315_576_000_000_000;
/// Largest token count of one request.
pub(super) const TOKENS_MAX: u64 = 1 << 32;

/// A line that must be a JSON object.
pub(super) fn object(text: &str) -> Result<Map<String, Value>, FieldError> {
    match json(text)? {
        Value::Object(map) => Ok(map),
        _ => Err(("line", Problem::Type { expected: "a JSON object" })),
    }
}

/// A line of JSON.
pub(super) fn json(text: &str) -> Result<Value, FieldError> {
    serde_json::from_str(text).map_err(|error| ("line", Problem::Json { column: error.column() }))
}

/// A member that must be there.
pub(super) fn member<'a>(
    map: &'a Map<String, Value>,
    field: &'static str,
) -> Result<&'a Value, FieldError> {
    map.get(field).ok_or((field, Problem::Missing))
}

/// A whole number from `min` to `max`.
pub(super) fn whole(
    value: &Value,
    field: &'static str,
    min: u64,
    max: u64,
) -> Result<u64, FieldError> {
    let Value::Number(number) = value else {
        return Err((field, Problem::Type { expected: "a whole number" }));
    };
    if let Some(whole) = number.as_u64() {
        return if (min..=max).contains(&whole) {
            Ok(whole)
        } else {
            Err((field, Problem::Range { min, max }))
        };
    }
    // Some exporters write 12.0 for 12; anything else with a point is no count.
    let exact = (1_u64 << 53) as f64;
    match number.as_f64() {
        Some(float) if float.fract() != 0.0 => {
            Err((field, Problem::Type { expected: "a whole number" }))
        }
        Some(float) if float >= min as f64 && float <= max as f64 && float < exact => {
            Ok(float as u64)
        }
        _ => Err((field, Problem::Range { min, max })),
    }
}

/// A number of tokens.
pub(super) fn tokens(map: &Map<String, Value>, field: &'static str) -> Result<u64, FieldError> {
    whole(member(map, field)?, field, 0, TOKENS_MAX)
}

/// Seconds, possibly with a fraction, as milliseconds.
pub(super) fn seconds(value: &Value, field: &'static str) -> Result<u64, FieldError> {
    let seconds = value.as_f64().ok_or((field, Problem::Type { expected: "seconds" }))?;
    let max = TIME_MS_MAX / 1000;
    if !(0.0..=max as f64).contains(&seconds) {
        return Err((field, Problem::Range { min: 0, max }));
    }
    Ok((seconds * 1000.0).round() as u64)
}

/// A list.
pub(super) fn list<'a>(value: &'a Value, field: &'static str) -> Result<&'a [Value], FieldError> {
    value.as_array().map(Vec::as_slice).ok_or((field, Problem::Type { expected: "a list" }))
}
