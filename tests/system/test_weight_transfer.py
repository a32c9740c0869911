"""Weights on their way into real engines: out of a folder, and from the learner over gloo without one."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cusearch_async.errors import WeightsMismatch, WeightsUnavailable
from cusearch_async.training.sending import sending
from cusearch_async.transport.gloo import GlooGroup
from cusearch_async.transport.weight_link import WeightLink
from cusearch_async.transport.weights import WeightStore
from tests.conftest import SLOW, free_port, wait_until
from tests.system.conftest import Run, finish
from tests.system.test_engine import STOPS, logprobs_of, publish, small_model, wide_model, with_engine

pytestmark = pytest.mark.system

QUESTION = "What is the currency of the country of Pinsk?"


async def exchange_in_flight(engine: Any, tokenizer: Any, source: Any, store: WeightStore, models: list[Any]) -> None:
    """Load both `models` from `source`, the second while 64 turns are played. Tokens know their version, and have the
    log-probabilities that it gives them after the tokens before."""
    text = tokenizer(QUESTION)["input_ids"]
    old, new = models
    await engine.load(source, publish(store, old, 0, text), check=True)
    newer = publish(store, new, 1, text)
    turns = [asyncio.create_task(engine.generate([*text, i], 80, 1.0, i, STOPS)) for i in range(64)]
    await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
    await engine.load(source, newer, check=True)
    assert (engine.version, engine.loaded) == (1, newer)
    spans = set()
    for number, turn in enumerate([await turn for turn in turns]):
        assert len(turn.token_ids) == len(turn.logprobs) == len(turn.versions)
        assert list(turn.versions) == sorted(turn.versions)
        spans |= set(turn.versions.tolist())
        ids = [*text, number, *turn.token_ids]
        for version, model in enumerate(models):
            own = turn.versions == version
            expected = np.array(logprobs_of(model, ids))[len(text) :]
            np.testing.assert_allclose(turn.logprobs[own], expected[own], atol=1e-3)
    assert spans == {0, 1}, "some turns saw both versions"


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_a_folder_are_exchanged_while_turns_are_in_flight(tied, atlas_config, tmp_path):
    store, models = WeightStore(tmp_path / "store"), [small_model(tied, seed) for seed in (0, 1)]

    async def body(engine, tokenizer):
        await exchange_in_flight(engine, tokenizer, store, store, models)

    with_engine(atlas_config, tmp_path, models[0], body)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_sent_are_exchanged_while_turns_are_in_flight(tied, atlas_config, tmp_path):
    store, url = WeightStore(tmp_path / "store"), f"http://127.0.0.1:{free_port()}"
    models = [small_model(tied, seed) for seed in (0, 1)]

    async def body(engine, tokenizer):
        async with sending(store, url, 5 * SLOW):
            link = WeightLink(url)
            await exchange_in_flight(engine, tokenizer, link, store, models)
            await link.close()

    with_engine(atlas_config, tmp_path, models[0], body, "--weights.url", url)


def test_a_learner_that_dies_while_it_sends_changes_nothing_and_its_successor_is_found(
    atlas_config, tmp_path, monkeypatch
):
    store, url = WeightStore(tmp_path / "store"), f"http://127.0.0.1:{free_port()}"
    old, new = small_model(True, 0), small_model(True, 1)
    broadcast, sent = GlooGroup.broadcast, []

    def dies(group, tensor):
        sent.append(tensor)
        if len(sent) > 5:
            raise RuntimeError("killed")
        broadcast(group, tensor)

    async def body(engine, tokenizer):
        text = tokenizer(QUESTION)["input_ids"]
        link = WeightLink(url)
        with pytest.raises(WeightsUnavailable, match=f"the learner does not answer at weights.url {url}"):
            await engine.load(link, "v000000-e1", check=True)
        async with sending(store, url, 5 * SLOW):
            await engine.load(link, publish(store, old, 0, text), check=True)
            newer = publish(store, new, 1, text)
            monkeypatch.setattr(GlooGroup, "broadcast", dies)
            with pytest.raises(WeightsUnavailable, match=f"v000001-e1 was not received from {url}: "):
                await engine.load(link, newer, check=True)
            monkeypatch.setattr(GlooGroup, "broadcast", broadcast)
        assert len(sent) > 5
        assert engine.version == 0
        np.testing.assert_allclose(await engine.score([*text, 5]), logprobs_of(old, [*text, 5]), atol=1e-3)
        async with sending(store, url, 5 * SLOW):
            await engine.load(link, newer, check=True)
        np.testing.assert_allclose(await engine.score([*text, 6]), logprobs_of(new, [*text, 6]), atol=1e-3)
        await link.close()

    with_engine(atlas_config, tmp_path, old, body, "--weights.url", url)


def test_a_learner_that_dies_while_it_sends_over_nccl_ends_the_worker(atlas_config, tmp_path, monkeypatch):
    """vLLM's own engine has begun to load by then. Gloo stands in for NCCL."""
    store, url = WeightStore(tmp_path / "store"), f"http://127.0.0.1:{free_port()}"
    old = small_model(True, 0)

    def dies(group, tensor):
        raise RuntimeError("killed")

    async def body(engine, tokenizer):
        from cusearch_async.rollout import receiving

        text = tokenizer(QUESTION)["input_ids"]
        async with sending(store, url, 5 * SLOW):
            link = WeightLink(url)
            await engine.load(link, publish(store, old, 0, text), check=True)
            monkeypatch.setattr(receiving, "backend", lambda: "nccl")
            monkeypatch.setattr(GlooGroup, "broadcast", dies)
            with pytest.raises(WeightsMismatch, match=r"v000001-e1 was not received .*: restart the worker"):
                await engine.load(link, publish(store, old, 1, text), check=True)
            await link.close()

    with_engine(atlas_config, tmp_path, old, body, "--weights.url", url)


def test_weights_of_another_model_end_the_worker(atlas_config, tmp_path):
    store, url = WeightStore(tmp_path / "store"), f"http://127.0.0.1:{free_port()}"
    model = small_model(True, 0)

    async def body(engine, tokenizer):
        text = tokenizer(QUESTION)["input_ids"]
        async with sending(store, url, 5 * SLOW):
            link = WeightLink(url)
            with pytest.raises(WeightsMismatch, match=r"loading v000001-e1 failed halfway; .*of this model\?"):
                await engine.load(link, publish(store, wide_model(), 1, text), check=True)
            await link.close()

    with_engine(atlas_config, tmp_path, model, body, "--weights.url", url)


def test_a_run_whose_workers_share_no_folder_with_the_learner(run: Run, tmp_path: Path, monkeypatch):
    """The learner is killed in the middle, and goes on; the worker stays, with a run folder of its own."""
    run.overrides["weights.url"] = f"http://127.0.0.1:{free_port()}"
    run.overrides["pool.max_staleness"] = 0
    monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", "of-this-test")
    run.cusearch("redis")
    run.worker("retriever")
    elsewhere = tmp_path / "elsewhere"
    rollout = run.worker("rollout", run__folder=elsewhere)
    learner = run.worker("learner", run__steps=6)
    wait_until(lambda: len(run.metrics()) >= 2 or rollout.poll() is not None or learner.poll() is not None, 150)
    assert (rollout.poll(), learner.poll()) == (None, None)
    psutil.Process(learner.pid).kill()
    learner.wait(60 * SLOW)
    status, output = finish(run.worker("learner", run__steps=6))
    assert status == 0, output
    assert "sending weights at http://127.0.0.1" in output
    assert [row["step"] for row in run.metrics()] == [0, 1, 2, 3, 4, 5]
    assert {row["staleness/max"] for row in run.metrics()} == {0}, "every version was loaded"
    rollout.send_signal(signal.SIGTERM)
    status, output = finish(rollout, 60)
    assert status == 0, output
    assert "loaded weights v000005-e2" in output
    assert not list(elsewhere.rglob("*.safetensors"))
