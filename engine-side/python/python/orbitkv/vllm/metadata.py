"""What scheduler and workers tell each other, once a step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

_Key = TypeVar("_Key")

#: Bytes of a block hash.
HASH = 32


@dataclass(slots=True)
class Part:
    """Pages of one group: of a load, those of a lease from `offset` on."""

    group: int
    hashes: bytes
    #: Blocks of the engine, u32, one a hash.
    pages: array
    offset: int = 0


@dataclass(slots=True)
class Load:
    """A leased prefix to be restored for one request."""

    request_id: str
    lease: bytes
    adapter: str
    #: First page of the request that is restored.
    first: int
    parts: list[Part]


@dataclass(slots=True)
class Chains:
    """New pages of one group, several requests one after the other."""

    group: int
    hashes: bytearray = field(default_factory=bytearray)
    pages: array = field(default_factory=lambda: array("I"))
    lengths: array = field(default_factory=lambda: array("I"))
    #: Hash before each chain; zeros where it starts its sequence.
    parents: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Save:
    """Pages to be saved, of one step and one adapter. Its number comes back when it has ended."""

    number: int
    adapter: str
    groups: list[Chains]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to every worker, for one step."""

    #: Which step, counted by the scheduler; 0 where nothing is to be confirmed.
    serial: int = 0
    loads: list[Load] = field(default_factory=list)
    #: Pages that this step writes: to be saved after it.
    saves: list[Save] = field(default_factory=list)
    #: Pages that earlier steps wrote, known to be right by now.
    confirmed: list[Save] = field(default_factory=list)


#: What most steps carry.
NOTHING = StepMetadata()


@dataclass(slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, after one step."""

    #: Saves that ended, and on how many workers.
    saved: dict[int, int] = field(default_factory=dict)
    #: Requests whose load failed.
    failed: set[str] = field(default_factory=set)
    #: Steps that ran to their end, and on how many workers.
    steps: dict[int, int] = field(default_factory=dict)
    #: Requests whose load was given up while it may still write, and on how many workers.
    given_up: dict[str, int] = field(default_factory=dict)
    #: Those of them whose load has ended since, and on how many workers.
    settled: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(
            _sum(self.saved, other.saved),
            self.failed | other.failed,
            _sum(self.steps, other.steps),
            _sum(self.given_up, other.given_up),
            _sum(self.settled, other.settled),
        )


@dataclass(slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What the scheduler must know of one worker: the namespaces of its pages, one a group, as the
    arguments of `orbitkv.Namespace`."""

    namespaces: list[dict]


def _sum(one: dict[_Key, int], other: dict[_Key, int]) -> dict[_Key, int]:
    total = dict(one)
    for key, count in other.items():
        total[key] = total.get(key, 0) + count
    return total
