"""The failed episodes of a worker, counted; equal reasons are one line of the log."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from dataclasses import dataclass

from cusearch_async.lifecycle.progress import LOG_EVERY_S
from cusearch_async.surrogates import without_surrogates

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d+")
_MOST_CHARACTERS = 2000
_MOST = 100
"""Different reasons; those beyond are counted by kind."""


@dataclass(slots=True)
class _Reason:
    text: str
    """Its first text; others may have other numbers in it."""
    count: int = 0
    unlogged: int = 0
    logged_at: float = float("-inf")


class Failures:
    """Reasons that differ in numbers only count as one. Each is logged at once, and then at most every LOG_EVERY_S."""

    def __init__(self) -> None:
        self.by_kind: Counter[str] = Counter()
        self._reasons: dict[str, _Reason] = {}

    def add(self, kind: str, ticket: int, rollout: int, why: str) -> None:
        """Count the failure of an episode, and log it unless the same was logged just now."""
        why = without_surrogates(why[:_MOST_CHARACTERS])  # it may quote a program or the policy, and goes to Redis
        self.by_kind[kind] += 1
        pattern = f"{kind}: {_NUMBER.sub('#', why)}"
        if pattern not in self._reasons and len(self._reasons) >= _MOST:
            pattern = kind
        reason = self._reasons.setdefault(pattern, _Reason(why))
        reason.count += 1
        reason.unlogged += 1
        if reason.count == 1:
            log.warning("episode %d:%d failed, its ticket will be requeued: %s", ticket, rollout, why)
            reason.unlogged, reason.logged_at = 0, time.monotonic()
        elif time.monotonic() - reason.logged_at >= LOG_EVERY_S:
            _log(reason)

    def finish(self) -> None:
        """Log what has not been logged yet."""
        for reason in self._reasons.values():
            if reason.unlogged:
                _log(reason)

    @property
    def most_frequent(self) -> str:
        """The most frequent reason, as "12 x reason"; empty without a failure."""
        reason = max(self._reasons.values(), key=lambda reason: reason.count, default=None)
        return f"{reason.count} x {reason.text}" if reason else ""


def _log(reason: _Reason) -> None:
    log.warning("failed episodes: %d more, %d in total: %s", reason.unlogged, reason.count, reason.text)
    reason.unlogged, reason.logged_at = 0, time.monotonic()
