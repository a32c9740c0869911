"""Figures that several benchmarks write into one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add(path: Path, figures: Mapping[str, Any]) -> None:
    """Write `figures` into a JSON file, beside those of other names that it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(known | dict(figures), indent=1), encoding="utf-8")
