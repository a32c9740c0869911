"""How many episodes a worker may have in flight."""

from __future__ import annotations

_REGAINED = 0.25


class Room:
    """At first `most`. One less for each episode for whose group another worker was faster (`pool.hedge_after_s`), one
    more for every four that were in time; never less than `least`, which is a group. So a worker that is slower than
    the others gets fewer tickets, and little of its work is in vain."""

    def __init__(self, most: int, least: int) -> None:
        self._most, self._least, self._size = most, least, float(most)

    def note(self, in_time: bool) -> None:
        """An episode has ended."""
        self._size = min(max(self._least, self._size + (_REGAINED if in_time else -1)), self._most)

    @property
    def size(self) -> int:
        return int(self._size)
