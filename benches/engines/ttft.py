#!/usr/bin/env python3
"""Time to first token of a real vLLM on a GPU, with and without a cache behind it.

    ttft.py measure --connector NAME --out FILE     one configuration, in this process
    ttft.py compare --connectors A,B,C --rounds N --json FILE [--csv FILE]
                                                    each in a process of its own, order alternated

A prompt of n + 1 tokens is asked for four times, one request at a time, one token each:

* cold: nothing of it is anywhere; the engine computes it and the connector saves it;
* after_cold: right behind that, its blocks still in GPU memory, while its save may still run;
* hbm: the same once more after a pause, so nothing runs beside it;
* pressure: after two disjoint long prompts have pushed its blocks out of GPU memory. With a
  connector its KV comes back from host memory, without one it is computed again.

The serial floor of a round is the median of `hbm` without any connector plus the time that the
prompt's KV bytes need at the speed of one large pinned copy, measured in the same process. Nothing
that restores first and computes then can be faster.

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


def transfer_config(connector, layers, socket):
    """What vLLM is told about a connector; None for none."""
    if connector == "none":
        return None
    config = {"kv_role": "kv_both"}
    if connector == "orbitkv":
        config |= {
            "kv_connector": "OrbitKVConnector",
            "kv_connector_module_path": "orbitkv.vllm",
            "kv_connector_extra_config": {"socket": socket, "load": layers},
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
        raise SystemExit(f"connector {connector!r} is not known to this benchmark")
    return config


class Server:
    """The process a connector needs beside the engine, stopped at the end."""

    def __init__(self, connector, folder):
        self.process = None
        self.socket = str(folder / "orbitkv.sock")
        if connector == "orbitkv":
            import orbitkv

            command = [orbitkv.binary(), "serve", "--socket", self.socket, "--dram", "16GiB"]
            command += ["--device", "cuda", "--http", "127.0.0.1:0"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            line = self.process.stdout.readline()
            if not line.startswith("ready"):
                raise SystemExit(f"orbitkv serve did not start: {line!r}")
        elif connector == "pegaflow":
            command = [shutil.which("pegaflow-server"), "--pool-size", "16gb", "--devices", "0"]
            self.process = subprocess.Popen(command)
            time.sleep(10)

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


def measure(args):
    """Runs one configuration and writes its times."""
    folder = Path(tempfile.mkdtemp(prefix="orbitkv-ttft-"))
    server = Server(args.connector, folder)
    try:
        result = run_engine(args, folder, server.socket)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    Path(args.out).write_text(json.dumps(result))


def run_engine(args, folder, socket):
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if args.one_process else "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_8B))

    import torch
    import vllm
    from vllm import LLM, SamplingParams

    options = {}
    config = transfer_config(args.connector, args.load, socket)
    if config is not None:
        options["kv_transfer_config"] = config
    began = time.monotonic()
    llm = LLM(
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
        gpu_memory_utilization=0.5,
        enable_prefix_caching=True,
        disable_log_stats=True,
        **options,
    )
    start_seconds = time.monotonic() - began
    sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    numbers = random.Random(args.seed)

    def prompt(tokens):
        return {"prompt_token_ids": [numbers.randrange(1000, 150000) for _ in range(tokens)]}

    def ask(what):
        begin = time.perf_counter()
        (answer,) = llm.generate([what], sampling, use_tqdm=False)
        return time.perf_counter() - begin, answer.num_cached_tokens or 0

    def pressure():
        for _ in range(2):
            ask(prompt(PRESSURE_TOKENS))

    for tokens in LENGTHS:
        ask(prompt(tokens + 1))
    pressure()
    samples = []
    for at in range(args.prompts):
        for tokens in LENGTHS:
            what = prompt(tokens + 1)
            times, cached = {}, {}
            times["cold"], cached["cold"] = ask(what)
            times["after_cold"], cached["after_cold"] = ask(what)
            time.sleep(0.1)
            times["hbm"], cached["hbm"] = ask(what)
            pressure()
            times["pressure"], cached["pressure"] = ask(what)
            samples.append({"prompt": at, "tokens": tokens, "seconds": times, "cached": cached})
    return {
        "connector": args.connector,
        "load": args.load if args.connector == "orbitkv" else None,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "one_process": args.one_process,
        "start_seconds": start_seconds,
        "copy_bytes_a_second": copy_speed(torch),
        "samples": samples,
    }


def compare(args):
    """Every configuration once a round, each round in the opposite order of the one before."""
    configurations = args.connectors.split(",")
    runs = []
    for number in range(args.rounds):
        order = configurations if number % 2 == 0 else configurations[::-1]
        for name in order:
            connector, _, load = name.partition("/")
            with tempfile.NamedTemporaryFile(suffix=".json") as out:
                command = [sys.executable, __file__, "measure", "--connector", connector]
                command += ["--out", out.name, "--prompts", str(args.prompts)]
                command += ["--seed", str(args.seed + number)]
                command += ["--load", load or "whole"] + ["--one-process"] * args.one_process
                print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
                done = subprocess.run(command, stdout=sys.stderr)
                if done.returncode != 0:
                    print(f"{name} failed with exit code {done.returncode}", file=sys.stderr)
                    runs.append({"name": name, "round": number, "failed": done.returncode})
                    continue
                runs.append({"name": name, "round": number, **json.loads(Path(out.name).read_text())})
            if args.json:
                Path(args.json).write_text(json.dumps({"command": sys.argv, "runs": runs}, indent=1))
    rows = table(runs)
    if args.json:
        whole = {"command": sys.argv, "rows": rows, "runs": runs}
        Path(args.json).write_text(json.dumps(whole, indent=1))
    if args.csv and rows:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    return 1 if any("failed" in run for run in runs) else 0


def table(runs):
    """One row a configuration and prompt length."""
    good = [run for run in runs if "samples" in run]
    rows = []
    for name in dict.fromkeys(run["name"] for run in good):
        for tokens in LENGTHS:
            times = {kind: ms_of(good, name, tokens, kind) for kind in KINDS}
            cached = [
                sample["cached"]["pressure"]
                for run in good
                if run["name"] == name
                for sample in run["samples"]
                if sample["tokens"] == tokens
            ]
            row = {"configuration": name, "tokens": tokens, "prompts": len(times["pressure"])}
            for kind in KINDS:
                row[f"{kind}_ms_p50"] = round(statistics.median(times[kind]), 2)
            row["pressure_ms_p90"] = round(quantile(times["pressure"], 0.9), 2)
            row["cached_tokens_min"] = min(cached)
            floor = serial_floor_ms(good, tokens)
            if floor is not None:
                row["serial_floor_ms"] = round(floor, 2)
                row["ratio_to_floor"] = round(statistics.median(times["pressure"]) / floor, 3)
            low, high = cold_interval(good, name, tokens)
            row["cold_slower_low"], row["cold_slower_high"] = low, high
            rows.append(row)
    return rows


def ms_of(runs, name, tokens, kind):
    return [
        sample["seconds"][kind] * 1000
        for run in runs
        if run["name"] == name
        for sample in run["samples"]
        if sample["tokens"] == tokens
    ]


def serial_floor_ms(runs, tokens):
    hits = ms_of(runs, "none", tokens, "hbm")
    if not hits:
        return None
    speed = statistics.median(run["copy_bytes_a_second"] for run in runs)
    return statistics.median(hits) + tokens * KV_BYTES_A_TOKEN / speed * 1000


def cold_interval(runs, name, tokens):
    """95 % interval of how much slower a cold prompt is than without a connector, as a ratio less
    one: pairs of the same prompt in the same round, bootstrapped."""
    pairs = []
    for run in runs:
        if run["name"] != name or name == "none":
            continue
        bare = [other for other in runs if other["name"] == "none" and other["round"] == run["round"]]
        for one, two in zip(run["samples"], bare[0]["samples"] if bare else []):
            if one["tokens"] == tokens:
                pairs.append(one["seconds"]["cold"] / two["seconds"]["cold"])
    if len(pairs) < 4:
        return None, None
    numbers = random.Random(1)
    medians = sorted(
        statistics.median(numbers.choices(pairs, k=len(pairs))) for _ in range(2000)
    )
    return round(medians[49] - 1, 4), round(medians[1949] - 1, 4)


def quantile(values, part):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("measure", "compare"):
        sub = verbs.add_parser(verb)
        sub.add_argument("--prompts", type=int, default=5, help="of each length, a round")
        sub.add_argument("--seed", type=int, default=1)
        sub.add_argument("--one-process", action="store_true")
        if verb == "measure":
            sub.add_argument("--connector", required=True)
            sub.add_argument("--load", default="whole", help="how OrbitKV restores")
            sub.add_argument("--out", required=True)
        else:
            sub.add_argument("--connectors", default="none,orbitkv,OffloadingConnector")
            sub.add_argument("--rounds", type=int, default=3)
            sub.add_argument("--json")
            sub.add_argument("--csv")
    args = parser.parse_args()
    if args.verb == "measure":
        measure(args)
        return 0
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
