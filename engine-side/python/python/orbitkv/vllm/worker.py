"""The worker's side: copies between the engine's KV memory and the Manager."""

from __future__ import annotations

from collections import deque
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Optional

from orbitkv import Client, CudaError, DoneWords, Events, Gpu, Lease, Namespace, OrbitKVError, Region
from orbitkv.link import End, Link, Operation
from orbitkv.vllm.layout import GroupLayout
from orbitkv.vllm.metadata import HASH, NOTHING, Load, Part, Save, StepMetadata, WorkerMetadata
from orbitkv.vllm.options import Options
from orbitkv.vllm.stats import Counters

#: Events of a GPU: operations that can wait for their fence at once.
EVENTS = 128
#: Looks at a done word between two looks at everything else.
LOOKS = 256
#: Seconds that the end of a worker waits for its copies.
DRAIN = 2.0


class Held:
    """What one session of a worker has registered."""

    def __init__(self, client: Client, layouts: list[GroupLayout], namespaces: list[dict], *, by_layer: bool, uses_stream: bool):
        self._by_layer = by_layer
        self._client = client
        self._layouts = layouts
        self._namespaces = namespaces
        self._regions: dict[tuple[int, str], Region] = {}
        #: By address of the storage: its memory and the offset of the storage in it.
        self._memories: dict[int, tuple] = {}
        self.gpu: Optional[Gpu] = None
        self.events: Optional[Events] = None
        self.done_words: Optional[DoneWords] = None
        for layout in layouts:
            for storage in layout.storages.values():
                if storage.address not in self._memories:
                    self._memories[storage.address] = self._register(storage)
        if self.gpu is not None:
            self.events = Events(client, self.gpu, EVENTS)
            if uses_stream:
                self.done_words = DoneWords(client, self.gpu)
        for group in range(len(layouts)):
            self.region(group, "")

    def region(self, group: int, adapter: str) -> Region:
        """The pages of one group as those of one adapter; registered when first asked for.

        Raises OrbitKVError where the Manager refuses."""
        region = self._regions.get((group, adapter))
        if region is None:
            layout = self._layouts[group]
            scope = self._client.define_namespace(Namespace(**self._namespaces[group], adapter=adapter))
            segments = []
            for piece in layout.pieces:
                storage = layout.storage_of(piece)
                memory, offset = self._memories[storage.address]
                layer = piece.layer if self._by_layer else 0
                segments.append((memory, offset + piece.address - storage.address, piece.stride, piece.length, layer))
            region = self._client.register_region(scope, layout.blocks, segments)
            self._regions[group, adapter] = region
        return region

    def _register(self, storage: Any) -> tuple:
        if self._on_gpu:
            if self.gpu is None:
                self.gpu = Gpu.of_address(storage.address)
            return self._client.register_cuda(self.gpu, storage.address, storage.bytes)
        return self._client.register_process(storage.address, storage.bytes), 0

    @property
    def _on_gpu(self) -> bool:
        return self._namespaces[0]["layout"].split()[2] == "cuda"


class Fence:
    """One recorded event, until its operation has ended."""

    __slots__ = ("_events", "index")

    def __init__(self, events: Events, index: int):
        self._events = events
        self.index = index

    def give_back(self) -> None:
        self._events.give_back(self.index)


class Loading:
    """One load until all of its restores have ended."""

    __slots__ = ("load", "left", "failed", "operations", "patience_ends", "is_given_up")

    def __init__(self, load: Load, patience_ends: float):
        self.load = load
        self.patience_ends = patience_ends
        #: Told as failed, while its restores may still write.
        self.is_given_up = False
        self.left = len(load.parts)
        #: Blocks without their bytes.
        self.failed: set[int] = set()
        self.operations: list[Operation] = []


class Saving:
    """One save until all of its operations have ended.

    The Manager refuses a page whose parent it does not have, and it has a page when its save has ended. So
    a save waits for the earlier ones that end in one of its parents: the chunk of a prompt for the chunk
    before. Only for earlier ones: no two can wait for each other."""

    __slots__ = ("save", "left", "parents", "tails", "blockers", "followers")

    def __init__(self, save: Save):
        self.save = save
        self.left = len(save.groups)
        #: Unfinished saves that it waits for, and those that wait for it.
        self.blockers = 0
        self.followers: list[Saving] = []
        #: What its chains begin behind and end in, by group.
        self.parents: list[tuple[int, bytes]] = []
        self.tails: list[tuple[int, bytes]] = []
        for chains in save.groups:
            at = 0
            for i, length in enumerate(chains.lengths):
                at += length
                self.parents.append((chains.group, bytes(chains.parents[i * HASH : (i + 1) * HASH])))
                self.tails.append((chains.group, bytes(chains.hashes[(at - 1) * HASH : at * HASH])))


class Worker:
    """See the module. One a worker process; every call on its main thread."""

    def __init__(self, options: Options, engine_id: bytes, counters: Counters, fails_by_request: bool):
        self._options = options
        #: Whether the engine is told of failed loads by request; by block otherwise.
        self._fails_by_request = fails_by_request
        self._engine_id = engine_id
        self.counters = counters
        self.link: Optional[Link] = None
        self._layouts: list[GroupLayout] = []
        self._on_gpu = False
        self._layer_index: dict[str, int] = {}
        self._loading: dict[str, Loading] = {}
        #: Loads that this step's forward waits for.
        self._now: list[Loading] = []
        #: Loads that wait for an event.
        self._waiting_loads: deque[Load] = deque()
        #: When the oldest load counts as silent.
        self._patience_ends = inf
        #: Saves that wait for an event only.
        self._ready_saves: deque[Saving] = deque()
        #: Unfinished saves by what they end in.
        self._by_tail: dict[tuple[int, bytes], list[Saving]] = {}
        self._is_beginning = False
        self._received: set[str] = set()
        self._failed_received: set[str] = set()
        self._invalid: set[int] = set()
        self._report = WorkerMetadata()
        self._has_report = False

    # Start

    def register(self, layouts: list[GroupLayout], namespaces: list[dict], on_gpu: bool) -> None:
        """The engine has made its KV memory."""
        self._layouts = layouts
        self._on_gpu = on_gpu
        for layout in layouts:
            for index, name in enumerate(layout.layers):
                self._layer_index[name] = index
        layers = max(len(layout.layers) for layout in layouts)
        by_layer = self._options.load == "layers"
        uses_stream = on_gpu and self._options.wait == "stream" and not self._options.is_async
        self.link = Link(
            "worker",
            engine_id=self._engine_id,
            socket=self._options.socket,
            register=lambda client: Held(client, layouts, namespaces, by_layer=by_layer, uses_stream=uses_stream),
            on_lost=self._lost,
            done_words=layers if by_layer else 1,
        )
        self.link.start()

    def unregister(self) -> None:
        """The engine's KV memory goes away: the session ends, and with it every use of the memory."""
        if self.link is not None:
            self.link.drain(DRAIN)
            self.link.close()
            self.link = None

    def _lost(self) -> None:
        self.counters.add("sessions_lost")

    # One step, in the order of the engine's calls

    def start_loads(self, metadata: StepMetadata) -> None:
        """Begins the restores of this step; where its forward needs them, waits as the options say."""
        link = self.link
        if link is None or (metadata is NOTHING and not self._waiting_loads):
            return
        for save in metadata.confirmed:
            self._save(save)
        waiting, self._waiting_loads = self._waiting_loads, deque()
        for load in (*waiting, *metadata.loads):
            self._begin_load(load)
        link.flush()
        if not self._options.is_async and metadata.loads:
            self._now = [self._loading[load.request_id] for load in metadata.loads]
            if self._options.load == "ordered":
                self._wait_for(None)

    def wait_for_layer(self, name: str) -> None:
        """The bytes of this layer are in place when it returns, or known not to come."""
        if self._now and self._options.load == "layers":
            self._wait_for(self._layer_index.get(name))

    def save_step(self, metadata: StepMetadata) -> None:
        """Begins the saves of what this step has written. Loads that it waited for have ended."""
        link = self.link
        if link is None:
            return
        self._finish_now()
        if metadata is not NOTHING or self._ready_saves:
            self._begin_ready_saves()
            for save in metadata.saves:
                self._save(save)
            link.flush()

    def received(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last time, and those of them whose load failed. With
        nothing ended it makes no system call."""
        link = self.link
        if link is not None:
            link.pump()
        if self._now:
            self._finish_now()
        if self._loading and monotonic() > self._patience_ends:
            self._give_up()
        if not self._received:
            return _NO_IDS, _NO_IDS
        received, self._received = self._received, set()
        failed, self._failed_received = self._failed_received, set()
        return received, failed

    def invalid_blocks(self) -> set[int]:
        """Blocks whose load failed since the last time."""
        if not self._invalid:
            return set()
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self, metadata: Optional[StepMetadata]) -> Optional[WorkerMetadata]:
        """What the scheduler must know."""
        if metadata is not None and metadata.serial:
            self._report.steps[metadata.serial] = 1
            self._has_report = True
        if not self._has_report:
            return None
        report, self._report, self._has_report = self._report, WorkerMetadata(), False
        return report

    # Loads

    def _begin_load(self, load: Load) -> None:
        loading = Loading(load, monotonic() + self._options.load_patience if self._options.is_async else inf)
        self._loading[load.request_id] = loading
        self._patience_ends = min(self._patience_ends, loading.patience_ends)
        try:
            lease = Lease.from_bytes(load.lease)
            regions = [self._held.region(part.group, load.adapter) for part in load.parts]
        except (OrbitKVError, ValueError, AttributeError):
            # Without a session, or one that refuses this adapter.
            for part in load.parts:
                self._restored(loading, part, None, None)
            return
        fences = self._fences(len(regions))
        if fences is None:
            if self._options.is_async:
                self._waiting_loads.append(self._loading.pop(load.request_id).load)
            else:
                for part in load.parts:
                    self._restored(loading, part, None, None)
            return
        for part, region, fence in zip(load.parts, regions, fences):
            operation = self.link.begin(
                "restore",
                lease,
                part.offset,
                region,
                part.hashes,
                part.pages,
                then=partial(self._restored, loading, part, fence),
                by_layer=self._options.load == "layers",
                fence=None if fence is None else fence.index,
            )
            loading.operations.append(operation)

    def _restored(self, loading: Loading, part: Part, fence: Optional[Fence], end: Optional[End]) -> None:
        if fence is not None:
            fence.give_back()
        pages = len(part.pages)
        if end is None or loading.is_given_up:
            restored = 0
        elif end.status == "ok":
            restored = pages
        elif end.first_failed is not None and end.status == "partial":
            restored = end.first_failed
        else:
            restored = 0
        if end is not None and end.bytes:
            self.counters.add("restored_bytes", end.bytes)
            self.counters.observe("restore_seconds", end)
        self.counters.add("restored_pages", restored)
        if restored < pages:
            self.counters.add("failed_pages", pages - restored)
            loading.failed.update(part.pages[restored:])
        loading.left -= 1
        if loading.left == 0 and self._options.is_async:
            self._end_load(loading)

    def _give_up(self) -> None:
        """Loads that have not ended in time: their requests are computed, in other blocks, as these may still
        be written. Told by block, that is possible only where no earlier block is the request's."""
        now = monotonic()
        for loading in list(self._loading.values()):
            request_id = loading.load.request_id
            if now < loading.patience_ends:
                continue
            loading.patience_ends = inf
            if not self._fails_by_request and loading.load.first:
                continue
            del self._loading[request_id]
            loading.is_given_up = True
            self.link.complain(f"a restore is {self._options.load_patience:g} s old")
            for operation in loading.operations:
                self.link.cancel(operation)
            self._received.add(request_id)
            self._report.failed.add(request_id)
            self._report.given_up[request_id] = 1
            self._has_report = True
            if self._fails_by_request:
                self._failed_received.add(request_id)
            else:
                self._invalid.update(page for part in loading.load.parts for page in part.pages)
        self._patience_ends = min((loading.patience_ends for loading in self._loading.values()), default=inf)
        self.link.flush()

    def _end_load(self, loading: Loading) -> None:
        request_id = loading.load.request_id
        if loading.is_given_up:
            self._report.settled[request_id] = 1
            self._has_report = True
            return
        self._loading.pop(request_id, None)
        if self._options.is_async:
            self._received.add(request_id)
        if loading.failed:
            self._report.failed.add(request_id)
            self._has_report = True
            if len(self._layouts) > 1:
                self._failed_received.add(request_id)
            else:
                self._invalid |= loading.failed

    def _wait_for(self, layer: Optional[int]) -> None:
        """Until the loads of this step are in place, up to and with one layer, or have ended."""
        words = self._held.done_words if self.link.held is not None else None
        if words is not None:
            self._wait_on_stream(words, layer)
            return
        for loading in self._now:
            for operation in loading.operations:
                self._wait_on_host(operation, layer)

    def _wait_on_host(self, operation: Operation, layer: Optional[int]) -> None:
        link = self.link
        while not operation.is_over:
            client = link.client
            if client is None or operation.number is None:
                link.wait(0.01)
                continue
            for _ in range(LOOKS):
                if layer is None:
                    done = client.is_done(operation.number)
                else:
                    done = client.is_layer_done(operation.number, layer)
                if done is not None:
                    return
            link.pump()

    def _wait_on_stream(self, words: DoneWords, layer: Optional[int]) -> None:
        stream = _current_stream()
        for loading in self._now:
            for operation in loading.operations:
                if not operation.is_over and operation.number is not None:
                    try:
                        words.wait(stream, operation.number, layer)
                    except CudaError:
                        self._wait_on_host(operation, layer)

    def _finish_now(self) -> None:
        """Nothing that this step computed is reported or saved before its loads are known to be good."""
        for loading in self._now:
            while loading.left:
                self.link.wait(0.05)
            self._end_load(loading)
        self._now = []

    # Saves

    def _save(self, save: Save) -> None:
        saving = Saving(save)
        for parent in saving.parents:
            for earlier in self._by_tail.get(parent, ()):
                earlier.followers.append(saving)
                saving.blockers += 1
        for tail in saving.tails:
            self._by_tail.setdefault(tail, []).append(saving)
        if not saving.blockers:
            self._ready_saves.append(saving)
            self._begin_ready_saves()

    def _begin_ready_saves(self) -> None:
        """In order, as long as there are events. One that ends at once may make others ready."""
        if self._is_beginning:
            return
        self._is_beginning = True
        while self._ready_saves and self._begin_save(self._ready_saves[0]):
            self._ready_saves.popleft()
        self._is_beginning = False

    def _begin_save(self, saving: Saving) -> bool:
        """Whether it began, or ended at once: `False` without an event."""
        save = saving.save
        try:
            regions = [self._held.region(chains.group, save.adapter) for chains in save.groups]
        except (OrbitKVError, AttributeError):
            regions = None
        fences = self._fences(len(save.groups)) if regions is not None else None
        if regions is not None and fences is None:
            return False
        for at, chains in enumerate(save.groups):
            fence = fences[at] if fences is not None else None
            if regions is None or not chains.pages:
                # Without a session, or one that refuses this adapter; or a group without new pages.
                self._saved(saving, len(chains.pages), fence, None)
                continue
            self.link.begin(
                "save_chains",
                regions[at],
                chains.hashes,
                chains.pages,
                chains.lengths,
                chains.parents,
                then=partial(self._saved, saving, len(chains.pages), fence),
                fence=None if fence is None else fence.index,
            )
        return True

    def _saved(self, saving: Saving, pages: int, fence: Optional[Fence], end: Optional[End]) -> None:
        if fence is not None:
            fence.give_back()
        if end is None or end.status in ("gone", "error"):
            self.counters.add("refused_pages", pages)
        else:
            self.counters.add("saved_pages", end.pages)
            self.counters.add("present_pages", end.pages_present)
            self.counters.add("refused_pages", pages - end.pages - end.pages_present)
            self.counters.add("saved_bytes", end.bytes)
            self.counters.observe("save_seconds", end)
        saving.left -= 1
        if saving.left == 0:
            self._end_save(saving)

    def _end_save(self, saving: Saving) -> None:
        for tail in saving.tails:
            unfinished = self._by_tail[tail]
            unfinished.remove(saving)
            if not unfinished:
                del self._by_tail[tail]
        for follower in saving.followers:
            follower.blockers -= 1
            if not follower.blockers:
                self._ready_saves.append(follower)
        self._report.saved[saving.save.number] = 1
        self._has_report = True
        if self._ready_saves:
            self._begin_ready_saves()

    # Fences

    @property
    def _held(self) -> Held:
        """AttributeError without a session."""
        return self.link.held

    def _fences(self, count: int) -> Optional[list[Optional[Fence]]]:
        """One for each operation; `None` while all events are in use."""
        fences = [self._fence() for _ in range(count)]
        if not self._on_gpu or None not in fences:
            return fences
        for fence in fences:
            if fence is not None:
                fence.give_back()
        return None

    def _fence(self) -> Optional[Fence]:
        """An event behind everything that the engine's stream was given so far: the kernels that wrote
        the pages of a save, and the last readers of those that a restore overwrites."""
        if not self._on_gpu or self.link.held is None:
            return None
        events = self._held.events
        index = events.take()
        if index is None:
            return None
        try:
            events.record(index, _current_stream())
        except CudaError:
            events.give_back(index)
            return None
        return Fence(events, index)


_NO_IDS: set[str] = set()


def _current_stream() -> int:
    import torch

    return torch.cuda.current_stream().cuda_stream


