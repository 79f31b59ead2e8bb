"""The scheduler's side: what to restore, what to save, and whose pages they are."""

from __future__ import annotations

from array import array
from time import monotonic, monotonic_ns, perf_counter
from typing import Any, Iterable, Optional

from orbitkv import Client, Lease, Namespace, OrbitKVError, Scope
from orbitkv.link import End, Link, Operation
from orbitkv.vllm.events import StoredEvents
from orbitkv.vllm.holds import Holds
from orbitkv.vllm.metadata import HASH, NOTHING, Chains, Load, Part, Save, StepMetadata, WorkerMetadata
from orbitkv.vllm.namespace import Adapters
from orbitkv.vllm.options import Options
from orbitkv.vllm.policy import Prepared, query_deadline
from orbitkv.vllm.stats import Counters

#: Most pages that one step offers; the rest waits for the next.
PAGES_A_STEP = 8192
#: Most pages of one query.
PAGES_A_QUERY = 16_000
#: Nanoseconds that a lease must have left when it is handed to the workers.
LEASE_MARGIN_NS = 2_000_000_000
#: Seconds for which unfinished operations keep an engine without requests stepping.
LINGER = 5.0

_ROOT = bytes(HASH)


class Scopes:
    """What one session of the scheduler has defined: for each adapter the namespaces of all ranks and
    groups, asked about together."""

    def __init__(self, client: Client, namespaces: list[dict]):
        self._client = client
        self._namespaces = namespaces
        self._scopes: dict[str, tuple[Scope, list[Scope]]] = {}
        self.of("")

    def of(self, adapter: str) -> Scope:
        """Defined when first asked for. Raises OrbitKVError where the Manager refuses."""
        if adapter not in self._scopes:
            members = [self._client.define_namespace(Namespace(**fields, adapter=adapter)) for fields in self._namespaces]
            scope = members[0] if len(members) == 1 else self._client.define_set(members)
            self._scopes[adapter] = (scope, members)
        return self._scopes[adapter][0]

    def members(self) -> list[Scope]:
        """Every namespace defined so far."""
        return [member for _, members in self._scopes.values() for member in members]


class Lookup:
    """One query, and the lease it was answered with until that is handed on or released."""

    __slots__ = ("first", "asked", "operation", "patience_ends", "is_over", "is_dropped", "is_owned", "pages", "dram", "ssd",
                 "lease", "session", "restorable")

    def __init__(self, first: int, asked: int, session: int, is_owned: bool, patience: float):
        #: First page and number of pages asked for.
        self.first = first
        self.asked = asked
        self.session = session
        #: Asked ahead of demand.
        self.is_owned = is_owned
        #: When a Manager that has not answered counts as hung.
        self.patience_ends = monotonic() + patience
        self.operation: Optional[Operation] = None
        self.is_over = False
        self.is_dropped = False
        self.pages = 0
        self.dram = 0
        self.ssd = 0
        self.lease: Optional[Lease] = None
        #: Page counts that can be restored, of several groups; `None` where every count can.
        self.restorable: Optional[array] = None

    def serves(self, start: int, session: int) -> bool:
        """Whether it still answers for pages from `start` on."""
        if self.session != session or start < self.first:
            return False
        if self.lease is not None and monotonic_ns() + LEASE_MARGIN_NS > self.lease.expires_ns:
            return False
        return True

    def usable(self, start: int, limit: int) -> int:
        """Pages behind `start` that can be restored, none at or behind `limit`."""
        end = min(self.first + self.pages, limit)
        if self.restorable is not None:
            ends = [self.first + count for count in self.restorable if self.first + count <= end]
            end = max(ends, default=start)
        return max(0, end - start)


class Tracked:
    """One request as the connector knows it."""

    __slots__ = ("request", "adapter", "lookup", "start", "is_barred", "blocks", "offered", "tiers")

    def __init__(self, request: Any, adapter: str):
        self.request = request
        self.adapter = adapter
        self.lookup: Optional[Lookup] = None
        #: First page that the last answer was about.
        self.start = 0
        #: A load of it has failed: it is not looked up again.
        self.is_barred = False
        #: Block ids by group.
        self.blocks: list[list[int]] = []
        #: Pages from the start that need not be offered any more.
        self.offered = 0
        #: Pages of the last load from DRAM and from SSD.
        self.tiers = (0, 0)


class LeaseInUse:
    """The lease of a load under way. It ends by itself when restores have named all of its pages."""

    __slots__ = ("lease", "session", "is_whole", "has_failed", "blocks", "is_held")

    def __init__(self, lease: Lease, session: int, is_whole: bool, blocks: list[int]):
        self.lease = lease
        self.session = session
        self.is_whole = is_whole
        #: On one of the workers at least.
        self.has_failed = False
        #: Blocks of the engine that the load writes.
        self.blocks = blocks
        #: Beyond the life of their request, as the load was given up.
        self.is_held = False


class Unconfirmed:
    """One step whose loads are not known to be good yet."""

    __slots__ = ("serial", "loads", "saves", "marks")

    def __init__(self, serial: int, loads: list[str], saves: list[Save], marks: list[tuple[Tracked, int]]):
        self.serial = serial
        #: Requests that it loads for.
        self.loads = loads
        self.saves = saves
        #: Requests, and what was offered of each before.
        self.marks = marks


class Scheduler:
    """See the module. Every call on the scheduler's one thread."""

    def __init__(self, options: Options, engine_id: bytes, workers: int, kv_cache_config: Any, counters: Counters,
                 events: StoredEvents):
        self._options = options
        self._engine_id = engine_id
        self._workers = workers
        self.counters = counters
        self.prepared = Prepared(counters)
        self.events = events
        groups = kv_cache_config.kv_cache_groups
        self._groups = len(groups)
        self._page_tokens = groups[0].kv_cache_spec.block_size if groups else 0
        self._windows: list[Optional[int]] = [None] * self._groups
        #: Block hashes a page.
        self._stride = 1
        self.link: Optional[Link] = None
        self._holds: Optional[Holds] = None
        self._adapters = Adapters()
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._in_use: dict[str, LeaseInUse] = {}
        self._left: dict[int, int] = {}
        #: Loads that were given up and may still write, and on how many workers.
        self._writing: dict[str, int] = {}
        self._next_save = 1
        self._last_work_at = 0.0
        self._serial = 0
        #: Where the workers wait for loads in the step itself: steps, and saves of good ones.
        self._unconfirmed: list[Unconfirmed] = []
        self._confirmed: list[Save] = []

    # Start

    def bind_pool(self, pool: Any) -> None:
        self._holds = Holds(pool, self._options.held_blocks_max)

    def start(self, namespaces: list[dict], hash_block_size: Optional[int]) -> None:
        """Every worker has said whose pages it holds; `namespaces` in the order of the ranks."""
        if hash_block_size:
            self._stride = max(1, self._page_tokens // hash_block_size)
        for fields in namespaces[: self._groups]:
            if fields["dependency"] == "window":
                self._windows[fields["group"]] = fields["window"]
        self.link = Link(
            "scheduler",
            engine_id=self._engine_id,
            socket=self._options.socket,
            register=lambda client: Scopes(client, namespaces),
            on_lost=self._lost,
        )
        self.link.start()

    def _lost(self) -> None:
        self.counters.add("sessions_lost")
        for tracked in self._tracked.values():
            # A Manager without these pages refuses the ones behind them.
            tracked.offered = 0

    # Requests

    def new_request(self, request: Any) -> None:
        """A request joined the queue."""
        tracked = self._track(request)
        options = self._options
        if not (options.queued_warming or options.prepare) or self.link is None or not self.link.ready:
            return
        pages = self._pages_of(tracked)
        if pages == 0:
            return
        if options.prepare:
            tracked.lookup = self._ask(tracked, 0, pages, is_owned=True)
        else:
            scope = self._scope(tracked.adapter)
            if scope is not None:
                self.link.begin("prepare", scope, self._hashes(tracked, 0, pages), then=_ignore)
        self.link.flush()

    def matched_tokens(self, request: Any, computed: int) -> Optional[int]:
        """Tokens that can be restored behind `computed`; `None` while the Manager has not answered."""
        link = self.link
        if link is None:
            return 0
        tracked = self._tracked.get(request.request_id) or self._track(request)
        lookup = tracked.lookup
        if lookup is not None and not lookup.is_over:
            # Asked in each step: whether the answer is of use is looked at once it is there.
            link.pump()
            if not lookup.is_over and monotonic() < lookup.patience_ends:
                return None
        start, rest = divmod(computed, self._page_tokens)
        limit = self._pages_of(tracked)
        if tracked.is_barred or rest or limit <= start:
            self._drop(tracked)
            return 0
        lookup = tracked.lookup
        if lookup is None or link.client is None or not lookup.serves(start, link.sessions):
            self._drop(tracked)
            if not link.ready:
                return 0
            first = 0 if self._groups > 1 else start
            tracked.lookup = lookup = self._ask(tracked, first, limit - first, is_owned=False)
            link.flush()
            self._spin(lookup)
        if not lookup.is_over:
            if monotonic() < lookup.patience_ends:
                return None
            self.counters.add("queries_given_up")
            link.complain(f"a query is {self._options.query_patience:g} s old")
            self._drop(tracked)
            return 0
        pages = lookup.usable(start, limit)
        if pages == 0:
            self._drop(tracked)
            return 0
        tracked.start = start
        return pages * self._page_tokens

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The engine has blocks for a request, `tokens` of them to be restored."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        lookup = tracked.lookup
        if tokens <= 0 or lookup is None or lookup.lease is None:
            self._drop(tracked)
            return
        pages = tokens // self._page_tokens
        start, end = tracked.start, tracked.start + pages
        block_ids = blocks.get_block_ids()
        parts = []
        is_whole = len(block_ids) == 1 and start == lookup.first and pages == lookup.pages
        for group, ids in enumerate(block_ids):
            window = self._windows[group]
            begin = start if window is None else max(start, end - window)
            parts.append(Part(group, self._hashes(tracked, begin, end), array("I", ids[begin:end]), begin - lookup.first))
        self._loads.append(Load(request.request_id, lookup.lease.to_bytes(), tracked.adapter, start, parts))
        if lookup.is_owned:
            self.prepared.settled(lookup.pages, pages)
            lookup.is_owned = False
        ssd = min(lookup.ssd, pages)
        tracked.tiers = (pages - ssd, ssd)
        written = [block for part in parts for block in part.pages if block]
        self._in_use[request.request_id] = LeaseInUse(lookup.lease, lookup.session, is_whole, written)
        tracked.lookup = None
        tracked.offered = end

    def tiers(self, request: Any) -> tuple[int, int]:
        """Tokens of the last load from DRAM and from SSD."""
        tracked = self._tracked.get(request.request_id)
        dram, ssd = tracked.tiers if tracked is not None else (0, 0)
        return dram * self._page_tokens, ssd * self._page_tokens

    def finished(self, request_id: str) -> None:
        """The request has ended, however. What it still holds is let go of."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._drop(tracked)
            if self.link is not None:
                self.link.flush()

    # Steps

    def build_step(self, output: Any) -> StepMetadata:
        """What the workers have to do in this step."""
        link = self.link
        if link is None:
            return NOTHING
        link.pump()
        saves: list[Save] = []
        marks: list[tuple[Tracked, int]] = []
        if output.num_scheduled_tokens:
            self._follow(output)
            if link.ready and self._options.save and self._holds is not None:
                saves = self._plan(output, marks)
        link.flush()
        if self._options.is_async:
            if not (saves or self._loads):
                return NOTHING
            metadata = StepMetadata(0, self._loads, saves)
        else:
            if output.num_scheduled_tokens and (self._loads or self._unconfirmed):
                self._serial += 1
                loads = [load.request_id for load in self._loads]
                self._unconfirmed.append(Unconfirmed(self._serial, loads, saves, marks))
                metadata = StepMetadata(self._serial, self._loads, [], self._confirmed)
            elif saves or self._loads or self._confirmed:
                # Nothing that this step builds on is in doubt: its pages are saved at its end.
                metadata = StepMetadata(0, self._loads, saves, self._confirmed)
            else:
                return NOTHING
            self._confirmed = []
        self._loads = []
        return metadata

    def step_done(self, report: Optional[WorkerMetadata], received: Iterable[str]) -> None:
        """All workers are through with a step."""
        if report is not None:
            for request_id in report.failed:
                used = self._in_use.get(request_id)
                if used is not None:
                    used.has_failed = True
            # Their requests still own the blocks: the engine frees them after this call.
            for request_id, count in report.given_up.items():
                self._given_up(request_id, count)
        for request_id in received:
            self._load_ended(request_id)
        if report is None:
            return
        for request_id, count in report.settled.items():
            self._settled(request_id, count)
        for request_id in report.failed:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.is_barred = True
                tracked.offered = 0
        if report.failed:
            self._discard_unconfirmed()
        for number, count in report.saved.items():
            self._save_ended(number, count)
        for serial in report.steps:
            self._confirm(serial)
        if self.link is not None:
            self.link.flush()

    @property
    def has_work(self) -> bool:
        """Whether steps are needed although no request is left: saves to hand out or to hear of, leases to
        let go of."""
        if self._confirmed or self._unconfirmed:
            return True
        is_open = self._left or self._writing or (self.link is not None and self.link.outstanding)
        return bool(is_open) and monotonic() - self._last_work_at < LINGER

    def forget_all(self) -> bool:
        """Makes every page of this engine unfindable, for all engines that share its namespaces. Whether the
        Manager has done it."""
        link = self.link
        for tracked in self._tracked.values():
            self._drop(tracked)
        self._discard_unconfirmed()
        for save in self._confirmed:
            self._let_go(save.number)
        self._confirmed = []
        if link is None or not link.ready:
            return False
        ends: list[End] = []
        members = link.held.members()
        for member in members:
            link.begin("forget", member, then=ends.append)
        end = monotonic() + self._options.query_patience
        while len(ends) < len(members) and monotonic() < end:
            link.wait(0.05)
        return len(ends) == len(members) and all(end.status in ("ok", "partial") for end in ends)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()

    # Looking up

    def _track(self, request: Any) -> Tracked:
        tracked = Tracked(request, self._adapters.identity(getattr(request, "lora_request", None)))
        self._tracked[request.request_id] = tracked
        return tracked

    def _pages_of(self, tracked: Tracked) -> int:
        """Full pages of a request that may be restored: at least one token is left to compute."""
        request = tracked.request
        pages = min((request.num_tokens - 1) // self._page_tokens, len(request.block_hashes) // self._stride)
        return min(pages, PAGES_A_QUERY)

    def _hashes(self, tracked: Tracked, first: int, end: int) -> bytes:
        hashes = tracked.request.block_hashes
        if self._stride == 1:
            return b"".join(hashes[first:end])
        # The hash of a page is that of its last block: it says everything before.
        return b"".join(hashes[(first + 1) * self._stride - 1 : end * self._stride : self._stride])

    def _parent(self, tracked: Tracked, first: int) -> Optional[bytes]:
        return bytes(tracked.request.block_hashes[first * self._stride - 1]) if first else None

    def _scope(self, adapter: str) -> Optional[Scope]:
        try:
            return self.link.held.of(adapter)
        except (OrbitKVError, AttributeError):
            return None

    def _ask(self, tracked: Tracked, first: int, pages: int, *, is_owned: bool) -> Lookup:
        lookup = Lookup(first, pages, self.link.sessions, is_owned, self._options.query_patience)
        scope = self._scope(tracked.adapter)
        if scope is None:
            lookup.is_over = True
            return lookup
        self.counters.add("queries")
        self.counters.add("queried_pages", pages)
        lookup.operation = self.link.begin(
            "query",
            scope,
            self._hashes(tracked, first, first + pages),
            parent=self._parent(tracked, first),
            mode="speculative" if is_owned else "demand",
            deadline=None if is_owned else query_deadline(self._options),
            then=lambda end: self._answered(lookup, end),
        )
        return lookup

    def _answered(self, lookup: Lookup, end: End) -> None:
        lookup.is_over = True
        self.counters.add("missed_pages", lookup.asked - end.pages)
        if end.lease is None:
            return
        self.counters.add("hit_pages_ssd", end.pages_ssd)
        self.counters.add("hit_pages_dram", end.pages - end.pages_ssd)
        lookup.pages = end.pages
        lookup.dram = end.pages - end.pages_ssd
        lookup.ssd = end.pages_ssd
        lookup.lease = end.lease
        if self._groups > 1:
            lookup.restorable = array("I", self.link.client.restorable_prefixes())
        if lookup.is_owned:
            self.prepared.leased(lookup.pages)
        if lookup.is_dropped:
            self._release(lookup)

    def _spin(self, lookup: Lookup) -> None:
        """Most answers come within microseconds: asking the engine to come again costs a step."""
        end = perf_counter() + self._options.query_spin_us / 1e6
        while not lookup.is_over and perf_counter() < end:
            self.link.pump()

    def _drop(self, tracked: Tracked) -> None:
        """The request has no use for its lookup."""
        lookup, tracked.lookup = tracked.lookup, None
        if lookup is None:
            return
        lookup.is_dropped = True
        self._last_work_at = monotonic()
        if lookup.is_over:
            self._release(lookup)
        elif lookup.operation is not None:
            self.link.cancel(lookup.operation)

    def _release(self, lookup: Lookup) -> None:
        if lookup.is_owned:
            self.prepared.settled(lookup.pages, 0)
        lease, lookup.lease = lookup.lease, None
        if lease is not None and lookup.session == self.link.sessions and self.link.client is not None:
            self.link.begin("release", lease, then=_ignore)

    def _given_up(self, request_id: str, count: int) -> None:
        """Workers will not wait any more for a load that may still write."""
        used = self._in_use.get(request_id)
        if used is None or self._holds is None:
            return
        if not used.is_held:
            used.is_held = True
            self._holds.hold(request_id, used.blocks)
        self._writing[request_id] = self._writing.get(request_id, 0) + count

    def _settled(self, request_id: str, count: int) -> None:
        """Workers say that a load that was given up has ended after all."""
        left = self._writing.pop(request_id, 0) - count
        if left > 0:
            self._writing[request_id] = left
        elif self._holds is not None:
            self._holds.let_go(request_id)

    def _load_ended(self, request_id: str) -> None:
        """All workers are through with a load: what they did not name of its lease is let go of."""
        used = self._in_use.pop(request_id, None)
        if used is None or (used.is_whole and not used.has_failed):
            return
        if self.link.client is not None and used.session == self.link.sessions:
            self.link.begin("release", used.lease, then=_ignore)

    # Saving

    def _follow(self, output: Any) -> None:
        """Keeps track of the blocks of each request."""
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.blocks = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids):
            if block_ids is None:
                continue
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if request_id in cached.resumed_req_ids or not tracked.blocks:
                tracked.blocks = [list(ids) for ids in block_ids]
            else:
                for known, ids in zip(tracked.blocks, block_ids):
                    known.extend(ids)

    def _plan(self, output: Any, marks: list[tuple[Tracked, int]]) -> list[Save]:
        """The pages that are full once this step has run and were not offered before."""
        saves: dict[str, Save] = {}
        room = min(PAGES_A_STEP, self._holds.room)
        blocks: dict[str, list[int]] = {}
        for request_id, done in _tokens_done(output):
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.blocks:
                continue
            full = min(done // self._page_tokens, len(tracked.request.block_hashes) // self._stride)
            full = min(full, min(len(ids) for ids in tracked.blocks))
            wanted = full - tracked.offered
            if wanted <= 0:
                continue
            pages = min(wanted, room // self._groups)
            if pages <= 0:
                self.counters.add("held_back_pages", wanted)
                continue
            save = saves.get(tracked.adapter)
            if save is None:
                chains = [Chains(group) for group in range(self._groups)]
                save = saves[tracked.adapter] = Save(self._next_save, tracked.adapter, chains)
                self._next_save += 1
                blocks[tracked.adapter] = []
            first, end = tracked.offered, tracked.offered + pages
            for group, chains in enumerate(save.groups):
                taken = self._add_chains(chains, tracked, tracked.blocks[group], first, end)
                blocks[tracked.adapter].extend(taken)
            self.events.note(save.number, tracked, first, end)
            marks.append((tracked, first))
            tracked.offered = end
            room -= pages * self._groups
        for adapter, save in saves.items():
            self._holds.hold(save.number, blocks[adapter])
            self._left[save.number] = self._workers
            self._last_work_at = monotonic()
        return list(saves.values())

    def _add_chains(self, chains: Chains, tracked: Tracked, ids: list[int], first: int, end: int) -> list[int]:
        """Adds the pages that still have a block: one behind a sliding window has the null block, 0."""
        taken = []
        at = first
        while at < end:
            stop = at
            while stop < end and ids[stop]:
                stop += 1
            if stop > at:
                chains.hashes += self._hashes(tracked, at, stop)
                chains.pages.extend(ids[at:stop])
                chains.lengths.append(stop - at)
                chains.parents += self._parent(tracked, at) or _ROOT
                taken.extend(ids[at:stop])
            at = stop + 1
        return taken

    def _save_ended(self, number: int, count: int) -> None:
        left = self._left.get(number)
        if left is None:
            return
        if left > count:
            self._left[number] = left - count
            return
        self._let_go(number)
        self.events.stored(number)

    def _let_go(self, number: int) -> None:
        self._left.pop(number, None)
        self._holds.let_go(number)

    def _confirm(self, serial: int) -> None:
        """A step ran, and none of its loads failed: what it wrote is right. Of several workers the last
        one counts, which is when the engine tells of the step."""
        ready = [step for step in self._unconfirmed if step.serial <= serial]
        self._unconfirmed = [step for step in self._unconfirmed if step.serial > serial]
        for step in ready:
            self._confirmed.extend(step.saves)
            for request_id in step.loads:
                self._load_ended(request_id)

    def _discard_unconfirmed(self) -> None:
        """A load has failed: whatever was computed since may be wrong, in every request that shares a
        block. None of it is saved; what is computed again is offered again."""
        for step in self._unconfirmed:
            for request_id in step.loads:
                if request_id in self._in_use:
                    self._in_use[request_id].has_failed = True
                self._load_ended(request_id)
            for save in step.saves:
                self._let_go(save.number)
                self.events.dropped(save.number)
            for tracked, offered in step.marks:
                tracked.offered = min(tracked.offered, offered)
        self._unconfirmed = []


def _tokens_done(output: Any) -> Iterable[tuple[str, int]]:
    """Each scheduled request with the tokens that are computed once the step has run."""
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens):
        yield request_id, computed + scheduled.get(request_id, 0)


def _ignore(_: End) -> None:
    pass
