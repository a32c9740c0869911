"""Payloads that nobody sent, in great number: python -m tests.transport.fuzz [--count 100000] [--seed 0].

Random bytes, and real payloads with bytes flipped, cut, doubled, swapped or re-sealed with a right checksum. Only
CorruptPayload may come out of the codec, or a trajectory that is as valid as any."""

from __future__ import annotations

import argparse
import random
import zlib
from collections import Counter

import msgspec
import numpy as np

from cusearch_async.errors import CorruptPayload
from cusearch_async.transport import codec
from cusearch_async.types import PAYLOAD_SCHEMA
from tests.strategies import make_trajectory

MAX_TOKENS = 200
JUNK = (
    None,
    True,
    -1,
    2**63,
    2**64 - 1,
    1e308,
    float("nan"),
    float("-inf"),
    "",
    "é" * 50,
    b"",
    b"\xff" * 64,
    [],
    {},
    [[]],
)


def seal(body: bytes) -> bytes:
    return b"CUS" + bytes([PAYLOAD_SCHEMA]) + zlib.crc32(body).to_bytes(4, "little") + body


def real(rng: random.Random) -> bytes:
    sampled = rng.randint(1, 60)
    logprobs = np.array([rng.uniform(-30, 0) for _ in range(sampled)], np.float32)
    depth = rng.randint(0, 5)
    return codec.encode(
        make_trajectory(rng.randint(0, 2**40), rng.randint(0, 64), sampled=sampled, logprobs=logprobs, depth=depth)
    )


def mutate(rng: random.Random) -> bytes:
    """One payload that is probably wrong."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randint(0, 300))
    payload = bytearray(real(rng))
    if kind == 1:  # a few bits flipped
        for _ in range(rng.randint(1, 4)):
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        return bytes(payload)
    if kind == 2:  # cut, or with something appended
        return bytes(payload[: rng.randrange(len(payload))]) + rng.randbytes(rng.randint(0, 3))
    body = bytearray(payload[8:])
    if kind == 3:  # bytes changed and sealed again: the checksum is right
        for _ in range(rng.randint(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        return seal(bytes(body))
    fields = msgspec.msgpack.decode(bytes(body))
    if kind == 4:  # fields of another kind, missing or doubled
        place = rng.randrange(len(fields))
        fields[place : place + rng.randint(0, 2)] = [rng.choice(JUNK) for _ in range(rng.randint(0, 2))]
    else:  # arrays that do not fit together
        place = rng.choice([6, 7, 8, 9])
        fields[place] = rng.choice([fields[place][:-1], fields[place] * 3, rng.randbytes(rng.randint(0, 400)), b""])
    return seal(msgspec.msgpack.encode(fields))


def fuzz(count: int, seed: int) -> Counter[str]:
    """What came of `count` payloads. Raises whatever else than CorruptPayload the codec lets out."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        payload = mutate(rng)
        try:
            trajectory = codec.decode(payload, MAX_TOKENS)
        except CorruptPayload:
            outcomes["refused"] += 1
        else:
            assert np.isfinite(trajectory.logprobs).all()
            assert codec.decode(codec.encode(trajectory), MAX_TOKENS).id == trajectory.id
            outcomes["still valid"] += 1
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(dict(fuzz(arguments.count, arguments.seed)))
