"""What an engine keeps of the weights that it no longer has."""

from __future__ import annotations

import pytest

from cusearch_async.weights.folder import WeightStore
from tests.system.test_engine import engine_process, publish, small_model, with_engine

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
        assert await load(range(20, 80)) - before < 6 << 20

    with_engine(atlas_config, tmp_path, model, body)
