"""What the figures of healthy runs are, to draw behind those of a run of the same world and method."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cusearch_async.config import load_config, shipped_configs

WORLD = "atlas-hard"
"""The shipped config of the committed study."""
_SECTIONS = ("environment", "episode", "pool", "loss", "data", "model", "method")
_KEYS = {"retriever": ("backend", "topk", "noise", "distractors"), "learner": ("lr", "trained_layers")}
"""What a run must share with it, whole sections and keys of others."""
_BANDS = Path(__file__).with_name("healthy.json")


def healthy(settings: Mapping[str, Any]) -> dict[str, dict[str, list[float]]] | None:
    """Metric -> low and high [step] of the study's ten runs with the method of `settings`, the run's as TOML has them;
    None for a run of another world. In half of the ten the retriever's failures are stochastic."""
    method = settings.get("method")
    name = method.get("name") if isinstance(method, dict) else None
    bands = _bands().get(name) if isinstance(name, str) else None
    return bands if bands is not None and _shared(settings) == _world(name) else None


@cache
def _world(method: str) -> dict[str, Any]:
    """What a run with the method must share."""
    config = load_config([shipped_configs()[WORLD]], ["--method.name", method])
    return _shared(config.model_dump(mode="json", exclude_none=True))


def _shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {
        key: settings.get(section, {}).get(key) for section, names in _KEYS.items() for key in names
    }
    return {section: settings.get(section) for section in _SECTIONS} | keys


@cache
def _bands() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_BANDS.read_bytes())
    return found
