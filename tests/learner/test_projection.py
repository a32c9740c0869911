"""Projected gradients: their cosines are those of the whole gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cusearch_async.config import STARTER, load_config
from cusearch_async.learner.model import SampledLogprobs, load_causal_lm
from cusearch_async.learner.projection import DIMENSIONS, ProjectedGradients
from cusearch_async.replay.alignment import cosine
from tests.strategies import make_trajectory


def episode(seed: int):
    """A prompt of 6 tokens, a search of 7, its result of 2, an answer of 7."""
    token_ids = np.random.default_rng(seed).integers(3, 380, 22).astype(np.int32)
    return make_trajectory(seed, prompt=6, sampled=14, token_ids=token_ids)


def exact(module: SampledLogprobs, trajectory, places: np.ndarray) -> np.ndarray:
    module.zero_grad()
    token_ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
    module(token_ids, torch.from_numpy(places), 1.0)[0].sum().backward()
    gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat(gradients).double().numpy()


@pytest.fixture(scope="module")
def config():
    return load_config(Path("atlas"))


def test_cosines_of_projected_gradients_are_those_of_the_gradients(config):
    projected = ProjectedGradients(str(STARTER), config)
    module = SampledLogprobs(load_causal_lm(str(STARTER), "float32"), 4096)
    episodes = [episode(seed) for seed in range(6)]
    whole = [exact(module, one, np.flatnonzero(one.sampled)) for one in episodes]
    small = [projected.of(one)["all"].astype(np.float64) for one in episodes]
    assert small[0].shape == (DIMENSIONS,)
    for i in range(6):
        assert np.linalg.norm(small[i]) == pytest.approx(np.linalg.norm(whole[i]), rel=0.05)
        for j in range(i):
            assert cosine(small[i], small[j]) == pytest.approx(cosine(whole[i], whole[j]), abs=0.03)


def test_search_tokens_are_those_that_something_follows(config):
    projected, one = ProjectedGradients(str(STARTER), config), episode(0)
    module = SampledLogprobs(load_causal_lm(str(STARTER), "float32"), 4096)
    found = projected.of(one)
    search = exact(module, one, np.arange(6, 13))
    assert np.linalg.norm(found["search"]) == pytest.approx(np.linalg.norm(search), rel=0.05)
    answer = exact(module, one, np.arange(15, 22))
    assert np.linalg.norm(found["all"] - found["search"]) == pytest.approx(np.linalg.norm(answer), rel=0.05)
    cut = {"token_ids": 13, "sampled": 13, "logprobs": 7, "versions": 7}
    at_once = replace(one, **{name: getattr(one, name)[:length] for name, length in cut.items()})
    assert (projected.of(at_once)["search"] == 0).all()


def test_parameters_that_are_not_trained_have_no_part(config):
    upper = config.model_copy(update={"learner": config.learner.model_copy(update={"trained_layers": 1})})
    one = episode(0)
    part, whole = (ProjectedGradients(str(STARTER), some).of(one)["all"] for some in (upper, config))
    assert 0 < np.linalg.norm(part) < np.linalg.norm(whole)
