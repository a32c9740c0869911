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
from cusearch_async.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward pass of this rank: some trajectories of a mini-batch, and what is known beforehand of the T tokens
    that they have sampled, laid end to end. Of trajectories with the same tokens the first alone is computed."""

    rows: tuple[int, ...]
    """Its trajectories, as indices of the selection."""
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
    """Sampled tokens of each trajectory; they sum to T."""
    row: torch.Tensor  # [T] int64, which of the selection the token belongs to
    depth: torch.Tensor  # [T] int64, search depth of the token's trajectory
    log_behaviour: torch.Tensor  # [T] float32, log μ, recorded when the token was sampled
    versions: torch.Tensor  # [T] int32, policy version that sampled the token
    advantages: torch.Tensor  # [T] float32
    aggregation: torch.Tensor  # [T] float32, a_t, from `losses.aggregation_weights` over the whole mini-batch

    def to(self, device: torch.device) -> MicroBatch:
        per_token = ("computed", "row", "depth", "log_behaviour", "versions", "advantages", "aggregation")
        moved = {name: getattr(self, name).to(device) for name in per_token}
        return replace(self, inputs=self.inputs.to(device), **moved)


MiniBatch = tuple[MicroBatch, ...]
"""What one rank does for one optimizer step."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePlan:
    """Step `step` on the `selected` trajectories, on one rank."""

    step: int
    selected: tuple[Trajectory, ...]
    minibatches: tuple[MiniBatch, ...]
    """As many, with as many micro-batches each, on every rank."""
    prefix_share: float
    """Of the tokens of different trajectories, on all ranks, those of a beginning that another one of the same
    mini-batch has too."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those of all mini-batches, in order."""
        return [micro for minibatch in self.minibatches for micro in minibatch]

    def tokens(self) -> tuple[int, int, int]:
        """Tokens of this rank's trajectories, those of them that are computed, and those with their padding. Fillers do
        not count."""
        trained = [micro for micro in self.micro_batches if not micro.is_filler]
        return (
            sum(len(self.selected[row].token_ids) for micro in trained for row in micro.rows),
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
    different = [batching.distinct(selected, part) for part in parts]
    minibatches = tuple(
        tuple(
            _micro_batch(share, selected, advantages, weights, config.learner.packing)
            for share in _shares_of_rank(copies, selected, advantages, config.loss, config.learner, rank, ranks)
        )
        for copies in different
    )
    return UpdatePlan(step, tuple(selected), minibatches, _prefix_share(different, selected))


def _prefix_share(different: list[list[list[int]]], selected: Sequence[Trajectory]) -> float:
    computed = [[selected[rows[0]] for rows in copies] for copies in different]
    tokens = sum(len(t.token_ids) for some in computed for t in some)
    return (tokens - sum(map(batching.prefix_tree_tokens, computed))) / max(tokens, 1)


@dataclass(frozen=True, slots=True)
class _Share:
    """One micro-batch as rows of the selection."""

    copies: list[list[int]]
    """Those with the same tokens in one list."""
    is_filler: bool
    has_gradient: bool


def _shares_of_rank(
    copies: list[list[int]],
    selected: Sequence[Trajectory],
    advantages: NDArray[np.float64],
    loss: LossConfig,
    learner: LearnerConfig,
    rank: int,
    ranks: int,
) -> Iterator[_Share]:
    """The micro-batches of one rank for a mini-batch, whose rows come as lists of `copies`: those with a gradient, and
    then those without. Fillers make them as many as the busiest rank has."""
    shortest = min(copies, key=lambda rows: len(selected[rows[0]].token_ids))
    # a user's own objective may give a gradient to a token without an advantage
    needs_advantage = loss.objective in losses.OBJECTIVES and not loss.kl_coef and not loss.entropy_coef
    divided: dict[bool, list[list[int]]] = {True: [], False: []}
    for rows in copies:
        divided[not needs_advantage or bool(np.any(advantages[rows]))].append(rows)
    if not divided[True]:  # an optimizer step needs a gradient, if only of zeros
        divided[False].remove(shortest)
        divided[True].append(shortest)
    for has_gradient, some in divided.items():
        own, most = _groups_of_rank(some, selected, learner, rank, ranks)
        for group in own:
            yield _Share(group, False, has_gradient)
        for _ in range(most - len(own)):
            yield _Share([shortest[:1]], True, has_gradient)


def _groups_of_rank(
    copies: list[list[int]], selected: Sequence[Trajectory], settings: LearnerConfig, rank: int, ranks: int
) -> tuple[list[list[list[int]]], int]:
    """The `copies` of each micro-batch of one rank, and how many micro-batches the busiest rank has."""
    tokens = [len(selected[rows[0]].token_ids) for rows in copies]
    per_rank = []
    for own in batching.shares(tokens, ranks):
        groups = batching.micro_batches([tokens[i] for i in own], settings.micro_batch_tokens, settings.packing)
        per_rank.append([[copies[own[i]] for i in group] for group in groups])
    return per_rank[rank], max(map(len, per_rank))


def _micro_batch(
    share: _Share,
    selected: Sequence[Trajectory],
    advantages: NDArray[np.float64],
    weights: NDArray[np.float64],
    packing: bool,
) -> MicroBatch:
    rows = [row for copies in share.copies for row in copies]
    chosen, first = [selected[row] for row in rows], [selected[copies[0]] for copies in share.copies]
    lengths = [t.sampled_tokens for t in chosen]
    ends = np.cumsum([t.sampled_tokens for t in first])
    computed = [
        np.arange(end - one.sampled_tokens, end)
        for end, one, copies in zip(ends, first, share.copies, strict=True)
        for _ in copies
    ]

    def spread(values: Sequence[int] | NDArray[np.float32]) -> torch.Tensor:
        """One value per trajectory, at each of its tokens."""
        return torch.from_numpy(np.repeat(values, lengths))

    return MicroBatch(
        rows=tuple(rows),
        is_filler=share.is_filler,
        has_gradient=share.has_gradient,
        inputs=batching.collate(first, packing),
        tokens=sum(len(t.token_ids) for t in first),
        computed=torch.from_numpy(np.concatenate(computed)),
        lengths=tuple(lengths),
        row=spread(rows),
        depth=spread([t.depth for t in chosen]),
        log_behaviour=torch.from_numpy(np.concatenate([t.logprobs for t in chosen])),
        versions=torch.from_numpy(np.concatenate([t.versions for t in chosen])),
        advantages=spread(advantages[rows].astype(np.float32)),
        aggregation=spread(weights[rows].astype(np.float32)),
    )
