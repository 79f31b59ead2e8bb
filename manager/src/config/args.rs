//! The flags of `serve`, as typed. Every value is checked with the file's, in one place.

use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Flags of `orbitkv serve` and of `orbitkv-manager`. A flag wins over the same field of the file.
#[derive(Clone, PartialEq, Eq, Default, Debug, clap::Args)]
pub struct ServeArgs {
    /// Configuration file (TOML); `--print-config` shows its form
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Socket that engines attach to
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// DRAM pool, as in 4GiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub dram: Option<String>,
    /// File of the SSD tier, made if absent; may be repeated
    #[arg(long, value_name = "PATH")]
    pub ssd: Vec<PathBuf>,
    /// Bytes of all SSD files together; 0 turns the tier off
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub ssd_capacity: Option<String>,
    /// Whether SSD I/O goes past the page cache
    #[arg(long, value_name = "on|off")]
    pub ssd_direct: Option<String>,
    /// How SSD I/O is done
    #[arg(long, value_name = "auto|uring|blocking")]
    pub ssd_engine: Option<String>,
    /// Bytes that all leases together may pin
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub query_budget: Option<String>,
    /// Bytes that the leases of one session may pin
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub session_budget: Option<String>,
    /// Life of a lease, as in 30s
    #[arg(long, value_name = "DUR", allow_hyphen_values = true)]
    pub lease_ttl: Option<String>,
    /// Deadline of an operation that names none
    #[arg(long, value_name = "DUR", allow_hyphen_values = true)]
    pub operation_timeout: Option<String>,
    /// Address of /metrics and /healthz: IP:PORT, PORT or off
    #[arg(long, value_name = "ADDR", allow_hyphen_values = true)]
    pub http: Option<String>,
    /// Start without metrics when the address is taken
    #[arg(long)]
    pub http_optional: bool,
    /// Where the engines' pages are
    #[arg(long, value_name = "auto|host|cuda")]
    pub device: Option<String>,
    /// 2 MiB pages for the DRAM pool
    #[arg(long, value_name = "require|prefer|off")]
    pub huge_pages: Option<String>,
    /// Which saved pages are written to SSD
    #[arg(long, value_name = "all|reuse")]
    pub spill: Option<String>,
    /// Which page goes when memory is short
    #[arg(long, value_name = "NAME")]
    pub replacement: Option<String>,
    /// User that may attach besides the owner; may be repeated
    #[arg(long, value_name = "UID", allow_hyphen_values = true)]
    pub allow_uid: Vec<String>,
    /// Group whose members may attach; may be repeated
    #[arg(long, value_name = "GID", allow_hyphen_values = true)]
    pub allow_gid: Vec<String>,
    /// How the reactor waits
    #[arg(long, value_name = "adaptive|dedicated")]
    pub wait: Option<String>,
    /// Print the resolved configuration with every limit, and exit
    #[arg(long)]
    pub print_config: bool,
}

/// A usage error of `clap` in one line: what, the nearest valid name, what is accepted.
///
/// `command` is the (sub)command whose flags are listed for a misspelt one. Not for `--help` and
/// `--version`, which `clap` reports as errors too: see [`clap::Error::use_stderr`].
pub fn usage_line(error: &clap::Error, command: &clap::Command) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => Some(texts.join(", ")),
        _ => None,
    };
    let argument = text(ContextKind::InvalidArg).unwrap_or_default();
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let flags: Vec<String> = command
                .get_arguments()
                .filter(|arg| !arg.is_hide_set())
                .filter_map(|arg| arg.get_long().map(|long| format!("--{long}")))
                .collect();
            let suggested = text(ContextKind::SuggestedArg).or_else(|| {
                super::field::nearest(&argument, flags.iter().map(String::as_str))
                    .map(str::to_owned)
            });
            let meant = suggested.map_or_else(String::new, |flag| format!("; did you mean {flag}"));
            let accepted = flags.join(" ");
            format!("unknown argument {argument}{meant}; accepted: {accepted}")
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let value = text(ContextKind::InvalidValue).unwrap_or_default();
            let what = if value.is_empty() {
                "the value is missing".to_owned()
            } else {
                format!("cannot use {value:?}")
            };
            // `argument` reads `--dram <SIZE>`; the field's own range says more than clap knows.
            let flag = argument.split(' ').next();
            let row = super::field::FIELDS.iter().find(|row| row.flag == flag);
            let accepted = text(ContextKind::ValidValue)
                .filter(|valid| !valid.is_empty())
                .or_else(|| row.map(|row| row.range.to_owned()))
                .map_or_else(String::new, |accepted| format!("; accepted: {accepted}"));
            format!("{argument}: {what}{accepted}")
        }
        _ => {
            // clap's first paragraph holds the cause; the rest is usage and tips.
            let rendered = error.to_string();
            let cause = rendered.split("\n\n").next().unwrap_or_default();
            let words: Vec<&str> = cause.split_whitespace().collect();
            words.join(" ").trim_start_matches("error: ").to_owned()
        }
    }
}
