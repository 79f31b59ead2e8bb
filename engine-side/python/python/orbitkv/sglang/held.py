"""What one session with the Manager has registered of the engine's memory."""

from __future__ import annotations

from typing import Optional, Sequence

from orbitkv import Client, DoneWords, Events, Gpu, Namespace, Region, Scope
from orbitkv.sglang.component import Component

#: Events of a GPU: operations that can wait for their fence at once.
EVENTS = 128


class Held:
    """Raises OrbitKVError where the Manager refuses."""

    def __init__(
        self,
        client: Client,
        components: Sequence[Component],
        namespaces: Sequence[dict],
        *,
        on_gpu: bool,
        uses_stream: bool,
    ):
        self.gpu: Optional[Gpu] = None
        self.events: Optional[Events] = None
        self.done_words: Optional[DoneWords] = None
        self.regions: dict[str, Region] = {}
        #: By address of the allocation: its memory and the offset of the allocation in it.
        self._memories: dict[int, tuple] = {}
        scopes = []
        for component, namespace in zip(components, namespaces):
            for address, size in component.storages.items():
                if address not in self._memories:
                    self._memories[address] = self._register(client, address, size, on_gpu)
            scope = client.define_namespace(Namespace(**namespace))
            segments = []
            for piece in component.pieces:
                storage = component.storage_of(piece)
                memory, offset = self._memories[storage]
                segments.append((memory, offset + piece.address - storage, piece.stride, piece.length, piece.layer))
            self.regions[component.name] = client.register_region(scope, component.pages, segments)
            scopes.append(scope)
        #: What lookups ask for: a hit needs its pages in every component.
        self.scope: Scope = scopes[0] if len(scopes) == 1 else client.define_set(scopes)
        if self.gpu is not None:
            self.events = Events(client, self.gpu, EVENTS)
            if uses_stream:
                self.done_words = DoneWords(client, self.gpu)

    def _register(self, client: Client, address: int, size: int, on_gpu: bool) -> tuple:
        if not on_gpu:
            return client.register_process(address, size), 0
        if self.gpu is None:
            self.gpu = Gpu.of_address(address)
        return client.register_cuda(self.gpu, address, size)
