"""The `orbitkv` executable that travels in the wheel: Manager and tools."""

import os
import sys
from typing import NoReturn


def binary() -> str:
    """Path of the executable."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "orbitkv")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"no executable at {path}: this copy of the package was not installed from a wheel of"
            " engine-side/python/build-wheel"
        )
    return path


def main() -> NoReturn:
    """Becomes the executable, with the arguments of this process."""
    path = binary()
    os.execv(path, [path, *sys.argv[1:]])
