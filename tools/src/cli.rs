//! The command line: one verb, its exit code, usage errors in one line.

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use orbitkv_manager::config::usage_line;

use crate::exit::{Exit, ToolError};
use crate::output::{complain, print};
use crate::{bench, demo, evict, inspect, replay, serve, simulate, verify};

/// Node-local KV-cache offload for LLM inference engines
#[derive(Debug, Parser)]
#[command(
    name = "orbitkv",
    version,
    disable_help_subcommand = true,
    arg_required_else_help = false
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run the Manager
    Serve(Box<serve::ServeVerb>),
    /// Show the product: a private Manager, several engines, every restored byte compared
    Demo {
        #[command(flatten)]
        outputs: replay::OutputArgs,
    },
    /// Play a trace against a Manager and compare every restored byte
    Replay(replay::ReplayArgs),
    /// Hit rates of a trace by the Manager's own decisions, no bytes moved
    Simulate(simulate::SimulateArgs),
    /// Show what a Manager holds and does; works on a hung or dead one too
    Inspect(inspect::InspectArgs),
    /// Wait until everything is written, then drop what nobody holds from a tier
    Evict(evict::EvictArgs),
    /// Check every image of a stopped Manager's SSD tier
    Verify(verify::VerifyArgs),
    /// Measure this machine and OrbitKV on it
    Bench(bench::BenchVerb),
    /// One process of a benchmark
    #[command(hide = true)]
    BenchPart,
    /// One engine of a replay
    #[command(hide = true)]
    ReplayEngine,
}

/// Runs one command line and says with which code the process ends.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            return finish(print(&error).map(|()| Exit::Ok));
        }
        Err(error) => {
            complain(format_args!("orbitkv: {}; see orbitkv --help", usage(&error, &arguments)));
            return Exit::Usage.code().into();
        }
    };
    let outcome = match cli.verb {
        // The Manager has errors and exit codes of its own.
        Verb::Serve(verb) => return serve::run(&verb),
        Verb::Demo { outputs } => demo::run(outputs),
        Verb::Replay(args) => replay::run(args),
        Verb::Simulate(args) => simulate::run(args),
        Verb::Inspect(args) => inspect::run(&args),
        Verb::Evict(args) => evict::run(&args),
        Verb::Verify(args) => verify::run(args),
        Verb::Bench(verb) => bench::run(verb),
        Verb::BenchPart => Ok(bench::run_part()),
        Verb::ReplayEngine => Ok(replay::run_engine_process()),
    };
    finish(outcome)
}

fn finish(outcome: Result<Exit, ToolError>) -> ExitCode {
    let exit = outcome.unwrap_or_else(|error| {
        complain(format_args!("orbitkv: {error}"));
        error.exit()
    });
    exit.code().into()
}

/// A usage error in one line: what is wrong, and what is accepted.
fn usage(error: &clap::Error, arguments: &[OsString]) -> String {
    let root = Cli::command();
    let verb = arguments.get(1).and_then(|verb| verb.to_str());
    match error.kind() {
        ErrorKind::MissingSubcommand => format!("no verb; accepted: {}", verbs(&root)),
        ErrorKind::InvalidSubcommand => {
            let verb = verb.unwrap_or_default();
            format!("unknown verb {verb:?}; accepted: {}", verbs(&root))
        }
        _ => {
            let command = verb.and_then(|verb| root.find_subcommand(verb)).unwrap_or(&root);
            let line = usage_line(error, command);
            // The parser of the value knows its range; clap keeps that apart from its own text.
            match error.source() {
                Some(range) if !line.contains("accepted") => format!("{line}: {range}"),
                _ => line,
            }
        }
    }
}

fn verbs(root: &clap::Command) -> String {
    let shown = root.get_subcommands().filter(|verb| !verb.is_hide_set());
    shown.map(clap::Command::get_name).collect::<Vec<_>>().join(", ")
}
