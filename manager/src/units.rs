//! Sizes and durations as people type them: `10 GiB`, `500ms`.
//!
//! Pure and total: every text is a value or a [`UnitError`] that lists the accepted forms. Only
//! whole numbers are accepted, so that what is typed is exactly what is used.
//!
//! | size suffix | bytes | | duration suffix | milliseconds |
//! | --- | ---: | --- | --- | ---: |
//! | none | 1 | | `ms` | 1 |
//! | `kb` `mb` `gb` `tb` | 1000, 1000², 1000³, 1000⁴ | | `s` | 1000 |
//! | `KiB` `MiB` `GiB` `TiB` | 1024, 1024², 1024³, 1024⁴ | | `m` | 60 000 |
//!
//! Case does not matter, one or more spaces may stand before the suffix, `_` may group digits.

use std::fmt;
use std::time::Duration;

/// What a size may look like, for messages.
pub const SIZE_FORMS: &str = "a whole number of bytes or one with KiB, MiB, GiB, TiB (powers of 1024) or kb, mb, gb, tb \
     (powers of 1000), as in 10GiB";
/// What a duration may look like, for messages.
pub const DURATION_FORMS: &str = "a whole number with ms, s or m, as in 500ms";

const KIB: u64 = 1024;
const SIZE_UNITS: [(&str, u64); 9] = [
    ("", 1),
    ("kib", KIB),
    ("mib", KIB.pow(2)),
    ("gib", KIB.pow(3)),
    ("tib", KIB.pow(4)),
    ("kb", 1000),
    ("mb", 1000_u64.pow(2)),
    ("gb", 1000_u64.pow(3)),
    ("tb", 1000_u64.pow(4)),
];
const DURATION_UNITS: [(&str, u64); 3] = [("ms", 1), ("s", 1000), ("m", 60_000)];

/// Why a text is no size or no duration. One line; says what is accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UnitError {
    /// Nothing but spaces.
    #[error("empty; write {forms}")]
    Empty {
        /// [`SIZE_FORMS`] or [`DURATION_FORMS`].
        forms: &'static str,
    },
    /// A sign, a fraction, an exponent or no digit at all where the number should be.
    #[error("not a whole number without sign; write {forms}")]
    NotANumber {
        /// [`SIZE_FORMS`] or [`DURATION_FORMS`].
        forms: &'static str,
    },
    /// The number is fine, what follows it is not (or is missing, for a duration).
    #[error("unknown or missing unit; write {forms}")]
    Unit {
        /// [`SIZE_FORMS`] or [`DURATION_FORMS`].
        forms: &'static str,
    },
    /// More than 2^64 - 1 bytes or milliseconds.
    #[error("larger than 2^64 - 1 {what}; write {forms}")]
    Overflow {
        /// `bytes` or `ms`.
        what: &'static str,
        /// [`SIZE_FORMS`] or [`DURATION_FORMS`].
        forms: &'static str,
    },
}

/// Bytes for a person: the largest unit of which there is one, cut to one decimal.
pub fn rounded(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(bits, _)| bytes >> bits > 0) {
        Some((bits, unit)) => {
            let tenths = (u128::from(bytes) * 10) >> bits;
            match (tenths / 10, tenths % 10) {
                (whole, 0) => format!("{whole} {unit}"),
                (whole, tenth) => format!("{whole}.{tenth} {unit}"),
            }
        }
        None => format!("{bytes} bytes"),
    }
}

/// Reads a size in bytes. Zero is a size; whether a field allows it is the field's business.
///
/// # Errors
/// Every text that is not of [`SIZE_FORMS`], or too large.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    parse(text, &SIZE_UNITS, "bytes", SIZE_FORMS)
}

/// Reads a duration; the resolution is one millisecond. A number needs its unit, except zero.
///
/// # Errors
/// Every text that is not of [`DURATION_FORMS`], or too large.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    if text.trim() == "0" {
        return Ok(Duration::ZERO);
    }
    parse(text, &DURATION_UNITS, "ms", DURATION_FORMS).map(Duration::from_millis)
}

fn parse(
    text: &str,
    units: &[(&str, u64)],
    what: &'static str,
    forms: &'static str,
) -> Result<u64, UnitError> {
    let text = text.trim();
    if text.is_empty() {
        return Err(UnitError::Empty { forms });
    }
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    if !number.starts_with(|c: char| c.is_ascii_digit()) || looks_like_float(suffix) {
        return Err(UnitError::NotANumber { forms });
    }
    let suffix = suffix.trim_start();
    let (_, factor) = units
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(suffix))
        .ok_or(UnitError::Unit { forms })?;
    number
        .bytes()
        .filter(|byte| *byte != b'_')
        .try_fold(0_u64, |sum, digit| sum.checked_mul(10)?.checked_add(u64::from(digit - b'0')))
        .and_then(|number| number.checked_mul(*factor))
        .ok_or(UnitError::Overflow { what, forms })
}

/// `1.5GiB`, `1e30`: digits go on after something that belongs to a number.
fn looks_like_float(suffix: &str) -> bool {
    let mut bytes = suffix.bytes();
    match bytes.next() {
        Some(b'.' | b',') => true,
        Some(b'e' | b'E') => bytes.next().is_some_and(|b| b.is_ascii_digit() || b"+-".contains(&b)),
        _ => false,
    }
}

/// Shows a number of bytes in the largest unit that divides it, so that [`parse_size`] reads the
/// same number back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (power, unit) in [(4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")] {
            let factor = KIB.pow(power);
            if self.0 != 0 && self.0.is_multiple_of(factor) {
                return write!(f, "{}{unit}", self.0 / factor);
            }
        }
        write!(f, "{}", self.0)
    }
}

/// Shows a duration, cut to milliseconds, in the largest unit that divides it, so that
/// [`parse_duration`] reads the same duration back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Span(pub Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        for (factor, unit) in [(60_000, "m"), (1000, "s")] {
            if ms != 0 && ms.is_multiple_of(factor) {
                return write!(f, "{}{unit}", ms / factor);
            }
        }
        write!(f, "{ms}ms")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_every_unit() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            (" 1KiB ", 1024),
            ("3 MiB", 3 << 20),
            ("10 GiB", 10 << 30),
            ("10gib", 10 << 30),
            ("2TiB", 2 << 40),
            ("1kb", 1000),
            ("1 MB", 1_000_000),
            ("7gb", 7_000_000_000),
            ("1tb", 1_000_000_000_000),
            ("0 GiB", 0),
            ("1_048_576", 1 << 20),
            ("18446744073709551615", u64::MAX),
            ("16777215TiB", 16_777_215 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn refused_sizes_name_the_cause_and_the_accepted_forms() {
        let forms = SIZE_FORMS;
        for (text, error) in [
            ("", UnitError::Empty { forms }),
            ("   ", UnitError::Empty { forms }),
            ("-1", UnitError::NotANumber { forms }),
            ("+1", UnitError::NotANumber { forms }),
            ("GiB", UnitError::NotANumber { forms }),
            ("_1", UnitError::NotANumber { forms }),
            ("1.5GiB", UnitError::NotANumber { forms }),
            ("1,5GiB", UnitError::NotANumber { forms }),
            ("1e30", UnitError::NotANumber { forms }),
            ("1E+3", UnitError::NotANumber { forms }),
            ("0x10", UnitError::Unit { forms }),
            ("10 G", UnitError::Unit { forms }),
            ("10GiBs", UnitError::Unit { forms }),
            ("1 0", UnitError::Unit { forms }),
            ("10%", UnitError::Unit { forms }),
            ("1 GiB 2", UnitError::Unit { forms }),
            ("١", UnitError::NotANumber { forms }),
            ("18446744073709551616", UnitError::Overflow { what: "bytes", forms }),
            ("16777216TiB", UnitError::Overflow { what: "bytes", forms }),
            ("99999999999999999999999999 KiB", UnitError::Overflow { what: "bytes", forms }),
        ] {
            assert_eq!(parse_size(text), Err(error), "{text}");
            let message = error.to_string();
            assert!(message.contains("GiB") && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn durations() {
        for (text, ms) in
            [("0", 0), ("0s", 0), ("500ms", 500), ("5 s", 5000), ("2m", 120_000), ("30S", 30_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "5", "-1s", "1.5s", "1h", "1e3ms", "307445734561826m", "ms"] {
            let error = parse_duration(text).expect_err(text);
            assert!(error.to_string().contains("ms, s or m"), "{error}");
        }
    }

    #[test]
    fn what_is_shown_reads_back() {
        for bytes in [0, 1, 1023, 1024, 1536, 10 << 30, (1 << 40) + 1, u64::MAX] {
            assert_eq!(parse_size(&Size(bytes).to_string()), Ok(bytes));
        }
        for ms in [0, 1, 999, 1000, 60_000, 90_000, 123_456_789] {
            let duration = Duration::from_millis(ms);
            assert_eq!(parse_duration(&Span(duration).to_string()), Ok(duration));
        }
        assert_eq!(Size(10 << 30).to_string(), "10GiB");
        assert_eq!(Span(Duration::from_secs(90)).to_string(), "90s");
    }

    #[test]
    fn sizes_are_cut_to_one_decimal() {
        let shown = [0, 1023, 1024, 1536, (64 << 20) - 1, 64 << 20, u64::MAX].map(rounded);
        let expected = ["0 bytes", "1023 bytes", "1 KiB", "1.5 KiB", "63.9 MiB", "64 MiB"];
        assert_eq!(shown[..6], expected);
        assert_eq!(shown[6], "16777215.9 TiB");
    }
}
