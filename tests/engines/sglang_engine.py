"""SGLang without a GPU: the recipe of its environment, and the rows of its scenarios."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Iterator

from environment import Environment, Recipe
from manager import folder_for

HERE = Path(__file__).resolve().parent
#: One start of the engine each: how it is set up. See `sglang_child`.
SETUPS = ("plain", "tampered", "small", "window", "stranger", "again")
#: Setups that leave their SSD file to the next.
SHARED = {"plain": "kept", "stranger": "kept", "again": "kept"}
SETUP_SECONDS = 900
#: What SGLang asks for and nothing here uses: kernels of GPUs, media, other front ends.
UNUSED = (
    "flash-attn-4", "flashinfer_python", "humming-kernels", "nvidia-cutlass-dsl", "nvidia-mathdx", "nvshmem4py-cu13",
    "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "tilelang", "torchcodec",
    "torchaudio", "decord2", "modelscope", "cuda-python", "smg-grpc-servicer", "deepseek-recipe", "tml-renderers",
)  # fmt: skip

RECIPES = (
    Recipe(
        name="sglang-0.5.23",
        python="python3.11",
        requirements=("sglang==0.5.23",),
        overrides=tuple(f'{name} ; python_version < "3"' for name in UNUSED),
        variables={"HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"},
    ),
)


def rows(environment: Environment, recipe: Recipe) -> Iterator[dict]:
    """Every scenario of one version; a setup that fails raises with the end of its log."""
    version = recipe.name.split("-", 1)[1]
    with tempfile.TemporaryDirectory(prefix="orbitkv-sglang-", dir="/var/tmp") as base:
        for setup in SETUPS:
            folder = folder_for(f"{base}/{SHARED.get(setup, setup)}")
            out, log = folder / f"rows-{setup}.jsonl", folder / f"engine-{setup}.log"
            status = environment.run(HERE / "sglang_child.py", [setup, str(folder), str(out)], log, SETUP_SECONDS)
            for text in out.read_text().splitlines() if out.exists() else ():
                yield {"engine": "sglang", "version": version, **json.loads(text)}
            if status != 0:
                raise RuntimeError(f"setup {setup} ended with {status}: {log.read_text(errors='replace')[-3000:]}")
