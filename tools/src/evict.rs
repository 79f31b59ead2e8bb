//! `evict`: asks the Manager to write what waits, then to drop every page of DRAM that nobody holds.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use orbitkv_manager::units::parse_duration;
use orbitkv_shm_protocol::bootstrap::message::{ClientMessage, ManagerMessage};
use orbitkv_shm_protocol::bootstrap::peer::socket_default_path;
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::exit::{Exit, ToolError};
use crate::output::{complain, print};

/// The Manager answers when the spill set is empty or the timeout is over, and then needs a moment
/// for the drop.
const ANSWER_MARGIN: Duration = Duration::from_secs(10);
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait that can be asked for: a day.
const TIMEOUT_MAX: Duration = Duration::from_secs(86_400);

/// Flags of `evict`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(crate) struct EvictArgs {
    /// Tier to empty
    #[arg(long, value_enum)]
    tier: Tier,
    /// Socket of the Manager
    #[arg(long, value_name = "PATH", value_parser = crate::place::socket_path_parser())]
    socket: Option<PathBuf>,
    /// Longest wait for an empty spill set
    #[arg(long, value_name = "DUR", default_value = "30s", value_parser = timeout)]
    timeout: Duration,
}

/// A tier that can be emptied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Tier {
    Dram,
}

fn timeout(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Ok(timeout) if timeout <= TIMEOUT_MAX => Ok(timeout),
        Ok(_) => Err("must be at most 1440m".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Runs the verb.
pub(crate) fn run(args: &EvictArgs) -> Result<Exit, ToolError> {
    let path = args.socket.clone().unwrap_or_else(socket_default_path);
    let Tier::Dram = args.tier;
    let socket = connect(&path)?;
    let question = ClientMessage::Evict {
        tier: "dram".to_owned(),
        timeout_ms: args.timeout.as_millis() as u64,
    };
    let talk = |source: TransportError| ToolError::Talk { socket: path.clone(), source };
    transport::send(&socket, &question, &[], SEND_TIMEOUT).map_err(talk)?;
    let (answer, _) =
        transport::receive_manager(&socket, args.timeout + ANSWER_MARGIN).map_err(talk)?;
    match answer {
        ManagerMessage::Evicted { pages, bytes, pages_kept, spill_drained } => {
            print(format_args!(
                "evicted {pages} pages ({bytes} bytes), kept {pages_kept} in use\n"
            ))?;
            if spill_drained {
                return Ok(Exit::Ok);
            }
            complain(
                "orbitkv: the spill set was not empty in time; raise --timeout, or see in `orbitkv \
                 inspect ssd` whether a device takes no writes",
            );
            Ok(Exit::Failed)
        }
        ManagerMessage::Refused { message, .. } => {
            Err(ToolError::Refused { message: message.into_boxed_str() })
        }
        _ => Err(ToolError::Refused { message: "answered with another message".into() }),
    }
}

fn connect(path: &Path) -> Result<OwnedFd, ToolError> {
    let system = |errno: rustix::io::Errno| ToolError::NoManager {
        socket: path.to_owned(),
        source: errno.into(),
    };
    let address = SocketAddrUnix::new(path).map_err(system)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(system)?;
    rustix::net::connect(&socket, &address).map_err(system)?;
    Ok(socket)
}
