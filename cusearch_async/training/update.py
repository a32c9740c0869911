"""One learner step as numbers: which trajectories, in which mini-batches, and what the loss needs of their tokens.

Nothing here knows how a mini-batch is divided over ranks and micro-batches, and nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cusearch_async.algorithm import losses
from cusearch_async.config import Config
from cusearch_async.streams import Stream, stream
from cusearch_async.training import batching
from cusearch_async.types import Trajectory

Scores = dict[int, NDArray[np.float32]]
"""Index of a selected trajectory -> log-probabilities [S] of its sampled tokens."""
_FAULTS_NAMED = 4


class Update:
    """Step `step` on `selected` trajectories with their `advantages` [K_eff]."""

    def __init__(
        self, selected: Sequence[Trajectory], advantages: NDArray[np.float64], step: int, config: Config
    ) -> None:
        self.selected = selected
        self.step = step
        self._advantages = advantages
        self._loss = config.loss
        self._most_tokens = (config.episode.s_max + 1) * config.episode.max_turn_tokens
        rng = stream(Stream.MINIBATCHES, config.run.seed, step)
        self.minibatches = [part.tolist() for part in batching.minibatches(len(selected), config.loss.minibatch, rng)]
        self.surrogate = losses.Surrogate(
            clip_low=config.loss.clip_low,
            clip_high=config.loss.clip_high,
            dual_clip=config.loss.dual_clip,
            ratio=config.loss.ratio,
            kl_coef=config.loss.kl_coef,
            entropy_coef=config.loss.entropy_coef,
        )
        self._log_prox: Scores | None = None
        self._log_reference: Scores | None = None
        self._faults: list[str] = []

    def set_proximal(self, scores: Scores) -> None:
        self._log_prox = scores
        self._check("log-probabilities", scores)

    def set_reference(self, scores: Scores) -> None:
        self._log_reference = scores
        self._check("reference log-probabilities", scores)

    def shares(self, part: list[int]) -> dict[int, float]:
        """The aggregation weight a_t of each trajectory of a mini-batch, by index."""
        lengths = [len(self.selected[row].logprobs) for row in part]
        weights = losses.aggregation_weights(lengths, self._loss.aggregation, self._most_tokens)
        return dict(zip(part, weights, strict=True))

    def tokens(self, rows: list[int], shares: dict[int, float], log_policy: torch.Tensor) -> losses.Tokens:
        """What the loss needs of the trajectories `rows`, whose current log-probabilities are `log_policy` [T]."""
        chosen = [self.selected[row] for row in rows]
        lengths = [len(t.logprobs) for t in chosen]
        current = dict(zip(rows, np.split(log_policy.float().cpu().numpy(), np.cumsum(lengths)[:-1]), strict=True))
        self._check("log-probabilities", current)
        log_prox = [self._proximal(row, current[row]) for row in rows]
        settings, reference = self._loss, self._log_reference
        weights = [
            losses.correction_weights(
                prox, t.logprobs, settings.correction, settings.correction_low, settings.correction_bound
            )
            for prox, t in zip(log_prox, chosen, strict=True)
        ]
        device = log_policy.device

        def flat(pieces: list[NDArray[np.float32]]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(pieces)).to(device)

        def spread(values: list[float]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(device)

        return losses.Tokens(
            lengths=lengths,
            log_behaviour=flat([t.logprobs for t in chosen]),
            log_prox=flat(log_prox),
            log_reference=None if reference is None else flat([reference[row] for row in rows]),
            advantages=spread([float(self._advantages[row]) for row in rows]),
            weights=flat(weights),
            aggregation=spread([shares[row] for row in rows]),
        )

    def _proximal(self, row: int, current: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._log_prox is not None:
            return self._log_prox[row]
        trajectory = self.selected[row]
        return losses.loglinear_proximal(current, trajectory.logprobs, trajectory.versions, self.step)

    def note_fault(self, what: str) -> None:
        """Remember that `what` is not finite."""
        self._faults.append(what)

    def _check(self, name: str, scores: Scores) -> None:
        for row, values in scores.items():
            if not np.isfinite(values).all():
                self.note_fault(f"{name} of trajectory {self.selected[row].id}")

    @property
    def made_of(self) -> str:
        """Which trajectories, in words."""
        tickets = [t.ticket for t in self.selected]
        return f"{len(tickets)} trajectories of tickets {min(tickets, default=0)} to {max(tickets, default=0)}"

    @property
    def faults(self) -> str:
        """What this rank found not to be finite; empty if nothing."""
        named = self._faults[:_FAULTS_NAMED]
        more = len(self._faults) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")
