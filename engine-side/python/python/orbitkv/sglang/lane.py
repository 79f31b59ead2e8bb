"""One thread's way to the Manager: one operation at a time, waited for."""

from __future__ import annotations

import time
from typing import Any, Callable, Optional

from orbitkv.link import End, Link

#: Seconds between two looks while no Manager is there whose end of copies is waited for.
PAUSE = 0.001


class Lane:
    """For the thread that made it; `close` for any, once that thread has ended."""

    def __init__(self, name: str, socket: Optional[str], engine_id: bytes, patience: float, register: Callable[..., Any]):
        self._patience = patience
        self.link = Link(name, engine_id=engine_id, socket=socket, register=register)
        self.link.start()

    def is_ready(self) -> bool:
        """Whether a Manager is there that answers."""
        self.link.pump()
        return self.link.ready

    @property
    def epoch(self) -> int:
        """Of the Manager: leases are of one epoch."""
        return self.link.client.epoch if self.link.client is not None else 0

    def copy(self, kind: str, *arguments: Any, **options: Any) -> tuple[End, bytes]:
        """A save or restore, and the results of its pages. Returns when nothing touches the engine's
        memory for it any more."""
        return self._run(None, kind, *arguments, **options)

    def ask(self, kind: str, *arguments: Any, late: Callable[[End], None], **options: Any) -> Optional[End]:
        """An operation without copies; `None` for one that is not answered in time: `late` gets that
        answer."""
        end, _ = self._run(late, kind, *arguments, **options)
        return end

    def tell(self, kind: str, *arguments: Any) -> None:
        """An operation whose end matters to nobody; it travels with the next one."""
        self.link.begin(kind, *arguments, then=_ignore)

    def close(self) -> None:
        self.link.drain(1.0)
        self.link.close()

    def _run(self, late: Optional[Callable[[End], None]], kind: str, *arguments: Any, **options: Any) -> tuple:
        ended: list[tuple[End, bytes]] = []
        given_up = False

        def then(end: End) -> None:
            if given_up:
                late(end)
            else:
                ended.append((end, self.link.results()))

        self.link.begin(kind, *arguments, then=then, **options)
        self.link.flush()
        deadline = time.monotonic() + self._patience
        while not ended:
            self.link.wait(0.05)
            if ended:
                break
            if self.link.client is None:
                time.sleep(PAUSE)
            if time.monotonic() > deadline:
                self.link.complain(f"a {kind} is unanswered")
                if late is not None:
                    given_up = True
                    return None, b""
        return ended[0]


def _ignore(_: End) -> None:
    pass
