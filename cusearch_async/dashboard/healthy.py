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
_SAME = ("environment", "episode", "pool", "loss")
_BANDS = Path(__file__).with_name("healthy.json")


def healthy(settings: Mapping[str, Any]) -> dict[str, dict[str, list[float]]] | None:
    """Metric -> low and high [step] of the ten runs of the study with the method of `settings`; None for a run of
    another world. `settings`: the run's, as TOML has them."""
    if not settings or any(settings.get(section) != of_study for section, of_study in _world().items()):
        return None
    found = _bands().get(settings["method"]["name"])
    return found if isinstance(found, dict) else None


@cache
def _world() -> dict[str, Any]:
    """The sections that a run must share."""
    whole = load_config([shipped_configs()[WORLD]]).model_dump(mode="json", exclude_none=True)
    return {section: whole[section] for section in _SAME} | {"data": whole["data"]}


@cache
def _bands() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_BANDS.read_bytes())
    return found
