"""A process of the run that writes down what it does: python -m tests.system.chaos.record NAME CONFIG ...

NAME is `learner` or `rollout`; the process is the real one. CHAOS_RECORD names a folder; each process appends to a
file of its own there, one JSON line an event, before it goes on: what every pool held when the learner took it, what
was committed, and a digest of every trajectory that a worker was about to put. The judge (checker.py) reads nothing
else of the run's own bookkeeping."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from cusearch_async.cli import main as entry
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.types import Trajectory

SPECIAL = 375
"""<|endoftext|> of the atlas tokenizer, its only special token."""


def digest(trajectory: Trajectory) -> str:
    """Of everything that training on it depends on."""
    t = trajectory
    arrays = (t.token_ids, t.sampled, t.logprobs, t.versions)
    told = f"{t.id} {t.question_id} {t.depth} {t.reward!r} {t.answers}".encode()
    return xxhash.xxh3_64_hexdigest(told + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))


def describe(trajectory: Trajectory) -> dict[str, Any]:
    """What the judge must know of a trajectory of a pool."""
    t = trajectory
    prompt = int(np.argmax(t.sampled))
    environment = t.token_ids[prompt:][~t.sampled[prompt:]]
    return {
        "id": t.id,
        "question": t.question_id,
        "oldest": int(t.versions.min()),
        "newest": int(t.versions.max()),
        "tokens": [int(t.token_ids.min()), int(t.token_ids.max())],
        "special": int((environment == SPECIAL).sum()),
        "digest": digest(t),
    }


class Record:
    def __init__(self, name: str) -> None:
        folder = Path(os.environ["CHAOS_RECORD"])
        self._file = os.open(folder / f"{name}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, **facts: Any) -> None:
        """Waits while no file may grow: that fault is meant for the run and not for its judge."""
        left = (json.dumps({"event": event, **facts}) + "\n").encode()
        while left:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                time.sleep(0.02)


def record_learner(record: Record) -> None:
    recover, claim, commit = RedisBuffer.recover, RedisBuffer.claim, RedisBuffer.commit

    counted: list[str] = []

    class Counted(logging.Handler):
        """Hears which trajectories the buffer says it has lost or taken out."""

        def emit(self, told: logging.LogRecord) -> None:
            assert isinstance(told.args, tuple)
            if "are lost" in told.msg:
                counted.extend(str(told.args[-1]).split(", "))
            elif "is quarantined" in told.msg:
                counted.append(str(told.args[0]))

    logging.getLogger("cusearch_async.transport").addHandler(Counted())

    @functools.wraps(recover)
    async def recording_recover(self: RedisBuffer, step: int, *rest: Any, **named: Any) -> None:
        await recover(self, step, *rest, **named)
        record.write("recover", epoch=self.epoch, step=step)

    @functools.wraps(claim)
    async def recording_claim(self: RedisBuffer, step: int, *rest: Any, **named: Any) -> Any:
        counted.clear()
        pool = await claim(self, step, *rest, **named)
        if pool is not None:
            lacking = await self.ask(lambda client: client.hgetall(self.keys.incomplete))
            known = {int(ticket): int(count) for ticket, count in lacking.items()}
            told = [describe(t) for t in pool]
            listed = await self.ask(lambda client: client.hget(self.keys.pool_info(step), "tickets"))
            facts = {"tickets": [*map(int, listed.split(b","))], "lacking": known, "counted": list(counted)}
            record.write("claim", epoch=self.epoch, step=step, pool=told, **facts)
        return pool

    @functools.wraps(commit)
    async def recording_commit(self: RedisBuffer, pool: Any, selected: Any, *rest: Any, **named: Any) -> None:
        await commit(self, pool, selected, *rest, **named)
        record.write("commit", epoch=self.epoch, step=pool.step, selected=[t.id for t in selected])

    RedisBuffer.recover, RedisBuffer.claim = recording_recover, recording_claim  # type: ignore[method-assign]
    RedisBuffer.commit = recording_commit  # type: ignore[method-assign]


def record_worker(record: Record) -> None:
    put = RedisBuffer.put

    @functools.wraps(put)
    async def recording_put(self: RedisBuffer, trajectory: Trajectory) -> Any:
        record.write("put", id=trajectory.id, digest=digest(trajectory))
        return await put(self, trajectory)

    RedisBuffer.put = recording_put  # type: ignore[method-assign]


def main() -> None:
    name = sys.argv[1]
    (record_learner if name == "learner" else record_worker)(Record(name))
    sys.argv.insert(1, "worker")
    entry.main()


if __name__ == "__main__":
    main()
