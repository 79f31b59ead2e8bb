"""The Manager as an engine's external cache: lookups, loads and offloads over one link."""

from __future__ import annotations

from typing import Callable, Optional, Sequence

import orbitkv
from orbitkv import Client
from orbitkv.link import Link
from orbitkv.sglang.component import Component
from orbitkv.sglang.held import Held
from orbitkv.sglang.loads import Loads, Record
from orbitkv.sglang.lookups import Lookups
from orbitkv.sglang.offloads import Offloads
from orbitkv.sglang.options import Options

#: Seconds that the end of an engine waits for its copies.
DRAIN = 2.0


class Store:
    """For the engine's main thread, which no Manager's absence or death holds up. One that is alive and
    silent holds it up only while its copies may still touch the engine's pages."""

    def __init__(
        self,
        options: Options,
        components: Sequence[Component],
        namespaces: Sequence[dict],
        *,
        name: str = "linker",
        can_refuse: bool = True,
        record: Optional[Record] = None,
        stream: Optional[Callable[[], int]] = None,
    ):
        """`record` and `stream` are for pages on a GPU. `can_refuse`: no other rank must agree."""
        uses_stream = record is not None and options.wait == "stream"

        def register(client: Client) -> Held:
            return Held(client, components, namespaces, on_gpu=record is not None, uses_stream=uses_stream)

        layers = 1 + max(layer for component in components for layer in component.layers)
        self.link = Link(
            name, engine_id=orbitkv.engine_id_random(), socket=options.socket, register=register, done_words=layers
        )
        self.lookups = Lookups(
            self.link,
            timeout_us=options.lookup_timeout_us,
            patience=options.patience,
            are_chains=all(component.dependency == "chain" for component in components),
        )
        self.loads = Loads(
            self.link,
            self.lookups,
            components,
            record=record,
            stream=stream if uses_stream else None,
            can_refuse=can_refuse,
        )
        self.offloads = Offloads(
            self.link,
            components,
            record=record,
            held_pages_max=options.held_pages_max,
            patience=options.patience,
            save=options.save,
        )
        self.link.start()

    def poll(self) -> int:
        """What an engine calls each step: how many offloads have ended. With nothing ready it makes no
        system call, but for the link's look at the Manager's process."""
        self.link.pump()
        self.lookups.sweep()
        return self.offloads.completed()

    def reset(self) -> None:
        """Waits until nothing touches the engine's pages and forgets all but what the Manager keeps."""
        self.loads.clear()
        self.lookups.clear()
        self.offloads.clear()
        self.link.flush()
        while self.link.outstanding:
            self.loads.rest()
        self.offloads.clear()

    def close(self) -> None:
        """Ends the session."""
        self.lookups.clear()
        self.link.drain(DRAIN)
        self.link.close()

    @property
    def counters(self) -> dict[str, int]:
        """Since the start."""
        return {**self.lookups.counters, **self.loads.counters, **self.offloads.counters}
