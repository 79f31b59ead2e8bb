"""Whose bytes the pages are: everything besides the token ids that decides them.

Token ids, multimodal inputs and cache salts are in the engine's block hashes. Model, weights, element
type, layout and topology are here; so is the content of an adapter, which the hashes only name.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Optional

from orbitkv.fingerprint import fit, folder_fingerprint
from orbitkv.vllm.layout import GroupLayout

#: Kinds of KV cache whose blocks never change once they are full.
_CACHED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec")


def engine_id(name: str) -> bytes:
    """The attachment group of one engine: its scheduler and all of its workers know the same name."""
    return hashlib.sha256(b"vllm " + name.encode()).digest()[:16]


def model_identity(config: Any, weights_version: str) -> str:
    """Model, revision and weights."""
    model = config.model_config
    parts = [f"{model.model}@{getattr(model, 'revision', None) or ''}"]
    digest = hashlib.sha256()
    hf_config = getattr(model, "hf_config", None)
    if hf_config is not None:
        digest.update(str(getattr(hf_config, "_commit_hash", None)).encode())
        digest.update(json.dumps(hf_config.to_dict(), sort_keys=True, default=str).encode())
    digest.update(str(getattr(model, "quantization", None)).encode())
    load_format = str(getattr(getattr(config, "load_config", None), "load_format", ""))
    if load_format.endswith("dummy"):
        digest.update(f"dummy {model.seed}".encode())
    elif os.path.isdir(model.model):
        digest.update(folder_fingerprint(Path(model.model)).encode())
    digest.update(weights_version.encode())
    parts.append(digest.hexdigest()[:32])
    return fit(" ".join(parts))


class Adapters:
    """Content identities of LoRA adapters; looks at the files of one again when they have changed."""

    def __init__(self) -> None:
        self._known: dict[tuple, str] = {}

    def identity(self, lora: Optional[Any]) -> str:
        """Empty for the base model."""
        if lora is None:
            return ""
        path = lora.lora_path
        try:
            stats = [(entry.name, entry.stat()) for entry in os.scandir(path)]
            seen = tuple(sorted((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats))
        except OSError:
            # Not a local folder: only its names and number tell it apart, for this engine's life.
            return fit(f"{lora.lora_name} {lora.lora_int_id} {path} pid {os.getpid()}")
        key = (path, lora.lora_int_id, seen)
        if key not in self._known:
            self._known[key] = f"{lora.lora_name} {folder_fingerprint(Path(path))}"
        return fit(self._known[key])


def namespaces(
    config: Any,
    kv_cache_config: Any,
    layouts: list[GroupLayout],
    *,
    backend: str,
    device: str,
    weights_version: str,
    rank: dict[str, int],
) -> list[dict]:
    """One a group, as the arguments of `orbitkv.Namespace`."""
    import vllm

    model = model_identity(config, weights_version)
    layout_name = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(config.cache_config, "kv_cache_layout", "")
    dtype = f"{config.cache_config.cache_dtype}/{config.model_config.dtype}".replace("torch.", "")
    result = []
    for group, layout in enumerate(layouts):
        spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
        text = f"vllm {vllm.__version__} {device} {backend} {layout_name} {type(spec).__name__} {layout.digest()}"
        result.append(
            dict(
                model=model,
                dtype=dtype,
                page_tokens=spec.block_size,
                page_bytes=layout.page_bytes,
                layout=fit(text),
                group=group,
                **rank,
                **dependency(spec),
            )
        )
    return result


def dependency(spec: Any) -> dict[str, Any]:
    """Which pages a hit needs besides its last one."""
    if type(spec).__name__.startswith("SlidingWindow"):
        # The pages that the next token can still see, of which the first may be seen in part.
        return {"dependency": "window", "window": max(1, -(-(spec.sliding_window - 1) // spec.block_size))}
    return {"dependency": "chain"}


def unsupported(config: Any, kv_cache_config: Any, has_request_failures: bool) -> Optional[str]:
    """Why the pages of this engine cannot be cached, if they cannot."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not specs:
        return "the model has no KV cache"
    if len({spec.block_size for spec in specs}) > 1:
        return f"the KV cache groups have blocks of {sorted({spec.block_size for spec in specs})} tokens"
    for spec in specs:
        for inner in getattr(spec, "kv_cache_specs", {"": spec}).values():
            if type(inner).__name__ not in _CACHED_SPECS:
                return f"a KV cache group is of kind {type(inner).__name__}"
    if len(specs) > 1 and not has_request_failures:
        return f"{len(specs)} KV cache groups need an engine that can fail single loads (vLLM 0.32)"
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}"
    return None
