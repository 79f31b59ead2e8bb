//! `orbitkv serve`: from the command line to the running service, and its exit code.
//!
//! Order matters. Nothing is made before the configuration is known to be right; the lock of the
//! socket comes before everything that a second Manager must not touch; the socket becomes visible
//! when all else is ready.

mod log;
mod signals;
mod start;

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use orbitkv_shm_protocol::bootstrap::peer::socket_default_path;
use orbitkv_shm_protocol::doorbell::ControlBell;
use orbitkv_shm_protocol::ids::Epoch;
use orbitkv_shm_protocol::inspect::LifeState;
use orbitkv_shm_protocol::spin;
use rustix::process::{Resource, Rlimit, getpriority_process, setpriority_process};

use crate::clock::{Clock, nanos_of};
use crate::config::{
    Config, ConfigError, DeviceKind, HugePages, Machine, Priority, ServeArgs, SpillPolicy,
    SsdEngine, Words, usage_line,
};
use crate::core::limits::writes_in_flight_bytes;
use crate::core::{Core, CoreConfig, DeviceLayout, slot_bytes};
use crate::device::{CudaDevice, CudaImporter, Devices, Gpus, HostDevice, NoCuda};
use crate::endpoint::{Claim, Endpoint, MemoryImporter, Settings};
use crate::error::{EXIT_USAGE, ServeError};
use crate::http::{Health, HttpListener, HttpThread, Pages};
use crate::pool::{self, DramPool, PageMode, PoolConfig};
use crate::service::{Service, ServiceParts, Storage};
use crate::ssd::{ClaimedTier, DeviceInfo, EngineChoice, MadeFiles, SsdConfig, SsdTier};
use crate::telemetry::{Telemetry, TelemetryIdentity, TelemetryReader};
use crate::wake;
pub use log::LOG_VARIABLE;
use start::Start;

/// Longest configuration file: no real one comes near, and what never ends is no file.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// Descriptors of a session with one memory: its socket, its pidfd, its submission segment, the
/// memory.
const DESCRIPTORS_PER_SESSION: u64 = 4;
/// Those that a client which attaches takes for a moment: its two segments, and one to accept the
/// next.
const DESCRIPTORS_OF_ATTACHING: u64 = 3;

/// The command line of the binary `orbitkv-manager`.
#[derive(Parser, Debug)]
#[command(name = "orbitkv-manager", version, about = "The OrbitKV Manager (same as orbitkv serve)")]
struct Command {
    #[command(flatten)]
    serve: ServeArgs,
}

/// Parses the command line of this process and serves.
pub fn main() -> ExitCode {
    match Command::try_parse() {
        Ok(command) => serve(&command.serve),
        // Help and version: asked for, so no error.
        Err(error) if !error.use_stderr() => {
            let _ = error.print();
            ExitCode::SUCCESS
        }
        Err(error) => {
            let command = <Command as clap::CommandFactory>::command();
            complain(&usage_line(&error, &command));
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// One line on stderr; whoever closed it does not want to know.
fn complain(error: &dyn std::fmt::Display) {
    let _untold = writeln!(std::io::stderr(), "orbitkv: {error}");
}

/// Serves until a stop signal. Every error is one line on stderr.
pub fn serve(args: &ServeArgs) -> ExitCode {
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(args: &ServeArgs) -> Result<(), ServeError> {
    let config = load(args)?;
    if args.print_config {
        // A reader that closed its end early has seen enough.
        let _ = std::io::stdout().write_all(config.to_string().as_bytes());
        return Ok(());
    }
    log::start();
    tracing::info!("configuration: {}", config.summary());
    warn_of_closed_doors(&config);
    raise_descriptor_limit();
    signals::ignore_file_size();
    let start = Start::watch()?;
    let Opened { mut service, http, mut made, _pool } = open(&config, &start)?;
    if !start.is_stopping() {
        check_descriptors(config.limits.sessions)?;
        let stale = service.let_clients_in()?;
        announce_ready(&config.socket.path, http.as_ref(), stale);
    }
    made.keep();
    raise_priority(config.priority);
    // A page that was not written in time is a page less to hit, not a failure of the stop.
    let _drained = service.run();
    drop(http);
    tracing::info!("stopped");
    Ok(())
}

/// Reads the file, asks the machine and checks everything.
///
/// # Errors
/// See [`ConfigError`].
pub fn load(args: &ServeArgs) -> Result<Config, ConfigError> {
    let mut words = match &args.config {
        None => Words::default(),
        Some(path) => Words::from_file(path, &read_config(path)?)?,
    };
    words.override_with(args);
    let machine = Machine {
        memory_available_bytes: pool::available_bytes(),
        socket_path: socket_default_path(),
    };
    Config::resolve(&words, &machine)
}

fn read_config(path: &Path) -> Result<String, ConfigError> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut bytes))
        .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
    if bytes.len() as u64 > CONFIG_BYTES_MAX {
        return Err(ConfigError::TooLong { path: path.to_owned(), bytes_max: CONFIG_BYTES_MAX });
    }
    let lines = |bytes: &[u8]| 1 + bytes.iter().filter(|byte| **byte == b'\n').count();
    String::from_utf8(bytes).map_err(|error| ConfigError::Syntax {
        path: path.to_owned(),
        line: lines(&error.as_bytes()[..error.utf8_error().valid_up_to()]),
        message: "not UTF-8".to_owned(),
    })
}

/// A user on the list still has to get past the mode of the socket file.
fn warn_of_closed_doors(config: &Config) {
    let owner = rustix::process::geteuid().as_raw();
    let shut_out = config.socket.allow_uids.iter().find(|uid| **uid != 0 && **uid != owner);
    if let Some(uid) = shut_out
        && config.socket.allow_gids.is_empty()
    {
        tracing::warn!(uid, "--allow-uid: the socket has mode 0600; add --allow-gid for its group");
    }
}

/// Makes everything that the service is made of, the slow parts after the ones that fail fast.
fn open(config: &Config, start: &Start) -> Result<Opened, ServeError> {
    let clock = Clock::monotonic();
    let started_ns = clock.now();
    let gpus = find_gpus(config.device)?;
    let claim = start.make(|made| {
        let claim = Claim::take(&config.socket)?;
        if let Some(lock) = claim.fresh_lock() {
            made.file(&lock);
        }
        Ok::<_, ServeError>(claim)
    })?;
    let http = bind_http(config)?;
    let mut random = File::open("/dev/urandom").map_err(ServeError::system("random numbers"))?;
    let epoch = new_epoch(&mut random).map_err(ServeError::system("random numbers"))?;
    let hash_seed = random_u64(&mut random).map_err(ServeError::system("random numbers"))?;
    let mut telemetry = start.make(|made| {
        let telemetry = Telemetry::create(&TelemetryIdentity {
            socket: config.socket.path.clone(),
            epoch,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_ns,
        })?;
        made.telemetry_of(&config.socket.path);
        Ok::<_, ServeError>(telemetry)
    })?;
    if let Some(gid) = config.socket.allow_gids.first() {
        telemetry.let_group_read(*gid)?;
    }
    telemetry.set_config(&config.to_string());
    // What may be wrong with a path or a disk shows before the memory is touched, which takes long.
    let mut claimed = claim_storage(config)?;
    let made = claimed.as_mut().map(ClaimedTier::made_files).unwrap_or_default();
    let pool = allocate_pool(config)?;
    let bell = ControlBell::new();
    let spin_window = measure_wake(&clock);
    let storage = claimed.map(|claimed| start_storage(claimed, &pool, &bell)).transpose()?;
    let host = HostDevice::start(pool.clone(), bell.ringer(), spin::window_here(spin_window))
        .map_err(ServeError::system("device threads"))?;
    let cuda = gpus.and_then(|gpus| start_cuda(config.device, gpus, &pool, &bell, spin_window));
    let (cuda, importer) = cuda.transpose()?.unzip();
    let endpoint = start.serve(|| {
        let endpoint = Endpoint::start(
            Settings::new(config, epoch, spin_window),
            claim.listen()?,
            MemoryImporter::new(importer),
            clock.clone(),
            bell.ringer(),
        )
        .map_err(ServeError::system("endpoint thread"))?;
        let stopper = endpoint.stopper();
        Ok::<_, ServeError>((endpoint, stopper))
    })?;
    let http = http
        .map(|listener| listener.serve(TelemetryPages(telemetry.reader())))
        .transpose()
        .map_err(ServeError::system("http thread"))?;
    let http_address = http.as_ref().map(|http| http.address().to_string());
    telemetry.set_texts(pool.page_mode().label(), http_address.as_deref());
    let mut core_config = core_config(config, pool.arena_bytes(), hash_seed);
    let mut storage_parts = None;
    if let Some((tier, devices)) = storage {
        core_config.devices = device_layouts(&devices);
        storage_parts = Some(Storage::new(tier, devices));
    }
    let mut core = Core::new(core_config);
    if storage_parts.is_some() {
        core.begin_recovery();
    }
    let parts = ServiceParts {
        core,
        device: Box::new(Devices::new(host, cuda)),
        storage: storage_parts,
        endpoint,
        telemetry,
        bell,
        clock,
        wait: config.wait,
        spin_window: spin::window_here(spin_window),
        stop_timeout: config.time.stop_timeout,
    };
    Ok(Opened { service: Service::new(parts), http, made, _pool: pool })
}

/// Nice value of the reactor's thread with a high priority.
const NICE: i32 = -10;

/// Lets the calling thread, which becomes the reactor, run before others on its core: it answers in
/// about a microsecond and then waits, while what it would wait for takes its whole time slice.
fn raise_priority(priority: Priority) {
    let nice = getpriority_process(None).unwrap_or(0);
    if priority == Priority::Normal || nice <= NICE {
        return;
    }
    match setpriority_process(None, NICE) {
        Ok(()) => tracing::info!(nice = NICE, "the reactor's thread has a high priority"),
        Err(errno) => tracing::info!(
            nice,
            %errno,
            "the reactor's thread keeps its priority: CAP_SYS_NICE or RLIMIT_NICE would let it rise"
        ),
    }
}

/// Measures a wake and says how long waiters, engines included, should spin before they sleep.
fn measure_wake(clock: &Clock) -> Duration {
    let wake = wake::measure(clock);
    let window = wake.map_or(spin::WINDOW_UNMEASURED, spin::window_of);
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    match wake {
        Some(wake) => tracing::info!(?wake, ?window, processors, "measured a wake"),
        None => tracing::info!(?window, processors, "no wake was measured: one processor, or busy"),
    }
    window
}

/// The service and what lives beside it. Dropped after the service has ended.
struct Opened {
    service: Service,
    http: Option<HttpThread>,
    /// Kept once the Manager has served, or was told to stop.
    made: MadeFiles,
    _pool: Arc<DramPool>,
}

fn allocate_pool(config: &Config) -> Result<Arc<DramPool>, ServeError> {
    let pool = DramPool::allocate(PoolConfig {
        bytes: config.dram.capacity_bytes,
        huge_pages: match config.dram.huge_pages {
            HugePages::Require => pool::HugePages::Require,
            HugePages::Prefer => pool::HugePages::Prefer,
            HugePages::Off => pool::HugePages::Off,
        },
        prefault_threads: 0,
    })?;
    tracing::info!(
        bytes = pool.bytes(),
        page_mode = pool.page_mode().label(),
        "DRAM pool is ready"
    );
    if config.dram.huge_pages == HugePages::Prefer && pool.page_mode() == PageMode::Small {
        tracing::warn!(
            huge_bytes = pool.huge_bytes(),
            "the DRAM pool lies in 4 KiB pages, which costs SSD bandwidth: allow transparent huge \
             pages (madvise), or say --huge-pages off"
        );
    }
    Ok(Arc::new(pool))
}

/// Looks for a CUDA driver where the configuration asks for one or leaves it open.
fn find_gpus(device: DeviceKind) -> Result<Option<Arc<Gpus>>, ServeError> {
    if device == DeviceKind::Host {
        return Ok(None);
    }
    let gpus = match (Gpus::find(), device) {
        (Ok(gpus), _) => gpus,
        (Err(error), DeviceKind::Cuda) => return Err(ServeError::NoCuda(error)),
        (Err(NoCuda::NoDriver), _) => return Ok(None),
        (Err(error), _) => {
            tracing::warn!("engines with pages in host memory only: {error}");
            return Ok(None);
        }
    };
    for gpu in gpus.list() {
        tracing::info!(number = gpu.ordinal(), id = %gpu.id(), name = gpu.name(), "found a gpu");
    }
    Ok(Some(Arc::new(gpus)))
}

/// Registers the pool with the driver. `None` where that fails and the configuration left it open.
fn start_cuda(
    device: DeviceKind,
    gpus: Arc<Gpus>,
    pool: &Arc<DramPool>,
    bell: &ControlBell,
    spin_window: Duration,
) -> Option<Result<(CudaDevice, CudaImporter), ServeError>> {
    let began = Instant::now();
    let spin_window = spin::window_here(spin_window);
    match CudaDevice::start(&gpus, pool, bell.ringer(), spin_window) {
        Ok(cuda) => {
            let elapsed = began.elapsed();
            tracing::info!(
                bytes = pool.bytes(),
                ?elapsed,
                "the pool is registered with the driver"
            );
            Some(Ok((cuda, CudaImporter::new(gpus))))
        }
        Err(error) if device == DeviceKind::Cuda => Some(Err(ServeError::Cuda(error))),
        Err(error) => {
            tracing::warn!("engines with pages in host memory only: {error}");
            None
        }
    }
}

/// Claims the SSD files, if there are any.
fn claim_storage(config: &Config) -> Result<Option<ClaimedTier>, ServeError> {
    let Some(ssd) = &config.ssd else { return Ok(None) };
    let slot_bytes_max =
        slot_bytes(u32::try_from(config.limits.page_bytes_max).unwrap_or(u32::MAX));
    let tier = SsdConfig {
        paths: ssd.paths.clone(),
        capacity_bytes: ssd.capacity_bytes,
        direct: ssd.direct,
        engine: match ssd.engine {
            SsdEngine::Auto => EngineChoice::Auto,
            SsdEngine::Uring => EngineChoice::Uring,
            SsdEngine::Blocking => EngineChoice::Blocking,
        },
        write_in_flight_bytes: ssd.write_in_flight_bytes,
        read_join_bytes: ssd.read_join_bytes,
        slot_bytes_max,
    };
    Ok(Some(ClaimedTier::claim(&tier)?))
}

/// Starts the workers of the SSD files, and the search for what is on them.
fn start_storage(
    claimed: ClaimedTier,
    pool: &Arc<DramPool>,
    bell: &ControlBell,
) -> Result<(SsdTier, Vec<DeviceInfo>), ServeError> {
    let ringer = bell.ringer();
    let notify = Arc::new(move || {
        ringer.ring();
    });
    let (tier, devices) = SsdTier::start(claimed, &pool.arena_bytes(), pool.clone(), notify)?;
    for device in &devices {
        tracing::info!(
            path = %device.path.display(),
            bytes = device.geometry.capacity_bytes,
            reads = %device.read_mode,
            writes = %device.write_mode,
            direct = device.direct,
            preallocated = device.preallocated,
            "ssd file is open"
        );
    }
    warn_of_unregistered_memory(&devices, pool.bytes());
    let slots: u64 = tier.scans().map(|scan| scan.slots).sum();
    tracing::info!(slots, "ssd slots are being read; DRAM is served meanwhile");
    Ok((tier, devices))
}

/// One line for all rings: it is one limit that they share.
fn warn_of_unregistered_memory(devices: &[DeviceInfo], pool_bytes: u64) {
    let modes = devices.iter().flat_map(|device| [device.read_mode, device.write_mode]);
    let refused: Vec<_> = modes.clone().filter_map(|mode| mode.register_errno).collect();
    let Some(errno) = refused.first() else { return };
    let limit = rustix::process::getrlimit(Resource::Memlock);
    let bytes = |limit: Option<u64>| {
        limit.map_or_else(|| "unlimited".to_owned(), |bytes| bytes.to_string())
    };
    tracing::warn!(
        %errno,
        rings = modes.count(),
        refused = refused.len(),
        needed_bytes = pool_bytes.saturating_mul(2 * devices.len() as u64),
        memlock_soft_bytes = bytes(limit.current),
        memlock_hard_bytes = bytes(limit.maximum),
        "DRAM is not registered with every ring, which costs a little CPU and nothing else: raise \
         RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=) or grant CAP_IPC_LOCK, and allow \
         io_uring_register"
    );
}

/// The files as `core` sees them.
fn device_layouts(devices: &[DeviceInfo]) -> Vec<DeviceLayout> {
    let layouts = devices.iter().map(|device| DeviceLayout {
        geometry: device.geometry,
        region_slot_bytes: device.regions.iter().map(|bytes| bytes.unwrap_or(0)).collect(),
        retired: device.retired.clone(),
    });
    layouts.collect()
}

/// What `core` is told of the configuration.
fn core_config(config: &Config, arena_bytes: Vec<u64>, hash_seed: u64) -> CoreConfig {
    let defaults = CoreConfig::with_dram(config.dram.capacity_bytes);
    let ssd = config.ssd.as_ref();
    let devices = ssd.map_or(1, |ssd| ssd.paths.len() as u64);
    CoreConfig {
        arena_bytes,
        writes_in_flight_bytes: writes_in_flight_bytes(config.dram.capacity_bytes, devices),
        query_budget_bytes: config.budget.query_bytes,
        speculative_budget_bytes: config.budget.speculative_bytes,
        session_budget_bytes: config.budget.session_bytes,
        lease_ttl_ns: nanos_of(config.time.lease_ttl),
        operation_timeout_ns: nanos_of(config.time.operation_timeout),
        page_bytes_max: config.limits.page_bytes_max,
        bad_requests_max: config.limits.bad_requests,
        scopes_per_session_max: config.limits.scopes_per_session as usize,
        regions_per_session_max: config.limits.regions_per_session as usize,
        events_per_session_max: config.limits.events_per_session as usize,
        spill_policy: match ssd.map_or(SpillPolicy::All, |ssd| ssd.spill) {
            SpillPolicy::All => crate::core::SpillPolicy::All,
            SpillPolicy::Reuse => crate::core::SpillPolicy::Reuse,
        },
        write_budget_bytes_a_day: ssd.and_then(|ssd| ssd.write_budget_per_day_bytes),
        hash_seed,
        ..defaults
    }
}

/// Says that clients are let in: the one line that `serve` prints on stdout.
fn announce_ready(socket: &Path, http: Option<&HttpThread>, stale: bool) {
    let socket = socket.display();
    let http = http.map_or_else(|| "off".to_owned(), |http| http.address().to_string());
    tracing::info!(%socket, http, replaced_stale_socket = stale, "ready");
    // Nobody has to read it.
    let mut stdout = std::io::stdout();
    let _ = writeln!(stdout, "ready socket={socket} http={http}");
    let _ = stdout.flush();
}

fn bind_http(config: &Config) -> Result<Option<HttpListener>, ServeError> {
    let Some(address) = config.http.address else { return Ok(None) };
    match HttpListener::bind(address) {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if config.http.optional => {
            tracing::warn!(%address, %error, "no /metrics: the address cannot be taken");
            Ok(None)
        }
        Err(source) => Err(ServeError::Http { address, source }),
    }
}

/// The two pages, from the telemetry segment.
struct TelemetryPages(TelemetryReader);

impl Pages for TelemetryPages {
    fn metrics(&self) -> String {
        self.0.prometheus()
    }

    fn health(&self) -> Health {
        let life = self.0.life();
        let healthy = matches!(life, LifeState::Ready | LifeState::Degraded);
        let reason = self.0.reason(life);
        let state =
            reason.map_or(life.label().to_owned(), |why| format!("{}: {why}", life.label()));
        Health { healthy, state }
    }
}

/// Random and never zero.
fn new_epoch(random: &mut File) -> std::io::Result<Epoch> {
    loop {
        let epoch = random_u64(random)? as u32;
        if epoch != 0 {
            return Ok(Epoch(epoch));
        }
    }
}

fn random_u64(random: &mut File) -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    random.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Sessions, pidfds and memories are descriptors; many shells give a process only 1,024.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(errno) = rustix::process::setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%errno, "cannot raise the limit of open descriptors");
        }
    }
}

/// A Manager that no client can attach to is none: refuses to start where the limit of open
/// descriptors leaves no room for one session, and warns where it leaves room for fewer than may
/// attach.
fn check_descriptors(sessions_max: u32) -> Result<(), ServeError> {
    let Some(limit) = rustix::process::getrlimit(Resource::Nofile).current else { return Ok(()) };
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |open| open.count() as u64);
    match sessions_within(limit, open) {
        0 => Err(ServeError::Descriptors {
            limit,
            needed: open + DESCRIPTORS_OF_ATTACHING + DESCRIPTORS_PER_SESSION,
        }),
        room if room < u64::from(sessions_max) => {
            tracing::warn!(
                limit,
                open,
                sessions = room,
                sessions_max,
                "the limit of open descriptors holds fewer sessions than may attach: raise it \
                 (ulimit -n, LimitNOFILE=)"
            );
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Sessions for which a limit of descriptors has room beside the open ones.
const fn sessions_within(limit: u64, open: u64) -> u64 {
    limit.saturating_sub(open).saturating_sub(DESCRIPTORS_OF_ATTACHING) / DESCRIPTORS_PER_SESSION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_hold_whole_sessions_beside_what_is_open() {
        assert_eq!(sessions_within(1024, 20), 250);
        assert_eq!(sessions_within(20 + DESCRIPTORS_OF_ATTACHING + 4, 20), 1);
        assert_eq!(sessions_within(20 + DESCRIPTORS_OF_ATTACHING + 3, 20), 0);
        assert_eq!(sessions_within(8, 20), 0);
    }

    #[test]
    fn epochs_are_random_and_never_zero() {
        let mut random = File::open("/dev/urandom").unwrap();
        let epochs: Vec<_> = (0..8).map(|_| new_epoch(&mut random).unwrap()).collect();
        assert!(epochs.iter().all(|epoch| epoch.0 != 0));
        assert!(epochs.iter().any(|epoch| *epoch != epochs[0]));
    }
}
