"""Every engine that `run` knows: its environment, and a function that yields its rows."""

from __future__ import annotations

from typing import Callable, Iterator

import sglang_engine
import vllm_engine
from environment import Environment, Recipe

Scenarios = Callable[[Environment, Recipe], Iterator[dict]]

ENGINES: dict[str, tuple[Recipe, Scenarios]] = {
    **{recipe.name: (recipe, vllm_engine.rows) for recipe in vllm_engine.RECIPES},
    **{recipe.name: (recipe, sglang_engine.rows) for recipe in sglang_engine.RECIPES},
}
