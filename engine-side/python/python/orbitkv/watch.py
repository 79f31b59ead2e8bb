"""Sleeps until a Manager's process exits, so that whoever polls a session need not ask the kernel."""

from __future__ import annotations

import os
import select
import threading
from typing import Callable

from orbitkv import Client

#: Seconds between two looks where the kernel does not name the Manager's process.
LOOK_EVERY = 0.25


class Watch:
    """One thread, asleep in the kernel, for the life of one session.

    `notice()` is called in that thread when the session should be looked at, which `take` then says once:
    when the Manager's process has exited, or, where nothing tells that, every `LOOK_EVERY` seconds.
    Raises OSError without a free descriptor."""

    def __init__(self, name: str, client: Client, notice: Callable[[], None]):
        self._notice = notice
        self._is_due = False
        self._pid = os.getpid()
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            pidfd = client.manager_pidfd()
        except BaseException:
            os.close(self._ended)
            raise
        self._thread = threading.Thread(target=self._run, args=(pidfd,), name=f"orbitkv-{name}-watch", daemon=True)
        self._thread.start()

    def take(self) -> bool:
        """Whether the session should be looked at; for the thread that polls it."""
        is_due, self._is_due = self._is_due, False
        return is_due

    def end(self) -> None:
        """The session is over. Returns once the thread has ended."""
        if os.getpid() == self._pid:  # a forked child has the descriptor, not the thread
            os.eventfd_write(self._ended, 1)
            self._thread.join()
        os.close(self._ended)

    def _run(self, pidfd: int | None) -> None:
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
        try:
            while self._ended not in (ready := {fd for fd, _ in poll.poll(None if pidfd is not None else LOOK_EVERY * 1000)}):
                self._is_due = True
                self._notice()
                if pidfd in ready:
                    return
        finally:
            if pidfd is not None:
                os.close(pidfd)
