"""A learner as the training loop knows it. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cusearch_async.metrics.table import Metrics
from cusearch_async.types import Trajectory

if TYPE_CHECKING:
    import torch

    from cusearch_async.weights.interface import Canary

STATE_FILE = "state.json"
"""Of a checkpoint's folder: written last, and deleted first."""


def is_sealed(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete: it has its state."""
    return (checkpoint / STATE_FILE).exists()


@dataclass(frozen=True, slots=True)
class Lent:
    """The policy's parameters by their Hugging Face names, or its adapter's by peft's. They do not change until
    `release` is called: the next optimizer step waits for that, unless they are copies."""

    tensors: Mapping[str, torch.Tensor]
    release: Callable[[], None]
    adapter: Mapping[str, Any] | None = None
    """peft's config of the adapter; None for a whole model."""


class Learner(Protocol):
    """Made, loaded and stopped in one thread; all other calls are made in another, first `enter_thread`."""

    waited_s: float
    """How long the last update waited until what was lent was released."""

    @property
    def vocab_size(self) -> int: ...

    def load(self, folder: Path) -> None:
        """Continue from what `capture` has written. Raises: ConfigError for a checkpoint that it cannot read."""
        ...

    def enter_thread(self) -> None: ...

    def update(self, selected: Sequence[Trajectory], advantages: NDArray[np.float64], step: int) -> Metrics: ...

    def mean_loss(self, trajectories: Sequence[Trajectory]) -> float: ...

    def lend(self) -> Lent: ...

    def canary(self) -> Canary: ...

    def capture(self, folder: Path) -> Callable[[], None]:
        """Copies all that a checkpoint needs; the returned function writes it into `folder`, in any thread."""
        ...

    def offload(self) -> None:
        """Moves everything from the GPUs to the host's memory."""
        ...

    def reload(self) -> None: ...

    def stop(self, is_finished: bool) -> None:
        """Ends the other ranks."""
        ...
