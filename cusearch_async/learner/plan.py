"""The plan of one learner step: its mini-batches, and of each this rank's micro-batches, before anything is computed.

How a mini-batch is divided over ranks and micro-batches does not change what is learned: the weight of every token is
fixed for the whole mini-batch before it is divided, gradients are summed, and only then does the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from cusearch_async.algorithm import losses
from cusearch_async.config import Config, LearnerConfig, LossConfig
from cusearch_async.learner import batching
from cusearch_async.learner.batching import Inputs
from cusearch_async.streams import Stream, stream
from cusearch_async.types import Row, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward pass of this rank: some rows of a mini-batch's trajectories, and what is known beforehand of the T
    tokens that are sampled in them, laid end to end. Of rows with the same tokens the first alone is computed."""

    rows: tuple[int, ...]
    """Indices of the plan's `rows`."""
    is_filler: bool
    """Not to be trained on: it stands in where another rank has more micro-batches, since every rank must call forward
    and backward equally often."""
    has_gradient: bool
    """Not if it changes nothing: all its advantages are 0, and the loss has no other term."""
    inputs: Inputs
    tokens: int
    """Tokens in `inputs`, without padding."""
    computed: torch.Tensor  # [T] int64, which of the sampled tokens in `inputs` each token is
    lengths: tuple[int, ...]
    """Sampled tokens of each row; they sum to T."""
    trajectory: torch.Tensor  # [T] int64, which of the selection the token belongs to
    depth: torch.Tensor  # [T] int64, search depth of the token's trajectory
    log_behaviour: torch.Tensor  # [T] float32, log μ, recorded when the token was sampled
    versions: torch.Tensor  # [T] int32, policy version that sampled the token
    advantages: torch.Tensor  # [T] float32
    aggregation: torch.Tensor  # [T] float32, a_t, from `losses.aggregation_weights` over the whole mini-batch

    def to(self, device: torch.device) -> MicroBatch:
        per_token = ("computed", "trajectory", "depth", "log_behaviour", "versions", "advantages", "aggregation")
        moved = {name: getattr(self, name).to(device) for name in per_token}
        return replace(self, inputs=self.inputs.to(device), **moved)


MiniBatch = tuple[MicroBatch, ...]
"""What one rank does for one optimizer step."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePlan:
    """Step `step` on the `selected` trajectories, on one rank."""

    step: int
    selected: tuple[Trajectory, ...]
    rows: tuple[Row, ...]
    """Of all of `selected`, in order."""
    minibatches: tuple[MiniBatch, ...]
    """As many, with as many micro-batches each, on every rank."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those of all mini-batches, in order."""
        return [micro for minibatch in self.minibatches for micro in minibatch]

    def tokens(self) -> tuple[int, int, int]:
        """Tokens of this rank's rows, those of them that are computed, and those with their padding. Fillers do
        not count."""
        trained = [micro for micro in self.micro_batches if not micro.is_filler]
        return (
            sum(len(self.rows[row].token_ids) for micro in trained for row in micro.rows),
            sum(micro.tokens for micro in trained),
            sum(micro.inputs.token_ids.numel() for micro in trained),
        )

    def to(self, device: torch.device) -> UpdatePlan:
        """The plan with its tensors on `device`; it is made on the CPU."""
        moved = tuple(tuple(micro.to(device) for micro in minibatch) for minibatch in self.minibatches)
        return replace(self, minibatches=moved)


def plan_update(
    selected: Sequence[Trajectory],
    advantages: NDArray[np.float64],
    step: int,
    config: Config,
    rank: int = 0,
    ranks: int = 1,
) -> UpdatePlan:
    """The plan of rank `rank` of `ranks` to train on `selected` with their `advantages` [K_eff].

    Depends on the arguments only: ranks that are given the same make plans that fit each other."""
    rng = stream(Stream.MINIBATCHES, config.run.seed, step)
    tickets = [trajectory.ticket for trajectory in selected]
    parts = [part.tolist() for part in batching.minibatches(tickets, config.loss.minibatch, rng)]
    most_tokens = (config.episode.s_max + 1) * config.episode.max_turn_tokens
    weights = np.zeros(len(selected))  # [K_eff] a_t for the tokens of each, by the whole mini-batch that it is in
    for part in parts:
        lengths = [selected[row].sampled_tokens for row in part]
        weights[part] = losses.aggregation_weights(lengths, config.loss.aggregation, most_tokens)
    rows = tuple(row for trajectory in selected for row in trajectory.rows)
    ends = np.cumsum([0, *(len(t.starts) for t in selected)])
    of_row = np.repeat(np.arange(len(selected)), np.diff(ends))
    different = [
        batching.distinct(rows, [number for i in part for number in range(ends[i], ends[i + 1])]) for part in parts
    ]
    minibatches = tuple(
        tuple(
            _micro_batch(share, selected, rows, of_row, advantages, weights, config.learner.packing)
            for share in _shares_of_rank(copies, rows, advantages[of_row], config.loss, config.learner, rank, ranks)
        )
        for copies in different
    )
    return UpdatePlan(step, tuple(selected), rows, minibatches)


@dataclass(frozen=True, slots=True)
class _Share:
    """One micro-batch as indices of the rows."""

    copies: list[list[int]]
    """Those with the same tokens in one list."""
    is_filler: bool
    has_gradient: bool


def _shares_of_rank(
    copies: list[list[int]],
    rows: Sequence[Row],
    advantages: NDArray[np.float64],
    loss: LossConfig,
    learner: LearnerConfig,
    rank: int,
    ranks: int,
) -> Iterator[_Share]:
    """The micro-batches of one rank for a mini-batch, whose rows come as lists of `copies`: those with a gradient, and
    then those without. Fillers make them as many as the busiest rank has. `advantages` [R] are the rows'."""
    shortest = min(copies, key=lambda same: len(rows[same[0]].token_ids))
    # a user's own objective may give a gradient to a token without an advantage
    needs_advantage = loss.objective in losses.OBJECTIVES and not loss.kl_coef and not loss.entropy_coef
    divided: dict[bool, list[list[int]]] = {True: [], False: []}
    for same in copies:
        divided[not needs_advantage or bool(np.any(advantages[same]))].append(same)
    if not divided[True]:  # an optimizer step needs a gradient, if only of zeros
        divided[False].remove(shortest)
        divided[True].append(shortest)
    for has_gradient, some in divided.items():
        own, most = _groups_of_rank(some, rows, learner, rank, ranks)
        for group in own:
            yield _Share(group, False, has_gradient)
        for _ in range(most - len(own)):
            yield _Share([shortest[:1]], True, has_gradient)


def _groups_of_rank(
    copies: list[list[int]], rows: Sequence[Row], settings: LearnerConfig, rank: int, ranks: int
) -> tuple[list[list[list[int]]], int]:
    """The `copies` of each micro-batch of one rank, and how many micro-batches the busiest rank has."""
    tokens = [len(rows[same[0]].token_ids) for same in copies]
    per_rank = []
    for own in batching.shares(tokens, ranks):
        groups = batching.micro_batches([tokens[i] for i in own], settings.micro_batch_tokens, settings.packing)
        per_rank.append([[copies[own[i]] for i in group] for group in groups])
    return per_rank[rank], max(map(len, per_rank))


def _micro_batch(
    share: _Share,
    selected: Sequence[Trajectory],
    rows: Sequence[Row],
    of_row: NDArray[np.int64],
    advantages: NDArray[np.float64],
    weights: NDArray[np.float64],
    packing: bool,
) -> MicroBatch:
    """`of_row` [R]: which of `selected` a row belongs to. `advantages` and `weights` are theirs."""
    numbers = [number for copies in share.copies for number in copies]
    chosen, first = [rows[number] for number in numbers], [rows[copies[0]] for copies in share.copies]
    of_chosen = of_row[numbers]
    lengths = [row.sampled_tokens for row in chosen]
    ends = np.cumsum([row.sampled_tokens for row in first])
    computed = [
        np.arange(end - one.sampled_tokens, end)
        for end, one, copies in zip(ends, first, share.copies, strict=True)
        for _ in copies
    ]

    def spread(values: Sequence[int] | NDArray[np.int64] | NDArray[np.float32]) -> torch.Tensor:
        """One value per row, at each of its tokens."""
        return torch.from_numpy(np.repeat(values, lengths))

    return MicroBatch(
        rows=tuple(numbers),
        is_filler=share.is_filler,
        has_gradient=share.has_gradient,
        inputs=batching.collate(first, packing),
        tokens=sum(len(row.token_ids) for row in first),
        computed=torch.from_numpy(np.concatenate(computed)),
        lengths=tuple(lengths),
        trajectory=spread(of_chosen),
        depth=spread([selected[i].depth for i in of_chosen]),
        log_behaviour=torch.from_numpy(np.concatenate([row.logprobs for row in chosen])),
        versions=torch.from_numpy(np.concatenate([row.versions for row in chosen])),
        advantages=spread(advantages[of_chosen].astype(np.float32)),
        aggregation=spread(weights[of_chosen].astype(np.float32)),
    )
