"""vLLM's scheduler on a CPU, with fewer messages: the tokens of a turn leave the engine when the turn ends.

vLLM sends every token at once, which takes a fifth of the receiving process's time. All is sent at a pause, because
outputs are labelled with the version of the weights when they are sent; at once where a text, not a token, may end the
turn, which only the receiver sees; and a piece after `LONGEST_S` without a turn, a sign that the engine does not hang.
vLLM imports this module, in the engine's process.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

LONGEST_S = 0.5


class GathersOutputs(Scheduler):  # type: ignore[misc]
    """For an engine with one client, as `AsyncLLM` is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: dict[str, list[EngineCoreOutput]] = {}
        """Request -> its outputs that are not sent yet, in order."""
        self._sent_at = time.monotonic()
        """The time when anything was last sent."""

    @property
    def _is_pausing(self) -> bool:
        return bool(self.pause_state != PauseState.UNPAUSED)

    def has_requests(self) -> bool:
        """Also true while something is held at a pause: the engine makes a step without tokens, which sends it."""
        return bool(super().has_requests() or (self._is_pausing and self._held))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        found: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for_client = found.setdefault(0, EngineCoreOutputs())
        ready = [output.request_id for output in for_client.outputs if self._hold(output)]
        if self._is_pausing:
            ready = list(self._held)
        elif not ready and time.monotonic() - self._sent_at >= LONGEST_S:
            ready = list(self._held)[:1]
        if ready:
            self._sent_at = time.monotonic()
        for_client.outputs = [joined(self._held.pop(request)) for request in ready]
        if not for_client.outputs and for_client.scheduler_stats is None and for_client.finished_requests is None:
            del found[0]
        return found

    def _hold(self, output: EngineCoreOutput) -> bool:
        """Hold an output; True when its request's outputs must be sent now."""
        self._held.setdefault(output.request_id, []).append(output)
        request = self.requests.get(output.request_id)
        return output.finished or request is None or bool(request.sampling_params.stop)


def joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Consecutive outputs of one request as one."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    columns = zip(*(of_one[:3] for of_one in logprobs), strict=True)
    return msgspec.structs.replace(
        outputs[-1],
        new_token_ids=[token for output in outputs for token in output.new_token_ids],
        new_logprobs=LogprobsLists(*map(np.concatenate, columns)) if logprobs else None,
        prefill_stats=outputs[0].prefill_stats,
        events=[event for output in outputs for event in output.events or ()] or None,
    )
