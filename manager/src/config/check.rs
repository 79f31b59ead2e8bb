//! The checks: each field by itself, then against the fields that it depends on.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use orbitkv_shm_protocol::layout;

use super::error::ConfigError;
use super::field::{Key, Kind, field, nearest};
use super::words::{Place, Raw, Word, Words};
use super::{
    BudgetConfig, Config, DeviceKind, DramConfig, HttpConfig, HugePages, Limits, Machine,
    PAGE_BYTES_MAX, PAGE_BYTES_MIN, Priority, Replacement, SESSIONS_MAX, SOCKET_PATH_BYTES_MAX,
    SocketConfig, SpillPolicy, SsdConfig, SsdEngine, TimeConfig, WaitMode,
};
use crate::core::{FOOTER_BYTES, limits};
use crate::ssd::format::Superblock;
use crate::units::{Size, Span, parse_duration, parse_size};

const NANOS_A_MS: u64 = 1_000_000;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// The DRAM pool is made of whole huge pages.
const DRAM_STEP: u64 = 2 * MIB;
const DRAM_DEFAULT: u64 = GIB;
const SSD_FILES_MAX: usize = 16;
/// Bounds of one file, and what its length is a multiple of.
const SSD_FILE_MIN: u64 = 2 * MIB;
const SSD_FILE_MAX: u64 = 64 * TIB;
const SSD_STEP: u64 = FOOTER_BYTES as u64;
const _: () = assert!(SSD_FILE_MIN >= Superblock::CAPACITY_BYTES_MIN);
const _: () = assert!(SSD_FILE_MAX <= Superblock::CAPACITY_BYTES_MAX);
const IDS_MAX: usize = 64;

impl Config {
    /// Checks every word and fills in the defaults.
    ///
    /// # Errors
    /// The first word that is wrong by itself or contradicts another.
    pub fn resolve(words: &Words, machine: &Machine) -> Result<Self, ConfigError> {
        let words = Checked(words);
        let dram = words.dram(machine)?;
        let budget = words.budget(dram.capacity_bytes)?;
        Ok(Self {
            socket: words.socket(machine)?,
            ssd: words.ssd()?,
            budget,
            time: words.time()?,
            limits: words.limits()?,
            http: HttpConfig {
                address: words.address(Key::HttpAddress)?,
                optional: words.switch(Key::HttpOptional)?,
            },
            device: words.choice(Key::DeviceKind, DeviceKind::Auto, DeviceKind::from_word)?,
            wait: words.choice(Key::ReactorWait, WaitMode::Adaptive, WaitMode::from_word)?,
            priority: words.choice(Key::ReactorPriority, Priority::High, Priority::from_word)?,
            dram,
        })
    }
}

struct Checked<'a>(&'a Words);

impl Checked<'_> {
    fn socket(&self, machine: &Machine) -> Result<SocketConfig, ConfigError> {
        let typed = self.path(Key::SocketPath)?;
        let config = SocketConfig {
            path_is_default: typed.is_none(),
            path: typed.unwrap_or_else(|| machine.socket_path.clone()),
            allow_uids: self.ids(Key::SocketAllowUids)?,
            allow_gids: self.ids(Key::SocketAllowGids)?,
        };
        let bytes = config.path.as_os_str().as_bytes();
        if bytes.len() > SOCKET_PATH_BYTES_MAX || bytes.last() == Some(&b'/') {
            let value = format!("{:?} ({} bytes)", config.path, bytes.len());
            return Err(self.out_of_range(Key::SocketPath, value));
        }
        Ok(config)
    }

    fn dram(&self, machine: &Machine) -> Result<DramConfig, ConfigError> {
        let quarter = machine.memory_available_bytes.map_or(DRAM_DEFAULT, |bytes| bytes / 4);
        let default = quarter.clamp(DRAM_STEP, DRAM_DEFAULT);
        let capacity = self.size(Key::DramCapacity, default, DRAM_STEP, 16 * TIB)?;
        Ok(DramConfig {
            capacity_bytes: capacity / DRAM_STEP * DRAM_STEP,
            huge_pages: self.choice(Key::DramHugePages, HugePages::Prefer, HugePages::from_word)?,
            replacement: self.choice(
                Key::DramReplacement,
                Replacement::PrefixLru,
                Replacement::from_word,
            )?,
        })
    }

    fn ssd(&self) -> Result<Option<SsdConfig>, ConfigError> {
        let paths = self.paths(Key::SsdPaths)?;
        let capacity = self.size(Key::SsdCapacity, 16 * GIB, 0, 256 * TIB)?;
        // Fields of a tier that is off are still checked: a slip must not wait for the day when
        // somebody turns it on.
        let mut config = SsdConfig {
            capacity_bytes: capacity,
            direct: self.choice(Key::SsdDirect, true, |word| match word {
                "on" => Some(true),
                "off" => Some(false),
                _ => None,
            })?,
            engine: self.choice(Key::SsdEngine, SsdEngine::Auto, SsdEngine::from_word)?,
            spill: self.choice(Key::SsdSpill, SpillPolicy::All, SpillPolicy::from_word)?,
            write_in_flight_bytes: self.size(Key::SsdWriteInFlight, 2 * MIB, 256 * KIB, 8 * MIB)?,
            read_join_bytes: self.size(Key::SsdReadJoin, MIB, 4 * KIB, MIB)?,
            write_budget_per_day_bytes: self.write_budget()?,
            paths,
        };
        let files = config.paths.len().max(1) as u64;
        if capacity != 0 && !(SSD_FILE_MIN..=SSD_FILE_MAX).contains(&(capacity / files)) {
            let value = match files {
                1 => bytes(capacity),
                files => format!("{} for {files} files", bytes(capacity)),
            };
            return Err(self.out_of_range(Key::SsdCapacity, value));
        }
        if config.paths.is_empty() {
            return match self.0.get(Key::SsdCapacity) {
                Some(word) if capacity != 0 => Err(ConfigError::Needs {
                    place: word.place.clone(),
                    needs: "a file: ssd.paths or --ssd PATH",
                }),
                _ => Ok(None),
            };
        }
        config.capacity_bytes = capacity / files / SSD_STEP * SSD_STEP * files;
        Ok((capacity != 0).then_some(config))
    }

    fn write_budget(&self) -> Result<Option<u64>, ConfigError> {
        let key = Key::SsdWriteBudget;
        let bytes = self.size(key, 0, 0, 1024 * TIB)?;
        match bytes {
            0 => Ok(None),
            GIB.. => Ok(Some(bytes)),
            _ => Err(self.out_of_range(key, self::bytes(bytes))),
        }
    }

    fn budget(&self, dram_bytes: u64) -> Result<BudgetConfig, ConfigError> {
        let query = self.size(
            Key::BudgetQuery,
            limits::query_budget_bytes(dram_bytes),
            PAGE_BYTES_MIN,
            dram_bytes,
        )?;
        Ok(BudgetConfig {
            query_bytes: query,
            session_bytes: self.size(Key::BudgetSession, query, PAGE_BYTES_MIN, query)?,
            speculative_bytes: self.size(
                Key::BudgetSpeculative,
                limits::speculative_budget_bytes(query),
                0,
                query,
            )?,
        })
    }

    fn time(&self) -> Result<TimeConfig, ConfigError> {
        Ok(TimeConfig {
            lease_ttl: self.duration(
                Key::TimeLeaseTtl,
                limits::LEASE_TTL_NS / NANOS_A_MS,
                100,
                3_600_000,
            )?,
            operation_timeout: self.duration(
                Key::TimeOperation,
                limits::OPERATION_TIMEOUT_NS / NANOS_A_MS,
                10,
                600_000,
            )?,
            handshake_timeout: self.duration(Key::TimeHandshake, 5_000, 100, 60_000)?,
            stop_timeout: self.duration(Key::TimeStop, 8_000, 100, 9_000)?,
        })
    }

    fn limits(&self) -> Result<Limits, ConfigError> {
        let (ring_min, ring_max) = (layout::RING_CAPACITY_MIN, layout::RING_CAPACITY_MAX);
        let limits = Limits {
            sessions: self.count(Key::LimitSessions, 64, 1, SESSIONS_MAX)?,
            ring_capacity_max: self.count(Key::LimitRingCapacity, ring_max, ring_min, ring_max)?,
            page_entries_max: self.count(
                Key::LimitPageEntries,
                layout::PAGE_ENTRIES_MAX,
                layout::PAGE_ENTRIES_MIN,
                layout::PAGE_ENTRIES_MAX,
            )?,
            page_bytes_max: self.size(
                Key::LimitPageBytes,
                PAGE_BYTES_MAX,
                PAGE_BYTES_MIN,
                PAGE_BYTES_MAX,
            )?,
            scopes_per_session: self.count(
                Key::LimitScopes,
                limits::SCOPES_PER_SESSION_MAX,
                1,
                65_536,
            )?,
            memories_per_session: self.count(Key::LimitMemories, 1024, 1, 4096)?,
            regions_per_session: self.count(
                Key::LimitRegions,
                limits::REGIONS_PER_SESSION_MAX,
                1,
                4096,
            )?,
            events_per_session: self.count(
                Key::LimitEvents,
                limits::EVENTS_PER_SESSION_MAX,
                1,
                65_536,
            )?,
            bad_requests: self.count(
                Key::LimitBadRequests,
                limits::BAD_REQUESTS_MAX,
                1,
                1_000_000,
            )?,
        };
        if !limits.ring_capacity_max.is_power_of_two() {
            let value = limits.ring_capacity_max.to_string();
            return Err(self.out_of_range(Key::LimitRingCapacity, value));
        }
        Ok(limits)
    }

    fn size(&self, key: Key, default: u64, min: u64, max: u64) -> Result<u64, ConfigError> {
        let value = match self.0.get(key) {
            // A default follows other fields into their corner: half of a tiny pool, for example.
            None => return Ok(default.clamp(min.min(max), max)),
            Some(Word { raw: Raw::Text(text), place }) => {
                parse_size(text).map_err(|error| ConfigError::BadValue {
                    place: place.clone(),
                    value: text.clone(),
                    nearest: None,
                    accepted: format!("{}: {error}", field(key).range),
                })?
            }
            Some(Word { raw: Raw::Integer(number), .. }) => u64::try_from(*number)
                .map_err(|_| self.out_of_range(key, format!("{number} bytes")))?,
            Some(word) => return Err(wrong_type(key, word)),
        };
        if value < min || value > max {
            return Err(self.out_of_range(key, bytes(value)));
        }
        Ok(value)
    }

    fn duration(
        &self,
        key: Key,
        default: u64,
        min: u64,
        max: u64,
    ) -> Result<Duration, ConfigError> {
        let value = match self.0.get(key) {
            None => return Ok(Duration::from_millis(default)),
            Some(Word { raw: Raw::Text(text), place }) => {
                parse_duration(text).map_err(|error| ConfigError::BadValue {
                    place: place.clone(),
                    value: text.clone(),
                    nearest: None,
                    accepted: format!("{}: {error}", field(key).range),
                })?
            }
            Some(word) => return Err(wrong_type(key, word)),
        };
        if value < Duration::from_millis(min) || value > Duration::from_millis(max) {
            return Err(self.out_of_range(key, Span(value).to_string()));
        }
        Ok(value)
    }

    fn count(&self, key: Key, default: u32, min: u32, max: u32) -> Result<u32, ConfigError> {
        match self.0.get(key) {
            None => Ok(default),
            Some(Word { raw: Raw::Integer(number), .. }) => u32::try_from(*number)
                .ok()
                .filter(|number| (min..=max).contains(number))
                .ok_or_else(|| self.out_of_range(key, number.to_string())),
            Some(word) => Err(wrong_type(key, word)),
        }
    }

    fn choice<T>(
        &self,
        key: Key,
        default: T,
        from_word: impl Fn(&str) -> Option<T>,
    ) -> Result<T, ConfigError> {
        let Kind::Choice(words) = field(key).kind else {
            unreachable!("{key:?} is no choice in the table");
        };
        match self.0.get(key) {
            None => Ok(default),
            Some(Word { raw: Raw::Text(text), place }) => {
                from_word(text).ok_or_else(|| ConfigError::BadValue {
                    place: place.clone(),
                    value: text.clone(),
                    nearest: nearest(text, words.iter().copied()),
                    accepted: words.join(", "),
                })
            }
            Some(word) => Err(wrong_type(key, word)),
        }
    }

    fn switch(&self, key: Key) -> Result<bool, ConfigError> {
        match self.0.get(key) {
            None => Ok(false),
            Some(Word { raw: Raw::Switch(value), .. }) => Ok(*value),
            Some(word) => Err(wrong_type(key, word)),
        }
    }

    fn path(&self, key: Key) -> Result<Option<PathBuf>, ConfigError> {
        self.0.get(key).map(|word| path(key, &word.raw, word)).transpose()
    }

    fn paths(&self, key: Key) -> Result<Vec<PathBuf>, ConfigError> {
        let Some(word) = self.0.get(key) else { return Ok(Vec::new()) };
        let Raw::List(items) = &word.raw else { return Err(wrong_type(key, word)) };
        let paths =
            items.iter().map(|item| path(key, item, word)).collect::<Result<Vec<_>, _>>()?;
        let twice = paths.iter().enumerate().find(|(i, path)| paths[..*i].contains(path));
        if let Some((_, path)) = twice {
            return Err(bad(key, word, format!("{}, named twice", path.display())));
        }
        if paths.len() > SSD_FILES_MAX {
            return Err(self.out_of_range(key, format!("{} files", paths.len())));
        }
        Ok(paths)
    }

    fn ids(&self, key: Key) -> Result<Vec<u32>, ConfigError> {
        let Some(word) = self.0.get(key) else { return Ok(Vec::new()) };
        let Raw::List(items) = &word.raw else { return Err(wrong_type(key, word)) };
        let mut ids = Vec::new();
        for item in items {
            let number = match item {
                Raw::Integer(number) => *number,
                // Flags are text.
                Raw::Text(text) if matches!(word.place, Place::Flag(_)) => {
                    text.parse().map_err(|_| bad(key, word, text.clone()))?
                }
                other => {
                    return Err(ConfigError::WrongType {
                        place: word.place.clone(),
                        expected: field(key).kind.expected(),
                        found: other.type_name(),
                    });
                }
            };
            // The largest number means "nobody" to the kernel.
            let id = u32::try_from(number).ok().filter(|id| *id != u32::MAX);
            ids.push(id.ok_or_else(|| self.out_of_range(key, number.to_string()))?);
        }
        if ids.len() > IDS_MAX {
            return Err(self.out_of_range(key, format!("{} ids", ids.len())));
        }
        Ok(ids)
    }

    fn address(&self, key: Key) -> Result<Option<SocketAddr>, ConfigError> {
        match self.0.get(key) {
            None => Ok(None),
            Some(word @ Word { raw: Raw::Text(text), .. }) => {
                if text == "off" {
                    return Ok(None);
                }
                if let Ok(port) = text.parse::<u16>() {
                    return Ok(Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)));
                }
                text.parse().map(Some).map_err(|_| bad(key, word, text.clone()))
            }
            Some(word) => Err(wrong_type(key, word)),
        }
    }

    fn out_of_range(&self, key: Key, value: String) -> ConfigError {
        let place = self.0.get(key).map_or(Place::Default(key), |word| word.place.clone());
        ConfigError::OutOfRange { place, value, accepted: field(key).range.to_owned() }
    }
}

fn path(key: Key, raw: &Raw, word: &Word) -> Result<PathBuf, ConfigError> {
    let path = match raw {
        Raw::Text(text) => PathBuf::from(text),
        Raw::Path(path) => path.clone(),
        other => {
            return Err(ConfigError::WrongType {
                place: word.place.clone(),
                expected: field(key).kind.expected(),
                found: other.type_name(),
            });
        }
    };
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.contains(&0) {
        return Err(bad(key, word, path.to_string_lossy().into_owned()));
    }
    Ok(path)
}

fn bad(key: Key, word: &Word, value: String) -> ConfigError {
    let accepted = field(key).range.to_owned();
    ConfigError::BadValue { place: word.place.clone(), value, nearest: None, accepted }
}

fn wrong_type(key: Key, word: &Word) -> ConfigError {
    ConfigError::WrongType {
        place: word.place.clone(),
        expected: field(key).kind.expected(),
        found: word.raw.type_name(),
    }
}

fn bytes(value: u64) -> String {
    format!("{value} bytes ({})", Size(value))
}
