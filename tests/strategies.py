"""Trajectories and pools for tests: plain ones to vary, and Hypothesis strategies."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from cusearch_async.algorithm.methods import Candidates
from cusearch_async.types import Trajectory


def make_trajectory(
    ticket: int = 0, rollout: int = 0, *, prompt: int = 3, sampled: int = 4, **changes: Any
) -> Trajectory:
    """A trajectory of `prompt` + `sampled` + 2 tokens: prompt, model turn, two environment tokens in between."""
    first = sampled // 2
    mask = np.array([False] * prompt + [True] * first + [False] * 2 + [True] * (sampled - first))
    values: dict[str, Any] = {
        "ticket": ticket,
        "rollout": rollout,
        "environment": "search",
        "question_id": "atlas/2/Pinsk",
        "question": "What is the currency of the country of Pinsk?",
        "answers": ("Ruble",),
        "prediction": "Ruble",
        "token_ids": np.arange(5, 5 + len(mask), dtype=np.int32),
        "sampled": mask,
        "logprobs": np.linspace(-2, -0.1, sampled, dtype=np.float32),
        "versions": np.zeros(sampled, dtype=np.int32),
        "depth": 1,
        "retrieval_tokens": first,
        "turns": 2,
        "cut_turns": 0,
        "recall": None,
        "reward": 1.0,
        "em": 1.0,
        "f1": 1.0,
        "format_valid": True,
        "worker": "w",
        "episode_s": 0.5,
        "search_s": 0.1,
    }
    return Trajectory(**(values | changes))


def make_pool(depths, rewards=None, rollouts=2, s_max=5, passed=None, questions=None, tokens=None) -> Candidates:
    """A pool of groups of `rollouts`, as a method sees it."""
    count = len(depths)
    rewards = np.zeros(count) if rewards is None else np.array(rewards, dtype=np.float64)
    tickets = np.arange(count) // rollouts
    return Candidates(
        depths=np.array(depths, dtype=np.int64),
        rewards=rewards,
        passed=rewards > 0.2 if passed is None else np.array(passed),
        tickets=tickets,
        rollouts=np.arange(count) % rollouts,
        tokens=np.arange(count) + 1 if tokens is None else np.array(tokens),
        questions=questions or [f"q{ticket}" for ticket in tickets],
        s_max=s_max,
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    sampled, prompt = draw(st.integers(1, 40)), draw(st.integers(1, 20))
    has_two_rows = sampled > 1 and draw(st.booleans())
    finite = st.floats(-50, 0, width=32)
    return make_trajectory(
        draw(st.integers(0, 2**40)),
        draw(st.integers(0, 64)),
        prompt=prompt,
        starts=(0, prompt + sampled // 2) if has_two_rows else (0,),
        sampled=sampled,
        logprobs=np.array(draw(st.lists(finite, min_size=sampled, max_size=sampled)), dtype=np.float32),
        versions=np.array(draw(st.lists(st.integers(0, 2**20), min_size=sampled, max_size=sampled)), dtype=np.int32),
        question=draw(st.text(max_size=60)),
        prediction=draw(st.none() | st.text(max_size=20)),
        answers=tuple(draw(st.lists(st.text(max_size=20), max_size=4))),
        depth=draw(st.integers(0, 9)),
        reward=draw(st.floats(0, 1)),
    )
