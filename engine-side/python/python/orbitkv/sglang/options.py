"""What `linker_extra_config`, and "orbitkv" in the extra configuration of the HiCache backend, may say."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, Optional

_CHOICES = {"wait": ("host", "stream")}


@dataclass(frozen=True)
class Options:
    """All of them optional. An unknown name, or a value of the wrong kind, stops the engine's start."""

    #: Socket of the Manager; without, the default of `orbitkv serve`.
    socket: Optional[str] = None
    #: Longest wait for the answer to a lookup, in microseconds: the scheduler stands still for it.
    #: What comes later serves the next lookup of the same request.
    lookup_timeout_us: int = 1000
    #: Seconds without an answer after which the Manager counts as hung and is left alone.
    patience: float = 5.0
    #: Who waits for the bytes of a layer: "host" holds the launch of its kernels back and notices a
    #: Manager that died; "stream" makes the GPU wait, which nothing can end if the Manager is killed
    #: meanwhile.
    wait: str = "host"
    #: Identity of the weights, for models that change under one name and path.
    weights_version: str = ""
    #: Whether new pages are saved.
    save: bool = True
    #: Largest part of the engine's pages that unfinished offloads may hold.
    held_pages_max: float = 0.5

    @classmethod
    def of(cls, extra: Optional[dict[str, Any]]) -> "Options":
        """Reads and checks them.

        Raises ValueError, naming the option, its value and what is possible."""
        known = {field.name: field for field in fields(cls)}
        given = {}
        for name, value in (extra or {}).items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"orbitkv has no option {name!r}; {hint}")
            default = known[name].default
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if isinstance(default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"{name} = {value!r}: give true or false")
            elif isinstance(default, (int, float)):
                if not is_number or value < 0:
                    raise ValueError(f"{name} = {value!r}: give a number of at least 0")
            elif not isinstance(value, str):
                raise ValueError(f"{name} = {value!r}: give a text")
            if name in _CHOICES and value not in _CHOICES[name]:
                raise ValueError(f"{name} = {value!r}: give one of {', '.join(_CHOICES[name])}")
            given[name] = value
        return cls(**given)
