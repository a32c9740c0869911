"""How trajectories are divided into mini-batches, among ranks and into micro-batches, and laid out for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cusearch_async.types import Row

COST_OF_A_PASS = 1 / 32
"""A forward pass costs this share of the token limit besides its tokens: layers are launched one by one."""


def minibatches(tickets: Sequence[int], size: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Indices of `tickets` in ceil(count / size) near-equal parts; none for no tickets. Rollouts of one ticket stay
    together, except those where a part ends; the order of the tickets is shuffled."""
    if not tickets:
        return []
    of_ticket: dict[int, list[int]] = {}
    for index, ticket in enumerate(tickets):
        of_ticket.setdefault(ticket, []).append(index)
    groups = list(of_ticket.values())
    order = np.concatenate([groups[i] for i in rng.permutation(len(groups))])
    return np.array_split(order, -(-len(tickets) // size))


def distinct(rows: Sequence[Row], some: Sequence[int]) -> list[list[int]]:
    """`some` of the `rows`, those with the same tokens, sampled at the same places, in one list."""
    same: dict[tuple[bytes, bytes], list[int]] = {}
    for number in some:
        same.setdefault((rows[number].token_ids.tobytes(), rows[number].sampled.tobytes()), []).append(number)
    return list(same.values())


def shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Which rows each rank takes, longest first: each goes to the rank that has the fewest tokens by then
    (longest-processing-time scheduling, Graham 1969)."""
    taken: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for i in _longest_first(lengths):
        rank = tokens.index(min(tokens))
        taken[rank].append(i)
        tokens[rank] += lengths[i]
    return taken


def micro_batches(lengths: Sequence[int], max_tokens: int, packing: bool) -> list[list[int]]:
    """Indices grouped so that each group holds at most `max_tokens` tokens, or one row: end to end with `packing`, else
    padded to its longest. Like lengths go together."""
    order = _longest_first(lengths)
    sorted_lengths = [lengths[i] for i in order]
    ends = _filled(sorted_lengths, max_tokens) if packing else _least_padded(sorted_lengths, max_tokens)
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _filled(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Where each group ends if each takes as many as it can hold end to end."""
    ends: list[int] = []
    tokens = 0
    for i, length in enumerate(lengths):
        if i and tokens + length > max_tokens:
            ends.append(i)
            tokens = 0
        tokens += length
    return [*ends, len(lengths)] if lengths else []


def _least_padded(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Where each group of these falling `lengths` ends at the least cost, of padded tokens and COST_OF_A_PASS for each
    group. By dynamic programming: the best division of the rest after a group does not depend on it."""
    count = len(lengths)
    cost, end_of = [0.0] * (count + 1), [0] * count
    for start in range(count - 1, -1, -1):
        longest = lengths[start]
        most = max(1, max_tokens // longest)
        possible = range(start + 1, min(start + most, count) + 1)
        end_of[start] = min(possible, key=lambda end: (end - start) * longest + cost[end])
        cost[start] = (end_of[start] - start) * longest + cost[end_of[start]] + COST_OF_A_PASS * max_tokens
    ends, end = [], 0
    while end < count:
        end = end_of[end]
        ends.append(end)
    return ends


class Packed(NamedTuple):
    """How rows lie end to end in L tokens. A tuple, in which DeepSpeed looks for tensors."""

    positions: torch.Tensor  # [1, L] int64, from 0 in each row
    bounds: torch.Tensor  # [N + 1] int32, where each row begins, and L
    lengths: tuple[int, ...]  # [N] their tokens, known without asking the device

    def to(self, device: torch.device) -> Packed:
        return Packed(self.positions.to(device), self.bounds.to(device), self.lengths)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The rows of one forward pass, padded on the right, or packed end to end."""

    token_ids: torch.Tensor  # [B, L] int64
    sampled: torch.Tensor  # [T] int64, places of the sampled tokens in the flattened token_ids, in order
    packed: Packed | None
    """None where rows are padded."""

    def to(self, device: torch.device) -> Inputs:
        packed = None if self.packed is None else self.packed.to(device)
        return Inputs(self.token_ids.to(device), self.sampled.to(device), packed)


def collate(rows: Sequence[Row], packing: bool) -> Inputs:
    """One forward pass of the rows, on the CPU. Their sampled tokens in order are the concatenation of each one's."""
    lengths = [len(row.token_ids) for row in rows]
    if packing:
        token_ids = np.concatenate([row.token_ids for row in rows], dtype=np.int64)[None]
        sampled = np.concatenate([row.sampled for row in rows])
    else:
        token_ids = np.zeros((len(rows), max(lengths)), dtype=np.int64)
        sampled = np.zeros_like(token_ids, dtype=np.bool_)
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            token_ids[number, :length] = row.token_ids
            sampled[number, :length] = row.sampled
    places = np.flatnonzero(sampled)  # numbers: to select by a mask, the host waits for the device to count it
    return Inputs(torch.from_numpy(token_ids), torch.from_numpy(places), pack(lengths) if packing else None)


def pack(lengths: list[int]) -> Packed:
    """Rows of these lengths end to end."""
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    return Packed(torch.from_numpy(positions), torch.from_numpy(bounds), tuple(lengths))
