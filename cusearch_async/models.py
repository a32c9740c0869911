"""Where the model of a run is, without loading it."""

from __future__ import annotations

from pathlib import Path

STARTER = Path(__file__).parent / "atlas" / "starter"
"""The shipped policy of the atlas world."""


def resolve_model(path: str) -> str:
    """`atlas` is the shipped starter; everything else is a local folder or a Hub id."""
    return str(STARTER) if path == "atlas" else path
