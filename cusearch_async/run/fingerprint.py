"""A checksum of a large file that takes a moment, however large it is."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import xxhash

_PIECE = 1 << 20
_PIECES = 64


def fingerprint(content: mmap.mmap | bytes) -> str:
    """Of its size and of 64 pieces of 1 MiB. Of a file of over 64 MiB it does not see an edit between the pieces that
    keeps the size."""
    digest = xxhash.xxh3_128(str(len(content)).encode())
    for place in np.linspace(0, max(0, len(content) - _PIECE), _PIECES, dtype=np.int64).tolist():
        digest.update(content[place : place + _PIECE])
    return str(digest.hexdigest())


def fingerprint_of_file(path: Path) -> str:
    """Raises: OSError."""
    with path.open("rb") as file:
        if not path.stat().st_size:  # an empty file cannot be mapped
            return fingerprint(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return fingerprint(content)
