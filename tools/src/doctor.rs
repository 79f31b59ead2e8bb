//! `doctor`: what this machine allows, each line with its fix.

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;
use orbitkv_manager::config::ServeArgs;
use orbitkv_manager::doctor::{self, Check, Patient, Status, Target};

use crate::exit::{Exit, ToolError};
use crate::output::print;
use crate::place;
use crate::table::Table;

/// Hidden verb of the process whose memory is read.
pub(crate) const TARGET_VERB: &str = "doctor-target";
/// What its word holds.
const NONCE: u64 = 0x6f72_6269_746b_7631;

/// Flags of `doctor`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(crate) struct DoctorArgs {
    /// SSD file or folder to try [default: the user's cache directory]
    #[arg(long, value_name = "PATH")]
    ssd: Option<PathBuf>,
    /// Socket that the Manager would take
    #[arg(long, value_name = "PATH", value_parser = crate::place::socket_path_parser())]
    socket: Option<PathBuf>,
    /// DRAM pool that the Manager would take, as in 4GiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    dram: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub(crate) fn run(args: &DoctorArgs) -> Result<Exit, ToolError> {
    let serve =
        ServeArgs { socket: args.socket.clone(), dram: args.dram.clone(), ..ServeArgs::default() };
    let config = orbitkv_manager::serve::load(&serve)?;
    let child = TargetProcess::start();
    let target = match &child {
        Ok(child) => Ok(child.target),
        Err(error) => Err(error.clone()),
    };
    let ssd_folder = args.ssd.as_deref().map_or_else(default_folder, folder_of);
    let checks = doctor::examine(&Patient { config, ssd_folder, target });
    drop(child);
    print(if args.json { json(&checks) } else { text(&checks) })?;
    let failed = checks.iter().any(|check| check.status == Status::Fail);
    Ok(if failed { Exit::Failed } else { Exit::Ok })
}

/// The folder that a path names, or that would hold a file of that path.
fn folder_of(path: &Path) -> PathBuf {
    if path.is_dir() {
        return path.to_owned();
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new(".")).to_owned()
}

/// Where `demo` would put its file: what is there of that folder.
fn default_folder() -> PathBuf {
    let folder = place::cache_folders().next().unwrap_or_else(env::temp_dir);
    let there = folder.ancestors().find(|folder| folder.is_dir());
    there.unwrap_or(Path::new("/")).to_owned()
}

fn json(checks: &[Check]) -> String {
    format!("{:#}\n", serde_json::to_value(checks).unwrap_or_default())
}

fn text(checks: &[Check]) -> String {
    let mut table = Table::new(&["", "check", "found"]);
    let mut fixes = String::new();
    for check in checks {
        let status = check.status.label();
        table.row([status.to_owned(), check.name.to_owned(), check.found.clone()]);
        if !check.fix.is_empty() {
            fixes.push_str(&format!("{status} {}: {}\n", check.name, check.fix));
        }
    }
    if fixes.is_empty() {
        return format!("{table}\nnothing to do\n");
    }
    format!("{table}\nto do\n{fixes}")
}

/// A process of ours that offers a word of its memory. Ended when dropped.
struct TargetProcess {
    child: Child,
    target: Target,
}

impl TargetProcess {
    fn start() -> Result<Self, String> {
        let program = env::current_exe().map_err(|error| error.to_string())?;
        let child = Command::new(program)
            .arg(TARGET_VERB)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("no child process: {error}"))?;
        let pid = child.id();
        let mut process = Self { child, target: Target { pid, address: 0, nonce: NONCE } };
        let mut line = String::new();
        let stdout = process.child.stdout.take().ok_or("a child without output")?;
        BufReader::new(stdout.take(64)).read_line(&mut line).map_err(|error| error.to_string())?;
        process.target.address =
            line.trim().parse().map_err(|_| format!("a child that said {line:?}"))?;
        Ok(process)
    }
}

impl Drop for TargetProcess {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// What the child does: says where its word is and keeps it until its input ends.
pub(crate) fn be_target() -> Result<Exit, ToolError> {
    let word = Box::new(AtomicU64::new(NONCE));
    print(format_args!("{}\n", std::ptr::from_ref(&*word).addr()))?;
    let mut byte = [0];
    while std::io::stdin().read(&mut byte).is_ok_and(|bytes| bytes > 0) {}
    // Kept until here.
    word.store(0, Ordering::Relaxed);
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_folder_or_a_file_in_one() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(folder_of(folder.path()), folder.path());
        assert_eq!(folder_of(&folder.path().join("tier")), folder.path());
        assert_eq!(folder_of(Path::new("tier")), Path::new("."));
        assert!(default_folder().is_dir());
    }

    #[test]
    fn every_fix_is_printed_with_its_check() {
        let check = |name, status, fix: &str| Check {
            name,
            status,
            found: "x".to_owned(),
            fix: fix.to_owned(),
        };
        let fine = [check("kernel", Status::Ok, "")];
        assert!(text(&fine).ends_with("nothing to do\n"));
        let ill = [check("kernel", Status::Ok, ""), check("memlock", Status::Warn, "raise it")];
        assert!(text(&ill).contains("warn memlock: raise it"), "{}", text(&ill));
        assert!(json(&ill).contains("\"status\": \"warn\""), "{}", json(&ill));
    }
}
