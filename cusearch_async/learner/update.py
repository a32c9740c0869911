"""One learner step on the device: the loss's inputs for each micro-batch, and the values that are not finite.

The host waits for the device in `faults` only, once per mini-batch.
"""

from __future__ import annotations

import torch

from cusearch_async.algorithm import losses
from cusearch_async.config import Config, LossConfig
from cusearch_async.learner.plan import MicroBatch, UpdatePlan

LogProbs = dict[MicroBatch, torch.Tensor]
"""Log-probabilities [T], float32, of the sampled tokens of each micro-batch."""
CHECKED = PROXIMAL, REFERENCE, POLICY = (
    "proximal log-probabilities",
    "reference log-probabilities",
    "log-probabilities",
)
_FAULTS_NAMED = 4


def surrogate_of(settings: LossConfig) -> losses.Surrogate:
    """The constants of the policy loss: the settings of the same names."""
    constants = {name: getattr(settings, name) for name in losses.Surrogate.__slots__}
    return losses.Surrogate(**constants | {"objective": losses.objective_of(settings.objective)})


def learning_rate(config: Config, step: int) -> float:
    """lr (t + 1) / W in the W steps of warm-up; with a linear schedule at most lr (T - t) / T, T being run.steps."""
    learner, steps = config.learner, max(config.run.steps, step + 1)
    factor = (step + 1) / learner.warmup_steps if step < learner.warmup_steps else 1.0
    if learner.lr_schedule == "linear":
        factor = min(factor, (steps - step) / steps)
    return learner.lr * factor


def to_backward(loss: torch.Tensor, log_policy: torch.Tensor, micro: MicroBatch, ranks: int) -> torch.Tensor:
    """The value on which a rank calls backward for a micro-batch. The weights in its loss count the mini-batch of all
    `ranks`, and DeepSpeed averages gradients over them. A filler is no part of the mini-batch."""
    return 0.0 * log_policy.sum() if micro.is_filler else loss * ranks


class Update:
    """A step's results so far for its `plan`, whose tensors are on `device`."""

    def __init__(self, plan: UpdatePlan, settings: LossConfig, device: torch.device) -> None:
        self.plan = plan
        self._settings = settings
        self._first = plan.minibatches[0] if plan.minibatches else ()
        self._log_prox: LogProbs | None = None
        self._log_reference: LogProbs | None = None
        count = len(plan.selected)
        self._bad = {name: torch.zeros(count, dtype=torch.int32, device=device) for name in CHECKED}
        """How many values of each trajectory are not finite."""

    @property
    def to_score(self) -> list[MicroBatch]:
        """The micro-batches whose π_prox must be known before the first optimizer step: those of all mini-batches but
        the first, for which the policy is still π_prox when it is trained on."""
        return [micro for minibatch in self.plan.minibatches[1:] for micro in minibatch]

    def set_proximal(self, log_probs: LogProbs) -> None:
        """Those of all micro-batches that are `to_score`."""
        self._log_prox = self._checked(PROXIMAL, log_probs)

    def set_reference(self, log_probs: LogProbs) -> None:
        self._log_reference = self._checked(REFERENCE, log_probs)

    def tokens(self, micro: MicroBatch, log_policy: torch.Tensor) -> losses.Tokens:
        """The loss's inputs for a micro-batch, whose current log-probabilities are `log_policy` [T], float32, without
        gradient."""
        self._checked(POLICY, {micro: log_policy})
        settings = self._settings
        if micro in self._first:
            log_prox = log_policy
        elif self._log_prox is None:
            log_prox = losses.loglinear_proximal(log_policy, micro.log_behaviour, micro.versions, self.plan.step)
        else:
            log_prox = self._log_prox[micro]
        weights = losses.correction_weights(
            log_prox,
            micro.log_behaviour,
            micro.lengths,
            settings.correction,
            settings.correction_low,
            settings.correction_bound,
        )
        return losses.Tokens(
            lengths=micro.lengths,
            log_behaviour=micro.log_behaviour,
            log_prox=log_prox,
            log_reference=None if self._log_reference is None else self._log_reference[micro],
            advantages=micro.advantages,
            weights=weights,
            aggregation=micro.aggregation,
        )

    def _checked(self, name: str, log_probs: LogProbs) -> LogProbs:
        """Counts what is not finite, without waiting for the device."""
        for micro, values in log_probs.items():
            self._bad[name].index_add_(0, micro.trajectory, (~torch.isfinite(values)).to(torch.int32))
        return log_probs

    def faults(self, gradient: torch.Tensor) -> str:
        """The values on this rank that were not finite, in words; empty if all were. `gradient` is one number that is
        finite as long as the gradient is. Waits for the device."""
        names = [f"{name} of trajectory {t.id}" for name in CHECKED for t in self.plan.selected] + ["the gradient"]
        bad = torch.cat([*self._bad.values(), ~torch.isfinite(gradient).reshape(1)]).tolist()
        found = [name for name, is_bad in zip(names, bad, strict=True) if is_bad]
        named = found[:_FAULTS_NAMED]
        more = len(found) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")

    @property
    def made_of(self) -> str:
        """Which trajectories, in words."""
        tickets = [t.ticket for t in self.plan.selected]
        return f"{len(tickets)} trajectories of tickets {min(tickets, default=0)} to {max(tickets, default=0)}"
