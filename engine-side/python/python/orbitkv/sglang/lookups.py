"""Lookups: which prefixes of a request can be restored, and the leases that keep them so."""

from __future__ import annotations

from array import array
from functools import partial
from time import monotonic, monotonic_ns
from typing import Optional, Sequence

from orbitkv import Lease
from orbitkv.link import End, Link
from orbitkv.sglang.held import Held

HASH = 32
#: Seconds for which a lease is kept after the request that it is for was last looked up: an abort in
#: the queue is not told.
HOLD = 5.0
#: Seconds that a lease must still live when its pages are asked for.
MARGIN = 1.0
_NONE: Sequence[int] = ()


class Hit:
    """What a lookup found."""

    __slots__ = ("hashes", "ends", "lease", "held", "asked_at")

    def __init__(self, hashes: bytes, ends: array, lease: Lease, held: Held):
        #: Of all pages that were asked for.
        self.hashes = hashes
        #: Ascending page counts that can be restored; the lease is for the last one.
        self.ends = ends
        self.lease = lease
        #: What the session of the lease has registered: tells sessions apart.
        self.held = held
        self.asked_at = monotonic()

    def lives(self, held: Optional[Held], seconds: float) -> bool:
        """Whether the lease can be used in the session that has this registered, so long at least."""
        return self.held is held and self.lease.expires_ns - monotonic_ns() > seconds * 1e9


class Question:
    """A lookup until its answer."""

    __slots__ = ("rid", "hashes", "held", "asked_at", "is_over", "is_void")

    def __init__(self, rid: str, hashes: bytes, held: Held):
        self.rid = rid
        self.hashes = hashes
        self.held = held
        self.asked_at = monotonic()
        self.is_over = False
        #: Nobody wants the answer any more.
        self.is_void = False


class Lookups:
    """For the engine's main thread. Nothing here raises."""

    def __init__(self, link: Link, *, timeout_us: int, patience: float, are_chains: bool):
        self._link = link
        self._timeout_ns = timeout_us * 1000
        self._patience = patience
        #: With chains only, a lease for n pages is one for every shorter prefix.
        self._are_chains = are_chains
        #: By request; the one asked for longest ago comes first.
        self._hits: dict[str, Hit] = {}
        self._unanswered: Optional[Question] = None
        self.counters = {"lookups": 0, "lookups_late": 0, "leases_abandoned": 0}

    def ask(self, rid: str, hashes: bytes) -> Sequence[int]:
        """Every number of leading pages that can be restored, ascending. Waits at most the timeout;
        the lease of a hit is kept until it is claimed or nobody asks again."""
        self._link.pump()
        hit = self._hits.pop(rid, None)
        if hit is not None:
            if hit.hashes == hashes and hit.lives(self._link.held, HOLD):
                hit.asked_at = monotonic()
                self._hits[rid] = hit
                return hit.ends
            self.release(hit.lease, hit.held)
        if self._unanswered is not None or not self._link.ready:
            return _NONE
        self.counters["lookups"] += 1
        question = Question(rid, hashes, self._link.held)
        self._link.begin(
            "query", self._link.held.scope, hashes, mode="candidate", then=partial(self._answered, question)
        )
        self._link.flush()
        end = monotonic_ns() + self._timeout_ns
        while not question.is_over and (left := end - monotonic_ns()) > 0:
            self._link.wait(left / 1e9)
        if not question.is_over:
            self.counters["lookups_late"] += 1
            self._unanswered = question
            return _NONE
        hit = self._hits.get(rid)
        return hit.ends if hit is not None else _NONE

    def claim(self, rid: str, hashes: bytes) -> Optional[Hit]:
        """The hit whose lease covers exactly the restore of these pages; asks once more where what was
        found does not, or no longer. The caller releases its lease."""
        pages = len(hashes) // HASH
        hit = self._hits.pop(rid, None)
        if hit is not None:
            # A lease over components that are no chains has only what its own last page needs.
            covers = hit.hashes.startswith(hashes) and (pages in hit.ends if self._are_chains else pages == hit.ends[-1])
            if covers and hit.lives(self._link.held, MARGIN):
                return hit
            self.release(hit.lease, hit.held)
        ends = self.ask(rid, hashes)
        hit = self._hits.pop(rid, None)
        if hit is None or not ends or ends[-1] == pages:
            return hit
        self.release(hit.lease, hit.held)
        return None

    def sweep(self) -> None:
        """Releases what nobody asked for again, and notices a Manager that does not answer."""
        now = monotonic()
        while self._hits:
            rid, hit = next(iter(self._hits.items()))
            if now - hit.asked_at < HOLD:
                break
            self.counters["leases_abandoned"] += 1
            del self._hits[rid]
            self.release(hit.lease, hit.held)
        if self._unanswered is not None and now - self._unanswered.asked_at > self._patience:
            self._link.complain("a lookup is unanswered")

    def clear(self) -> None:
        """Releases every lease, also those of answers that are still to come."""
        for hit in self._hits.values():
            self.release(hit.lease, hit.held)
        self._hits.clear()
        if self._unanswered is not None:
            self._unanswered.is_void = True

    def release(self, lease: Lease, held: Held) -> None:
        """Gives a lease back, if the session that it is of still exists."""
        if held is self._link.held:
            self._link.begin("release", lease, then=_ignore)

    def _answered(self, question: Question, end: End) -> None:
        question.is_over = True
        if self._unanswered is question:
            self._unanswered = None
        if end.lease is None:
            return
        if question.is_void:
            self.release(end.lease, question.held)
            return
        ends = array("I")
        ends.frombytes(self._link.client.restorable_prefixes())
        if not ends:
            self.release(end.lease, question.held)
            return
        self._hits[question.rid] = Hit(question.hashes, ends, end.lease, question.held)


def _ignore(_: End) -> None:
    pass
