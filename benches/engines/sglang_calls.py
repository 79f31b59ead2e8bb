#!/usr/bin/env python3
"""What SGLang's scheduler pays for the linker: a step with nothing ready, and lookups.

    PYTHONPATH=engine-side/python/tests VENV/bin/python benches/engines/sglang_calls.py [--json OUT]

in an environment with the wheel; needs no SGLang: pools are stand-ins, the Manager is real. For the step the
Manager is stopped with an offload and a lookup outstanding; system calls of a loop of steps are counted by
strace. Lookups include the joining of the hashes, as SGLang writes them, and the release of the lease of the
lookup before."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

from orbitkv.sglang.identity import join_hashes
from rig import Manager
from sglang_stand_ins import DevicePool, keys_of
from test_sglang_store import Engine

ROUNDS, CALLS = 25, 4000
LOOKUPS = 3000
LENGTHS = (1, 12, 128)
STRACED_STEPS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description="What SGLang's scheduler pays for the linker.")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    manager = Manager().start(dram="256MiB")
    try:
        report = measure(manager)
    finally:
        os.kill(manager.pid, signal.SIGCONT)
        manager.stop()
    for name, value in report.items():
        print(f"{name:44} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(manager: Manager) -> dict[str, Any]:
    engine = Engine(manager.socket, DevicePool("kv", 512, range(3)), patience=1e9, lookup_timeout_us=1000)
    store = engine.store
    report: dict[str, Any] = {"python": platform.python_version(), "machine": f"{os.cpu_count()} x {cpu()}"}
    report["step_idle_ns"] = cost(store.poll)
    for length in LENGTHS:
        there, absent = keys_of(f"there {length}", length), keys_of(f"absent {length}", length)
        engine.save(there, range(length))
        report |= lookups(store, f"lookup_hit_{length}_pages", there)
        report |= lookups(store, f"lookup_miss_{length}_pages", absent)
        report[f"lookup_asked_again_{length}_pages_ns"] = cost(lambda: store.lookups.ask("again", join_hashes(there)))
    store.reset()
    os.kill(manager.pid, signal.SIGSTOP)
    engine.offload(engine.part("kv", keys_of("outstanding", 2), [1, 2]))
    engine.lookup("unanswered", keys_of("unanswered", 12))
    assert store.link.outstanding == 2
    report["step_with_two_outstanding_ns"] = cost(store.poll)
    report["client_poll_ns"] = cost(store.link.client.poll)
    report["empty_call_ns"] = cost(lambda: None)
    report |= system_calls(store.poll)
    os.kill(manager.pid, signal.SIGCONT)
    store.reset()
    store.close()
    return report


def lookups(store: Any, name: str, keys: list[str]) -> dict[str, Any]:
    """Of a new request each."""
    took = []
    late = store.counters["lookups_late"]
    for _ in range(LOOKUPS):
        began = time.perf_counter_ns()
        store.lookups.ask("request", join_hashes(keys))
        took.append(time.perf_counter_ns() - began)
        store.lookups.clear()  # staged only: the release travels with the next lookup
    took.sort()
    late = store.counters["lookups_late"] - late
    return {f"{name}_ns_p50": took[len(took) // 2], f"{name}_ns_p99": took[len(took) * 99 // 100], f"{name}_late": late}


def cost(call: Callable[[], Any]) -> int:
    """Nanoseconds a call: the median of many rounds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter_ns() - began) / CALLS)
    return round(statistics.median(rounds))


def system_calls(step: Callable[[], Any]) -> dict[str, Any]:
    """System calls of this thread between two marks."""
    if not shutil.which("strace"):
        return {"system_calls": "not counted: no strace"}
    with tempfile.TemporaryDirectory() as notes:
        trace = Path(notes) / "trace"
        strace = subprocess.Popen(["strace", "-p", str(os.getpid()), "-o", str(trace)], stderr=subprocess.DEVNULL)
        while "TracerPid:\t0" in Path("/proc/self/status").read_text():
            time.sleep(0.01)
        os.getppid()
        began = time.perf_counter()
        for _ in range(STRACED_STEPS):
            step()
        took = time.perf_counter() - began
        os.getppid()
        strace.send_signal(signal.SIGINT)
        strace.wait()
        lines = [line for line in trace.read_text().splitlines() if "(" in line and not line.startswith("---")]
    first, last = (at for at, line in enumerate(lines) if line.startswith("getppid"))
    between = [line.split("(")[0] for line in lines[first + 1 : last]]
    return {
        "steps_traced": STRACED_STEPS,
        "seconds_traced": round(took, 3),
        "system_calls": {name: between.count(name) for name in sorted(set(between))},
    }


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
