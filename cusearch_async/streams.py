"""Random streams. Whatever draws has a name here, and draws from (name, run seed, numbers) and from nothing else.

Two streams never coincide: names differ, and a name always goes with as many numbers. A list of numbers as the seed
would not do: NumPy pads it with zeros, so that [seed, epoch] is [seed, epoch, 0] too. A
spawn key comes after the padding.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What is drawn, and by which numbers besides the seed."""

    QUESTIONS = 1
    """The order of an epoch's questions: epoch."""
    SELECTION = 2
    """What a method takes from a pool: step."""
    MINIBATCHES = 3
    """Which trajectories make a mini-batch: step."""
    TURN = 4
    """The engine's seed for a turn, and the draw that goes with its search: ticket, rollout, turn."""
    DISTRACTORS = 5
    """Random documents of a local index: draw."""
    LATENCY = 6
    """Waiting time of a local index: draw."""
    NOISE = 7
    """Whether a simulated search is useful: draw."""
    DOCUMENTS = 8
    """What the stand-in for a simulating model answers where it is to be useless; no number."""
    EVALUATED = 9
    """Which questions are scored; no number."""
    RESAMPLING = 10
    """Confidence intervals; no number."""
    CENTROIDS = 11
    """Passages that an IVF index is trained on; no number."""


def stream(name: Stream, seed: int, *numbers: int) -> np.random.Generator:
    """The generator of a stream."""
    return np.random.default_rng(_sequence(name, seed, *numbers))


def draw_number(name: Stream, seed: int, *numbers: int) -> int:
    """One number of 32 bits of a stream."""
    return int(_sequence(name, seed, *numbers).generate_state(1, np.uint32)[0])


def _sequence(name: Stream, seed: int, *numbers: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(name, *numbers))
