//! The resolved whole, as a configuration file that resolves to the same.

use std::fmt::{self, Display};
use std::path::Path;
use std::time::Duration;

use super::field::{FIELDS, Key};
use super::{Config, FIXED_LIMITS};
use crate::units::{Size, Span};

impl Display for Config {
    /// TOML: every field with its unit, range, default and cost, then the fixed limits as comments.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut section = "";
        for row in FIELDS {
            if row.section != section {
                let gap = if section.is_empty() { "" } else { "\n" };
                writeln!(f, "{gap}[{}]", row.section)?;
                section = row.section;
            }
            let flag = row.flag.map_or_else(String::new, |flag| format!("{flag}; "));
            writeln!(f, "# {flag}{}; default {}", row.range, row.default)?;
            writeln!(f, "# {}", row.cost)?;
            match self.value(row.key) {
                Some(value) => writeln!(f, "{} = {value}", row.name)?,
                None => writeln!(f, "# {} is unset", row.name)?,
            }
        }
        writeln!(f, "\n# Fixed, shown for completeness:")?;
        for (name, value) in FIXED_LIMITS {
            writeln!(f, "# {name} = {value}")?;
        }
        Ok(())
    }
}

impl Config {
    /// Every field on one line, for the log.
    pub fn summary(&self) -> String {
        let mut line = String::new();
        for row in FIELDS {
            if let Some(value) = self.value(row.key) {
                let value = value.split(" # ").next().unwrap_or_default();
                if !line.is_empty() {
                    line.push(' ');
                }
                line.push_str(&format!("{}.{}={value}", row.section, row.name));
            }
        }
        line
    }

    /// As the file writes it; `None` where the file would leave it out.
    fn value(&self, key: Key) -> Option<String> {
        let limits = &self.limits;
        let ssd = self.ssd.as_ref();
        Some(match key {
            Key::SocketPath => path(&self.socket.path),
            Key::SocketAllowUids => format!("{:?}", self.socket.allow_uids),
            Key::SocketAllowGids => format!("{:?}", self.socket.allow_gids),
            Key::DramCapacity => size(self.dram.capacity_bytes),
            Key::DramHugePages => word(self.dram.huge_pages.as_str()),
            Key::DramReplacement => word(self.dram.replacement.as_str()),
            Key::SsdPaths => {
                let paths: Vec<_> = ssd?.paths.iter().map(|item| path(item)).collect();
                format!("[{}]", paths.join(", "))
            }
            Key::SsdCapacity => size(ssd?.capacity_bytes),
            Key::SsdDirect => word(if ssd?.direct { "on" } else { "off" }),
            Key::SsdEngine => word(ssd?.engine.as_str()),
            Key::SsdSpill => word(ssd?.spill.as_str()),
            Key::SsdWriteInFlight => size(ssd?.write_in_flight_bytes),
            Key::SsdReadJoin => size(ssd?.read_join_bytes),
            Key::SsdWriteBudget => size(ssd?.write_budget_per_day_bytes.unwrap_or(0)),
            Key::BudgetQuery => size(self.budget.query_bytes),
            Key::BudgetSession => size(self.budget.session_bytes),
            Key::BudgetSpeculative => size(self.budget.speculative_bytes),
            Key::TimeLeaseTtl => span(self.time.lease_ttl),
            Key::TimeOperation => span(self.time.operation_timeout),
            Key::TimeHandshake => span(self.time.handshake_timeout),
            Key::TimeStop => span(self.time.stop_timeout),
            Key::LimitSessions => limits.sessions.to_string(),
            Key::LimitRingCapacity => limits.ring_capacity_max.to_string(),
            Key::LimitPageEntries => limits.page_entries_max.to_string(),
            Key::LimitPageBytes => size(limits.page_bytes_max),
            Key::LimitScopes => limits.scopes_per_session.to_string(),
            Key::LimitMemories => limits.memories_per_session.to_string(),
            Key::LimitRegions => limits.regions_per_session.to_string(),
            Key::LimitEvents => limits.events_per_session.to_string(),
            Key::LimitBadRequests => limits.bad_requests.to_string(),
            Key::HttpAddress => {
                let address = self.http.address;
                word(&address.map_or_else(|| "off".to_owned(), |address| address.to_string()))
            }
            Key::HttpOptional => self.http.optional.to_string(),
            Key::DeviceKind => word(self.device.as_str()),
            Key::ReactorWait => word(self.wait.as_str()),
            Key::ReactorPriority => word(self.priority.as_str()),
        })
    }
}

/// Exact bytes, and the same with a unit for people.
fn size(bytes: u64) -> String {
    format!("{bytes} # {}", Size(bytes))
}

fn span(duration: Duration) -> String {
    word(&Span(duration).to_string())
}

fn word(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// TOML holds Unicode only; a path that is none is shown with replacement characters.
fn path(path: &Path) -> String {
    word(&path.to_string_lossy())
}
