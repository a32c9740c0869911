"""The learner's side of the buffer in Redis: implements `interface.LearnerBuffer`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import uuid
from collections.abc import Sequence

import msgspec

from cusearch_async.errors import CorruptPayload, InvalidTrajectory
from cusearch_async.transport import codec
from cusearch_async.transport.connection import check_server
from cusearch_async.transport.interface import ALIVE_S, NOTHING, LearnerStatus, MethodState
from cusearch_async.transport.limits import LIMITS_IN_REDIS, QuestionOf
from cusearch_async.transport.redis_run import RedisRun, reported, text_of
from cusearch_async.types import Pool, Trajectory

log = logging.getLogger(__name__)

_FETCH_AT_ONCE = 64


class LearnerSide(RedisRun):
    epoch = 0
    nonce = ""

    async def epoch_of(self, nonce: str) -> int | None:
        given = await self.ask(lambda client: client.hget(self.keys.learners, nonce))
        return None if given is None else self._number("learners", given)

    async def recover(
        self, step: int, method: MethodState = NOTHING, least_epoch: int = 0, accepts_changes: bool = False
    ) -> None:
        await check_server(self.connection)
        nonce = uuid.uuid4().hex
        limits = {name: str(getattr(self._limits, name)) for name in LIMITS_IN_REDIS}
        limits["lease_ms"] = str(int(self._limits.lease_s * 1000))
        identity = dataclasses.asdict(self._identity) | {"digest": self._identity.digest}
        of_checkpoint = step, msgspec.json.encode(method), nonce, least_epoch
        of_process = json.dumps(limits), json.dumps(identity), int(accepts_changes)
        self.epoch = await self.run_script("recover", *of_checkpoint, *of_process)
        self.nonce = nonce

    async def claim(self, step: int, question_of: QuestionOf | None = None) -> Pool | None:
        answer = await self.run_script("claim", self.epoch, step, "look")
        if answer is None:
            return None
        status, gone, names = answer[0].decode(), [*map(text_of, answer[1])], [*map(text_of, answer[2])]
        if gone:
            log.warning("%d trajectories disappeared from Redis and are lost: %s", len(gone), ", ".join(gone))
        if status == "waits":
            log.warning("step %d waits for requeued tickets: %s", step, ", ".join(names))
            return None
        found, bad = await self._read_all(names)
        if status == "found":
            bad |= self._limits.faults(found, step, question_of)
        if bad:
            for name, reason in bad.items():
                log.warning("trajectory %s is quarantined: %s", name, reason)
            reasons = itertools.chain.from_iterable(bad.items())
            await self.run_script("quarantine", self.epoch, self.next_name(), *reasons)
        if status == "found":
            taken = None if bad else await self.run_script("claim", self.epoch, step, "take", *names)
            if taken is None or taken[0] != b"kept":
                return None
        pool = Pool(step, tuple(t for t in found if t.id not in bad))
        if not pool.trajectories:
            log.warning("the pool of step %d is empty: no episode of it succeeded", step)
        return pool

    async def commit(self, pool: Pool, selected: Sequence[Trajectory], method: MethodState = NOTHING) -> None:
        await self.run_script("commit", self.epoch, pool.step, msgspec.json.encode(method), *(t.id for t in selected))

    async def announce(self, version: int, directory: str) -> None:
        await self.run_script("announce", self.epoch, version, directory)

    async def checkpoint(self, step: int) -> None:
        await self.run_script("checkpoint", self.epoch, step)

    async def finish(self) -> None:
        await self.run_script("finish", self.epoch)

    async def learner_heartbeat(self, status: LearnerStatus) -> None:
        await self.run_script("learner", self.epoch, int(ALIVE_S * 1000), *reported(status))

    async def learner_leaves(self) -> None:
        await self.run_script("learner", self.epoch, 0)

    async def _read_all(self, names: Sequence[str]) -> tuple[list[Trajectory], dict[str, str]]:
        """(trajectories, id -> why it cannot be read)."""
        found, bad = [], {}
        for start in range(0, len(names), _FETCH_AT_ONCE):
            some = names[start : start + _FETCH_AT_ONCE]
            for name, payload in zip(some, await self._payloads(some), strict=True):
                try:
                    found.append(self._read(name, payload))
                except (CorruptPayload, InvalidTrajectory) as error:
                    bad[name] = str(error)
        return found, bad

    async def _payloads(self, names: Sequence[str]) -> list[bytes | None]:
        return await self.ask_all(lambda pipe: [pipe.get(self.keys.payload(name)) for name in names])

    def _read(self, name: str, payload: bytes | None) -> Trajectory:
        """The trajectory. Raises: CorruptPayload or InvalidTrajectory when it must not be trained on."""
        trajectory = codec.decode(payload or b"", self._limits.max_trajectory_tokens)
        if trajectory.id != name:
            raise CorruptPayload(f"the payload belongs to trajectory {trajectory.id}")
        self._limits.check(trajectory)
        return trajectory
