#!/usr/bin/env python3
"""Time to first token of a real vLLM on a GPU, with and without a cache behind it.

    ttft.py --configurations A,B,C --prompts N --json FILE [--csv FILE]

Every configuration is an engine of its own; all are started first and stay, idle but for the one that
is asked. For each prompt they are asked one after the other, the order turned round each time.

A prompt of n + 1 tokens is asked for four times, one request at a time, one token each:

* cold: nothing of it is anywhere; the engine computes it and the connector saves it;
* after_cold: right behind that, its blocks still in GPU memory, while its save may still run;
* hbm: the same once more after a pause, so nothing runs beside it;
* pressure: after two disjoint long prompts have pushed its blocks out of GPU memory. With a
  connector its KV comes back from host memory, without one it is computed again.

The serial floor is the median of `hbm` without any connector plus the time that the prompt's KV bytes
need at the speed of one large pinned copy, measured in the same run. Nothing that restores first and
computes then can be faster.

Configurations: `none`, `orbitkv/LOAD[+WAIT]` (whole, ordered, layers; host, stream), `pegaflow`, and
vLLM's own `OffloadingConnector` and `SimpleCPUOffloadConnector`.

The model is shaped like Qwen3-8B with random weights (load_format="dummy"): times are those of
the real one, tokens mean nothing, so what came back is judged by the number of cached tokens here
and by the bytes in the engine tests.
"""

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# K and V, bfloat16.
KV_BYTES_A_TOKEN = (
    2 * 2 * QWEN3_8B["num_hidden_layers"] * QWEN3_8B["num_key_value_heads"] * QWEN3_8B["head_dim"]
)

BLOCK_TOKENS = 64
LENGTHS = (1024, 4096, 8192)
# Two of these push everything else out of 16,384 GPU tokens.
PRESSURE_TOKENS = 12288
GPU_BLOCKS = 257
HOST_BYTES = 16 << 30
KINDS = ("cold", "after_cold", "hbm", "pressure")


def transfer_config(configuration, socket):
    """What vLLM is told about a connector; None for none."""
    connector, _, how = configuration.partition("/")
    if connector == "none":
        return None
    config = {"kv_role": "kv_both"}
    if connector == "orbitkv":
        load, _, wait = how.partition("+")
        extra = {"socket": socket, "load": load or "whole", "wait": wait or "host"}
        config |= {
            "kv_connector": "OrbitKVConnector",
            "kv_connector_module_path": "orbitkv.vllm",
            "kv_connector_extra_config": extra,
        }
    elif connector in ("OffloadingConnector", "SimpleCPUOffloadConnector"):
        config |= {
            "kv_connector": connector,
            "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
        }
    elif connector == "pegaflow":
        config |= {
            "kv_connector": "PegaKVConnector",
            "kv_connector_module_path": "pegaflow.connector",
        }
    else:
        raise SystemExit(f"configuration {configuration!r} is not known to this benchmark")
    return config


class Server:
    """The process a connector needs beside the engine, stopped at the end."""

    def __init__(self, configuration, folder):
        self.process = None
        self.address = None
        self.socket = str(folder / "orbitkv.sock")
        if configuration.startswith("orbitkv"):
            import orbitkv

            command = [orbitkv.binary(), "serve", "--socket", self.socket, "--dram", "16GiB"]
            command += ["--device", "cuda", "--http", "127.0.0.1:0"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            line = self.process.stdout.readline()
            if not line.startswith("ready"):
                raise SystemExit(f"orbitkv serve did not start: {line!r}")
            self.address = line.rpartition("http=")[2].strip() or None
        elif configuration == "pegaflow":
            import pegaflow

            binary = Path(pegaflow.__file__).with_name("pegaflow-server-py")
            command = [str(binary), "--pool-size", "16gb", "--devices", "0"]
            self.process = subprocess.Popen(command, stdout=sys.stderr)
            time.sleep(15)

    def metrics(self):
        """What the Manager says about itself, if there is one."""
        if self.address is None:
            return None
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=5) as answer:
            return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]

    def stop(self):
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def copy_speed(torch):
    """Bytes a second of one large copy from pinned host memory, the median of 20."""
    size = 512 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(20):
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return size / statistics.median(times)


class Engine:
    """One vLLM in this process."""

    def __init__(self, configuration, folder, socket):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(QWEN3_8B))

        import vllm

        options = {}
        config = transfer_config(configuration, socket)
        if config is not None:
            options["kv_transfer_config"] = config
        self.version = vllm.__version__
        self._llm = vllm.LLM(
            model=str(model),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            seed=0,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=GPU_BLOCKS,
            max_model_len=12800,
            max_num_seqs=8,
            max_num_batched_tokens=8192,
            # Several engines share the GPU, so none measures what is free.
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=GPU_BLOCKS * BLOCK_TOKENS * KV_BYTES_A_TOKEN,
            enable_prefix_caching=True,
            disable_log_stats=True,
            **options,
        )
        self._sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)

    def ask(self, token_ids):
        """Seconds until the token, and how many tokens of the prompt were cached."""
        begin = time.perf_counter()
        (answer,) = self._llm.generate([{"prompt_token_ids": token_ids}], self._sampling, use_tqdm=False)
        return time.perf_counter() - begin, answer.num_cached_tokens or 0

    def sample(self, seed, tokens):
        """One prompt of `tokens` and one token, four times."""
        numbers = random.Random(seed * 100_003 + tokens)

        def prompt(length):
            return [numbers.randrange(1000, 150000) for _ in range(length)]

        asked, others = prompt(tokens + 1), [prompt(PRESSURE_TOKENS) for _ in range(2)]
        seconds, cached = {}, {}
        seconds["cold"], cached["cold"] = self.ask(asked)
        seconds["after_cold"], cached["after_cold"] = self.ask(asked)
        time.sleep(0.1)
        seconds["hbm"], cached["hbm"] = self.ask(asked)
        for other in others:
            self.ask(other)
        seconds["pressure"], cached["pressure"] = self.ask(asked)
        return {"prompt": seed, "tokens": tokens, "seconds": seconds, "cached": cached}


def serve(configuration, orders, answers):
    """One configuration: starts it, then answers each order, a line of JSON, with another."""
    folder = Path(tempfile.mkdtemp(prefix="orbitkv-ttft-"))
    server = Server(configuration, folder)
    try:
        began = time.monotonic()
        engine = Engine(configuration, folder, server.socket)
        for tokens in LENGTHS:
            engine.sample(0, tokens)
        say(answers, {"vllm": engine.version, "start_seconds": time.monotonic() - began})
        for line in orders:
            order = json.loads(line)
            if "tokens" in order:
                say(answers, engine.sample(order["seed"], order["tokens"]))
            else:
                say(answers, {"metrics": server.metrics()})
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def say(file, what):
    file.write(json.dumps(what) + "\n")
    file.flush()


class Child:
    """A configuration in a process of its own."""

    def __init__(self, configuration, log):
        self.name = configuration
        self.samples = []
        read, write = os.pipe()
        command = [sys.executable, __file__, "--serve", configuration, "--answers", str(write)]
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=file, text=True, pass_fds=[write]
            )
        os.close(write)
        self._answers = os.fdopen(read)

    def answer(self):
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}")
        return json.loads(line)

    def order(self, **what):
        say(self.process.stdin, what)
        return self.answer()

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


def compare(args):
    """Starts every configuration and asks them in turn."""
    logs = Path(args.logs or tempfile.mkdtemp(prefix="orbitkv-ttft-logs-"))
    names = args.configurations.split(",")
    children = [Child(name, logs / f"{name.replace('/', '-')}.log") for name in names]
    result = {"command": sys.argv, "failed": [], "started": {}}
    for child in list(children):
        try:
            result["started"][child.name] = child.answer()
        except RuntimeError as error:
            print(f"{error}: see {logs}", file=sys.stderr)
            result["failed"].append(child.name)
            children.remove(child)
    import torch

    result |= {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    speeds = [copy_speed(torch)]
    began = time.monotonic()
    for seed in range(1, args.prompts + 1):
        if args.seconds and time.monotonic() - began > args.seconds:
            break
        for tokens in LENGTHS:
            for child in children if seed % 2 else children[::-1]:
                child.samples.append(child.order(seed=seed, tokens=tokens))
    speeds.append(copy_speed(torch))
    result["copy_bytes_a_second"] = statistics.median(speeds)
    result["metrics"] = {child.name: child.order()["metrics"] for child in children}
    result["samples"] = {child.name: child.samples for child in children}
    for child in children:
        child.stop()
    result["rows"] = rows = table(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    if args.csv and rows:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    return 1 if result["failed"] else 0


def table(result):
    """One row a configuration and prompt length."""
    rows = []
    for name, samples in result["samples"].items():
        for tokens in LENGTHS:
            times = {kind: ms_of(samples, tokens, kind) for kind in KINDS}
            if not times["pressure"]:
                continue
            row = {"configuration": name, "tokens": tokens, "prompts": len(times["pressure"])}
            for kind in KINDS:
                row[f"{kind}_ms_p50"] = round(statistics.median(times[kind]), 2)
            row["pressure_ms_p90"] = round(quantile(times["pressure"], 0.9), 2)
            row["cached_tokens_min"] = min(
                sample["cached"]["pressure"] for sample in samples if sample["tokens"] == tokens
            )
            bare = result["samples"].get("none")
            if bare:
                kv_ms = tokens * KV_BYTES_A_TOKEN / result["copy_bytes_a_second"] * 1000
                floor = statistics.median(ms_of(bare, tokens, "hbm")) + kv_ms
                row["serial_floor_ms"] = round(floor, 2)
                row["ratio_to_floor"] = round(statistics.median(times["pressure"]) / floor, 3)
                row["cold_slower_low"], row["cold_slower_high"] = slower(samples, bare, tokens, "cold")
                row["after_cold_slower_low"], row["after_cold_slower_high"] = slower(
                    samples, bare, tokens, "after_cold"
                )
            rows.append(row)
    return rows


def ms_of(samples, tokens, kind):
    return [sample["seconds"][kind] * 1000 for sample in samples if sample["tokens"] == tokens]


def slower(samples, bare, tokens, kind):
    """95 % interval of how much slower than without a connector, as a ratio less one: the median of
    the pairs of one prompt each, bootstrapped."""
    pairs = [one / two for one, two in zip(ms_of(samples, tokens, kind), ms_of(bare, tokens, kind))]
    if len(pairs) < 4 or samples is bare:
        return None, None
    numbers = random.Random(1)
    medians = sorted(statistics.median(numbers.choices(pairs, k=len(pairs))) for _ in range(2000))
    return round(medians[49] - 1, 4), round(medians[1949] - 1, 4)


def quantile(values, part):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configurations", default="none,orbitkv/whole,OffloadingConnector")
    parser.add_argument("--prompts", type=int, default=15, help="of each length")
    parser.add_argument("--seconds", type=float, help="no new prompt after so many of them")
    parser.add_argument("--json")
    parser.add_argument("--csv")
    parser.add_argument("--logs", help="folder for what the engines say")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, sys.stdin, os.fdopen(args.answers, "w"))
        return 0
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
