"""What is shown of the buffer."""

from __future__ import annotations

from cusearch_async.dashboard.snapshot import Snapshot
from cusearch_async.transport.interface import Ledger, Queues, RunState


def test_a_deeper_trajectory_than_the_readers_settings_know_has_a_row():
    """The learner was restarted with a larger S_max while a page was open."""
    queues = Queues(ready_of_pool=0, is_claimed=False, ready=0, leased=0, requeued=0, incomplete=0)
    found = Snapshot(0.0, RunState(step=3), Ledger(), 0, queues, {(4, 0): 1, (1, 3): 2}, {})
    assert found.cells(s_max=2, staleness=1) == [[0] * 4, [2, 0, 0, 0], [0] * 4, [0] * 4, [0, 0, 0, 1]]
