"""The transport that the setting weights.transport names."""

from __future__ import annotations

from cusearch_async.config import Config
from cusearch_async.extensions import load
from cusearch_async.weights.folder import FolderTransport
from cusearch_async.weights.http import HttpTransport
from cusearch_async.weights.interface import WeightTransport

TRANSPORTS: dict[str, type[WeightTransport]] = {"folder": FolderTransport, "http": HttpTransport}


def transport_of(config: Config) -> WeightTransport:
    """Raises: ConfigError when weights.transport names none."""
    name = config.weights.transport
    kind = TRANSPORTS.get(name) or load("weights.transport", name, WeightTransport, TRANSPORTS)  # type: ignore[type-abstract]
    return kind(config)  # type: ignore[call-arg]
