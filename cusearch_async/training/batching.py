"""How trajectories are divided into mini-batches, among ranks and into micro-batches, and laid out for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


def micro_batches(lengths: Sequence[int], max_tokens: int, packing: bool) -> list[list[int]]:
    """Indices grouped so that each group holds at most `max_tokens` tokens, or one trajectory: end to end with
    `packing`, else padded to its longest. Like lengths go together."""
    groups: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        added = lengths[i] if packing or not groups else lengths[groups[-1][0]]
        if groups and tokens + added <= max_tokens:
            groups[-1].append(i)
            tokens += added
        else:
            groups.append([i])
            tokens = lengths[i]
    return groups


class Packed(NamedTuple):
    """How trajectories lie end to end in one row of L tokens. A tuple, in which DeepSpeed looks for tensors."""

    positions: torch.Tensor  # [1, L] int64, from 0 in each trajectory
    bounds: torch.Tensor  # [N + 1] int32, where each trajectory begins in the row, and L
    lengths: tuple[int, ...]  # [N] their tokens, known without asking the device

    def to(self, device: torch.device) -> Packed:
        return Packed(self.positions.to(device), self.bounds.to(device), self.lengths)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The trajectories of one forward pass, padded on the right, or packed into one row."""

    token_ids: torch.Tensor  # [B, L] int64
    sampled: torch.Tensor  # [T] int64, places of the sampled tokens in the flattened token_ids, in order
    packed: Packed | None
    """None where rows are padded."""

    def to(self, device: torch.device) -> Inputs:
        packed = None if self.packed is None else self.packed.to(device)
        return Inputs(self.token_ids.to(device), self.sampled.to(device), packed)


def collate(trajectories: Sequence[Trajectory], packing: bool) -> Inputs:
    """One forward pass of the trajectories, on the CPU. Their sampled tokens in order are the concatenation of each
    one's."""
    if packing:
        token_ids = np.concatenate([t.token_ids for t in trajectories], dtype=np.int64)[None]
        sampled = np.concatenate([t.sampled for t in trajectories])
        return Inputs(torch.from_numpy(token_ids), _places(sampled), _pack([len(t.token_ids) for t in trajectories]))
    longest = max(len(t.token_ids) for t in trajectories)
    token_ids = np.zeros((len(trajectories), longest), dtype=np.int64)
    sampled = np.zeros((len(trajectories), longest), dtype=np.bool_)
    for row, trajectory in enumerate(trajectories):
        length = len(trajectory.token_ids)
        token_ids[row, :length] = trajectory.token_ids
        sampled[row, :length] = trajectory.sampled
    return Inputs(torch.from_numpy(token_ids), _places(sampled), None)


def _pack(lengths: list[int]) -> Packed:
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    return Packed(torch.from_numpy(positions), torch.from_numpy(bounds), tuple(lengths))


def _places(sampled: NDArray[np.bool_]) -> torch.Tensor:
    """Numbers, not a mask: to select by a mask, the host waits for the device to count it."""
    return torch.from_numpy(np.flatnonzero(sampled))
