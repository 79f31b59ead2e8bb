//! What every benchmark does with its report: a table on standard output, and files.

use std::path::PathBuf;

use clap::Args;
use orbitkv_benches::{Bar, BenchError, Machine, Report, Row};

use crate::exit::{Exit, ToolError};
use crate::output::{Output, print};
use crate::progress::{Progress, State};
use crate::signal;
use crate::table::Table;

/// The flags that name files.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(super) struct FileArgs {
    /// Write every number as JSON
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// Write every number as comma-separated values
    #[arg(long, value_name = "OUT")]
    csv: Option<PathBuf>,
}

/// The files, open before the work.
pub(super) struct Files {
    json: Option<Output>,
    csv: Option<Output>,
}

impl Files {
    pub(super) fn open(args: FileArgs) -> Result<Self, ToolError> {
        Ok(Self { json: Output::open("json", args.json)?, csv: Output::open("csv", args.csv)? })
    }

    /// Runs a benchmark of so many `steps` of something, which `run` counts, and publishes what it
    /// found. A missed bar is a printed fact.
    pub(super) fn fill(
        self,
        what: &'static str,
        steps: u64,
        run: impl FnOnce(&mut dyn FnMut(u64)) -> Result<Report, BenchError>,
    ) -> Result<Exit, ToolError> {
        signal::install()?;
        let mut progress = Progress::new(what, steps);
        let report = run(&mut |done| {
            progress.advance(&State { done, note: String::new() });
        });
        progress.finish();
        let report = report?;
        print(table(&report.rows, &report.bars))?;
        print(origin(&report))?;
        if let Some(json) = self.json {
            json.json(&report.to_json())?;
        }
        if let Some(csv) = self.csv {
            csv.text(&report.to_csv())?;
        }
        Ok(Exit::Ok)
    }
}

/// Numbers, then their bars.
fn table(rows: &[Row], bars: &[Bar]) -> String {
    let mut numbers = Table::new(&["number", "median", "min", "max", "rounds"]);
    for row in rows {
        let rounds = row.rounds.to_string();
        numbers.row([row.name.clone(), short(row.median), short(row.min), short(row.max), rounds]);
    }
    let mut verdicts = Table::new(&["bar", "value", "limit", "ratio", "", "rule"]);
    for bar in bars {
        let verdict = if bar.pass { "pass" } else { "MISS" };
        let (value, limit) = (short(bar.value), short(bar.limit));
        let ratio = bar.ratio.map(short).unwrap_or_default();
        let (name, verdict, rule) = (bar.name.clone(), verdict.to_owned(), bar.rule.clone());
        verdicts.row([name, value, limit, ratio, verdict, rule]);
    }
    format!("{numbers}\n{verdicts}\n")
}

/// Where the numbers are from.
fn origin(report: &Report) -> String {
    let Machine { cpu, cpus, kernel, .. } = &report.machine;
    let setting = report.setting.iter().map(|words| format!("{words}; ")).collect::<String>();
    format!("{setting}{cpu} with {cpus} CPUs, Linux {kernel}; commit {}\n", report.commit)
}

/// Three significant digits or so.
fn short(value: f64) -> String {
    match value {
        whole if whole.fract() == 0.0 => format!("{whole:.0}"),
        large if large.abs() >= 100.0 => format!("{large:.0}"),
        middle if middle.abs() >= 1.0 => format!("{middle:.1}"),
        small => format!("{small:.4}"),
    }
}
