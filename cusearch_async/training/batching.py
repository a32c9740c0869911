"""From selected trajectories to tensors: mini-batches, ranks, micro-batches.

Nothing here changes what is learned: per-token weights are fixed for a whole mini-batch before it is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cusearch_async.types import Trajectory


def minibatches(count: int, size: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Shuffled indices 0..count-1 in ceil(count / size) near-equal parts; none for count 0."""
    if count == 0:
        return []
    return np.array_split(rng.permutation(count), -(-count // size))


def share_of_rank(lengths: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Which trajectories of a mini-batch a rank takes: dealt in order of length, so that loads are alike."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return order[rank::ranks]


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices grouped so that each group, padded to its longest, holds at most `max_tokens` tokens (or one
    trajectory). Like lengths go together."""
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * longest <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = lengths[i]
    return groups


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Trajectories of one forward pass, padded on the right."""

    rows: list[int]
    """Which trajectories, as indices into whatever list the caller split."""
    token_ids: torch.Tensor  # [B, L] int64
    sampled: torch.Tensor  # [B, L] bool, True where the policy sampled the token


def collate(trajectories: Sequence[Trajectory], rows: list[int], device: torch.device) -> MicroBatch:
    """Pad the trajectories `rows`. Their sampled tokens in row-major order are the concatenation of each one's."""
    longest = max(len(trajectories[i].token_ids) for i in rows)
    token_ids = np.zeros((len(rows), longest), dtype=np.int64)
    sampled = np.zeros((len(rows), longest), dtype=np.bool_)
    for row, i in enumerate(rows):
        length = len(trajectories[i].token_ids)
        token_ids[row, :length] = trajectories[i].token_ids
        sampled[row, :length] = trajectories[i].sampled
    return MicroBatch(rows, torch.from_numpy(token_ids).to(device), torch.from_numpy(sampled).to(device))
