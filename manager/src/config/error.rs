//! What is wrong with the operator's words. Every message is one line.

use std::io;
use std::path::PathBuf;

use super::words::Place;

/// Why a configuration is refused. Nothing was created before it was found.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read the configuration: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is longer than any configuration.
    #[error("{}: not a configuration: longer than {bytes_max} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The bound.
        bytes_max: u64,
    },
    /// The file is no TOML.
    #[error("{}:{line}: not TOML: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The parser's words.
        message: String,
    },
    /// A table or key that does not exist.
    #[error("{place}: unknown name{}; accepted: {accepted}", did_you_mean(*nearest))]
    UnknownName {
        /// Where.
        place: Place,
        /// What was probably meant.
        nearest: Option<&'static str>,
        /// Every name that may stand there.
        accepted: String,
    },
    /// A key that exists, in another table.
    #[error("{place}: belongs into {homes}; accepted: {accepted}")]
    WrongSection {
        /// Where.
        place: Place,
        /// The tables that have this key.
        homes: String,
        /// The key's values.
        accepted: String,
    },
    /// A value of another type than the field's.
    #[error("{place}: is {found}; accepted: {expected}")]
    WrongType {
        /// Where.
        place: Place,
        /// What the field takes.
        expected: &'static str,
        /// What stands there.
        found: &'static str,
    },
    /// A value that cannot be read as the field's.
    #[error("{place}: cannot use {value:?}{}; accepted: {accepted}", did_you_mean(*nearest))]
    BadValue {
        /// Where.
        place: Place,
        /// As typed.
        value: String,
        /// What was probably meant, for a choice.
        nearest: Option<&'static str>,
        /// What the field takes.
        accepted: String,
    },
    /// A value that can be read and lies outside the field's range.
    #[error("{place}: {value} is out of range; accepted: {accepted}")]
    OutOfRange {
        /// Where.
        place: Place,
        /// As understood, with its unit.
        value: String,
        /// The range.
        accepted: String,
    },
    /// A field that has no meaning without another.
    #[error("{place}: needs {needs}")]
    Needs {
        /// Where.
        place: Place,
        /// The other one.
        needs: &'static str,
    },
}

impl ConfigError {
    /// Whether only the system could tell (exit code 3) and not the text alone (2).
    pub const fn is_environment(&self) -> bool {
        matches!(self, Self::Unreadable { .. })
    }
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |name| format!("; did you mean {name}"))
}
