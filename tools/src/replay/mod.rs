//! `replay`: engines in processes of their own play a trace against a Manager.

mod attach;
mod control;
mod coordinator;
mod device;
mod engine;
#[cfg(test)]
mod fake;
mod job;
mod latency;
mod link;
mod observe;
mod process;
mod report;
mod tally;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use clap::builder::TypedValueParser;
use orbitkv_benches::manager::Manager;
use orbitkv_manager::config::{PAGE_BYTES_MAX, PAGE_BYTES_MIN};
use orbitkv_manager::units::{Size, parse_duration, parse_size};

use crate::exit::{Exit, ToolError};
use crate::output::{Output, print};
use crate::place::RunFolder;
use crate::progress::Progress;
use crate::trace::TraceReader;
use crate::{html, signal};
use control::Open;
pub(crate) use coordinator::Requests;
use coordinator::{Outcome, Plan};
pub use latency::Percentiles;
use observe::Numbers;
pub use observe::Spill;
pub(crate) use process::run as run_engine_process;
pub use report::{LatencyReport, Report, RunReport};

/// Most engine processes, and most requests at a time in each.
const ENGINES_MAX: u64 = 64;
/// Most bytes of device pages that an engine reserves unless `--device-pages` asks for more. Longer
/// requests go in parts.
const DEVICE_BYTES_DEFAULT: u64 = 512 << 20;
/// Most device pages of an engine.
const DEVICE_PAGES_MAX: u64 = 1 << 24;

/// Flags of `replay`.
#[derive(Clone, PartialEq, Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Trace file, or the bare name of one in the folder that ORBITKV_TRACES names
    #[arg(long, value_name = "FILE")]
    trace: String,
    /// Start a private Manager (the default)
    #[arg(long, conflicts_with = "socket")]
    spawn: bool,
    /// Use the Manager at this socket
    #[arg(long, value_name = "PATH", value_parser = crate::place::socket_path_parser(), conflicts_with_all = MANAGER_FLAGS)]
    socket: Option<PathBuf>,
    /// Engine processes
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = within(1, ENGINES_MAX))]
    engines: u64,
    /// Requests at a time in each engine
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = within(1, ENGINES_MAX))]
    concurrency: u64,
    /// Play only the first N requests
    #[arg(long, value_name = "N", value_parser = within(1, u64::MAX))]
    limit: Option<u64>,
    /// Wall time over trace time; 0 plays as fast as the engines take requests
    #[arg(long, value_name = "X|0", default_value = "0", allow_hyphen_values = true, value_parser = time_scale)]
    time_scale: f64,
    /// Bytes of one page, 4KiB to 64MiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = page_bytes)]
    page_bytes: u64,
    /// Device pages of each engine; by default enough for the longest request times the
    /// concurrency, at most 512MiB
    #[arg(long, value_name = "N", value_parser = within(1, DEVICE_PAGES_MAX))]
    device_pages: Option<u64>,
    /// DRAM pool of the private Manager
    #[arg(long, value_name = "SIZE")]
    dram: Option<String>,
    /// SSD file of the private Manager
    #[arg(long, value_name = "PATH")]
    ssd: Option<PathBuf>,
    /// Bytes of the SSD file
    #[arg(long, value_name = "SIZE")]
    ssd_capacity: Option<String>,
    /// Which page goes when memory is short
    #[arg(long, value_name = "NAME")]
    replacement: Option<String>,
    /// Which saved pages are written to SSD
    #[arg(long, value_name = "all|reuse")]
    spill: Option<String>,
    /// Bytes that all leases together may pin
    #[arg(long, value_name = "SIZE")]
    query_budget: Option<String>,
    /// Longest absence of the Manager
    #[arg(long, value_name = "DUR", default_value = "5s", value_parser = parse_duration)]
    reattach: Duration,
    /// Seed of page names and bytes
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    pub(crate) outputs: OutputArgs,
}

/// Files that `replay` and `demo` write.
#[derive(Clone, PartialEq, Eq, Debug, Default, Args)]
pub(crate) struct OutputArgs {
    /// Write every number as JSON
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// Write a page for a browser
    #[arg(long, value_name = "OUT")]
    html: Option<PathBuf>,
}

/// Flags that configure a private Manager, so senseless with `--socket`.
const MANAGER_FLAGS: [&str; 6] =
    ["dram", "ssd", "ssd_capacity", "replacement", "spill", "query_budget"];

/// Takes a whole number in a range, and names the range to who types another.
pub(crate) fn within(min: u64, max: u64) -> impl TypedValueParser<Value = u64> {
    move |text: &str| match text.parse() {
        Ok(number) if (min..=max).contains(&number) => Ok(number),
        _ if max == u64::MAX => Err(format!("must be a whole number of at least {min}")),
        _ => Err(format!("must be a whole number, {min} to {max}")),
    }
}

fn page_bytes(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    if (PAGE_BYTES_MIN..=PAGE_BYTES_MAX).contains(&bytes) {
        Ok(bytes)
    } else {
        Err(format!("must be {} to {}", Size(PAGE_BYTES_MIN), Size(PAGE_BYTES_MAX)))
    }
}

fn time_scale(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(scale) if (0.0..=1000.0).contains(&scale) => Ok(scale),
        _ => Err("must be 0 to 1000, as in 0.1 for ten times as fast".to_owned()),
    }
}

/// Where the Manager comes from.
pub(crate) enum Server {
    /// A private one, with its own folder and these flags of `serve`.
    Spawn {
        /// Holds its socket and its log, and goes with the run.
        folder: RunFolder,
        /// Flags of `serve` besides `--socket`.
        flags: Vec<OsString>,
    },
    /// The one at a socket.
    Socket(PathBuf),
}

/// A run: what is played, how, and against whom.
pub(crate) struct Run {
    pub(crate) name: String,
    pub(crate) block_tokens: u32,
    pub(crate) requests: Requests,
    pub(crate) requests_count: u64,
    /// Full pages of the longest request.
    pub(crate) longest: u64,
    pub(crate) engines: u64,
    pub(crate) concurrency: u64,
    pub(crate) page_bytes: u64,
    pub(crate) device_pages: Option<u64>,
    pub(crate) time_scale: f64,
    pub(crate) reattach: Duration,
    pub(crate) seed: u64,
    pub(crate) server: Server,
}

/// Runs the verb.
pub(crate) fn run(args: ReplayArgs) -> Result<Exit, ToolError> {
    // The whole trace is read once before anything starts: a malformed line costs nothing then,
    // and the longest request is known.
    let limit = args.limit.unwrap_or(u64::MAX);
    let reader = TraceReader::open(&args.trace)?;
    let info = reader.info().clone();
    let (mut requests_count, mut longest) = (0, 0);
    for request in reader.take(usize::try_from(limit).unwrap_or(usize::MAX)) {
        longest = longest.max(request?.full_blocks(info.block_tokens));
        requests_count += 1;
    }
    let requests = TraceReader::open(&args.trace)?.take(requests_count as usize);
    let server = match &args.socket {
        Some(socket) => Server::Socket(socket.clone()),
        None => Server::Spawn { folder: RunFolder::new(false)?, flags: serve_flags(&args) },
    };
    let run = Run {
        name: info.name,
        block_tokens: info.block_tokens,
        requests: Box::new(requests),
        requests_count,
        longest,
        engines: args.engines,
        concurrency: args.concurrency,
        page_bytes: args.page_bytes,
        device_pages: args.device_pages,
        time_scale: args.time_scale,
        reattach: args.reattach,
        seed: args.seed,
        server,
    };
    execute(run, args.outputs)
}

fn serve_flags(args: &ReplayArgs) -> Vec<OsString> {
    let mut flags = Vec::new();
    let mut flag = |name: &str, value: Option<&OsString>| {
        if let Some(value) = value {
            flags.extend([OsString::from(name), value.clone()]);
        }
    };
    let text = |value: &Option<String>| value.as_ref().map(OsString::from);
    flag("--dram", text(&args.dram).as_ref());
    flag("--ssd", args.ssd.as_ref().map(|path| path.clone().into_os_string()).as_ref());
    flag("--ssd-capacity", text(&args.ssd_capacity).as_ref());
    flag("--replacement", text(&args.replacement).as_ref());
    flag("--spill", text(&args.spill).as_ref());
    flag("--query-budget", text(&args.query_budget).as_ref());
    flags
}

/// Plays a run and reports it; what `replay` and `demo` have in common.
pub(crate) fn execute(run: Run, outputs: OutputArgs) -> Result<Exit, ToolError> {
    let json = Output::open("json", outputs.json)?;
    let page = Output::open("html", outputs.html)?;
    signal::install()?;
    let (socket, private) = match &run.server {
        Server::Socket(socket) => (socket.clone(), None),
        Server::Spawn { folder, flags } => {
            let manager = Manager::spawn(&folder.socket(), &folder.log(), flags)?;
            let manager = manager.until_ready(|| signal::check().is_err())?;
            (manager.socket().to_owned(), Some(manager))
        }
    };
    // Else it would depend on the moment of the start how much of the trace is on SSD.
    observe::recovered(&socket)?;
    let before = Numbers::read(&socket)?;
    let plan = plan(&run, &socket);
    let device_pages = u64::from(plan.open.device_pages);
    let mut progress = Progress::new("requests", run.requests_count);
    let outcome = coordinator::run(&plan, run.requests, &mut progress);
    progress.finish();
    let drain = Instant::now();
    let numbers = observe::drained(&socket, &before).map(|after| after.since(&before));
    let mut report = Report {
        trace: run.name,
        drain_seconds: drain.elapsed().as_secs_f64(),
        run: RunReport {
            command: std::env::args().collect::<Vec<_>>().join(" "),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            engines: run.engines,
            concurrency: run.concurrency,
            page_bytes: run.page_bytes,
            page_tokens: run.block_tokens.into(),
            device_pages,
            seed: run.seed,
        },
        ..Report::default()
    };
    let exit = sum_up(&mut report, &outcome, &numbers, run.engines);
    let stopped = private.is_none_or(|manager| manager.stop().is_ok());
    if !stopped {
        report.failures.push("the Manager did not stop in order".to_owned());
    }
    if let Some(json) = json {
        json.json(&report)?;
    }
    if let Some(page) = page {
        page.text(&html::page(&report))?;
    }
    print(&report)?;
    Ok(if stopped { exit } else { exit.max(Exit::Failed) })
}

fn plan(run: &Run, socket: &Path) -> Plan {
    let wanted = run.longest.saturating_mul(run.concurrency);
    let affordable = (DEVICE_BYTES_DEFAULT / run.page_bytes).max(1);
    let pages = run.device_pages.unwrap_or(wanted.clamp(1, affordable));
    Plan {
        open: Open {
            socket: socket.to_owned(),
            name: run.name.clone(),
            block_tokens: run.block_tokens,
            page_bytes: run.page_bytes,
            seed: run.seed,
            device_pages: u32::try_from(pages).unwrap_or(u32::MAX),
            concurrency: run.concurrency as u32,
            reattach_ms: run.reattach.as_millis() as u64,
        },
        engines: run.engines as usize,
        time_scale: run.time_scale,
    }
}

/// Fills the report and says how the run ended.
fn sum_up(
    report: &mut Report,
    outcome: &Outcome,
    numbers: &Result<Numbers, orbitkv_shm_protocol::inspect::InspectError>,
    engines: u64,
) -> Exit {
    let tally = &outcome.tally;
    report.requests = tally.requests;
    report.pages_total = tally.pages_total;
    report.pages_hit_dram = tally.pages_hit_dram;
    report.pages_hit_ssd = tally.pages_hit_ssd;
    report.pages_missed = tally.pages_missed;
    report.hit_ratio = tally.hit_ratio();
    report.pages_verified = tally.pages_verified;
    report.bytes_verified = tally.bytes_verified;
    report.mismatches = tally.mismatches.max(tally.mismatches_seen);
    report.pages_saved = tally.pages_saved;
    report.pages_present = tally.pages_present;
    report.pages_refused.clone_from(&tally.pages_refused);
    report.queries_cut.clone_from(&tally.queries_cut);
    report.restores_cut.clone_from(&tally.restores_cut);
    report.requests_restarted = tally.requests_restarted;
    report.reattached = tally.reattached;
    report.wall_seconds = outcome.work.as_secs_f64();
    report.latency_us = LatencyReport {
        query: outcome.latencies.query.percentiles(),
        prepare: outcome.latencies.prepare.percentiles(),
        restore: outcome.latencies.restore.percentiles(),
        save: outcome.latencies.save.percentiles(),
        delivery: outcome.latencies.delivery.percentiles(),
    };
    let mut exit = Exit::Ok;
    if let Some(failure) = &outcome.failure {
        report.failures.push(failure.to_string());
        exit = failure.exit();
    } else if (outcome.engines_drained as u64) < engines {
        report.failures.push("an engine's session still owned something at its end".to_owned());
    }
    match numbers {
        Ok(numbers) => {
            report.spill = numbers.spill;
            report.spill_offered = numbers.spill_offered;
            report.ssd_bytes_written = numbers.ssd_bytes_written;
            report.ssd_bytes_read = numbers.ssd_bytes_read;
            report.ssd_read_errors = numbers.ssd_read_errors;
            report.ssd_write_queue_full = numbers.ssd_write_queue_full;
            report.alloc_failures = numbers.alloc_failures;
            report.evictions = numbers.evictions;
            report.query_budget_peak_bytes = numbers.query_budget_peak_bytes;
            report.speculative_budget_peak_bytes = numbers.speculative_budget_peak_bytes;
            report.leaked_bytes = numbers.held_bytes;
            report.leaked_leases = numbers.leases;
            report.manager_cpu_seconds = numbers.cpu_seconds;
            if numbers.unwritable {
                report.give_up(numbers.spill_waiting);
            }
            report.judge_pages();
            if numbers.dead {
                let gone =
                    "the Manager is dead: what it held and what waited to be written is gone";
                report.failures.push(gone.to_owned());
            } else {
                report.judge_drain();
            }
        }
        Err(error) => report.failures.push(error.to_string()),
    }
    if exit == Exit::Ok && !report.failures.is_empty() { Exit::Failed } else { exit }
}
