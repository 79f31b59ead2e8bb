//! `simulate`: hit rates of a trace by the Manager's own decision code. No byte is moved: every
//! copy, read and write ends as soon as it is ordered.

mod driver;
mod second_tier;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::exit::{Exit, ToolError};
use crate::output::{Output, print};
use crate::replay::within;
use crate::table::Table;
use crate::trace::TraceReader;
pub use driver::Simulation;

/// Most pages of a tier: their addresses stay small numbers.
const PAGES_MAX: u64 = 1 << 28;

/// Flags of `simulate`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(crate) struct SimulateArgs {
    /// Trace file, or the bare name of one in the folder that ORBITKV_TRACES names
    #[arg(long, value_name = "FILE")]
    trace: String,
    /// Size of the DRAM pool in pages; several sizes are simulated side by side
    #[arg(
        long,
        value_name = "N[,N…]",
        required = true,
        value_delimiter = ',',
        value_parser = within(1, PAGES_MAX)
    )]
    dram_pages: Vec<u64>,
    /// Size of the SSD tier in pages
    #[arg(long, value_name = "M", default_value_t = 0, value_parser = within(0, PAGES_MAX))]
    ssd_pages: u64,
    /// Which page goes: prefix-lru as the product does (inclusive tiers), or lru with an exclusive
    /// second tier
    #[arg(long, value_name = "NAME", value_enum, default_value_t = Policy::PrefixLru)]
    replacement: Policy,
    /// Which saved pages are written to SSD: all, or those with evidence of reuse
    #[arg(long, value_name = "all|reuse", value_enum, default_value_t = Spill::All)]
    spill: Spill,
    /// Use only the first N requests
    #[arg(long, value_name = "N", value_parser = within(1, u64::MAX))]
    limit: Option<u64>,
    /// Write the numbers as JSON
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
}

/// What is simulated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The product's default: prefix-aware LRU, pages on SSD while they are in DRAM too.
    PrefixLru,
    /// The same in DRAM; its victims go to an exclusive LRU on SSD, from where a hit moves up.
    Lru,
}

/// What is written to SSD.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spill {
    /// Every saved page.
    All,
    /// Pages that were hit, or saved again after they left.
    Reuse,
}

/// One size and what it hit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Row {
    /// Size of the DRAM pool.
    pub dram_pages: u64,
    /// Size of the SSD tier; 0 = none.
    pub ssd_pages: u64,
    /// Policy.
    pub replacement: Policy,
    /// What was written to the SSD tier.
    pub spill: Spill,
    /// Pages written to the SSD tier.
    pub written_pages: u64,
    /// Requests.
    pub requests: u64,
    /// Pages that they asked for.
    pub accesses: u64,
    /// Pages of hit prefixes that were in DRAM.
    pub hit_pages_dram: u64,
    /// Pages of hit prefixes that were on SSD.
    pub hit_pages_ssd: u64,
    /// Tokens of hit prefixes; a partial last block counts its own.
    pub hit_tokens: u64,
    /// Exclusive second tier only: pages that came from DRAM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub demoted_pages: Option<u64>,
    /// Exclusive second tier only: pages that went back to DRAM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub promoted_pages: Option<u64>,
    /// Exclusive second tier only: pages that left it for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped_pages: Option<u64>,
}

/// Runs the verb.
pub(crate) fn run(args: SimulateArgs) -> Result<Exit, ToolError> {
    let reader = TraceReader::open(&args.trace)?;
    let output = Output::open("json", args.json)?;
    let info = reader.info().clone();
    let mut simulations: Vec<Simulation> = args
        .dram_pages
        .iter()
        .map(|dram| Simulation::new(&info, *dram, args.ssd_pages, args.replacement, args.spill))
        .collect();
    let limit = usize::try_from(args.limit.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
    for request in reader.take(limit) {
        let request = request?;
        for simulation in &mut simulations {
            simulation.request(&request);
        }
    }
    let rows: Vec<Row> = simulations.iter().map(Simulation::row).collect();
    print(table(&rows))?;
    if let Some(output) = output {
        output.json(&rows)?;
    }
    Ok(Exit::Ok)
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(&[
        "DRAM pages",
        "SSD pages",
        "requests",
        "accesses",
        "DRAM hits",
        "SSD hits",
        "SSD writes",
        "hit",
        "tokens",
    ]);
    for row in rows {
        let hits = row.hit_pages_dram + row.hit_pages_ssd;
        table.row([
            row.dram_pages.to_string(),
            row.ssd_pages.to_string(),
            row.requests.to_string(),
            row.accesses.to_string(),
            row.hit_pages_dram.to_string(),
            row.hit_pages_ssd.to_string(),
            row.written_pages.to_string(),
            format!("{:.2} %", hits as f64 / row.accesses.max(1) as f64 * 100.0),
            row.hit_tokens.to_string(),
        ]);
    }
    table
}
