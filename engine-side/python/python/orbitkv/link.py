"""A session with the Manager that outlives the Manager.

A `Link` is what an adapter holds instead of a `Client`. It attaches, registers through the adapter's
own function, and does both again, in a thread of its own, when the Manager has gone: no call on the
engine's path ever waits for a Manager. Each operation begun on a link ends exactly once, whatever
happens to the session: with the Manager's completion, or with an `Ended` whose status is "gone"
(the session was lost) or "error" (it was refused before it reached the ring).

For one thread, except where a method says otherwise. Nothing here raises into the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from time import monotonic
from typing import Any, Callable, Optional, Union

from orbitkv import Client, Completion, ConnectError, Gone, OrbitKVError, SubmitError, WouldBlock
from orbitkv.watch import Watch

#: Seconds between two looks whether the copies of a lost session have ended.
CHECK_EVERY = 0.25
#: Seconds before the first new attempt to attach, and the longest pause between two of them.
RETRY_FIRST = 0.1
RETRY_MAX = 5.0
#: Longest wait for one answer of the Manager to a connect or a registration, in seconds. In the
#: first attempt, at start, the engine waits for it.
ANSWER_MAX = 5.0

_log = logging.getLogger("orbitkv")


class Ended:
    """The end of an operation that has no completion: it reads like one that did nothing."""

    __slots__ = ("operation", "kind", "status", "code")

    pages = pages_dram = pages_ssd = pages_present = pages_refused = bytes = 0
    queued_ns = prepared_ns = copied_ns = published_ns = observed_ns = 0
    first_failed = None
    lease = None

    def __init__(self, operation: Optional[int], kind: str, status: str, code: str):
        self.operation = operation
        self.kind = kind
        self.status = status
        self.code = code


End = Union[Completion, Ended]


class Operation:
    """One operation from its begin to its one end."""

    __slots__ = ("number", "kind", "then", "is_over", "_arguments", "_options")

    def __init__(self, kind: str, then: Callable[[End], None], arguments: tuple, options: dict):
        #: As the client names it; `None` while it waits for a credit and after a refusal.
        self.number: Optional[int] = None
        self.kind = kind
        self.then = then
        self.is_over = False
        self._arguments = arguments
        self._options = options

    def stage(self, client: Client) -> int:
        """Stages it; raises what the client raises."""
        self.number = getattr(client, self.kind)(*self._arguments, **self._options)
        return self.number

    def end(self, end: End) -> None:
        """Tells its owner, once."""
        if not self.is_over:
            self.is_over = True
            self.then(end)


#: Kinds whose copies may go on after the session is lost.
_COPIES = frozenset(("save", "save_chains", "restore"))


class Link:
    """See the module.

    `register(client)` is called after each attach, in the thread that attached; what it returns is
    `held` from then on, until the session is lost. It may raise `OrbitKVError`: then the attempt has
    failed and another follows. `on_lost()` is called on the engine's thread when a session has ended,
    after all of its operations have.
    """

    def __init__(
        self,
        name: str,
        *,
        engine_id: bytes,
        register: Callable[[Client], Any],
        socket: Optional[str] = None,
        on_lost: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = _log.warning,
        **geometry: int,
    ):
        self.name = name
        self.client: Optional[Client] = None
        #: What `register` returned for the session that `client` is; `None` while there is none.
        self.held: Any = None
        #: Sessions attached so far: tells an adapter that handles it kept are of an older one.
        self.sessions = 0
        #: Sessions lost so far.
        self.losses = 0
        #: Whether new work makes sense: attached, and the Manager answers.
        self.ready = False
        self._engine_id = engine_id
        self._register = register
        self._socket = socket
        self._on_lost = on_lost
        self._say = say
        self._geometry = geometry
        self._operations: dict[int, Operation] = {}
        self._backlog: deque[Operation] = deque()
        #: Ends that wait for the next pump: refused, or lost with a session.
        self._stillborn: list[tuple[Operation, Ended]] = []
        #: Lost sessions whose copies may still run: what they had registered, and the operations that
        #: wait for the end of the copies.
        self._lingering: list[tuple[Client, Any, list[Operation]]] = []
        self._gone: list[Operation] = []
        self._fresh: Optional[tuple[Client, Any, Watch]] = None
        #: Something besides the ring wants to be looked at by the next pump.
        self._attention = False
        self._staged = False
        self._check_at = 0.0
        self._is_silent = False
        self._said: Optional[str] = None
        self._watch: Optional[Watch] = None
        self._closed = threading.Event()
        self._attacher: Optional[threading.Thread] = None

    # Life

    def start(self) -> bool:
        """Attaches once, now; where that fails, goes on trying in the background. Whether it is attached."""
        if self._attach():
            self._adopt()
            return True
        self._attach_in_background()
        return False

    def drain(self, timeout: float) -> None:
        """Waits, at most `timeout` seconds, until nothing is outstanding."""
        end = monotonic() + timeout
        self.flush()
        while self.outstanding and self.client is not None and monotonic() < end:
            self.wait(0.05)

    def close(self) -> None:
        """Ends the session and every operation. The engine's memory may go away afterwards only if
        it had unregistered it or the process ends."""
        self._closed.set()
        if self._attacher is not None:
            self._attacher.join()
        self._end_watch()
        client, held, self.client, self.held, self.ready = self.client, self.held, None, None, False
        if self._fresh is not None:
            fresh, _, watch = self._fresh
            watch.end()
            fresh.close()
            self._fresh = None
        for operation in (*self._operations.values(), *self._backlog):
            operation.end(Ended(operation.number, operation.kind, "gone", "closed"))
        self._operations.clear()
        self._backlog.clear()
        for operation, end in self._stillborn:
            operation.end(end)
        self._stillborn.clear()
        for lost, _, operations in self._lingering:
            for operation in operations:
                operation.end(Ended(operation.number, operation.kind, "gone", "closed"))
            lost.close()
        self._lingering.clear()
        if client is not None:
            client.close()
        del held  # outlives the client

    # Work

    @property
    def outstanding(self) -> int:
        """Operations begun and not ended."""
        lingering = sum(len(operations) for _, _, operations in self._lingering)
        return len(self._operations) + len(self._backlog) + len(self._stillborn) + lingering

    def begin(self, kind: str, *arguments: Any, then: Callable[[End], None], **options: Any) -> Operation:
        """Stages the client's operation `kind` with its arguments. `then(end)` is called once, by a
        later `pump`, never from here. Without a credit it waits its turn. Visible to the Manager
        after `flush`."""
        operation = Operation(kind, then, arguments, options)
        if self.client is None:
            self._stillborn.append((operation, Ended(None, kind, "gone", "away")))
            self._attention = True
        elif self._backlog:
            self._backlog.append(operation)
        elif not self._stage(operation):
            self._backlog.append(operation)
        return operation

    def cancel(self, operation: Operation) -> None:
        """Asks for an early end. Whether or not it comes, the operation ends by itself."""
        if operation.is_over or self.client is None:
            return
        if operation.number is None:
            if operation in self._backlog:
                self._backlog.remove(operation)
                self._refuse(operation, "cancelled")
            return
        if self._operations.get(operation.number) is operation:
            self.begin("cancel", operation.number, then=_ignore)

    def flush(self) -> None:
        """Publishes what was staged: at most one wake of the Manager."""
        if self._staged and self.client is not None:
            self._staged = False
            try:
                self.client.submit()
            except OrbitKVError:
                self._attention = True  # the next poll says why

    def pump(self) -> None:
        """Ends what has ended. With nothing ready it makes no system call: a Manager that closes the
        session says so in shared memory, and of its death the watch tells."""
        if self._attention:
            self._attend()
        client = self.client
        if client is None:
            return
        try:
            while (completion := client.poll()) is not None:
                self._end(completion)
        except Gone as gone:
            self._lose(gone)
            return
        except OrbitKVError as error:
            self._tell(f"cannot poll: {error}")
            return
        if self._backlog:
            self._retry()
        if self._staged:
            self.flush()  # what was begun by those that were told

    def wait(self, timeout: float) -> None:
        """Like `pump`, but waits for the first end, at most `timeout` seconds, without the GIL."""
        client = self.client
        self._staged = False
        if client is None:
            self.pump()
            return
        try:
            completion = client.wait(timeout)
        except Gone as gone:
            self._lose(gone)
            return
        except OrbitKVError as error:
            self._tell(f"cannot wait: {error}")
            return
        if completion is not None:
            self._end(completion)
        self.pump()

    def results(self) -> bytes:
        """Page results of the completion that is being ended: only inside `then`."""
        try:
            return (self.client.results() if self.client is not None else None) or b""
        except OrbitKVError:
            return b""

    def complain(self, what: str) -> None:
        """The Manager is alive and does not answer: no new work until it does."""
        if not self._is_silent:
            self._is_silent = True
            self.ready = False
            self._tell(f"the Manager does not answer ({what}); serving without the cache until it does")

    # The session

    def _stage(self, operation: Operation) -> bool:
        """Whether it needs no further try: staged, or refused for good."""
        try:
            number = operation.stage(self.client)
        except WouldBlock:
            return False
        except Gone:
            self._refuse(operation, "gone", "gone")  # the next poll says why
            return True
        except (OrbitKVError, ValueError, OverflowError, TypeError) as error:
            self._refuse(operation, _code_of(error))
            if self.client.state() == "draining":
                self.ready = False
                self._tell("the Manager is stopping; serving without the cache until it is back")
            else:
                self._tell(f"{operation.kind} refused: {error}")
            return True
        self._operations[number] = operation
        self._staged = True
        return True

    def _refuse(self, operation: Operation, code: str, status: str = "error") -> None:
        self._stillborn.append((operation, Ended(operation.number, operation.kind, status, code)))
        self._attention = True

    def _retry(self) -> None:
        while self._backlog and self._stage(self._backlog[0]):
            self._backlog.popleft()
        self.flush()

    def _end(self, completion: Completion) -> None:
        operation = self._operations.pop(completion.operation, None)
        if operation is None:
            return
        if completion.status == "gone":
            # Whether its memory is free is known when the last of them was returned.
            self._gone.append(operation)
            return
        if self._is_silent:
            self._is_silent = False
            self.ready = True
            self._tell("the Manager answers again; the cache is on")
        operation.end(completion)

    def _notice(self) -> None:
        """In the watch's thread."""
        self._attention = True

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _lose(self, gone: Gone) -> None:
        """The session is over and the client has returned every operation."""
        client, held, self.client, self.held, self.ready = self.client, self.held, None, None, False
        self._is_silent = False
        self._staged = False
        self.losses += 1
        self._end_watch()
        lost = [*self._gone, *self._operations.values(), *self._backlog]
        self._gone.clear()
        self._operations.clear()
        self._backlog.clear()
        copying = []
        for operation in lost:
            if gone.copies_may_run and operation.kind in _COPIES and operation.number is not None:
                copying.append(operation)
            else:
                operation.end(Ended(operation.number, operation.kind, "gone", "gone"))
        if copying:
            self._lingering.append((client, held, copying))
            self._attention = True
        else:
            client.close()
        self._tell(f"{gone}; serving without the cache, it comes back by itself")
        self._on_lost()
        self._attach_in_background()

    def _attend(self) -> None:
        self._attention = False
        stillborn, self._stillborn = self._stillborn, []
        for operation, end in stillborn:
            operation.end(end)
        if self._lingering:
            self._attend_to_lost()
        if self._fresh is not None and self.client is None:
            self._adopt()
        if self._watch is not None and self.client is not None and self._watch.take():
            try:
                self.client.check_manager()
            except OrbitKVError:
                pass  # the next poll says why

    def _attend_to_lost(self) -> None:
        """Copies of a lost session touch nothing any more once the Manager's process has exited; no
        time that passes proves it."""
        if monotonic() < self._check_at:
            self._attention = True
            return
        self._check_at = monotonic() + CHECK_EVERY
        still = []
        for client, held, operations in self._lingering:
            if client.has_manager_exited():
                for operation in operations:
                    operation.end(Ended(operation.number, operation.kind, "gone", "gone"))
                client.close()
            else:
                still.append((client, held, operations))
                self._attention = True
        self._lingering = still

    # Attaching

    def _attach_in_background(self) -> None:
        if self._closed.is_set() or (self._attacher is not None and self._attacher.is_alive()):
            return
        self._attacher = threading.Thread(target=self._attach_until_done, name=f"orbitkv-{self.name}", daemon=True)
        self._attacher.start()

    def _attach_until_done(self) -> None:
        pause = RETRY_FIRST
        while not self._closed.wait(pause):
            if self._attach():
                return
            pause = min(pause * 2, RETRY_MAX)

    def _attach(self) -> bool:
        """In any thread: on success a fresh session waits for the next pump."""
        client, watch = None, None
        try:
            client = Client(self._socket, engine_id=self._engine_id, timeout=ANSWER_MAX, **self._geometry)
            watch = Watch(self.name, client, self._notice)
            held = self._register(client)
        except Exception as error:  # noqa: BLE001 - an adapter's mistake must not end the thread unseen
            if watch is not None:
                watch.end()
            if client is not None:
                client.close()
            self._tell_away(error)
            return False
        self._fresh = (client, held, watch)
        self._attention = True
        return True

    def _adopt(self) -> None:
        (self.client, self.held, self._watch), self._fresh = self._fresh, None
        self._attacher = None
        self.sessions += 1
        self.ready = True
        if self.sessions > 1 or self._said is not None:
            self._tell(f"attached to the Manager, epoch {self.client.epoch}; the cache is on")
        else:
            _log.info("orbitkv %s: attached to the Manager, epoch %s", self.name, self.client.epoch)

    def _tell_away(self, error: Exception) -> None:
        if isinstance(error, ConnectError) and self._said is not None:
            return  # said already that it is away
        self._tell(f"{error}; serving without the cache, trying again by itself")

    def _tell(self, text: str) -> None:
        """Says it, unless it was the last thing said."""
        if text != self._said:
            self._said = text
            self._say(f"orbitkv {self.name}: {text}")


def _ignore(_: End) -> None:
    pass


def _code_of(error: Exception) -> str:
    """The stable name of why something was not staged."""
    return getattr(error, "reason", None) or type(error).__name__
