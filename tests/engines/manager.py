"""A real Manager for engine tests: DRAM and an SSD file, in a folder of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Optional

START_SECONDS = 60


class Manager:
    """`orbitkv serve` as a child process. `binary` is the wheel's."""

    def __init__(self, binary: str, folder: Path, *, dram: str = "256MiB", ssd_capacity: str = "512MiB", lease_ttl: str = "30s"):
        self.binary = binary
        self.socket = str(folder / "orbitkv.sock")
        self._folder = folder
        self._arguments = [
            "serve", "--socket", self.socket, "--dram", dram, "--ssd", str(folder / "tier.ssd"), "--ssd-capacity",
            ssd_capacity, "--device", "host", "--http", "127.0.0.1:0", "--huge-pages", "off", "--lease-ttl", lease_ttl,
        ]
        self._process: Optional[subprocess.Popen] = None

    def start(self) -> None:
        """Returns once it is ready."""
        log = open(self._folder / "manager.log", "ab")
        self._process = subprocess.Popen([self.binary, *self._arguments], stdout=subprocess.PIPE, stderr=log)
        end = time.monotonic() + START_SECONDS
        line = b""
        while not line.startswith(b"ready"):
            if not select.select([self._process.stdout], [], [], max(0, end - time.monotonic()))[0]:
                raise RuntimeError(f"the Manager was not ready within {START_SECONDS} s")
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"the Manager ended: {(self._folder / 'manager.log').read_text()[-2000:]}")

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """A clean end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            self._process.wait(30)

    def pause(self) -> None:
        """Alive and silent, until `resume`."""
        self._process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self._process.pid}/stat")
        while state.read_text().rsplit(")", 1)[1].split()[0] not in "Tt":
            time.sleep(0.001)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def evict(self) -> None:
        """All pages leave DRAM; what was offered to SSD is there."""
        subprocess.run([self.binary, "evict", "--tier", "dram", "--socket", self.socket], check=True, capture_output=True, timeout=60)

    def inspect(self, *what: str) -> dict:
        told = subprocess.run([self.binary, "inspect", *what, "--socket", self.socket, "--json"], check=True, capture_output=True, timeout=30)
        return json.loads(told.stdout)

    def counter(self, name: str) -> int:
        """A counter's value, summed over its labels."""
        counters = self.inspect()["counters"]
        return int(sum(value for key, value in counters.items() if key.split("{")[0] == name))

    def wait_for_sessions(self, count: int, timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while len(self.inspect()["sessions"]) < count:
            if time.monotonic() > end:
                raise RuntimeError(f"fewer than {count} sessions after {timeout} s")
            time.sleep(0.05)


def folder_for(base: str) -> Path:
    """A folder on a file system that can hold an SSD file."""
    folder = Path(base)
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    return folder
