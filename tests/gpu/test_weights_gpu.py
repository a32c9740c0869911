"""Weights from one GPU into an engine on another, over NCCL. Needs vLLM for CUDA and two GPUs."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds less than two CUDA devices"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_an_engine_on_another_gpu_gets_every_version(atlas_config, tmp_path, monkeypatch):
    from cusearch_async.lifecycle.ports import free_port
    from cusearch_async.training.sending import sending
    from cusearch_async.transport.weight_link import WeightLink
    from cusearch_async.transport.weights import WeightStore
    from tests.conftest import SLOW
    from tests.system.test_engine import logprobs_of, publish, small_model, with_engine

    monkeypatch.setenv("LOCAL_RANK", "1")  # the learner's GPU; the engine takes the first one
    store, url = WeightStore(tmp_path / "store"), f"http://127.0.0.1:{free_port()}"
    models = [small_model(True, seed) for seed in range(3)]

    async def body(engine, tokenizer):
        text = tokenizer("What is the currency of the country of Pinsk?")["input_ids"]
        async with sending(store, url, 5 * SLOW):
            link = WeightLink(url)
            for version, model in enumerate(models):
                await engine.load(link, publish(store, model, version, text, tolerance=0.02), check=True)
                np.testing.assert_allclose(await engine.score(text), logprobs_of(model, text), atol=0.05)
            await link.close()

    with_engine(atlas_config, tmp_path, models[0], body, "--weights.url", url, forks=False)
