"""Whose bytes the pages are: everything besides the token ids that decides them.

Token ids, cache salts and adapters are in the engine's page hashes. Model, weights, element type, layout
and topology are here."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from orbitkv.fingerprint import fit, folder_fingerprint


def model_identity(server_args: Any, weights_version: str) -> str:
    """Model, revision and weights, for one that `server_args` of SGLang describe."""
    path = str(getattr(server_args, "model_path", ""))
    digest = hashlib.sha256()
    for name in ("load_format", "quantization", "json_model_override_args"):
        digest.update(f"{name} {getattr(server_args, name, None)}\n".encode())
    if getattr(server_args, "load_format", "") == "dummy":
        digest.update(f"seed {getattr(server_args, 'random_seed', None)}\n".encode())
    if os.path.isdir(path):
        digest.update(folder_fingerprint(Path(path)).encode())
    for adapter in getattr(server_args, "lora_paths", None) or ():
        # The engine's page hashes have the name and path of an adapter, not what is in there.
        folder = Path(str(getattr(adapter, "lora_path", None) or adapter))
        name = f"adapter {getattr(adapter, 'lora_name', '')} {folder}"
        digest.update(f"{name} {folder_fingerprint(folder) if os.path.isdir(folder) else ''}\n".encode())
    digest.update(weights_version.encode())
    revision = getattr(server_args, "revision", None) or ""
    return fit(f"{path}@{revision} {digest.hexdigest()[:32]}")


def join_hashes(keys: list[str]) -> bytes:
    """Hashes as the engine writes them, 64 hexadecimal digits each, in one buffer.

    Raises ValueError for anything else."""
    hashes = bytes.fromhex("".join(keys))
    if len(hashes) != 32 * len(keys) or any(len(key) != 64 for key in keys):
        raise ValueError("a page hash is not 64 hexadecimal digits")
    return hashes
