"""The learner's side of the buffer in Redis: pools in, weight versions out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from cusearch_async.errors import CorruptPayload, InvalidTrajectory
from cusearch_async.run.identity import NOBODY, Identity
from cusearch_async.transport import codec
from cusearch_async.transport.checks import faults
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.health import check_server
from cusearch_async.transport.interface import ALIVE_S, NOTHING, LearnerStatus, MethodState, QuestionOf
from cusearch_async.transport.limits import LIMITS_IN_REDIS, RunLimits
from cusearch_async.transport.redis_run import RedisRun
from cusearch_async.types import Pool, Trajectory

log = logging.getLogger(__name__)

_FETCH_AT_ONCE = 64


class LearnerSide(RedisRun):
    """Implements `interface.LearnerBuffer`."""

    def __init__(self, connection: Connection, run: str, limits: RunLimits, identity: Identity = NOBODY) -> None:
        super().__init__(connection, run, limits, identity)
        self._epoch = 0
        self._nonce = ""

    @property
    def nonce(self) -> str:
        return self._nonce

    async def epoch_of(self, nonce: str) -> int | None:
        given = await self.ask(lambda client: client.hget(self.keys.learners, nonce))
        return None if given is None else self._number("learners", given)

    @property
    def epoch(self) -> int:
        return self._epoch

    async def recover(
        self,
        step: int,
        method: MethodState = NOTHING,
        least_epoch: int = 0,
        accepts_changes: bool = False,
    ) -> None:
        await check_server(self.connection)
        nonce = uuid.uuid4().hex
        limits, own = _limits(self._limits), self._identity
        identity = json.dumps({**dataclasses.asdict(own), "digest": own.digest})
        self._epoch = await self.run_script(
            "recover", step, _method_json(method), nonce, least_epoch, limits, identity, int(accepts_changes)
        )
        self._nonce = nonce

    async def claim(self, step: int, question_of: QuestionOf | None = None) -> Pool | None:
        answer = await self.run_script("claim", self._epoch, step, "look")
        if answer is None:
            return None
        status, gone, names = answer[0].decode(), _decoded(answer[1]), _decoded(answer[2])
        if gone:
            log.warning("%d trajectories disappeared from Redis and are lost: %s", len(gone), ", ".join(gone))
        if status == "waits":
            log.warning("step %d waits for requeued tickets: %s", step, ", ".join(names))
            return None
        found, bad = await self._read_all(names)
        if status == "found":
            bad |= faults(found, step, self._limits, question_of)
        if bad:
            for name, reason in bad.items():
                log.warning("trajectory %s is quarantined: %s", name, reason)
            await self.run_script("quarantine", self._epoch, *itertools.chain.from_iterable(bad.items()))
        if status == "found":
            taken = None if bad else await self.run_script("claim", self._epoch, step, "take", *names)
            if taken is None or taken[0] != b"kept":
                return None
        pool = Pool(step, tuple(t for t in found if t.id not in bad))
        if not pool.trajectories:
            log.warning("the pool of step %d is empty: no episode of it succeeded", step)
        return pool

    async def commit(self, pool: Pool, selected: Sequence[Trajectory], method: MethodState = NOTHING) -> None:
        await self.run_script("commit", self._epoch, pool.step, _method_json(method), *(t.id for t in selected))

    async def announce(self, version: int, directory: str) -> None:
        await self.run_script("announce", self._epoch, version, directory)

    async def checkpoint(self, step: int) -> None:
        await self.run_script("checkpoint", self._epoch, step)

    async def finish(self) -> None:
        await self.run_script("finish", self._epoch)

    async def learner_heartbeat(self, status: LearnerStatus) -> None:
        fields = msgspec.structs.asdict(status)
        del fields["heartbeat_age_s"]  # computed from Redis' clock
        listed = itertools.chain.from_iterable(fields.items())
        await self.run_script("learner", self._epoch, int(ALIVE_S * 1000), *listed)

    async def learner_leaves(self) -> None:
        await self.run_script("learner", self._epoch, 0)

    async def _payloads(self, ids: Sequence[str]) -> list[tuple[str, bytes]]:
        found: list[tuple[str, bytes]] = []
        for start in range(0, len(ids), _FETCH_AT_ONCE):
            some = ids[start : start + _FETCH_AT_ONCE]

            async def fetch(client: Any, some: Sequence[str] = some) -> Any:
                async with client.pipeline(transaction=False) as pipe:
                    for name in some:
                        pipe.get(self.keys.payload(name))
                    return await pipe.execute()

            found += zip(some, await self.ask(fetch), strict=True)
        return found

    async def _read_all(self, names: Sequence[str]) -> tuple[list[Trajectory], dict[str, str]]:
        """(trajectories, id -> why it cannot be read)."""
        found, bad = [], {}
        for name, payload in await self._payloads(names):
            try:
                found.append(self._read(name, payload))
            except (CorruptPayload, InvalidTrajectory) as error:
                bad[name] = str(error)
        return found, bad

    def _read(self, name: str, payload: bytes | None) -> Trajectory:
        """The trajectory. Raises: CorruptPayload or InvalidTrajectory when it must not be trained on."""
        trajectory = codec.decode(payload or b"", self._limits.max_tokens)
        if trajectory.id != name:
            raise CorruptPayload(f"the payload belongs to trajectory {trajectory.id}")
        self._limits.check(trajectory)
        return trajectory


def _decoded(texts: Iterable[bytes]) -> list[str]:
    return [text.decode() for text in texts]


def _limits(limits: RunLimits) -> str:
    """The run limits as JSON for the scripts."""
    texts = {name: str(getattr(limits, name)) for name in LIMITS_IN_REDIS}
    return json.dumps(texts | {"lease_ms": str(int(limits.lease_s * 1000))})


def _method_json(method: MethodState) -> bytes:
    """The method state as JSON for the scripts."""
    return msgspec.json.encode(method)
