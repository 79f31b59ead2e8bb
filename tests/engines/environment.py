"""The Python environment of one engine: made outside the checkout, removed before the next one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

#: Pinned, so that a new release cannot change what resolves.
UV = "uv==0.13.9"


@dataclass(frozen=True)
class Recipe:
    """What an engine needs."""

    #: As `--engine` names it.
    name: str
    python: str
    requirements: tuple[str, ...]
    #: Lines for uv's `--override`.
    overrides: tuple[str, ...] = ()
    #: Lines for uv's `--constraint`: versions that are known to work.
    constraints: str = ""
    #: Environment variables of the engine's process.
    variables: dict[str, str] = field(default_factory=dict)


class Environment:
    """A virtual environment with one engine and the wheel; a context manager."""

    def __init__(self, recipe: Recipe, wheel: Path, keep: bool):
        base = os.environ.get("ORBITKV_ENGINES_DIR")
        self._base = Path(base) if base else Path(tempfile.mkdtemp(prefix="orbitkv-engines-"))
        self._owns_base = base is None
        self._recipe = recipe
        self._wheel = wheel
        self._keep = keep
        self.folder = self._base / recipe.name
        self.python = self.folder / "bin" / "python"

    def __enter__(self) -> "Environment":
        uv = self._uv()
        recipe = self._recipe
        variables = {**os.environ, "VIRTUAL_ENV": str(self.folder)}
        if not (self.folder / "complete").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            for other in self._base.iterdir():
                if other.is_dir() and (other / "complete").exists():
                    shutil.rmtree(other)  # one at a time: each takes some 6 GB
            _run([uv, "venv", "--quiet", "--python", recipe.python, self.folder], variables)
            arguments = [uv, "pip", "install", "--quiet"]
            with tempfile.TemporaryDirectory() as notes:
                if recipe.overrides:
                    overrides = Path(notes) / "overrides.txt"
                    overrides.write_text("\n".join(recipe.overrides) + "\n")
                    arguments += ["--override", overrides]
                if recipe.constraints:
                    constraints = Path(notes) / "constraints.txt"
                    constraints.write_text(recipe.constraints)
                    arguments += ["--constraint", constraints]
                _run([*arguments, *recipe.requirements], variables)
            (self.folder / "complete").touch()
        _run([uv, "pip", "install", "--quiet", "--reinstall", "--no-deps", self._wheel], variables)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._owns_base:
                shutil.rmtree(self._base, ignore_errors=True)

    def run(self, script: Path, arguments: list[str], log: Path, timeout: float) -> int:
        """Runs a script of this folder in the environment; the exit status."""
        here = Path(__file__).parent
        variables = {**os.environ, **self._recipe.variables, "PYTHONPATH": str(here), "PYTHONUNBUFFERED": "1"}
        variables["PATH"] = f"{self.python.parent}:{variables['PATH']}"
        with log.open("ab") as out:
            process = subprocess.Popen([str(self.python), str(script), *arguments], env=variables, stdout=out, stderr=out, start_new_session=True)
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                return 124
            finally:
                # Engines leave processes behind when they fail.
                try:
                    os.killpg(process.pid, 9)
                except ProcessLookupError:
                    pass
                process.wait()

    def _uv(self) -> str:
        found = shutil.which("uv")
        if found:
            return found
        tools = self._base / "uv"
        if not (tools / "bin" / "uv").exists():
            _run([sys.executable, "-m", "venv", tools], dict(os.environ))
            _run([tools / "bin" / "pip", "install", "--quiet", UV], dict(os.environ))
        return str(tools / "bin" / "uv")


def _run(command: list, variables: dict[str, str]) -> None:
    subprocess.run([str(part) for part in command], check=True, env=variables)
