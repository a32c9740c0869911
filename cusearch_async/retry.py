"""The pause before a retry."""

from __future__ import annotations

_MOST_DOUBLINGS = 60


def doubling_pause_s(failed: int, first_s: float, longest_s: float) -> float:
    """The pause after `failed` failures in a row: it doubles each time, from `first_s` up to `longest_s`."""
    return min(first_s * 2.0 ** min(failed - 1, _MOST_DOUBLINGS), longest_s)
