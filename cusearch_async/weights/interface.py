"""How weights get from the learner to whoever loads them: workers and the evaluator.

A version is a folder of files (weights/folder.py). The learner publishes it into a store; a source gives it to a
process that loads it. A `WeightTransport` (weights/transports.py) joins the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cusearch_async.weights.tensor_file import TensorRecord

TENSORS = "model.safetensors"
ADAPTER_TENSORS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
MANIFEST = "manifest.json"


class Canary(msgspec.Struct):
    """A text, and its log-probabilities under the published weights, to compare with those of an engine."""

    token_ids: list[int]  # [C]
    logprobs: list[float]  # [C - 1] natural log of token i+1 given tokens 0..i, temperature 1
    tolerance: float
    """Largest mean absolute difference that rounding can explain."""


class Manifest(msgspec.Struct):
    version: int
    epoch: int
    tensors: dict[str, TensorRecord]
    canary: Canary
    adapter: dict[str, Any] | None = None
    """peft's config, when the tensors are those of an adapter; None for a whole model."""

    @property
    def file(self) -> str:
        """Name of the file that holds the tensors."""
        return TENSORS if self.adapter is None else ADAPTER_TENSORS


@dataclass(frozen=True, slots=True)
class OpenedVersion:
    """A version in a folder of this machine, whose files match its manifest."""

    name: str
    manifest: Manifest
    directory: Path


class WeightSource(Protocol):
    """Versions, for a process that loads them."""

    async def open(self, name: str) -> OpenedVersion:
        """Blocks until the version is on this machine and verified. Raises: WeightsUnavailable."""
        ...

    async def newest_of(self, version: int) -> str | None:
        """The name of a version that can still be opened, by the latest learner that published it."""
        ...
