"""`cusearch atlas check`, with episodes of a stand-in for the policy."""

from __future__ import annotations

import argparse
import re

import pytest

from cusearch_async.cli.atlas import POOLS, check_policy, searched_here
from cusearch_async.config import load_config
from cusearch_async.evaluation.probing import PassResult
from tests.strategies import make_trajectory


class Running:
    """Greedy episodes are right and of depth 1; the others are wrong, and of depth 2."""

    def __init__(self) -> None:
        self.passes = []

    async def __call__(self, search, config, model, passes):
        self.passes = passes
        return [
            PassResult(
                [self.episode(i, one.temperature) for i in range(len(one.questions))], [None] * len(one.questions)
            )
            for one in passes
        ]

    @staticmethod
    def episode(number, temperature):
        right = float(temperature == 0)
        return make_trajectory(number, 0, em=right, reward=right, depth=1 if right else 2)


@pytest.mark.system
def test_a_check_runs_the_held_out_cities_greedy_and_sampled_and_then_pools(atlas_config, capsys):
    running = Running()
    arguments = argparse.Namespace(config=[atlas_config], checkpoint=None, per_length=2)
    check_policy(arguments, ["--episode.temperature", "0.5", "--retriever.backend", "serper"], running)
    greedy, sampled, *siblings = running.passes
    assert (greedy.temperature, sampled.temperature) == (0.0, 0.5)
    assert len(greedy.questions) == 10
    assert greedy.questions == sampled.questions
    assert [(one.temperature, len(one.questions)) for one in siblings] == [(0.5, POOLS * 64)] * 3
    said = capsys.readouterr().out
    first = said.splitlines()[0]
    assert "starter, suite atlas, questions 10 (" in first
    assert re.search(r"engine bm25 over \d+ passages \(\w+\), k 2", first), (
        "it searches here, whatever the config's retriever is"
    )
    assert first.endswith("sampling greedy, and temperature 0.5")
    assert "groups with equal rewards 100.0%" in said
    assert f"trajectories by depth 0 0 {POOLS * 64 * 3} 0 0 0" in said
    (everything,) = [line.split() for line in said.splitlines() if " all " in line]
    assert [cell for cell in everything if cell[0].isdigit()] == ["10", "1.00", "0.00", "1.00", "2.00"]


@pytest.mark.system
def test_a_check_asks_in_the_environment_that_is_scored(atlas_config, tmp_path):
    """Its questions were of `search` whatever eval.environment named, and a run without one ended in a KeyError."""
    running = Running()
    config = tmp_path / "wiki.toml"
    config.write_text(atlas_config.read_text().replace("[environment.search]", "[environment.wiki]"))
    check_policy(argparse.Namespace(config=[config], checkpoint=None, per_length=2), [], running)
    assert {question.environment for one in running.passes for question in one.questions} == {"wiki"}


def test_a_check_keeps_the_noise_of_the_config(atlas_config):
    overrides = ["--retriever.noise", "0.25", "--retriever.stochastic", "false", "--eval.suite", '["nq"]']
    config = searched_here(load_config(atlas_config, overrides))
    assert (config.retriever.noise, config.retriever.stochastic, config.retriever.topk) == (0.25, False, 2)
    assert config.eval.suite == ()
