"""What `kv_connector_extra_config` may say."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, Optional

_CHOICES = {
    "load": ("whole", "ordered", "layers"),
    "wait": ("host", "stream"),
    "stop": ("wait_all", "deadline", "best_effort"),
}


@dataclass(frozen=True)
class Options:
    """All of them optional. An unknown name, or a value of the wrong kind, stops the engine's start."""

    #: Socket of the Manager; without, the default of `orbitkv serve`.
    socket: Optional[str] = None
    #: How a request waits for its restore. "whole": the engine parks it and looks at each step.
    #: "ordered": it is scheduled at once and the step waits for the restore. "layers": likewise, each
    #: layer waiting for its own bytes only; needs piecewise CUDA graphs, which it asks for. In both of
    #: the latter a Manager that hangs in the middle of a restore holds the step until it goes on or ends.
    load: str = "whole"
    #: Who waits in "ordered" and "layers": "host" holds the launch back and notices a Manager that
    #: died; "stream" makes the GPU wait, which nothing can end if the Manager is killed meanwhile.
    wait: str = "host"
    #: Microseconds for which a query is waited for on the spot, before the engine is told to ask again.
    query_spin_us: int = 100
    #: Seconds without an answer to a query after which the Manager counts as hung and is left alone.
    query_patience: float = 5.0
    #: Seconds after which a restore without an end is given up, with "whole": its request is computed in
    #: other blocks; those of the restore, which may still be written, stay out of use until it has ended.
    load_patience: float = 30.0
    #: What to do with pages that are still on their way when asked for: "wait_all" waits for the whole
    #: prefix, "deadline" at most `stop_ms` and then takes what has come, "best_effort" takes what is there.
    stop: str = "wait_all"
    #: Milliseconds of "deadline".
    stop_ms: int = 50
    #: Hints the Manager about the pages of each request when it joins the queue.
    queued_warming: bool = False
    #: Prepares and leases the pages of a request when it joins the queue, within the Manager's
    #: speculative budget.
    prepare: bool = False
    #: Identity of the weights, for models that change under one name and path.
    weights_version: str = ""
    #: KV layout to ask the engine for; "auto" asks for a block-outermost one on GPUs, "" for none.
    kv_layout: str = "auto"
    #: Largest part of the engine's KV blocks that unfinished saves may hold back from reuse.
    held_blocks_max: float = 0.5
    #: Whether new pages are saved.
    save: bool = True

    @classmethod
    def of(cls, extra: Optional[dict[str, Any]]) -> "Options":
        """Reads and checks them.

        Raises ValueError, naming the option, its value and what is possible."""
        known = {field.name: field for field in fields(cls)}
        given = {}
        for name, value in (extra or {}).items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ValueError(f"kv_connector_extra_config has no option {name!r}{hint}")
            default = known[name].default
            if isinstance(default, bool) and not isinstance(value, bool):
                raise ValueError(f"{name} = {value!r}: give true or false")
            if isinstance(default, (int, float)) and not isinstance(default, bool):
                if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0:
                    raise ValueError(f"{name} = {value!r}: give a number of at least 0")
            if name in _CHOICES and value not in _CHOICES[name]:
                raise ValueError(f"{name} = {value!r}: give one of {', '.join(_CHOICES[name])}")
            given[name] = value
        return cls(**given)

    @property
    def is_async(self) -> bool:
        """Whether a request is parked while its pages are restored."""
        return self.load == "whole"
