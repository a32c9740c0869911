"""The end of the run, for the processes that play its episodes: workers and evaluator."""

from __future__ import annotations

from cusearch_async.transport.interface import RunState


class Finish:
    """Whether the run is finished, as one process sees it from the first state that it is shown.

    A run that was finished before the process came counts only if the process's own `steps` are done: with more steps,
    a learner that continues the run may be starting now."""

    def __init__(self, steps: int) -> None:
        """`steps`: run.steps of this process."""
        self._steps = steps
        self._before: int | None = None
        """Epoch of the learner that had finished the run when this process came; 0 for none."""

    def has_come(self, state: RunState) -> bool:
        if self._before is None:
            self._before = state.epoch if state.is_finished else 0
        return state.is_finished and (state.epoch != self._before or state.step >= self._steps)
