"""The engine's scheduler on a CPU: turns arrive whole, labelled with the versions that sampled their tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cusearch_async.weights.folder import WeightStore
from tests.conftest import SLOW
from tests.system.test_engine import STOPS, logprobs_of, publish, small_model, with_engine

pytestmark = pytest.mark.system


def watched(engine: Any) -> Counter[str]:
    """Request -> how many messages have brought something of it."""
    seen: Counter[str] = Counter()
    process = engine._llm.output_processor.process_outputs

    def noting(outputs: Any, *rest: Any, **options: Any) -> Any:
        seen.update(output.request_id for output in outputs)
        return process(outputs, *rest, **options)

    engine._llm.output_processor.process_outputs = noting
    return seen


def assert_sampled_by(model: Any, prompt: list[int], turn: Any, of: Any, temperature: float = 1.0) -> None:
    """The tokens `of` a turn have the log-probabilities that `model` gives them."""
    expected = np.array(logprobs_of(model, [*prompt, *turn.token_ids], temperature))[len(prompt) - 1 :]
    np.testing.assert_allclose(turn.logprobs[of], expected[of], atol=1e-3)


def test_a_turn_arrives_whole(atlas_config, tmp_path):
    model = small_model(False, 0)

    async def body(engine, text):
        seen = watched(engine)
        prompts = [[*text, number] for number in range(24)]
        turns = await asyncio.gather(*(engine.generate(prompt, 60, 0.7, 1, STOPS) for prompt in prompts))
        assert sum(len(turn.token_ids) for turn in turns) > 1000
        assert len(seen) == 24
        assert sum(seen.values()) < 100, "most came in one message; signs of life are the rest"
        for prompt, turn in zip(prompts, turns, strict=True):
            assert_sampled_by(model, prompt, turn, slice(None), 0.7)

    with_engine(atlas_config, tmp_path, model, body)


def test_a_turn_that_a_text_may_end_is_sent_as_it_is_sampled(atlas_config, tmp_path):
    async def body(engine, text):
        seen = watched(engine)
        turn = await engine.generate(text, 40, 1.0, 1, ["no model says that"])
        assert list(seen.values()) == [len(turn.token_ids)] == [40]

    with_engine(atlas_config, tmp_path, small_model(False, 0), body)


def test_tokens_that_were_held_when_weights_are_loaded_keep_their_version(atlas_config, tmp_path):
    """Three versions in turns that are still sampled: every token has the log-probability of the version it names."""
    store = WeightStore(tmp_path / "store")
    models = [small_model(False, seed) for seed in range(3)]

    async def body(engine, text):
        names = [publish(store, model, version, text) for version, model in enumerate(models)]
        await engine.load(store, names[0], check=False)
        seen = watched(engine)
        prompts = [[*text, number] for number in range(16)]
        playing = [asyncio.create_task(engine.generate(prompt, 400, 1.0, 1, STOPS)) for prompt in prompts]
        for name in names[1:]:
            begun = sum(seen.values())
            async with asyncio.timeout(60 * SLOW):
                while sum(seen.values()) == begun:
                    await asyncio.sleep(0.01)
            await engine.load(store, name, check=False)
        turns = await asyncio.gather(*playing)
        of_all = [turn for turn in turns if set(turn.versions) == {0, 1, 2}]
        assert of_all
        for prompt, turn in zip(prompts, turns, strict=True):
            assert (np.diff(turn.versions) >= 0).all()
            for version, model in enumerate(models):
                assert_sampled_by(model, prompt, turn, turn.versions == version)

    with_engine(atlas_config, tmp_path, models[0], body)


def test_a_turn_that_is_given_up_leaves_nothing_behind(atlas_config, tmp_path):
    model = small_model(False, 0)

    async def body(engine, text):
        seen = watched(engine)
        given_up = asyncio.create_task(engine.generate(text, 800, 1.0, 1, STOPS))
        async with asyncio.timeout(60 * SLOW):
            while not seen:
                await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.wait([given_up])
        turn = await engine.generate(text, 60, 1.0, 2, STOPS)
        assert_sampled_by(model, text, turn, slice(None))

    with_engine(atlas_config, tmp_path, model, body)
