//! What the operator typed, field by field, with the place of each word for messages.

use std::fmt;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::args::ServeArgs;
use super::error::ConfigError;
use super::field::{FIELDS, Field, Key, field, nearest, sections};

/// Where a word was typed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// On the command line.
    Flag(&'static str),
    /// In the file.
    File(Box<FilePlace>),
    /// Nowhere: a default that does not fit what else was typed.
    Default(Key),
}

/// A place in a configuration file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FilePlace {
    /// The file.
    pub path: PathBuf,
    /// Line, from 1.
    pub line: usize,
    /// Table; empty at the top of the file.
    pub section: String,
    /// Key in it.
    pub name: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => f.write_str(flag),
            Self::File(at) => {
                write!(f, "{}:{}: ", at.path.display(), at.line)?;
                if !at.section.is_empty() {
                    write!(f, "{}.", Quoted(&at.section))?;
                }
                write!(f, "{}", Quoted(&at.name))
            }
            Self::Default(key) => {
                let row = field(*key);
                write!(f, "default of {}.{}", row.section, row.name)
            }
        }
    }
}

/// A name that an operator typed: bare when it is harmless, else escaped onto one line.
pub(crate) struct Quoted<'a>(pub(crate) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if !self.0.is_empty() && self.0.chars().all(bare) {
            f.write_str(self.0)
        } else {
            write!(f, "{:?}", self.0)
        }
    }
}

/// One value, with the types that file and flags have.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Raw {
    Text(String),
    Path(PathBuf),
    Integer(i128),
    Switch(bool),
    List(Vec<Raw>),
    /// A type that no field takes: float, date, table.
    Other(&'static str),
}

impl Raw {
    /// Name of the type, for messages.
    pub(crate) const fn type_name(&self) -> &'static str {
        match self {
            Self::Text(_) | Self::Path(_) => "a string",
            Self::Integer(_) => "an integer",
            Self::Switch(_) => "a boolean",
            Self::List(_) => "an array",
            Self::Other(name) => name,
        }
    }
}

/// A value and where it was typed.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Word {
    pub(crate) raw: Raw,
    pub(crate) place: Place,
}

/// Everything the operator typed, at most one word a field: flags have replaced the file's.
#[derive(Clone, Default, Debug)]
pub struct Words {
    list: Vec<(Key, Word)>,
}

impl Words {
    /// Reads the text of a configuration file. `path` is for messages only.
    ///
    /// # Errors
    /// Anything that is not TOML, or a table or key that the Manager does not know.
    pub fn from_file(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let root = DeTable::parse(text).map_err(|error| ConfigError::Syntax {
            path: path.to_owned(),
            line: line_of(text, error.span().map_or(0, |span| span.start)),
            message: one_line(error.message()),
        })?;
        let mut words = Self::default();
        for (name, value) in root.get_ref() {
            let line = line_of(text, name.span().start);
            let place = |section: &str, name: &str, line| {
                Place::File(Box::new(FilePlace {
                    path: path.to_owned(),
                    line,
                    section: section.to_owned(),
                    name: name.to_owned(),
                }))
            };
            let section = name.get_ref().as_ref();
            if !sections().any(|known| known == section) {
                return Err(unknown_section(place("", section, line), section));
            }
            let DeValue::Table(table) = value.get_ref() else {
                let found = raw(value.get_ref()).type_name();
                return Err(ConfigError::WrongType {
                    place: place("", section, line),
                    expected: "a table",
                    found,
                });
            };
            for (key, value) in table {
                let place = place(section, key.get_ref(), line_of(text, key.span().start));
                let row = FIELDS
                    .iter()
                    .find(|row| row.section == section && row.name == key.get_ref().as_ref())
                    .ok_or_else(|| unknown_key(place.clone(), section, key.get_ref()))?;
                words.set(row.key, Word { raw: raw(value.get_ref()), place });
            }
        }
        Ok(words)
    }

    /// Puts the flags over what is there.
    pub fn override_with(&mut self, args: &ServeArgs) {
        let text = |value: &Option<String>| value.clone().map(Raw::Text);
        let many = |values: &[String]| {
            (!values.is_empty()).then(|| Raw::List(values.iter().cloned().map(Raw::Text).collect()))
        };
        let paths = || Raw::List(args.ssd.iter().cloned().map(Raw::Path).collect());
        let typed = [
            (Key::SocketPath, args.socket.clone().map(Raw::Path)),
            (Key::SocketAllowUids, many(&args.allow_uid)),
            (Key::SocketAllowGids, many(&args.allow_gid)),
            (Key::DramCapacity, text(&args.dram)),
            (Key::DramHugePages, text(&args.huge_pages)),
            (Key::DramReplacement, text(&args.replacement)),
            (Key::SsdPaths, (!args.ssd.is_empty()).then(paths)),
            (Key::SsdCapacity, text(&args.ssd_capacity)),
            (Key::SsdDirect, text(&args.ssd_direct)),
            (Key::SsdEngine, text(&args.ssd_engine)),
            (Key::SsdSpill, text(&args.spill)),
            (Key::BudgetQuery, text(&args.query_budget)),
            (Key::BudgetSession, text(&args.session_budget)),
            (Key::TimeLeaseTtl, text(&args.lease_ttl)),
            (Key::TimeOperation, text(&args.operation_timeout)),
            (Key::HttpAddress, text(&args.http)),
            (Key::HttpOptional, args.http_optional.then_some(Raw::Switch(true))),
            (Key::DeviceKind, text(&args.device)),
            (Key::ReactorWait, text(&args.wait)),
        ];
        for (key, raw) in typed {
            if let Some(raw) = raw {
                let flag = field(key).flag.expect("the table names the flag of every typed field");
                self.set(key, Word { raw, place: Place::Flag(flag) });
            }
        }
    }

    /// The word of a field, if one was typed.
    pub(crate) fn get(&self, key: Key) -> Option<&Word> {
        self.list.iter().find(|(found, _)| *found == key).map(|(_, word)| word)
    }

    fn set(&mut self, key: Key, word: Word) {
        self.list.retain(|(found, _)| *found != key);
        self.list.push((key, word));
    }
}

fn raw(value: &DeValue<'_>) -> Raw {
    match value {
        DeValue::String(text) => Raw::Text(text.clone().into_owned()),
        DeValue::Integer(number) => i128::from_str_radix(number.as_str(), number.radix())
            .map_or(Raw::Other("an integer of more than 127 bits"), Raw::Integer),
        DeValue::Boolean(value) => Raw::Switch(*value),
        DeValue::Array(values) => Raw::List(values.iter().map(|v| raw(v.get_ref())).collect()),
        DeValue::Float(_) => Raw::Other("a float"),
        DeValue::Datetime(_) => Raw::Other("a date"),
        DeValue::Table(_) => Raw::Other("a table"),
    }
}

fn unknown_section(place: Place, typed: &str) -> ConfigError {
    // A key at the top of the file usually lacks its table above it.
    if let Some(row) = FIELDS.iter().find(|row| row.name == typed) {
        return wrong_section(place, row);
    }
    let accepted: Vec<_> = sections().collect();
    ConfigError::UnknownName {
        place,
        nearest: nearest(typed, sections()),
        accepted: accepted.join(", "),
    }
}

fn unknown_key(place: Place, section: &str, typed: &str) -> ConfigError {
    let names = || FIELDS.iter().filter(|row| row.section == section).map(|row| row.name);
    let meant = nearest(typed, names());
    // `path` below [ssd] is a slip of `paths`, not a stray from [socket].
    let slip = meant.is_some_and(|name| name.starts_with(typed) || typed.starts_with(name));
    if !slip && let Some(row) = FIELDS.iter().find(|row| row.name == typed) {
        return wrong_section(place, row);
    }
    let accepted: Vec<_> = names().collect();
    ConfigError::UnknownName { place, nearest: meant, accepted: accepted.join(", ") }
}

fn wrong_section(place: Place, row: &Field) -> ConfigError {
    let homes: Vec<_> = FIELDS
        .iter()
        .filter(|other| other.name == row.name)
        .map(|other| format!("[{}]", other.section))
        .collect();
    ConfigError::WrongSection {
        place,
        homes: homes.join(" or "),
        accepted: format!("{}: {}", row.name, row.range),
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.as_bytes().iter().take(offset).filter(|byte| **byte == b'\n').count()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
