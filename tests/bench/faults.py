"""What breaks a run, for bench_alarms: rewards, a search backend and weight stores that are wrong in one way each."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cusearch_async.environments import Episode, Score
from cusearch_async.retrieval.backend import Query, Scored
from cusearch_async.weights.folder import FolderTransport, WeightStore
from cusearch_async.weights.interface import OpenedVersion, WeightSource

SLOW_DISK_S = 12.0
HEALTHY_TICKETS = 4 * 64
"""Rewards are right in the first four steps of the demo's pools."""


def format_alone(episode: Episode, score: Score) -> float:
    return float(score.format_valid)


def no_searching(episode: Episode, score: Score) -> float:
    return 1 - episode.depth / 5


def not_a_number(episode: Episode, score: Score) -> float:
    return score.reward if episode.ticket < HEALTHY_TICKETS else math.nan


async def judge_is_down(episode: Episode, score: Score) -> float:
    if episode.ticket < HEALTHY_TICKETS:
        return score.reward
    raise ConnectionError("the judge does not answer")


class Rubbish:
    """Finds the same passage, whatever is asked."""

    deterministic = True
    accepts_seed = False

    async def search(self, queries: Sequence[Query], topk: int) -> list[list[Scored]]:
        return [[({"id": "0", "contents": "A passage about nothing that was asked."}, 1.0)] for _ in queries]

    def figures(self) -> dict[str, str | int | float]:
        return {}

    async def close(self) -> None:
        return


class SlowStore(WeightStore):
    def publish(self, *arguments: Any, **named: Any) -> str:
        time.sleep(SLOW_DISK_S)
        return super().publish(*arguments, **named)


class SlowDisk(FolderTransport):
    def store(self) -> WeightStore:
        return SlowStore(self._config.weights_folder, keeps=self._config.eval.keeps)


class IgnoredWeights(FolderTransport):
    """Workers get the tensors of version 0 under the name of each later one."""

    @asynccontextmanager
    async def source(self, needs_last: bool = False) -> AsyncIterator[WeightSource]:
        async with super().source(needs_last) as found:
            yield First(found)


class First:
    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._first: Path | None = None

    async def open(self, name: str) -> OpenedVersion:
        opened = await self._source.open(name)
        if self._first is None:  # the store deletes old versions
            self._first = Path(tempfile.mkdtemp()) / "first"
            shutil.copytree(opened.directory, self._first)
        return OpenedVersion(opened.name, opened.manifest, self._first)

    async def newest_of(self, version: int) -> str | None:
        return await self._source.newest_of(version)
