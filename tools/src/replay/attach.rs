//! The real [`Link`]: the ring client, attached to a Manager.

use std::path::Path;
use std::time::Duration;

use orbitkv_engine::{
    Chain, Client, Completion, Connect, ConnectError, Deadline, DependencySpec, Gone, Lease,
    NamespaceSpec, Operation, QueryMode, Region, RegionLayout, RegisterError, RestoreOptions,
    Scope, Segment, Status, SubmitError,
};
use orbitkv_shm_protocol::ids::PageHash;
use orbitkv_shm_protocol::layout::PAGES_PER_REQUEST_MAX;

use super::control::Open;
use super::device::DevicePages;
use super::link::{Block, Ended, Link, LinkError, PageEnd, Times};

/// Longest wait for one answer on the bootstrap socket.
const BOOTSTRAP_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the session to own nothing at its end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);
/// Operations of a session that the replay can have outstanding, several a request.
const RING_CAPACITY: u32 = 256;
/// Requests of the largest kind whose page ranges fit side by side.
const PAGE_TABLE_REQUESTS: u32 = 8;

/// Why an engine could not attach.
#[derive(Debug, thiserror::Error)]
pub(super) enum AttachError {
    /// No session.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Namespace, memory or region were refused.
    #[error(transparent)]
    Register(#[from] RegisterError),
}

impl AttachError {
    /// Whether a Manager that is coming back could cure it.
    pub(super) fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Connect(
                ConnectError::NoSocket { .. }
                    | ConnectError::NotListening { .. }
                    | ConnectError::Timeout { .. }
                    | ConnectError::Transport(_)
            ) | Self::Register(
                RegisterError::ManagerGone(_)
                    | RegisterError::Timeout { .. }
                    | RegisterError::Transport(_)
            )
        )
    }
}

/// A session with its namespace and region.
pub(super) struct Attached {
    client: Client,
    scope: Scope,
    region: Region,
    blocks: Vec<orbitkv_engine::Block>,
}

impl Attached {
    /// Attaches to the Manager at `socket` and registers `device`.
    pub(super) fn attach(
        socket: &Path,
        open: &Open,
        device: &DevicePages,
    ) -> Result<Self, AttachError> {
        let mut client = Connect::new(socket)
            .ring_capacity(RING_CAPACITY)
            .page_entries(PAGES_PER_REQUEST_MAX * PAGE_TABLE_REQUESTS)
            .timeout(BOOTSTRAP_TIMEOUT)
            .connect()?;
        let scope = client.define_namespace(&namespace(open))?;
        let memory = client.register_memfd(device, device.bytes())?;
        let page_bytes = device.page_bytes() as u64;
        let segment =
            Segment { memory, offset: 0, stride: page_bytes, length: page_bytes, layer: 0 };
        let layout = RegionLayout { scope, pages: device.pages(), segments: vec![segment] };
        let region = client.register_region(&layout)?;
        Ok(Self { client, scope, region, blocks: Vec::new() })
    }

    /// Waits until the session owns nothing, then ends it. False when that did not come. A Manager
    /// that has died holds nothing for anyone: an engine without requests may learn of it only
    /// here, when another Manager is long back.
    pub(super) fn drain(mut self) -> bool {
        let drain = match self.client.drain(Deadline::after(DRAIN_TIMEOUT)) {
            Ok(drain) => drain,
            Err(error) => return matches!(error, SubmitError::ManagerGone(Gone::Died)),
        };
        let end = std::time::Instant::now() + DRAIN_TIMEOUT;
        while let Some(left) = end.checked_duration_since(std::time::Instant::now()) {
            match self.client.wait(left) {
                Ok(Some(end)) if end.operation == drain && end.status != Status::Gone => {
                    return end.status == Status::Ok;
                }
                Ok(_) => {}
                Err(gone) => return matches!(gone, Gone::Died),
            }
        }
        false
    }

    fn blocks(&mut self, blocks: &[Block]) {
        let engine = |block: &Block| orbitkv_engine::Block { hash: block.hash, page: block.page };
        self.blocks.clear();
        self.blocks.extend(blocks.iter().map(engine));
    }
}

/// Identity of the bytes that a workload's pages have.
fn namespace(open: &Open) -> NamespaceSpec {
    NamespaceSpec {
        model: format!("orbitkv-replay/{}", open.name),
        dtype: "bytes".to_owned(),
        page_tokens: open.block_tokens,
        page_bytes: open.page_bytes,
        layout: "one segment a page, bytes derived from the page key".to_owned(),
        group: 0,
        tp_rank: 0,
        tp_size: 1,
        pp_rank: 0,
        pp_size: 1,
        adapter: String::new(),
        salt: format!("seed {}", open.seed),
        dependency: DependencySpec::Chain,
    }
}

impl From<SubmitError> for LinkError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::WouldBlock => Self::Full,
            // A lease of the Manager's last life is as gone as the Manager.
            SubmitError::ManagerGone(_) | SubmitError::Draining | SubmitError::StaleHandle => {
                Self::Gone
            }
            SubmitError::TooManyPages { .. } => Self::Refused("too many pages"),
            SubmitError::NoPages => Self::Refused("no pages"),
            SubmitError::BadPage { .. } => Self::Refused("a page outside the region"),
            SubmitError::WrongProcess => Self::Refused("called in a forked child"),
        }
    }
}

fn ended(completion: &Completion) -> Ended<Operation, Lease> {
    let times = completion.times;
    Ended {
        operation: completion.operation,
        kind: completion.kind,
        code: completion.code,
        pages: completion.pages,
        pages_ssd: completion.pages_ssd,
        lease: completion.lease,
        times: Times {
            queued_ns: times.queued_ns,
            prepared_ns: times.prepared_ns,
            published_ns: times.published_ns,
            observed_ns: times.observed_ns,
        },
    }
}

impl Link for Attached {
    type Operation = Operation;
    type Lease = Lease;

    fn query(
        &mut self,
        parent: Option<PageHash>,
        hashes: &[PageHash],
    ) -> Result<Operation, LinkError> {
        let chain = Chain { parent, blocks: hashes };
        Ok(self.client.query(&self.scope, chain, QueryMode::Demand, Deadline::DEFAULT)?)
    }

    fn restore(
        &mut self,
        lease: Lease,
        offset: u32,
        blocks: &[Block],
    ) -> Result<Operation, LinkError> {
        self.blocks(blocks);
        let options = RestoreOptions::default();
        Ok(self.client.restore(&lease, offset, &self.region, &self.blocks, options)?)
    }

    fn save(&mut self, parent: Option<PageHash>, blocks: &[Block]) -> Result<Operation, LinkError> {
        self.blocks(blocks);
        Ok(self.client.save(&self.region, Chain { parent, blocks: &self.blocks })?)
    }

    fn release(&mut self, lease: Lease) -> Result<Operation, LinkError> {
        Ok(self.client.release(lease)?)
    }

    fn submit(&mut self) {
        // A session that is over says so at the next wait, after its operations.
        let _gone = self.client.submit();
    }

    fn wait(
        &mut self,
        timeout: Duration,
        ends: &mut Vec<PageEnd>,
    ) -> Result<Option<Ended<Operation, Lease>>, LinkError> {
        ends.clear();
        let completion = match self.client.wait(timeout) {
            Ok(Some(completion)) if completion.status == Status::Gone => {
                return Err(LinkError::Gone);
            }
            Ok(Some(completion)) => completion,
            Ok(None) => return Ok(None),
            Err(_) => return Err(LinkError::Gone),
        };
        let results = self.client.results(&completion);
        ends.extend(results.map(|page| PageEnd {
            outcome: page.outcome,
            tier: page.tier,
            code: page.code,
        }));
        Ok(Some(ended(&completion)))
    }
}
