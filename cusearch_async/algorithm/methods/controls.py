"""Controls for SDGA-Phase: is its effect due to longer trajectories, or to the difficulty of the questions?

Both take SDGA-Phase's own selection from the same pool, with its phase, and replace it. A selection with the same
number of each depth is no control: SDGA itself draws at random within a depth.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.methods.base import Candidates, Selection
from cusearch_async.algorithm.methods.sdga import SdgaMemory, SdgaPhase, in_buckets


class RandomTokens(SdgaPhase):
    """Random trajectories with as many tokens as SDGA-Phase would train on: separates depth from length."""

    def select(self, pool: Candidates, memory: SdgaMemory, rng: np.random.Generator) -> Selection[SdgaMemory]:
        followed = super().select(pool, memory, rng)
        order = rng.permutation(in_buckets(pool, self.settings))
        tokens = np.concatenate([[0], np.cumsum(pool.tokens[order])])
        wanted = pool.tokens[followed.indices].sum()
        least = min(1, len(followed.indices))
        count = max(least, int(np.abs(tokens - wanted).argmin()))
        return _instead(followed, order[:count])


class RandomSiblings(SdgaPhase):
    """Of each question as many trajectories as SDGA-Phase would take, but random ones: separates depth from the
    difficulty of the questions."""

    def select(self, pool: Candidates, memory: SdgaMemory, rng: np.random.Generator) -> Selection[SdgaMemory]:
        followed = super().select(pool, memory, rng)
        _, first, group = np.unique(pool.tickets, return_index=True, return_inverse=True)
        wanted = np.bincount(group[followed.indices], minlength=len(first))
        shuffled = np.lexsort((rng.random(len(group)), group))  # each group at its place, in random order
        place = np.arange(len(group)) - first[group]
        return _instead(followed, shuffled[place < wanted[group]])


def _instead(followed: Selection[SdgaMemory], chosen: NDArray[np.int64]) -> Selection[SdgaMemory]:
    """The phase of `followed`, with another selection; it cannot be trapped."""
    return replace(followed, indices=np.sort(chosen), metrics={"phase": followed.memory.phase}, warnings=())
