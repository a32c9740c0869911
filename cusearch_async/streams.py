"""Random streams. Every random draw has a name here, and is a function of (name, run seed, numbers) only.

Two streams never coincide: their names differ, and each name is always used with the same count of numbers. A list of
numbers as the seed would not work: NumPy pads it with zeros, so [seed, epoch] equals [seed, epoch, 0]. A spawn key is
added after the padding.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What is drawn, and the numbers that identify the draw, besides the seed."""

    QUESTIONS = 1
    """The order of an epoch's questions: epoch."""
    SELECTION = 2
    """The selection of a method from a pool: step."""
    MINIBATCHES = 3
    """The division into mini-batches: step."""
    TURN = 4
    """The engine's seed for a turn, and the draw of the environment's search in it: ticket, rollout, turn."""
    DISTRACTORS = 5
    """Random documents of a local index: draw."""
    LATENCY = 6
    """Waiting time of a local index: draw."""
    NOISE = 7
    """Whether a simulated search is useful: draw."""
    DOCUMENTS = 8
    """Noisy answers of the atlas simulator; no number."""
    EVALUATED = 9
    """The questions that are scored; no number."""
    RESAMPLING = 10
    """Confidence intervals; no number."""
    CENTROIDS = 11
    """Passages that an IVF index is trained on; no number."""
    DEMONSTRATIONS = 12
    """The order of demonstrations: epoch from 1; with 0, which are held out."""
    SIMULATION = 13
    """Episodes and deaths of a simulated run; no number."""
    SEARCH = 14
    """The draw of an agent's search: ticket, rollout, number of the search in the episode."""


def stream(name: Stream, seed: int, *numbers: int) -> np.random.Generator:
    """The generator of a stream."""
    return np.random.default_rng(_sequence(name, seed, *numbers))


def draw_number(name: Stream, seed: int, *numbers: int) -> int:
    """The first 32-bit number of a stream."""
    return int(_sequence(name, seed, *numbers).generate_state(1, np.uint32)[0])


def _sequence(name: Stream, seed: int, *numbers: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(name, *numbers))
