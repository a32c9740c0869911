"""Trajectories to bytes and back: msgpack with a schema version and a checksum; never pickle.

payload = b"CUS" + schema (1 byte) + crc32 of the body (4 bytes, little endian) + msgpack body.
Arrays are little-endian bytes: token ids int32 [L], sampled as packed bits, logprobs float32 [S], versions int32 [S].
"""

from __future__ import annotations

import zlib
from typing import Any, get_type_hints

import msgspec
import numpy as np

from cusearch_async.errors import CorruptPayload
from cusearch_async.types import PAYLOAD_SCHEMA, Trajectory

_MAGIC = b"CUS" + bytes([PAYLOAD_SCHEMA])
_HEADER = len(_MAGIC) + 4

_ARRAYS = {"token_ids": "<i4", "logprobs": "<f4", "versions": "<i4"}  # besides `sampled`
_Body: Any = msgspec.defstruct(
    "_Body",
    [(name, bytes if name in (*_ARRAYS, "sampled") else kind) for name, kind in get_type_hints(Trajectory).items()],
    array_like=True,
    forbid_unknown_fields=True,
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


def encode(trajectory: Trajectory) -> bytes:
    values = {name: getattr(trajectory, name) for name in _Body.__struct_fields__}
    values |= {name: values[name].astype(kind).tobytes() for name, kind in _ARRAYS.items()}
    values["sampled"] = np.packbits(trajectory.sampled).tobytes()
    body = _encoder.encode(_Body(**values))
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def decode(payload: bytes, max_tokens: int) -> Trajectory:
    """The trajectory in `payload`. Raises: CorruptPayload, and no other error, for bytes that are not a trajectory of
    this schema, or have more than `max_tokens` tokens."""
    if len(payload) > _most_bytes(max_tokens):
        raise CorruptPayload(
            f"payload has {len(payload)} bytes, but {max_tokens} tokens take at most {_most_bytes(max_tokens)}"
        )
    if len(payload) < _HEADER or payload[:3] != _MAGIC[:3]:
        raise CorruptPayload("payload does not start with the header of a trajectory")
    if payload[3] != PAYLOAD_SCHEMA:
        raise CorruptPayload(f"payload has schema {payload[3]}, this version reads {PAYLOAD_SCHEMA}")
    body = payload[_HEADER:]
    if zlib.crc32(body).to_bytes(4, "little") != payload[4:_HEADER]:
        raise CorruptPayload("payload checksum does not match")
    try:
        values = msgspec.structs.asdict(_decoder.decode(body))
        for name, kind in _ARRAYS.items():  # copied, as an array that can be written, in the machine's byte order
            values[name] = np.frombuffer(values[name], kind).astype(np.dtype(kind).newbyteorder("="))
        bits = np.unpackbits(np.frombuffer(values["sampled"], np.uint8), count=len(values["token_ids"]))
        return Trajectory(**values | {"sampled": bits.astype(np.bool_)})
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptPayload(f"payload is not a trajectory: {error}") from error


def _most_bytes(max_tokens: int) -> int:
    """Upper bound of a payload with `max_tokens` tokens: 4 + 4 + 4 + 1/8 bytes per token, and its texts."""
    return 2**20 + 13 * max_tokens


def readable_fields(trajectory: Trajectory) -> dict[str, str | int]:
    """The fields of a trajectory that people can read in Redis (`HGETALL`)."""
    return {
        "depth": trajectory.depth,
        "reward": f"{trajectory.reward:.6g}",
        "em": f"{trajectory.em:g}",
        "f1": f"{trajectory.f1:.6g}",
        "format_valid": int(trajectory.format_valid),
        "environment": trajectory.environment,
        "question": trajectory.question,
        "prediction": trajectory.prediction or "",
        "answers": " | ".join(trajectory.answers),
        "question_id": trajectory.question_id,
        "ticket": trajectory.ticket,
        "rollout": trajectory.rollout,
        "version": trajectory.oldest_version,
        "newest_version": int(trajectory.versions.max()),
        "tokens": len(trajectory.token_ids),
        "sampled_tokens": trajectory.sampled_tokens,
        "turns": trajectory.turns,
        "cut_turns": trajectory.cut_turns,
        "recall": "" if trajectory.recall is None else f"{trajectory.recall:.6g}",
        "worker": trajectory.worker,
        "episode_s": f"{trajectory.episode_s:.3f}",
        "search_s": f"{trajectory.search_s:.3f}",
    }
