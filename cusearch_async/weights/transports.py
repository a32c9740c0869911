"""The transport that the setting weights.transport names."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from cusearch_async.config import Config
from cusearch_async.extensions import load
from cusearch_async.weights.folder import FolderTransport, WeightStore
from cusearch_async.weights.http import HttpTransport
from cusearch_async.weights.interface import WeightSource
from cusearch_async.weights.objects import ObjectTransport


@runtime_checkable
class WeightTransport(Protocol):
    """Made with the run's `Config`. Learner, workers and evaluator of a run may have different ones, as long as the
    sources of one find what the learner's serves."""

    def store(self) -> WeightStore:
        """Where the learner publishes. Its `publish` may hand the files on to where sources look for them."""
        ...

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Inside the context, in the learner, sources find what its store holds."""
        ...

    def source(self, needs_last: bool = False) -> AbstractAsyncContextManager[WeightSource]:
        """With `needs_last`, the last version of the run can be opened after the learner's end, too."""
        ...


TRANSPORTS: dict[str, type[WeightTransport]] = {
    "folder": FolderTransport,
    "http": HttpTransport,
    "object": ObjectTransport,
}


def transport_of(config: Config) -> WeightTransport:
    """Raises: ConfigError when weights.transport names none."""
    name = config.weights.transport
    kind = TRANSPORTS.get(name) or load("weights.transport", name, WeightTransport, TRANSPORTS)  # type: ignore[type-abstract]
    return kind(config)  # type: ignore[call-arg]
