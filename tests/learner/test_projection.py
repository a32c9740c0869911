"""Projected gradients: their cosines are those of the whole gradients of the linear layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cusearch_async.config import STARTER, load_config
from cusearch_async.learner import projection
from cusearch_async.learner.model import SampledLogprobs, load_causal_lm
from cusearch_async.learner.projection import DIMENSIONS, ProjectedGradients
from tests.strategies import make_trajectory


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other) / float(np.linalg.norm(one) * np.linalg.norm(other))


def episode(seed: int, answer: int = 7):
    """A prompt of 6 tokens, a search of 7, its result of 2, an answer of 7 or more."""
    length = 15 + answer
    token_ids = np.random.default_rng(seed).integers(3, 380, length).astype(np.int32)
    one = make_trajectory(seed, prompt=6, sampled=14, token_ids=token_ids[:22])
    sampled = np.array([6 <= place < 13 or place >= 15 for place in range(length)])
    count = int(sampled.sum())
    facts = {"logprobs": np.full(count, -1.0, np.float32), "versions": np.zeros(count, np.int32)}
    return replace(one, token_ids=token_ids, sampled=sampled, **facts)


@pytest.fixture(scope="module")
def module():
    return SampledLogprobs(load_causal_lm(str(STARTER), "float32"), 4096)


def exact(module: SampledLogprobs, trajectory, places: np.ndarray) -> np.ndarray:
    module.zero_grad()
    token_ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
    module(token_ids, torch.from_numpy(places), 1.0)[0].sum().backward()
    head = module.model.get_output_embeddings()
    linear = [one for one in module.modules() if isinstance(one, torch.nn.Linear) and one is not head]
    return torch.cat([one.weight.grad.flatten() for one in linear]).double().numpy()


@pytest.fixture(scope="module")
def config():
    return load_config(Path("atlas"))


@pytest.mark.parametrize(("most", "off"), [(1000, 0.02), (32, 0.1)])
def test_cosines_of_projected_gradients_are_those_of_the_gradients(config, module, monkeypatch, most, off):
    """Of episodes of several lengths in one batch, and whether layers are projected first or not."""
    monkeypatch.setattr(projection, "MOST", most)
    episodes = [episode(seed, answer=7 + 3 * seed) for seed in range(6)]
    whole = [exact(module, one, np.flatnonzero(one.sampled)) for one in episodes]
    small = ProjectedGradients(str(STARTER), config).of(episodes)["all"].astype(np.float64)
    assert small.shape == (6, DIMENSIONS)
    for i in range(6):
        assert np.linalg.norm(small[i]) == pytest.approx(np.linalg.norm(whole[i]), rel=2 * off)
        for j in range(i):
            assert cosine(small[i], small[j]) == pytest.approx(cosine(whole[i], whole[j]), abs=off)


def test_a_batch_gives_what_each_gives_alone(config):
    episodes = [episode(seed, answer=7 + 3 * seed) for seed in range(3)]
    projected = ProjectedGradients(str(STARTER), config)
    together = projected.of(episodes)
    for row, one in enumerate(episodes):
        alone = projected.of([one])
        for part in ("all", "search"):
            assert together[part][row] == pytest.approx(alone[part][0], abs=1e-3 * float(np.abs(alone[part]).max()))


def test_search_tokens_are_those_that_something_follows(config, module):
    projected, one = ProjectedGradients(str(STARTER), config), episode(0)
    found = {part: values[0] for part, values in projected.of([one]).items()}
    search = exact(module, one, np.arange(6, 13))
    assert np.linalg.norm(found["search"]) == pytest.approx(np.linalg.norm(search), rel=0.05)
    answer = exact(module, one, np.arange(15, 22))
    assert np.linalg.norm(found["all"] - found["search"]) == pytest.approx(np.linalg.norm(answer), rel=0.05)
    cut = {"token_ids": 13, "sampled": 13, "logprobs": 7, "versions": 7}
    at_once = replace(one, **{name: getattr(one, name)[:length] for name, length in cut.items()})
    assert (projected.of([at_once])["search"] == 0).all()


def test_turns_of_rows_that_others_follow_are_search_tokens(config, module):
    """Of an agent that changes its history; all its turns but the last were none."""
    first, last = episode(0), episode(1)
    cut = {"token_ids": 13, "sampled": 13, "logprobs": 7, "versions": 7}
    turns = [{name: getattr(one, name)[:length] for name, length in cut.items()} for one in (first, last)]
    both = {name: np.concatenate([one[name] for one in turns]) for name in cut}
    found = ProjectedGradients(str(STARTER), config).of([replace(first, starts=(0, 13), **both)])
    alone = exact(module, replace(first, **turns[0]), np.arange(6, 13))
    assert np.linalg.norm(found["search"][0]) == pytest.approx(np.linalg.norm(alone), rel=0.05)


def test_parameters_that_are_not_trained_have_no_part(config):
    upper = config.model_copy(update={"learner": config.learner.model_copy(update={"trained_layers": 1})})
    part, whole = (ProjectedGradients(str(STARTER), some).of([episode(0)])["all"] for some in (upper, config))
    assert 0 < np.linalg.norm(part) < np.linalg.norm(whole)
