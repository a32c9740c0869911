"""The plan of one learner step: its mini-batches, and of each this rank's micro-batches. Made once, before anything is
computed.

How a mini-batch is divided over ranks and micro-batches does not change what is learned: the weight of every token is
fixed for the whole mini-batch before it is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from cusearch_async.algorithm import losses
from cusearch_async.config import Config, LearnerConfig
from cusearch_async.streams import Stream, stream
from cusearch_async.training import batching
from cusearch_async.training.batching import Inputs
from cusearch_async.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward pass of this rank: some trajectories of a mini-batch, and what is known beforehand of the T tokens
    that they have sampled, laid end to end."""

    rows: tuple[int, ...]
    """Its trajectories, as indices of the selection."""
    is_filler: bool
    """Not to be trained on: it stands in where another rank has more micro-batches, since every rank must call forward
    and backward equally often."""
    inputs: Inputs
    lengths: tuple[int, ...]
    """Sampled tokens of each trajectory; they sum to T."""
    row: torch.Tensor  # [T] int64, which of the selection the token belongs to
    depth: torch.Tensor  # [T] int64, search depth of the token's trajectory
    log_behaviour: torch.Tensor  # [T] float32, log μ, recorded when the token was sampled
    versions: torch.Tensor  # [T] int32, policy version that sampled the token
    advantages: torch.Tensor  # [T] float32
    aggregation: torch.Tensor  # [T] float32, a_t, from `losses.aggregation_weights` over the whole mini-batch

    def to(self, device: torch.device) -> MicroBatch:
        per_token = ("row", "depth", "log_behaviour", "versions", "advantages", "aggregation")
        moved = {name: getattr(self, name).to(device) for name in per_token}
        return replace(self, inputs=self.inputs.to(device), **moved)


MiniBatch = tuple[MicroBatch, ...]
"""What one rank does for one optimizer step."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePlan:
    """Step `step` on the `selected` trajectories, as one rank does it."""

    step: int
    selected: tuple[Trajectory, ...]
    minibatches: tuple[MiniBatch, ...]
    """As many, with as many micro-batches each, on every rank."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those of all mini-batches, in order."""
        return [micro for minibatch in self.minibatches for micro in minibatch]

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
    parts = [part.tolist() for part in batching.minibatches(len(selected), config.loss.minibatch, rng)]
    weights = _weights(parts, selected, config)
    minibatches = tuple(
        tuple(
            _micro_batch(rows or part[:1], not rows, selected, advantages, weights, config.learner.packing)
            for rows in _groups_of_rank(part, selected, config.learner, rank, ranks)
        )
        for part in parts
    )
    return UpdatePlan(step, tuple(selected), minibatches)


def _weights(parts: list[list[int]], selected: Sequence[Trajectory], config: Config) -> NDArray[np.float64]:
    """a_t for the tokens of each selected trajectory [K_eff], by the whole mini-batch that it is in."""
    most_tokens = (config.episode.s_max + 1) * config.episode.max_turn_tokens
    weights = np.zeros(len(selected))
    for part in parts:
        lengths = [len(selected[row].logprobs) for row in part]
        weights[part] = losses.aggregation_weights(lengths, config.loss.aggregation, most_tokens)
    return weights


def _groups_of_rank(
    part: list[int], selected: Sequence[Trajectory], settings: LearnerConfig, rank: int, ranks: int
) -> list[list[int]]:
    """The rows of each micro-batch of one rank for a mini-batch; empty ones fill up to the count of the busiest
    rank."""
    tokens = [len(selected[row].token_ids) for row in part]
    per_rank = []
    for each in range(ranks):
        own = batching.share_of_rank(tokens, each, ranks)
        groups = batching.micro_batches([tokens[i] for i in own], settings.micro_batch_tokens, settings.packing)
        per_rank.append([[part[own[i]] for i in group] for group in groups])
    most = max(len(groups) for groups in per_rank)
    return per_rank[rank] + [[]] * (most - len(per_rank[rank]))


def _micro_batch(
    rows: list[int],
    is_filler: bool,
    selected: Sequence[Trajectory],
    advantages: NDArray[np.float64],
    weights: NDArray[np.float64],
    packing: bool,
) -> MicroBatch:
    chosen = [selected[row] for row in rows]
    lengths = [len(t.logprobs) for t in chosen]

    def spread(values: Sequence[int] | NDArray[np.float32]) -> torch.Tensor:
        """One value per trajectory, at each of its tokens."""
        return torch.from_numpy(np.repeat(values, lengths))

    return MicroBatch(
        rows=tuple(rows),
        is_filler=is_filler,
        inputs=batching.collate(chosen, packing),
        lengths=tuple(lengths),
        row=spread(rows),
        depth=spread([t.depth for t in chosen]),
        log_behaviour=torch.from_numpy(np.concatenate([t.logprobs for t in chosen])),
        versions=torch.from_numpy(np.concatenate([t.versions for t in chosen])),
        advantages=spread(advantages[rows].astype(np.float32)),
        aggregation=spread(weights[rows].astype(np.float32)),
    )
