//! `inspect`: what a Manager holds and does, read from its telemetry segment. Asks it nothing,
//! changes nothing, works on a hung or dead one too.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use orbitkv_shm_protocol::bootstrap::peer::socket_default_path;
use orbitkv_shm_protocol::inspect::{self, DeviceView, LifeState, Snapshot, Value};

use crate::exit::{Exit, ToolError};
use crate::output::print;
use crate::table::Table;

/// Flags of `inspect`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(crate) struct InspectArgs {
    /// Only this part
    #[arg(value_enum)]
    section: Option<Section>,
    /// Socket of the Manager
    #[arg(long, value_name = "PATH", value_parser = crate::place::socket_path_parser())]
    socket: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A part of what is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Section {
    Sessions,
    Rings,
    Operations,
    Leases,
    Pool,
    Ssd,
    Pages,
    Config,
}

/// Runs the verb.
pub(crate) fn run(args: &InspectArgs) -> Result<Exit, ToolError> {
    let socket = args.socket.clone().unwrap_or_else(socket_default_path);
    let snapshot = inspect::read(&socket)?;
    let shown: fn(&Snapshot, Option<Section>) -> String = if args.json { json } else { text };
    print(shown(&snapshot, args.section))?;
    Ok(Exit::Ok)
}

/// The whole snapshot, or the named part beside the Manager's identity.
fn json(snapshot: &Snapshot, section: Option<Section>) -> String {
    let mut value = serde_json::to_value(snapshot).unwrap_or_default();
    if let Some(map) = value.as_object_mut() {
        match section {
            Some(Section::Config) => {
                map.retain(|key, _| key == "manager");
                map.insert("config".to_owned(), snapshot.config.clone().into());
            }
            Some(section) => {
                let name = section.to_possible_value().map(|name| name.get_name().to_owned());
                map.retain(|key, _| key == "manager" || Some(key) == name.as_ref());
            }
            None => {}
        }
    }
    format!("{value:#}\n")
}

fn text(snapshot: &Snapshot, section: Option<Section>) -> String {
    let one = |section| match section {
        Section::Sessions => sessions(snapshot),
        Section::Rings => rings(snapshot),
        Section::Operations => operations(snapshot),
        Section::Leases => leases(snapshot),
        Section::Pool => pool(snapshot),
        Section::Ssd => ssd(snapshot),
        Section::Pages => pages(snapshot),
        Section::Config => format!("{}\n", snapshot.config.trim_end()),
    };
    match section {
        Some(section) => one(section),
        None => {
            let sections = [
                Section::Pool,
                Section::Ssd,
                Section::Sessions,
                Section::Rings,
                Section::Operations,
                Section::Leases,
                Section::Pages,
            ];
            let parts = [manager(snapshot), budget(snapshot)]
                .into_iter()
                .chain(sections.map(one))
                .chain([latency(snapshot), counters(snapshot)]);
            parts.collect::<Vec<_>>().join("\n")
        }
    }
}

fn manager(snapshot: &Snapshot) -> String {
    let m = &snapshot.manager;
    let http = m.http.as_deref().unwrap_or("off");
    let mut text = format!(
        "manager {} (pid {}, version {}, epoch {}), up {:.0} s\n  socket {}\n  http   {http}\n",
        m.state.label(),
        m.pid,
        m.version,
        m.epoch,
        m.uptime_seconds,
        m.socket,
    );
    if matches!(m.state, LifeState::Dead | LifeState::Unresponsive) {
        let seconds = m.heartbeat_age_ms as f64 / 1e3;
        text.push_str(&format!("  numbers are {seconds:.1} s old\n"));
    }
    if !m.torn.is_empty() {
        text.push_str(&format!("  changing while read: {}\n", m.torn.join(", ")));
    }
    for problem in &m.problems {
        text.push_str(&format!("  problem: {problem}\n"));
    }
    text
}

fn budget(snapshot: &Snapshot) -> String {
    let b = &snapshot.budget;
    let mut table = Table::new(&["budget", "used bytes", "peak", "limit", "queries waiting"]);
    let (total, speculative) = (b.limits.total_bytes, b.limits.speculative_bytes);
    for (name, used, peak, limit, waiting) in [
        ("query", b.total_bytes, b.total_peak_bytes, total, b.waiting_queries.to_string()),
        ("speculative", b.speculative_bytes, b.speculative_peak_bytes, speculative, String::new()),
    ] {
        let [used, peak, limit] = [used, peak, limit].map(|bytes| bytes.to_string());
        table.row([name.to_owned(), used, peak, limit, waiting]);
    }
    table.to_string()
}

/// Every kind and stage that was timed.
fn latency(snapshot: &Snapshot) -> String {
    let mut table = Table::new(&["latency", "stage", "count", "p50 µs", "p95", "p99", "max"]);
    for l in snapshot.latency.iter().filter(|latency| latency.count > 0) {
        let [p50, p95, p99, max] =
            [l.p50_us, l.p95_us, l.p99_us, l.max_us].map(|us| format!("{us:.1}"));
        let count = l.count.to_string();
        table.row([l.kind.to_owned(), l.stage.to_owned(), count, p50, p95, p99, max]);
    }
    table.to_string()
}

fn sessions(snapshot: &Snapshot) -> String {
    let mut table = Table::new(&[
        "session",
        "pid",
        "uid",
        "state",
        "submitted",
        "consumed",
        "outstanding",
        "leased bytes",
        "regions",
    ]);
    for s in &snapshot.sessions {
        table.row([
            s.id.to_string(),
            s.pid.to_string(),
            s.uid.to_string(),
            s.state.to_owned(),
            s.requests_submitted.to_string(),
            s.completions_consumed.to_string(),
            s.outstanding.to_string(),
            s.leased_bytes.to_string(),
            s.regions.to_string(),
        ]);
    }
    table.to_string()
}

fn rings(snapshot: &Snapshot) -> String {
    let mut table =
        Table::new(&["session", "requests", "completions", "credits used", "of", "idle ms"]);
    for r in &snapshot.rings {
        table.row([
            r.session.to_string(),
            r.requests_queued.to_string(),
            r.completions_queued.to_string(),
            r.credits_used.to_string(),
            r.credits.to_string(),
            r.last_progress_ms.to_string(),
        ]);
    }
    table.to_string()
}

fn operations(snapshot: &Snapshot) -> String {
    let mut table = Table::new(&["session", "operation", "kind", "stage", "age ms"]);
    for o in &snapshot.operations {
        table.row([
            o.session.to_string(),
            o.id.clone(),
            o.kind.to_owned(),
            o.stage.to_owned(),
            o.age_ms.to_string(),
        ]);
    }
    table.to_string()
}

fn leases(snapshot: &Snapshot) -> String {
    let mut table = Table::new(&["lease", "group", "bytes", "pages", "ttl ms"]);
    for l in &snapshot.leases {
        table.row([
            l.id.to_string(),
            l.group.clone(),
            l.bytes.to_string(),
            l.pages.to_string(),
            l.ttl_ms.to_string(),
        ]);
    }
    table.to_string()
}

fn pool(snapshot: &Snapshot) -> String {
    let p = &snapshot.pool;
    let mut table =
        Table::new(&["pool bytes", "used", "pinned", "draining", "largest free", "pages of"]);
    table.row([
        p.capacity_bytes.to_string(),
        p.used_bytes.to_string(),
        p.pinned_bytes.to_string(),
        p.draining_bytes.to_string(),
        p.largest_free_bytes.to_string(),
        p.page_mode.clone(),
    ]);
    table.to_string()
}

fn ssd(snapshot: &Snapshot) -> String {
    let mut table = Table::new(&[
        "ssd file",
        "bytes",
        "used",
        "slots",
        "reading",
        "writing",
        "engine",
        "direct",
        "preallocated",
        "registered",
        "health",
        "recovery",
    ]);
    for d in &snapshot.ssd {
        table.row([
            d.path.clone(),
            d.capacity_bytes.to_string(),
            d.used_bytes.to_string(),
            d.slots.to_string(),
            d.reading.to_string(),
            d.writing.to_string(),
            d.engine.to_owned(),
            d.direct.to_string(),
            d.preallocated.to_string(),
            d.registered.to_string(),
            d.health.to_owned(),
            recovery(d),
        ]);
    }
    table.to_string()
}

/// How the search for pages of before the start stands.
fn recovery(device: &DeviceView) -> String {
    if device.recovery == "done" {
        return "done".to_owned();
    }
    format!("{} {}/{}", device.recovery, device.scanned_slots, device.scan_slots)
}

fn pages(snapshot: &Snapshot) -> String {
    let mut table = Table::new(&["namespace", "tier", "pages", "bytes"]);
    for p in &snapshot.pages {
        table.row([
            p.namespace.clone(),
            p.tier.to_owned(),
            p.count.to_string(),
            p.bytes.to_string(),
        ]);
    }
    table.to_string()
}

/// Every counter that is not zero.
fn counters(snapshot: &Snapshot) -> String {
    let mut table = Table::new(&["counter", "value"]);
    for (family, position, value) in snapshot.counters.series() {
        let shown = match value {
            Value::Whole(0) => continue,
            Value::Whole(count) => count.to_string(),
            Value::Seconds(0.0) => continue,
            Value::Seconds(seconds) => format!("{seconds:.3}"),
        };
        table.row([format!("{}{}", family.name, family.label_text(position)), shown]);
    }
    table.to_string()
}
