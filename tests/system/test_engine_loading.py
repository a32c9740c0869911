"""What an engine does while it loads weights, and what it keeps of those that it had."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from cusearch_async.weights.folder import WeightStore
from tests.conftest import SLOW
from tests.system.test_engine import FakeLLM, engine_of, engine_process, publish, small_model, with_engine

pytestmark = pytest.mark.system


def test_an_engine_keeps_nothing_of_versions_that_were_replaced(atlas_config, tmp_path):
    """vLLM's notes on each layer held it: all the layers of each version, 480 MiB an hour in a run of short steps."""
    store, model = WeightStore(tmp_path / "store"), small_model(True, 0)

    async def body(engine, text):
        async def load(versions: range) -> int:
            for version in versions:
                await engine.load(store, publish(store, model, version, text), check=False)
            return engine_process().memory_full_info().uss

        before = await load(range(20))
        assert await load(range(20, 140)) - before < 14 << 20

    with_engine(atlas_config, tmp_path, model, body)


class RecordingLLM(FakeLLM):
    """Keeps under which cache each turn was sent; sums weights when it is told to."""

    def __init__(self, **options):
        super().__init__(**options)
        self.salts, self.summing = [], asyncio.Event()

    async def generate(self, tokens, *_, **__):
        self.salts.append(tokens["cache_salt"])
        yield None

    async def compute_weight_checksums(self):
        self.summing.set()
        await self.go_on.wait()
        return [{}]


def test_a_turn_that_begins_in_a_swap_uses_no_cache_of_the_old_weights(tmp_path):
    """vLLM queues it, and runs it with the new ones."""
    store, model = WeightStore(tmp_path), small_model(False, 0)

    async def body() -> None:
        engine = engine_of(llm := RecordingLLM(is_held=True), recomputes_kv=False)
        llm.go_on.set()
        await engine.load(store, publish(store, model, 0, [1, 2, 3]), check=False)
        llm.go_on.clear()
        llm.swapping.clear()
        new = publish(store, model, 1, [1, 2, 3])
        loading = asyncio.create_task(engine.load(store, new, check=False))
        await asyncio.wait_for(llm.swapping.wait(), 60 * SLOW)
        turn = asyncio.create_task(engine._run([1], None))
        await asyncio.sleep(0)
        llm.go_on.set()
        await asyncio.gather(loading, turn)
        assert llm.salts == [new]

    asyncio.run(body())


def test_an_engine_that_sums_its_weights_does_not_look_like_a_hang(tmp_path):
    """That takes two minutes for 32 billion parameters, and its leases ran out."""

    async def body() -> None:
        engine = engine_of(llm := RecordingLLM(is_held=True))
        async with engine._busy():
            checking = asyncio.create_task(engine._refuse_stale(SimpleNamespace(tensors={}), "v1"))
            await asyncio.wait_for(llm.summing.wait(), 60 * SLOW)
            await asyncio.sleep(0.05)
            assert engine.last_token_age_s == 0.0
            llm.go_on.set()
            await checking
            assert 0 < engine.last_token_age_s < 1

    asyncio.run(body())
