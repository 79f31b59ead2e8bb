//! `demo`: the product in one command. A private Manager, several engine processes, a built-in
//! workload of agents, every restored byte compared.

use std::ffi::OsString;
use std::time::Duration;

use crate::exit::{Exit, ToolError};
use crate::output::print;
use crate::place::RunFolder;
use crate::replay::{self, OutputArgs, Run, Server};
use crate::workload::{self, Shape};

/// A page of the demo, in bytes: that of a small model.
const PAGE_BYTES: u64 = 256 << 10;
/// Smaller than the working set, so that pages go to SSD and come back.
const DRAM: &str = "192MiB";
const SSD_CAPACITY: &str = "2GiB";
const ENGINES: u64 = 3;
const CONCURRENCY: u64 = 2;
const SEED: u64 = 1;

/// Runs the verb.
pub(crate) fn run(outputs: OutputArgs) -> Result<Exit, ToolError> {
    let shape = Shape::DEMO;
    let requests = workload::generate(&shape, SEED);
    let longest = requests.iter().map(|request| request.blocks.len()).max().unwrap_or(0);
    let folder = RunFolder::new(true)?;
    print(format_args!(
        "{} agent sessions in {} requests against a Manager with {DRAM} of DRAM\n",
        shape.sessions,
        requests.len()
    ))?;
    let flags = ["--dram", DRAM, "--ssd-capacity", SSD_CAPACITY, "--ssd"];
    let mut flags: Vec<OsString> = flags.iter().map(OsString::from).collect();
    flags.push(folder.ssd_file().into_os_string());
    let run = Run {
        name: "demo".to_owned(),
        block_tokens: shape.block_tokens,
        requests_count: requests.len() as u64,
        requests: Box::new(requests.into_iter().map(Ok)),
        longest,
        engines: ENGINES,
        concurrency: CONCURRENCY,
        page_bytes: PAGE_BYTES,
        device_pages: None,
        time_scale: 0.0,
        reattach: Duration::from_secs(5),
        seed: SEED,
        server: Server::Spawn { folder, flags },
    };
    replay::execute(run, outputs)
}
