"""How files and payloads are spoiled."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from cusearch_async.transport import codec


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


BAD_PAYLOADS = (
    "flipped byte",
    "other schema",
    "truncated",
    "token outside the vocabulary",
    "negative token",
    "old versions",
    "future versions",
    "another question",
)


def spoil_payload(what: str, payload: bytes, max_tokens: int) -> bytes:
    """A payload as a wrong, older or malicious worker could have stored it."""
    if what == "flipped byte":
        return payload[:50] + bytes([payload[50] ^ 4]) + payload[51:]
    if what == "other schema":
        return payload[:3] + bytes([payload[3] + 1]) + payload[4:]
    if what == "truncated":
        return payload[: len(payload) // 2]
    good = codec.decode(payload, max_tokens)
    tokens, versions = good.token_ids.copy(), good.versions.copy()
    if what == "token outside the vocabulary":
        tokens[-1] = 389
    elif what == "negative token":
        tokens[-1] = -1
    elif what == "old versions":
        versions[:] = -(2**31)
    elif what == "future versions":
        versions[:] = 2**31 - 1
    question = "atlas/1/nowhere" if what == "another question" else good.question_id
    return codec.encode(dataclasses.replace(good, token_ids=tokens, versions=versions, question_id=question))
