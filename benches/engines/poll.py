#!/usr/bin/env python3
"""What one step of vLLM pays for the connector while nothing is ready, and which system calls it makes.

    PYTHONPATH=tests/engines VENV/bin/python benches/engines/poll.py [--json OUT]

in an environment with vLLM and the wheel (`tests/engines/run --keep` leaves one). The engine runs in this
process against a real Manager. One request is parked on a restore, another waits for the answer to its
query, and the Manager is stopped, so that neither comes: the engine polls. Measured are the connector's
calls alone, with the step's own arguments; system calls are counted by strace around a loop of steps."""

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

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", TORCH_COMPILE_DISABLE="1")
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", PYTHONHASHSEED="0")

import orbitkv  # noqa: E402
from manager import Manager, folder_for  # noqa: E402
from vllm_inside import Engine, prompt_of  # noqa: E402

ROUNDS, CALLS = 25, 4000
STRACED_STEPS = 500_000


def main() -> None:
    parser = argparse.ArgumentParser(description="What one step pays for the connector while nothing is ready.")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orbitkv-poll-", dir="/var/tmp") as base:
        folder = folder_for(base)
        manager = Manager(orbitkv.binary(), folder, lease_ttl="10m")
        manager.start()
        try:
            report = measure(manager, folder)
        finally:
            manager.stop()
    for name, value in report.items():
        print(f"{name:44} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(manager: Manager, folder: Path) -> dict[str, Any]:
    import vllm
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.v1.outputs import KVConnectorOutput

    engine = Engine(manager, folder, "whole")
    # Nobody gives up while the Manager stands still.
    object.__setattr__(engine.side._options, "query_patience", 1e9)
    object.__setattr__(engine.worker._options, "load_patience", 1e9)
    prompt = prompt_of("poll", 600)
    engine.generate([prompt])
    engine.forget_local()
    outputs: list[Any] = []
    scheduler, worker = engine.connector, get_kv_transfer_group()

    def stop_at_load(old: Callable) -> Callable:
        def allocated(request: Any, blocks: Any, tokens: int) -> None:
            old(request, blocks, tokens)
            if tokens:
                manager.pause()

        return allocated

    def note(old: Callable) -> Callable:
        def build(output: Any) -> Any:
            outputs[:] = [output]
            return old(output)

        return build

    with engine.patched(engine.side, "allocated", stop_at_load), engine.patched(scheduler, "build_connector_meta", note):
        engine.add("parked", prompt)
        while not engine.worker._loading:
            engine.step()
        engine.add("asking", prompt_of("poll too", 600))
        for _ in range(3):
            engine.step()
    asking = next(request for request in engine.scheduler.requests.values() if not engine.side._tracked[request.request_id].offered)
    output, nothing, finished = outputs[0], KVConnectorOutput(), set()
    assert scheduler.get_num_new_matched_tokens(asking, 0) == (None, False)
    assert engine.worker.link.outstanding and engine.side.link.outstanding

    poll = worker.get_transfer_results if hasattr(vllm.distributed.kv_transfer.kv_connector.v1.base, "KVConnectorTransferResults") else worker.get_finished

    def step() -> None:
        scheduler.get_num_new_matched_tokens(asking, 0)
        metadata = scheduler.build_connector_meta(output)
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        poll(finished)
        worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        worker.get_kv_connector_kv_cache_events()
        worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        scheduler.update_connector_output(nothing)
        scheduler.get_kv_connector_stats()
        scheduler.take_events()

    def three() -> None:
        scheduler.get_num_new_matched_tokens(asking, 0)
        scheduler.build_connector_meta(output)
        poll(finished)

    report = {
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} x {cpu()}",
        "query_pending_ns": cost(lambda: scheduler.get_num_new_matched_tokens(asking, 0)),
        "build_connector_meta_ns": cost(lambda: scheduler.build_connector_meta(output)),
        "poll_ns": cost(lambda: poll(finished)),
        "three_together_ns": cost(three),
        "whole_step_of_15_calls_ns": cost(step),
        "client_poll_ns": cost(engine.worker.link.client.poll),
        "empty_call_ns": cost(lambda: None),
    }
    report |= system_calls(step)
    manager.resume()
    engine.settle(60)
    return report


def cost(call: Callable[[], Any]) -> int:
    """Nanoseconds a call: the median of many rounds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter_ns() - began) / CALLS)
    return round(statistics.median(rounds))


def system_calls(step: Callable[[], None]) -> dict[str, Any]:
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
    first, last = (i for i, line in enumerate(lines) if line.startswith("getppid"))
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
