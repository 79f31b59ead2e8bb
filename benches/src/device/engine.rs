//! One engine on its device: saves and restores pages, copies the same bytes raw, and looks at every
//! byte that comes back.

use std::hint::spin_loop;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use orbitkv_engine::{
    Block, Client, Completion, Connect, Deadline, Lease, NamespaceSpec, Operation, PageHash,
    QueryMode, Region, RegionLayout, RestoreOptions, SaveOptions, Scope, Segment, StageTimes,
    Status,
};
use serde::{Deserialize, Serialize};

use super::Kind;
use super::cuda::CudaField;
use super::field::{Field, Raw, Side};
use super::host::HostField;
use super::shape::{Layout, SHAPES, Shape};
use crate::clock;
use crate::error::BenchError;
use crate::gpu::Device;
use crate::pages;
use crate::session::wrong;

/// Longest wait for any answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// Looks at a done word between two at the clock.
const LOOKS: u32 = 1 << 16;
/// Bytes that one round copies again and again, at least one copy and at most so many.
const ROUND_BYTES: u64 = 64 << 20;
const COPIES_MAX: u64 = 100;
/// Copies by which a raw way is chosen.
const TRIALS: usize = 5;

/// What is copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Op {
    /// From the device.
    Save,
    /// To the device.
    Restore,
    /// Both at once, other pages each.
    Both,
}

impl Op {
    /// Its name in the results.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Save => "save",
            Self::Restore => "restore",
            Self::Both => "both",
        }
    }
}

/// One order of the coordinator. `shape` is a position in the shapes.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Every operation of a shape, ours and raw in turn; `ours_first` changes from round to round.
    Round { shape: usize, ours_first: bool },
    /// Whatever the runs of a shape need: they use no GPU but for copies.
    Prepare { shape: usize, op: Op },
    /// The same operation again and again, ours or raw.
    Run { ours: bool, slice_ns: u64 },
    /// Compares what the runs left.
    Check,
}

/// What one operation took.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Copies {
    pub(crate) op: Op,
    /// From staging the request to seeing its end.
    pub(crate) ours_ns: Vec<u64>,
    /// From the first call to seeing the flag behind the last.
    pub(crate) raw_ns: Vec<u64>,
    /// The same in another process.
    pub(crate) elsewhere_ns: Vec<u64>,
    /// The raw way that was chosen.
    pub(crate) way: String,
    /// Of restores by layer: from staging to seeing the first layer done, and the last.
    pub(crate) layers_ns: Vec<[u64; 2]>,
    /// From the Manager's first sight of the done word to this process's first sight of the done word.
    pub(crate) delivery_ns: Vec<i64>,
    /// From staging to the stages that the completion tells, see [`STAGES`].
    pub(crate) stages_ns: Vec<[u64; STAGES.len()]>,
}

/// Stages of an operation in its completion's words: the Manager took the request, had memory and a
/// passed fence for it, saw the last byte in place, published the completion.
pub(super) const STAGES: [&str; 4] = ["queued", "prepared", "copied", "published"];

impl Copies {
    fn new(op: Op, way: String) -> Self {
        let (ours_ns, raw_ns, elsewhere_ns) = (Vec::new(), Vec::new(), Vec::new());
        let (layers_ns, delivery_ns, stages_ns) = (Vec::new(), Vec::new(), Vec::new());
        Self { op, ours_ns, raw_ns, elsewhere_ns, way, layers_ns, delivery_ns, stages_ns }
    }
}

/// The engine of the benchmark; attached to the Manager while it holds pages of a shape.
pub(crate) struct Engine {
    socket: PathBuf,
    device: Option<Rc<Device>>,
    attached: Option<Attached>,
    /// Of the next save: no two save the same pages.
    seed: u32,
}

impl Engine {
    /// An engine on a device of this kind, for the Manager at `socket`.
    pub(crate) fn new(socket: &Path, kind: Kind) -> Result<Self, BenchError> {
        let device = match kind {
            Kind::Host => None,
            Kind::Cuda => Some(Rc::new(Device::open(0)?)),
        };
        Ok(Self { socket: socket.to_owned(), device, attached: None, seed: 0 })
    }

    /// Follows one order.
    pub(crate) fn follow(&mut self, order: Order) -> Result<Vec<Copies>, BenchError> {
        match order {
            Order::Round { shape, ours_first } => {
                let (attached, seed) = self.attached_for(shape)?;
                attached.round(seed, ours_first)
            }
            Order::Prepare { shape, op } => {
                let (attached, seed) = self.attached_for(shape)?;
                attached.prepare(seed, op)?;
                Ok(Vec::new())
            }
            Order::Run { ours, slice_ns } => {
                let attached = self.attached.as_mut().expect("runs are prepared");
                attached.run(ours, slice_ns, &mut self.seed).map(|copies| vec![copies])
            }
            Order::Check => {
                let attached = self.attached.as_mut().expect("runs are prepared");
                attached.check_run()?;
                Ok(Vec::new())
            }
        }
    }

    /// A session of its own for each shape, so that the Manager lets go of the memory of the last.
    fn attached_for(&mut self, shape: usize) -> Result<(&mut Attached, &mut u32), BenchError> {
        let shape = &SHAPES[shape];
        if self.attached.as_ref().is_none_or(|attached| attached.shape != *shape) {
            self.end()?;
            let attached = Attached::new(&self.socket, shape, self.device.as_ref())?;
            self.attached = Some(attached);
        }
        Ok((self.attached.as_mut().expect("attached just now"), &mut self.seed))
    }

    /// Ends the session.
    pub(crate) fn end(&mut self) -> Result<(), BenchError> {
        self.attached.take().map_or(Ok(()), Attached::end)
    }
}

/// A session with the pages of one shape.
struct Attached {
    // The session ends before its memory is freed.
    client: Client,
    field: Box<dyn Field>,
    shape: Shape,
    scope: Scope,
    region: Region,
    from: Vec<u32>,
    to: Vec<u32>,
    /// Ways of the raw save, the raw restore, and of both at once.
    ways: [usize; 2],
    ways_of_both: [usize; 2],
    run: Option<Run>,
}

/// What a run of the same operation needs.
struct Run {
    op: Op,
    seed: u32,
    lease: Lease,
}

/// An operation that is looked at: a restore by its done word, a save by its completion.
struct Begun {
    operation: Operation,
    is_restore: bool,
    fence: Option<u32>,
    /// When its end was first seen.
    seen_ns: Option<u64>,
    ended: Option<Completion>,
}

impl Begun {
    fn new(operation: Operation, is_restore: bool, fence: Option<u32>) -> Self {
        Self { operation, is_restore, fence, seen_ns: None, ended: None }
    }
}

impl Attached {
    fn new(socket: &Path, shape: &Shape, device: Option<&Rc<Device>>) -> Result<Self, BenchError> {
        let connect = Connect::new(socket).timeout(PATIENCE).done_words(shape.layers());
        let connected = connect.connect();
        let mut client = connected.map_err(wrong("attach"))?;
        let mut field: Box<dyn Field> = match device {
            Some(device) => Box::new(CudaField::new(shape, device)?),
            None => Box::new(HostField::new(shape)?),
        };
        let spec = NamespaceSpec {
            model: "orbitkv-bench/device".to_owned(),
            page_bytes: shape.image_bytes(),
            layout: shape.name.to_owned(),
            ..pages::namespace()
        };
        let scope = client.define_namespace(&spec).map_err(wrong("define a namespace"))?;
        let memories = field.register(&mut client)?;
        let layout = Layout::of(shape);
        let segment = |(part, &(at, offset)): (u32, &(usize, u64))| Segment {
            memory: memories[at],
            offset,
            stride: layout.stride,
            length: layout.length,
            layer: shape.layer(part),
        };
        let segments = (0..).zip(&layout.segments).map(segment).collect();
        let region = RegionLayout { scope, pages: layout.pages, segments };
        let region = client.register_region(&region).map_err(wrong("register a region"))?;
        let (from, to) = layout.places(shape);
        let mut attached = Self {
            client,
            field,
            shape: *shape,
            scope,
            region,
            from,
            to,
            ways: [0; 2],
            ways_of_both: [0; 2],
            run: None,
        };
        attached.choose()?;
        Ok(attached)
    }

    /// Finds the fastest raw way of each direction, alone and beside the other.
    fn choose(&mut self) -> Result<(), BenchError> {
        let counts = [Side::From, Side::To].map(|side| self.field.ways(side).len());
        let [saves, restores] = counts;
        self.ways[0] = self.fastest(saves, |way| (Some(Raw { way, slot: 0 }), None))?;
        self.ways[1] = self.fastest(restores, |way| (None, Some(Raw { way, slot: 0 })))?;
        if self.shape.both {
            let pairs = saves * restores;
            let pair = |at: usize| [at / restores, at % restores];
            let best = self.fastest(pairs, |at| {
                let [save, restore] = pair(at);
                (Some(Raw { way: save, slot: 1 }), Some(Raw { way: restore, slot: 0 }))
            })?;
            self.ways_of_both = pair(best);
        }
        Ok(())
    }

    fn fastest(
        &mut self,
        count: usize,
        raw: impl Fn(usize) -> (Option<Raw>, Option<Raw>),
    ) -> Result<usize, BenchError> {
        let mut best = (u64::MAX, 0);
        for at in (0..count).filter(|_| count > 1) {
            let (save, restore) = raw(at);
            let mut times = [0; TRIALS];
            for time in &mut times {
                *time = self.field.raw(save, restore)?;
            }
            times.sort_unstable();
            best = best.min((times[TRIALS / 2], at));
        }
        Ok(best.1)
    }

    fn way(&self, op: Op) -> String {
        let name = |side, way: usize| self.field.ways(side)[way];
        let both = self.ways_of_both;
        match op {
            Op::Save => name(Side::From, self.ways[0]).to_owned(),
            Op::Restore => name(Side::To, self.ways[1]).to_owned(),
            Op::Both => format!("{}+{}", name(Side::From, both[0]), name(Side::To, both[1])),
        }
    }

    fn raw_save(&mut self, slot: usize) -> Result<u64, BenchError> {
        self.field.raw(Some(Raw { way: self.ways[0], slot }), None)
    }

    fn raw_restore(&mut self, slot: usize) -> Result<u64, BenchError> {
        self.field.raw(None, Some(Raw { way: self.ways[1], slot }))
    }

    /// All operations of the shape, ours and raw in turn.
    fn round(&mut self, seed: &mut u32, ours_first: bool) -> Result<Vec<Copies>, BenchError> {
        let [mut save, mut restore, mut both] =
            [Op::Save, Op::Restore, Op::Both].map(|op| Copies::new(op, self.way(op)));
        let sides = [ours_first, !ours_first];
        let all = if ours_first {
            [Who::Ours, Who::Raw, Who::Elsewhere]
        } else {
            [Who::Raw, Who::Elsewhere, Who::Ours]
        };
        let copies = (ROUND_BYTES / self.shape.bytes()).clamp(1, COPIES_MAX);
        for _ in 0..copies {
            let first = next(seed);
            for who in all {
                // By a kernel of this process: whoever copies finds the GPU in the same state.
                self.field.fill(Side::From, first.into())?;
                match who {
                    Who::Ours => self.timed_save(first, &mut save)?,
                    Who::Raw => save.raw_ns.push(self.raw_save(0)?),
                    Who::Elsewhere => {
                        let raw = Raw { way: self.ways[0], slot: 0 };
                        save.elsewhere_ns.extend(self.field.elsewhere(Some(raw), None)?);
                    }
                }
            }
            for who in all {
                self.field.poison()?;
                match who {
                    Who::Ours => {
                        let lease = self.hit(first)?;
                        self.timed_restore(first, &lease, &mut restore)?;
                    }
                    Who::Raw => restore.raw_ns.push(self.raw_restore(0)?),
                    Who::Elsewhere => {
                        let raw = Raw { way: self.ways[1], slot: 0 };
                        let Some(ns) = self.field.elsewhere(None, Some(raw))? else { continue };
                        restore.elsewhere_ns.push(ns);
                    }
                }
                self.compare(first, Op::Restore)?;
            }
            if self.shape.layers() > 1 {
                self.field.poison()?;
                let lease = self.hit(first)?;
                restore.layers_ns.push(self.timed_layers(first, &lease)?);
                self.compare(first, Op::Restore)?;
            }
            if self.shape.both {
                self.both_ways(first, next(seed), sides, &mut both)?;
            }
            self.forget()?;
        }
        let found = [save, restore, both];
        Ok(found.into_iter().filter(|copies| !copies.ours_ns.is_empty()).collect())
    }

    /// Saves the pages of `second` while those of `first`, which are there, are restored.
    fn both_ways(
        &mut self,
        first: u32,
        second: u32,
        sides: [bool; 2],
        both: &mut Copies,
    ) -> Result<(), BenchError> {
        self.field.fill(Side::From, second.into())?;
        for ours in sides {
            if ours {
                let lease = self.hit(first)?;
                self.field.poison()?;
                let fence = self.field.fence()?;
                let begin = clock::now_ns();
                let mut operations =
                    [self.stage_save(second, fence)?, self.stage_restore(first, &lease, false)?];
                let seen = self.finish(&mut operations)?;
                both.ours_ns.push(seen - begin);
                self.take(operations)?;
                self.compare(first, Op::Both)?;
                let lease = self.hit(second)?;
                self.field.poison()?;
                self.timed_restore(second, &lease, &mut Copies::new(Op::Both, String::new()))?;
            } else {
                self.field.poison()?;
                let [save, restore] = self.ways_of_both;
                let (save, restore) = (Raw { way: save, slot: 1 }, Raw { way: restore, slot: 0 });
                both.raw_ns.push(self.field.raw(Some(save), Some(restore))?);
                self.compare(first, Op::Both)?;
                self.field.poison()?;
                self.raw_restore(1)?;
            }
            self.compare(second, Op::Both)?;
        }
        Ok(())
    }

    fn timed_save(&mut self, seed: u32, into: &mut Copies) -> Result<(), BenchError> {
        let fence = self.field.fence()?;
        let begin = clock::now_ns();
        let operations = [self.stage_save(seed, fence)?];
        self.timed(begin, operations, into)
    }

    fn timed_restore(
        &mut self,
        seed: u32,
        lease: &Lease,
        into: &mut Copies,
    ) -> Result<(), BenchError> {
        let begin = clock::now_ns();
        let operations = [self.stage_restore(seed, lease, self.run.is_some())?];
        self.timed(begin, operations, into)
    }

    /// Restores layer by layer: nanoseconds to the first sight of the first layer and of the last.
    fn timed_layers(&mut self, seed: u32, lease: &Lease) -> Result<[u64; 2], BenchError> {
        let blocks = blocks(seed, &self.to);
        let options = RestoreOptions { by_layer: true, ..RestoreOptions::default() };
        let begin = clock::now_ns();
        let staged = self.client.restore(lease, 0, &self.region, &blocks, options);
        let operation = staged.map_err(wrong("restore by layer"))?;
        self.client.submit().map_err(wrong("submit"))?;
        let end = begin + PATIENCE.as_nanos() as u64;
        let seen = |layer, client: &Client| {
            let mut now = clock::now_ns();
            while client.is_layer_done(&operation, layer).is_none() && now < end {
                spin_loop();
                now = clock::now_ns();
            }
            now - begin
        };
        let times = [0, self.shape.layers() - 1].map(|layer| seen(layer, &self.client));
        // A copy that failed or was late is found here.
        self.take([Begun::new(operation, true, None)])?;
        Ok(times)
    }

    fn timed(
        &mut self,
        begin: u64,
        mut operations: [Begun; 1],
        into: &mut Copies,
    ) -> Result<(), BenchError> {
        let is_restore = operations[0].is_restore;
        let seen = self.finish(&mut operations)?;
        into.ours_ns.push(seen - begin);
        let times = self.take(operations)?;
        if is_restore {
            into.delivery_ns.push(seen.cast_signed() - times.copied_ns.cast_signed());
        }
        let stages = [times.queued_ns, times.prepared_ns, times.copied_ns, times.published_ns];
        into.stages_ns.push(stages.map(|at| at.saturating_sub(begin)));
        Ok(())
    }

    fn stage_save(&mut self, seed: u32, fence: Option<u32>) -> Result<Begun, BenchError> {
        let blocks = blocks(seed, &self.from);
        let options = SaveOptions { fence, ..SaveOptions::default() };
        let staged = self.client.save_chains(&self.region, &[(&blocks).into()], options);
        let operation = staged.map_err(wrong("save"))?;
        Ok(Begun::new(operation, false, fence))
    }

    fn stage_restore(&mut self, seed: u32, lease: &Lease, keep: bool) -> Result<Begun, BenchError> {
        let blocks = blocks(seed, &self.to);
        let options = RestoreOptions { keep, ..RestoreOptions::default() };
        let staged = self.client.restore(lease, 0, &self.region, &blocks, options);
        let operation = staged.map_err(wrong("restore"))?;
        Ok(Begun::new(operation, true, None))
    }

    /// Submits what is staged and looks until every end was seen: when the last was.
    fn finish(&mut self, operations: &mut [Begun]) -> Result<u64, BenchError> {
        self.client.submit().map_err(wrong("submit"))?;
        let mut end = None;
        loop {
            for _ in 0..LOOKS {
                if self.look(operations)? {
                    return Ok(operations
                        .iter()
                        .filter_map(|begun| begun.seen_ns)
                        .max()
                        .unwrap_or(0));
                }
                spin_loop();
            }
            self.client.check_manager().map_err(wrong("wait for the end of a copy"))?;
            let now = clock::now_ns();
            if now > *end.get_or_insert(now + PATIENCE.as_nanos() as u64) {
                return Err(BenchError::Wrong("a copy did not end within 20 s".into()));
            }
        }
    }

    /// Whether the end of every operation was seen.
    #[inline]
    fn look(&mut self, operations: &mut [Begun]) -> Result<bool, BenchError> {
        let (mut all, mut any_save) = (true, false);
        for begun in operations.iter_mut().filter(|begun| begun.seen_ns.is_none()) {
            if begun.is_restore && self.client.is_done(&begun.operation).is_some() {
                begun.seen_ns = Some(clock::now_ns());
            } else {
                all = false;
                any_save |= !begun.is_restore;
            }
        }
        if any_save && let Some(ended) = self.client.poll().map_err(wrong("poll"))? {
            keep(operations, ended);
        }
        Ok(all)
    }

    /// Takes the completions of operations whose end was seen; each must have copied every page.
    /// Returns the stages of the last.
    fn take<const N: usize>(
        &mut self,
        mut operations: [Begun; N],
    ) -> Result<StageTimes, BenchError> {
        while operations.iter().any(|begun| begun.ended.is_none()) {
            let ended = self.answer()?;
            keep(&mut operations, ended);
        }
        let mut times = StageTimes::default();
        for begun in operations {
            self.field.end_fence(begun.fence);
            let Some(ended) = begun.ended else { continue };
            let all = ended.pages == self.shape.pages && ended.bytes == self.shape.bytes();
            if ended.status != Status::Ok || !all {
                return Err(self.unexpected(&ended));
            }
            times = ended.times;
        }
        Ok(times)
    }

    fn answer(&mut self) -> Result<Completion, BenchError> {
        self.client.submit().map_err(wrong("submit"))?;
        let answer = self.client.wait(PATIENCE).map_err(wrong("wait"))?;
        answer.ok_or_else(|| BenchError::Wrong("no answer within 20 s".into()))
    }

    /// A lease of all pages of a save, which must be in DRAM.
    fn hit(&mut self, seed: u32) -> Result<Lease, BenchError> {
        let chain = chain(seed, self.shape.pages);
        let asked = self.client.query(&self.scope, &chain, QueryMode::Demand, Deadline::DEFAULT);
        asked.map_err(wrong("query"))?;
        let answer = self.answer()?;
        let lease = answer.lease.filter(|_| answer.pages_dram == self.shape.pages);
        lease.ok_or_else(|| self.unexpected(&answer))
    }

    fn forget(&mut self) -> Result<(), BenchError> {
        self.client.forget(&self.scope).map_err(wrong("forget"))?;
        let answer = self.answer()?;
        if answer.status == Status::Ok { Ok(()) } else { Err(self.unexpected(&answer)) }
    }

    fn compare(&mut self, seed: u32, op: Op) -> Result<(), BenchError> {
        match self.field.wrong_words(seed.into())? {
            0 => Ok(()),
            count => {
                let (shape, op) = (self.shape.name, op.label());
                let words = self.shape.bytes() / 8;
                let text = format!("{shape}, {op}: {count} of {words} restored words differ");
                Err(BenchError::Wrong(text.into()))
            }
        }
    }

    fn prepare(&mut self, seed: &mut u32, op: Op) -> Result<(), BenchError> {
        self.run = None;
        self.forget()?;
        let first = next(seed);
        self.field.fill(Side::From, first.into())?;
        self.timed_save(first, &mut Copies::new(op, String::new()))?;
        self.raw_save(0)?;
        self.field.poison()?;
        self.choose()?;
        let lease = self.hit(first)?;
        self.run = Some(Run { op, seed: first, lease });
        Ok(())
    }

    fn run(&mut self, ours: bool, slice_ns: u64, seed: &mut u32) -> Result<Copies, BenchError> {
        let run = self.run.as_ref().expect("runs are prepared");
        let (op, first, lease) = (run.op, run.seed, run.lease);
        let mut copies = Copies::new(op, self.way(op));
        let end = clock::now_ns() + slice_ns;
        loop {
            match (op, ours) {
                (Op::Restore, true) => self.timed_restore(first, &lease, &mut copies)?,
                (Op::Restore, false) => copies.raw_ns.push(self.raw_restore(0)?),
                (_, true) => self.timed_save(next(seed), &mut copies)?,
                (_, false) => copies.raw_ns.push(self.raw_save(0)?),
            }
            if clock::now_ns() > end {
                return Ok(copies);
            }
        }
    }

    /// Restores once more, then compares.
    fn check_run(&mut self) -> Result<(), BenchError> {
        let Some(Run { op, seed, lease }) = self.run.take() else { return Ok(()) };
        self.field.poison()?;
        self.timed_restore(seed, &lease, &mut Copies::new(op, String::new()))?;
        self.compare(seed, op)?;
        self.forget()
    }

    fn end(mut self) -> Result<(), BenchError> {
        let drain = self.client.drain(Deadline::after(PATIENCE));
        drain.map_err(wrong("drain"))?;
        let answer = self.answer()?;
        if answer.status != Status::Ok {
            return Err(self.unexpected(&answer));
        }
        self.client.close();
        Ok(())
    }

    fn unexpected(&self, answer: &Completion) -> BenchError {
        let Completion { kind, status, code, pages, pages_dram, bytes, .. } = answer;
        let text = format!(
            "{}: {kind}: {status:?} ({code:?}), {pages} pages, {pages_dram} from DRAM, {bytes} bytes",
            self.shape.name
        );
        BenchError::Wrong(text.into())
    }
}

/// Files a completion with its operation. That of a save is the first sight of its end.
fn keep(operations: &mut [Begun], ended: Completion) {
    let of = operations.iter_mut().find(|begun| begun.operation == ended.operation);
    if let Some(begun) = of {
        begun.seen_ns.get_or_insert_with(clock::now_ns);
        begun.ended = Some(ended);
    }
}

fn next(seed: &mut u32) -> u32 {
    *seed += 1;
    *seed
}

/// Who copies.
#[derive(Clone, Copy)]
enum Who {
    /// The Manager.
    Ours,
    /// This process, without it.
    Raw,
    /// A third one, likewise.
    Elsewhere,
}

/// Names of the pages of one save.
fn chain(seed: u32, pages: u32) -> Vec<PageHash> {
    (0..pages).map(|page| pages::hash(seed, page)).collect()
}

fn blocks(seed: u32, places: &[u32]) -> Vec<Block> {
    let names = chain(seed, places.len() as u32).into_iter();
    names.zip(places).map(|(hash, page)| Block { hash, page: *page }).collect()
}
