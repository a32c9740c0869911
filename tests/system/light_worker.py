"""A rollout worker whose engine costs nothing: python -m tests.system.light_worker CONFIG ...

Everything else is the real one: its loop, episodes, search client, weight store and Redis. LIGHT_TURN_S is how long a
turn may take; with CHAOS_RECORD it writes down what it puts (tests/system/chaos/record.py)."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import numpy as np

from cusearch_async.cli import main as entry
from cusearch_async.config import Config
from cusearch_async.rollout.turn import Turn
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.interface import WeightSource
from tests.system.chaos.record import Record, record_worker

TURN_S = float(os.environ["LIGHT_TURN_S"])
"""Longest turn; who makes them longer leaves the machine to others."""
WORDS = ("Pinsk", "capital", "currency", "of", "Belarus", "largest", "neighbour", "Minsk", "river", "Lima")


class Engine:
    """Samples searches and answers of random words, a function of the seed, most of them in a valid format, so that
    rewards differ; labels tokens by the version that is loaded, also where one is loaded in the middle of a turn."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.version = -1
        self.loaded = ""
        self.sampled_tokens = 0
        self.busy_s = self.request_s = 0.0
        self.last_token_age_s = 0.0

    @classmethod
    def start(cls, model: str, tokenizer: Any, config: Config, lock: object) -> Engine:
        return cls(tokenizer)

    def active(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, seed: int | None, stops: Sequence[str]
    ) -> Turn:
        draw, began, first = random.Random(seed), time.monotonic(), self.version
        words = " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))
        tag = draw.choices(("search", "answer", "question"), (6, 3, 1))[0]
        thought = f"<think>{draw.choice(WORDS)}</think>" if draw.random() < 0.9 else ""
        ids = self._tokenizer(f"{thought}<{tag}>{words}</{tag}>", add_special_tokens=False)["input_ids"][:max_tokens]
        await asyncio.sleep(draw.uniform(0, TURN_S))
        half = len(ids) // 2
        versions = np.array([first] * half + [self.version] * (len(ids) - half), dtype=np.int32)
        logprobs = np.array([-draw.uniform(2, 6) for _ in ids], dtype=np.float32)
        self.sampled_tokens += len(ids)
        self.busy_s += time.monotonic() - began
        self.request_s += time.monotonic() - began
        return Turn(ids, logprobs, versions)

    async def load(self, source: WeightSource, name: str, check: bool) -> None:
        """Reads all of it, as an engine does. Raises: WeightsUnavailable."""
        found = await source.open(name)
        read = WeightStore(found.directory.parent).verify(name)
        assert read == found.manifest
        self.version, self.loaded = read.version, name

    def close(self) -> None:
        pass


def main() -> None:
    # the real module brings vLLM; what uses it finds ours in its place
    sys.modules["cusearch_async.rollout.engine"] = sys.modules[__name__]
    if "CHAOS_RECORD" in os.environ:
        record_worker(Record("light"))
    sys.argv[1:1] = ["worker", "rollout"]
    entry.main()


if __name__ == "__main__":
    main()
