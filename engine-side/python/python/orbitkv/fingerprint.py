"""Names for contents: which weights a folder holds, and texts as long as the Manager takes them."""

from __future__ import annotations

import hashlib
from pathlib import Path

#: Bytes read at each of `SAMPLES` places of a weights file. Reading whole files would cost minutes.
SAMPLE_BYTES = 16 * 1024
SAMPLES = 16
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGS = (".json",)
#: Longest text that the Manager takes, with room for a digest.
_TEXT_MAX, _TEXT_KEPT = 500, 400


def folder_fingerprint(folder: Path) -> str:
    """Names the weights in a folder by sizes and samples of their bytes, its settings in full.

    Raises OSError where the folder or a file in it cannot be read."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _CONFIGS:
            digest.update(path.name.encode() + path.read_bytes())
        elif path.suffix in _WEIGHTS:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for i in range(SAMPLES):
                    file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def fit(text: str) -> str:
    """At most what the Manager takes, still one name for one text."""
    encoded = text.encode()
    if len(encoded) <= _TEXT_MAX:
        return text
    return f"{encoded[:_TEXT_KEPT].decode(errors='ignore')} {hashlib.sha256(encoded).hexdigest()[:32]}"
