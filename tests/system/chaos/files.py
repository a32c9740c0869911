"""How a file is spoiled."""

from __future__ import annotations

import random
from pathlib import Path


def spoil(path: Path, draw: random.Random) -> str:
    """One byte flipped, cut in half, or gone."""
    how = draw.choice(("flipped", "truncated", "removed"))
    content = bytearray(path.read_bytes())
    if how == "flipped" and content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    return how
